"""Context parallelism: the positions that ranks keep, the blocks that they compute, and parity with one process."""

import random
from pathlib import Path
from typing import Any

import pytest

from muster.layout.context_parallel import AttentionBlock, attention_blocks, chunk_places, kept_positions
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.workload import Workload
from tests.parity import small_run, with_two_layers
from tests.sampling import quick_sample
from tests.test_parity import GRADIENT_TOLERANCE, cache, check_parity, run  # noqa: F401
from tests.train_runs import QUICK, losses, train

KINDS = {
    2: ("", "a", "u", "b", "t", "s"),
    4: ("", "a", "u", "u2", "w2", "b", "t", "s"),
    8: ("", "a", "u2", "u4", "u2w2", "w2", "w4", "b", "t", "s"),
}
"""Letters of the kinds that so many context-parallel ranks can have."""
FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "olmo2", "sinks")
WINDOWS = ("qwen3", "gemma2", "gemma3")
PACKINGS = ("concatenate", "document_mask", "next_fit", "none")
SP = {"default_strategy": {"sp": True, "tp_overlap": "async_tp"}}
OTHER_ORDER = {"axis_order": ["pp", "tp", "cp", "dp_shard", "dp_replicate"]}


def cases_of_kind(cp: int, kind: str) -> list[dict[str, Any]]:
    """Plans of `cp` ranks alone: masks, packed documents, grouped and plain heads, levels of ZeRO, recompute."""
    plan = f"cp{cp}{kind}"
    cases = [
        *({"plan": plan, "family": family} for family in FAMILIES),
        *({"plan": plan, "family": family, "kv_heads": 4} for family in ("llama", "gemma3")),
        *({"plan": f"{plan}-mb2", "family": "qwen3", "packing": packing} for packing in PACKINGS),
        *({"plan": f"{plan}-{zero}", "tied": True, "z_loss": 0.1} for zero in ("z1", "z2", "z3")),
        *({"plan": f"{plan}-{how}", "family": "gemma3", "profile": True} for how in ("rfull", "relem")),
    ]
    return [with_possible_family(case, kind) for case in cases]


def with_possible_family(case: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the case, with another family where the kind has no sliding windows."""
    return case | ({"family": "gpt_neox"} if kind == "b" and case.get("family") in WINDOWS else {})


def cases_of_other_axes(kind: str) -> list[dict[str, Any]]:
    """Plans of four ranks, two of them context-parallel."""
    cases = [
        {"plan": f"tp2-sp-cp2{kind}", "tied": True, "family": "gpt2", "profile": True},
        {"plan": f"tp2-cp2{kind}-mb2", "changes": SP, "packing": "none"},
        {"plan": f"pp2-cp2{kind}", "tied": True},
        {"plan": f"pp2v2-cp2{kind}-szbv", "family": "qwen3", "packing": "document_mask"},
        {"plan": f"pp2-cp2{kind}-z1-vocab", "tied": True, "z_loss": 0.1},
        {"plan": f"pp2-cp2{kind}-sgpipe-oact"},
        *({"plan": f"dp2-cp2{kind}-{zero}"} for zero in ("z1", "z2", "z3")),
        {"plan": f"dp2x1-cp2{kind}-z1", "optim": "muon"},
        {"plan": f"dp2-cp2{kind}-z1-uneven3.1"},
        {"plan": f"dp2-cp2{kind}-z2", "changes": OTHER_ORDER},
    ]
    return [with_possible_family(case, kind) for case in cases]


def cases_of_groups(kind: str) -> list[dict[str, Any]]:
    """Plans of eight ranks, of which four are parts of groups of context-parallel ranks."""
    return [
        {"plan": f"tp2-sp-cp4{kind}", "family": "gpt2", "tied": True},
        {"plan": f"pp2v2-cp4{kind}-szbv", "family": "qwen3", "packing": "document_mask"},
        {"plan": f"dp2-cp4{kind}-z2", "changes": OTHER_ORDER, "packing": "next_fit"},
    ]


CASES: dict[int, list[dict[str, Any]]] = {
    2: [case for kind in KINDS[2] for case in cases_of_kind(2, kind)],
    4: [
        *(case for kind in KINDS[4] for case in cases_of_kind(4, kind)),
        *(case for kind in KINDS[2] for case in cases_of_other_axes(kind)),
    ],
    8: [
        *(
            with_possible_family({"plan": f"cp8{kind}", "family": family, "packing": packing, "kv_heads": heads}, kind)
            for kind in KINDS[8]
            for family, packing, heads in (("gpt2", "none", 2), ("gemma3", "concatenate", 4), ("qwen3", "next_fit", 2))
        ),
        *(case for kind in KINDS[4] if len(kind) > 1 for case in cases_of_groups(kind)),
        {"plan": "cp4u-pp2"},
        {"plan": "dp2-tp2-sp-cp2", "family": "qwen3", "packing": "next_fit"},
        {"plan": "dp2-tp2-sp-cp2a", "family": "qwen3", "packing": "next_fit"},
        {"plan": "tp2-pp2-cp2u", "family": "gpt2", "tied": True},
    ],
}


def sample_of(num_ranks: int) -> list[dict[str, Any]]:
    """Return a case of each kind (of half of them on four ranks) and two others, drawn for the number of ranks."""
    draw, cases = random.Random(num_ranks), CASES[num_ranks]
    kinds = KINDS[num_ranks] if num_ranks == 2 else draw.sample(KINDS[num_ranks], len(KINDS[num_ranks]) // 2)
    return [*(draw.choice(cases_of_kind(num_ranks, kind)) for kind in kinds), *draw.sample(cases, 2)]


def in_float64(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where the plan's name says nothing else, two sequences a micro-batch, which takes half the time of one."""
    return [{"micro_batch_size": 2} | case | {"precision": "fp64", "steps": 1} for case in cases]


@pytest.mark.parametrize("num_ranks", quick_sample([2, 4], 1))
def test_gradients_equal_one_process(num_ranks: int, cache: Path) -> None:  # noqa: F811
    check_parity(num_ranks, in_float64(list(map(with_two_layers, sample_of(num_ranks)))), cache)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_ranks", CASES)
def test_gradients_of_every_plan_equal_one_process(num_ranks: int, cache: Path) -> None:  # noqa: F811
    check_parity(num_ranks, in_float64(CASES[num_ranks]), cache)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_ladder_of_words_trains_as_one_process(tmp_path: Path) -> None:
    """Each plan as a person gives it to `muster train`."""
    words = {"dp1": 1, "cp4": 4, "cp4u2": 4, "cp4w2": 4, "cp2-tp2-sp": 4, "cp2-pp2": 4, "dp2-cp2-z3": 4}
    for word, ranks in (words | {f"cp2{kind}": 2 for kind in KINDS[2]}).items():
        run = (
            "--run",
            tmp_path / word,
            "--nproc",
            str(ranks),
            "--train.steps",
            "3",
            "--train.global_batch_size",
            "8",
            *QUICK,
        )
        assert train("--preset", "tiny", "--parallel", word, *run).code == 0, word
        assert losses(tmp_path / word) == pytest.approx(losses(tmp_path / "dp1"), rel=1e-5), word


BUGS = {
    "mask off by one": ("cp2", "cp2a", "cp2b", "cp2t"),
    "dropped lse": ("cp2", "cp2a", "cp2b", "cp2t"),
    "row off by one": ("cp2s",),
    "swapped parts": ("cp2",),
    "labels not shifted": ("cp2u",),
}
"""Kinds of plans in which each bug is sown."""


@pytest.mark.parametrize("first", quick_sample([1, 4], 0))
def test_sown_bugs_are_caught(first: int, cache: Path) -> None:  # noqa: F811
    """In the first plans of each kind."""
    bugs = [{"plan": plan, "fault": fault, "layers": 2} for fault, plans in BUGS.items() for plan in plans[:first]]
    for case, found in zip(bugs, run(2, in_float64(bugs), cache), strict=True):
        assert max(rank["gradient_error"] for rank in found) > 1e4 * GRADIENT_TOLERANCE, case


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_ranks_keep_each_position_once(cp: int) -> None:
    length = 32
    kept = [[position for run in kept_positions(length, cp, rank) for position in run] for rank in range(cp)]
    assert sorted(position for rank in kept for position in rank) == list(range(length))
    assert {len(rank) for rank in kept} == {length // cp}
    if cp > 1:
        chunk = length // (2 * cp)
        places = chunk_places(cp)
        assert [kept[rank][place * chunk] for rank, place in places] == list(range(0, length, chunk))


def seen_pairs(blocks: tuple[AttentionBlock, ...], queries: list[int], keys: list[int], window: int | None) -> set:
    """(sequence, query position, key position) of all visible scores, none of them computed twice."""
    found: list[tuple[int | None, int, int]] = []
    for block in blocks:
        for row, query in enumerate(block.queries):
            for column, key in enumerate(block.keys):
                behind = row + block.offset - column
                assert queries[query] - keys[key] == behind
                hidden = {"none": False, "causal": behind < 0}.get(
                    block.mask, behind < 0 or (window is not None and behind >= window)
                )
                if not hidden:
                    found.append((block.sequence, queries[query], keys[key]))
    assert len(set(found)) == len(found)
    return set(found)


def test_blocks_show_what_each_query_sees() -> None:
    rng = random.Random(0)
    for _ in range(200):
        cp, length = rng.choice((1, 2, 4)), 16
        window = rng.choice((None, 1, 3, 5, 16, 40))
        documents: tuple[int, ...] | None = None
        if rng.random() < 0.7:
            bounds = sorted({*rng.sample(range(1, 2 * length), 5), length, 2 * length})
            documents = tuple(end - start for start, end in zip([0, *bounds], bounds, strict=False))
        number = [sum(end <= at for end in bounds) for at in range(2 * length)] if documents else [0] * 2 * length
        for rank in range(cp):
            own = kept_positions(length, cp, rank)
            for keys in [(range(length),), *(kept_positions(length, cp, other) for other in range(cp))]:
                blocks = attention_blocks(length, own, keys, window, documents)
                flat_own, flat_keys = ([position for run in runs for position in run] for runs in (own, keys))
                expected = {
                    (sequence, query, key)
                    for sequence in ((0, 1) if documents else (None,))
                    for query in flat_own
                    for key in flat_keys
                    if key <= query and (window is None or query - key < window)
                    if number[(sequence or 0) * length + query] == number[(sequence or 0) * length + key]
                }
                assert seen_pairs(blocks, flat_own, flat_keys, window) == expected


@pytest.mark.parametrize("window", [None, 1024])
def test_ranks_have_equal_work(window: int | None) -> None:
    """The scores that ranks compute, of 4,096 positions: the largest number over the mean."""

    def scores(block: AttentionBlock) -> int:
        rows, columns = len(block.queries), len(block.keys)
        return rows * (rows + 1) // 2 if block.mask == "causal" else rows * columns

    for cp in (2, 4, 8):
        work = [
            sum(map(scores, attention_blocks(4096, kept_positions(4096, cp, rank), (range(4096),), window)))
            for rank in range(cp)
        ]
        assert max(work) / (sum(work) / cp) <= (1.02 if window is None else 1.3)


@pytest.mark.parametrize(
    "name",
    [
        "cp2-mb1-bf16",
        "cp4a-mb1-bf16",
        "cp8u2w2-mb1-bf16",
        "cp4w2-mb1-bf16",
        "cp4b-mb1-bf16",
        "cp4t-mb1-bf16",
        "cp4s-mb1-bf16",
        "cp4l-mb1-z1-bf16",
        "cp4z-mb1-bf16",
        "dp2-tp2-sp-cp2u-mb1-z1-bf16",
    ],
)
def test_plan_names_say_the_kind(name: str) -> None:
    assert format_plan_name(parse_plan_name(name)) == name


def test_groups_of_all_ranks_or_of_one_are_a_simpler_kind() -> None:
    assert [format_plan_name(parse_plan_name(name)) for name in ("cp4u4", "cp4u1w4", "cp8u2w4")] == [
        "cp4u-mb1-bf16",
        "cp4-mb1-bf16",
        "cp8u2-mb1-bf16",
    ]


@pytest.mark.parametrize(
    ("name", "fields", "sentence", "nearest"),
    [
        ("cp8u", {}, "cp 8 doesn't divide the 4 heads and 2 key/value heads: legal are 1, 2, 4", "cp8u4"),
        ("tp2-cp4u", {}, "the 2 heads and 1 key/value head of each of tp 2 ranks: legal are 1, 2", "tp2-cp4u2"),
        ("cp6u3", {}, "cp_ulysses_degree 3 doesn't divide the 4 heads and 2 key/value heads: legal are 2", "cp6u2"),
        ("cp4u3", {}, "cp_ulysses_degree 3 of cp 4 doesn't make them: legal are 2", "cp4u2"),
        ("cp3u2", {}, "cp_ulysses_degree 2 of cp 3 doesn't make them: legal are none, but a2a or p2p", "cp3"),
        ("cp8u2w3", {}, "cp_window_size 3 of a ring of 4 doesn't make them: legal are 2", "cp8u2w2"),
        ("cp4bw2", {}, "cp_window_size 2 is of inner rings, which cp_comm_type burst hasn't", "cp4b"),
        ("cp2b", {"sliding_window": 5}, "burst sends queries past all keys, most of which a sliding window", "cp2"),
        (
            "cp64",
            {},
            "seq_len 96 is not a multiple of 128 (two for each rank of cp 64), as 128 would be",
            "dp2-cp16",
        ),
    ],
)
def test_impossible_kinds_are_refused_with_the_nearest_plan(
    name: str, fields: dict[str, Any], sentence: str, nearest: str
) -> None:
    model = small_run().model.model_copy(update=fields)
    plan = parse_plan_name(name)
    with pytest.raises(InfeasibleError) as refusal:
        require_runnable(plan, model, Workload(seq_len=96, global_batch_size=8), plan.world_size)
    assert sentence in str(refusal.value)
    assert f"{nearest}-mb1" in str(refusal.value)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown part 'cp4q'"):
        parse_plan_name("cp4q")
