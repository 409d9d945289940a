"""Every plan trains the same model: losses and gradients equal those of plain PyTorch in one process."""

import functools
import random
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from muster.schedule.resolve import resolve_schedule
from muster.spec.plan_name import parse_plan_name
from tests.parity import small_run, with_two_layers
from tests.plans import timed_order, unequal
from tests.ranks import run_ranks
from tests.sampling import quick_sample

CHUNKED = {"default_strategy": {"sp": True, "tp_overlap": "async_tp"}}


def by_layer(*recompute: str, **strategy: Any) -> dict[str, Any]:
    """Fields of a plan whose layers recompute each in its own way."""
    runs = enumerate(recompute)
    return {"overrides": [{"start": i, "count": 1, "strategy": {"recompute": how} | strategy} for i, how in runs]}


CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"plan": "dp1-s1f1b"},
        {"plan": "dp1-sgpipe"},
        {"plan": "dp1", "tied": True},
        {"plan": "dp1", "z_loss": 0.1},
        {"plan": "dp1-rfull"},
        {"plan": "dp1-relem", "family": "gpt2"},
        {"plan": "dp1-mb2", "packing": "none"},
    ],
    2: [
        {"plan": "pp2"},
        {"plan": "pp2-sgpipe"},
        {"plan": "pp2-l1.3"},
        {"plan": "pp2-sgpipe-oact", "profile": True},
        {"plan": "pp2-szbh1-oact-relem"},
        {"plan": "pp2-l3.1-sgpipe"},
        {"plan": "pp2", "tied": True},
        {"plan": "pp2-sgpipe", "tied": True},
        *({"plan": f"pp2v2-s{name}"} for name in ("gis", "breadthfirst", "zbv", "vmin", "vzb", "hanayo", "zeropp")),
        *({"plan": f"pp2-s{name}"} for name in ("2bpgpipe", "2bp1f1b", "zbh1")),
        {"plan": "pp2v4-sbitpipe", "layers": 8, "tied": True},
        {"plan": "pp2v2-sdualpipe", "tied": True, "profile": True},
        {"plan": "pp2v2-sautobidirectional", "tied": True},
        {"plan": "dp2"},
        {"plan": "dp2-sgpipe"},
        {"plan": "dp2-z1"},
        {"plan": "dp2-z2", "tied": True},
        {"plan": "dp2x1"},
        {"plan": "dp2x1-sgpipe"},
        {"plan": "tp2"},
        {"plan": "tp2", "z_loss": 0.1},
        {"plan": "tp2-sp", "tied": True},
        {"plan": "tp2-sp", "profile": True},
        {"plan": "tp2-mb2", "changes": CHUNKED},
        {"plan": "tp2", "changes": {"default_strategy": CHUNKED["default_strategy"] | {"recompute": "full"}}},
        {"plan": "tp2-sp-relem", "profile": True},
        {"plan": "tp2-rfull", "profile": True},
        {"plan": "dp2-z1-relem"},
        {"plan": "dp2-z1", "changes": {"bucket_layers": 2}, "profile": True},
        {"plan": "dp2-rfull", "changes": {"bucket_layers": 3}},
        {"plan": "dp2-z2", "changes": {"bucket_layers": 9}},
        {"plan": "dp2", "changes": {"prefetch_buckets": 2}, "profile": True},
        {"plan": "dp2-z1", "profile": True},
        {"plan": "dp2-z1", "profile": True, "overlaps": True},
        {"plan": "dp2-z1-rfull", "changes": {"bucket_layers": 2}, "overlaps": True},
        {"plan": "dp2-z1-uneven3.1", "profile": True, "z_loss": 0.1},
        {"plan": "dp2-z2", "profile": True},
        {"plan": "dp2-z3", "profile": True},
        {"plan": "pp2", "profile": True},
        {"plan": "pp2v2-sinterleaved", "tied": True},
        {"plan": "pp2-vocab", "tied": True, "profile": True},
        {"plan": "pp2-sauto"},
        {"plan": "pp2-sexact", "tied": True},
        {"plan": "pp2v2-sauto-inflight1", "profile": True},
        {"plan": "tp2-sp", "family": "gpt2", "tied": True, "profile": True},
        {"plan": "tp2-relem", "family": "gpt2", "profile": True},
        {"plan": "tp2", "family": "gpt2", "changes": CHUNKED},
        {"plan": "pp2-szbh1", "family": "gpt2"},
        {"plan": "pp2v2-sinterleaved-vocab", "tied": True},
        {"plan": "pp2-vocab", "family": "gpt2", "tied": True},
        {"plan": "dp2", "family": "gpt2", "profile": True},
        {"plan": "tp2-sp", "family": "qwen3", "profile": True},
        {"plan": "pp2-szbh1", "family": "qwen3"},
        {"plan": "dp2-rfull", "family": "qwen3"},
        {"plan": "tp2-relem", "family": "gpt_neox", "profile": True},
        {"plan": "pp2-szbh1", "family": "gpt_neox", "profile": True},
        {"plan": "tp2-sp-relem", "family": "olmo2", "profile": True},
        {"plan": "tp2-sp", "family": "gemma2", "tied": True, "profile": True, "z_loss": 0.1},
        {"plan": "dp2-relem", "family": "gemma2", "profile": True},
        {"plan": "tp2-sp-rfull", "family": "gemma3", "tied": True, "profile": True},
        {"plan": "pp2-mb2-vocab", "family": "gemma3", "packing": "none"},
        {"plan": "pp2-vocab", "family": "gemma2", "tied": True, "z_loss": 0.1, "packing": "none"},
        {"plan": "dp2-relem", "family": "olmo2"},
        {"plan": "pp2-szbh1", "family": "olmo2", "packing": "none"},
        {"plan": "pp2-mb2-rfull", "family": "qwen3", "packing": "none"},
        {"plan": "pp2-vocab", "tied": True, "packing": "none"},
        {"plan": "tp2-sp-mb2", "family": "gpt2", "packing": "none"},
        {"plan": "dp2-z1-uneven3.1", "packing": "none"},
        {"plan": "tp2-sp-rfull", "packing": "document_mask", "family": "gemma3"},
        {"plan": "pp2-mb2-szbh1-relem-oact", "packing": "next_fit", "family": "gemma3"},
        {"plan": "pp2v2-sauto-inflight3", "changes": timed_order(2, 2, 8), "tied": True, "profile": True},
    ],
    4: [
        {"plan": "pp4"},
        {"plan": "pp4-sgpipe"},
        {"plan": "pp4-sauto-rfull", "profile": True},
        {"plan": "dp2-pp2v2-sauto-inflight1.5-z1", "tied": True, "profile": True},
        {"plan": "dp2-pp2-z2-sauto-vocab"},
        {"plan": "dp2-pp2v3-z1-sauto-inflight3", "layers": 6, "changes": timed_order(2, 3, 4), "tied": True},
        {"plan": "pp4-sexact"},
        {"plan": "pp4-vocab", "z_loss": 0.1, "profile": True},
        {"plan": "pp4-szbh1-vocab-rfull", "tied": True},
        {"plan": "dp2-pp2-z2-vocab"},
        {"plan": "dp2-pp2v2-szbv-z1-vocab", "tied": True, "profile": True},
        {"plan": "pp4-l1.3.1.1", "layers": 6},
        {"plan": "dp2-pp2-z1"},
        {"plan": "dp2-pp2-z1", "tied": True, "overlaps": True},
        {"plan": "tp2-sp-dp2-z1", "overlaps": True},
        {"plan": "dp2x2-z1", "profile": True, "overlaps": True},
        {"plan": "dp2-pp2-z2"},
        {"plan": "dp2-pp2-z3"},
        {"plan": "dp2-pp2-z1-sgpipe"},
        {"plan": "dp2-pp2-z3-sgpipe", "tied": True},
        {"plan": "dp2-pp2-z1-l3.1", "tied": True},
        {"plan": "dp2x2-z1"},
        {"plan": "dp2x2-z1-uneven3.1", "tied": True},
        {"plan": "dp2-pp2-z1-uneven5.3", "profile": True},
        {"plan": "dp2-pp2v2-szbv-z1-uneven1.3-vocab", "tied": True},
        {"plan": "dp2-pp2", "changes": by_layer("full", "elementwise", "none", "full"), "profile": True},
        {"plan": "tp2-sp-pp2", "changes": by_layer("none", "full", "elementwise", "full", sp=True)},
        {"plan": "tp4"},
        {"plan": "tp4-sp", "tied": True},
        {"plan": "tp4", "tied": True, "changes": CHUNKED},
        {"plan": "tp2-pp2-mb2", "changes": CHUNKED},
        {"plan": "tp2-dp2-z1"},
        {"plan": "tp2-sp-dp2-z3"},
        {"plan": "tp2-sp-pp2", "tied": True},
        {"plan": "dp2-pp2-z1", "optim": "muon"},
        {"plan": "pp4v2-sdualpipe", "layers": 8},
        {"plan": "pp4v4-sautobidirectional", "layers": 8},
        {"plan": "pp4-szbh2"},
        {"plan": "pp4v2-svhalf", "layers": 8},
        {"plan": "dp2-pp2v2-z2-szbv", "tied": True},
        {"plan": "dp2-pp2v2-z3-sdualpipe"},
        {"plan": "tp2-sp-relem-pp2v2-sdualpipev"},
        {"plan": "tp2-rfull-pp2-szbh1"},
        {"plan": "tp2-sp-dp2-z3", "optim": "muon"},
        {"plan": "tp2-sp-pp2-szbh1", "family": "gpt2", "tied": True},
        {"plan": "tp4", "family": "qwen3"},
        {"plan": "tp4-sp-rfull", "family": "olmo2"},
        {"plan": "dp2-pp2v2-sinterleaved-z1"},
        {"plan": "dp2-pp2v2-sinterleaved-z2", "tied": True},
        {"plan": "dp2-pp2v2-sinterleaved-z3"},
        {"plan": "tp2-sp-pp2v2-sinterleaved-l1.2.1.2", "layers": 6, "profile": True},
        {"plan": "pp3-z1", "tied": True, "changes": unequal((2, {"tp": 2}), (1, {}), (1, {}))},
        {"plan": "pp3-sp", "tied": True, "changes": unequal((1, {}), (2, {"tp": 2}), (1, {}))},
        {"plan": "pp2-mb2-z1", "tied": True, "changes": unequal((3, {"tp": 2}), (1, {"dp_shard": 2}))},
        {"plan": "pp2-sp", "tied": True, "profile": True, "changes": unequal((1, {"dp_shard": 2}), (3, {"tp": 2}))},
        {
            "plan": "pp2-sp",
            "changes": unequal((1, {"dp_shard": 2}), (3, {"tp": 2})),
            "packing": "none",
            "z_loss": 0.1,
        },
        {"plan": "tp2-sp-pp2-mb2", "packing": "none", "family": "qwen3"},
        {"plan": "dp2-pp2-mb2", "packing": "none"},
        {"plan": "dp2-tp2-rfull-z3", "packing": "next_fit", "family": "qwen3"},
        {"plan": "pp2-mb2-z2", "changes": unequal((2, {"tp": 2}), (2, {"dp_replicate": 2}))},
        {"plan": "dp2-pp2-z1", "tied": True, "changes": {"axis_order": ["dp_shard", "dp_replicate", "cp", "tp", "pp"]}},
    ],
    8: [
        {"plan": "dp2x2-pp2-z1"},
        {"plan": "dp2x2-pp2-z3"},
        {"plan": "dp2-tp2-sp-pp2-z1"},
        {"plan": "dp2-tp2-pp2-z2"},
        {"plan": "dp2-tp2-sp-pp2-z3-sgpipe", "tied": True},
        {"plan": "dp2x2-pp2-z2-sgpipe", "tied": True},
        {
            "plan": "dp2-tp2-sp-pp2-z1",
            "tied": True,
            "changes": {"axis_order": ["tp", "dp_shard", "cp", "pp", "dp_replicate"]},
        },
    ],
}
COMPILED = [
    {"plan": "tp2-sp-rfull", "packing": "next_fit", "changes": {"compile": True}},
    *(
        {"plan": plan, "changes": {"compile": True}}
        for plan in ("dp2-z1", "dp2-z3-rfull", "pp2", "tp2", "tp2-sp-rfull")
    ),
    {"plan": "tp2-sp", "changes": CHUNKED | {"compile": True}},
    {"plan": "tp2-domino-mb2", "changes": {"compile": True}},
    {"plan": "tp2-sp-domino-mb4-rfull", "changes": {"compile": True}},
    {"plan": "dp2", "packing": "document_mask", "family": "gemma3", "changes": {"compile": True}},
]
COMPILED_FAMILIES = [
    {"plan": plan, "family": family, "tied": tied, "changes": {"compile": True}}
    for family, plan, tied in (
        ("gpt2", "tp2-sp", True),
        ("qwen3", "dp2", False),
        ("gpt2", "pp2-sgpipe-oact", False),
        ("gemma2", "dp2", True),
        ("olmo2", "tp2", False),
        ("gpt_neox", "dp2", False),
        ("latent", "tp2-sp", False),
    )
]
SPREAD_OVER_8 = [
    {"plan": "pp8-vocab", "layers": 8, "tied": True},
    {"plan": "pp8-szbh1-vocab", "layers": 8, "z_loss": 0.1},
    {"plan": "dp2-pp4v2-szbv-z1-vocab", "layers": 8},
]
SOAK_CASES = CASES | {3: [{"plan": "pp2-sp", "tied": True, "changes": unequal((2, {"tp": 2}), (2, {}))}]}
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-10


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def run(num_ranks: int, cases: list[dict[str, Any]], cache: Path) -> list[list[dict[str, Any]]]:
    """Per case, what each rank found."""
    cases = [case | {"changes": exact_order(case["plan"])} if "sexact" in case["plan"] else case for case in cases]
    by_rank = run_ranks(num_ranks, "tests.parity:run_cases", {"cases": cases, "cache": str(cache)}, timeout_s=1100)
    return [[found[index] for found in by_rank] for index in range(len(cases))]


@functools.cache
def exact_order(name: str) -> dict[str, Any]:
    """Found once, since ranks may find different ones."""
    pytest.importorskip("ortools")
    config = small_run()
    order = resolve_schedule(parse_plan_name(name), config.model, config.workload).pinned_schedule
    assert order is not None
    return {"pinned_schedule": order.model_dump()}


def check_parity(num_ranks: int, cases: list[dict[str, Any]], cache: Path) -> list[list[dict[str, Any]]]:
    """Compare each case with one process; return what each rank found."""
    by_case = run(num_ranks, cases, cache)
    for case, found in zip(cases, by_case, strict=True):
        assert all(rank["num_gradients"] > 0 for rank in found), case
        assert all(rank["fed_right"] for rank in found), case
        assert max(rank["loss_error"] for rank in found) < LOSS_TOLERANCE, case
        if case["precision"] == "fp64":
            assert max(rank["gradient_error"] for rank in found) < GRADIENT_TOLERANCE, case
        assert not any(rank["untimed"] for rank in found), case
        for rank in found:
            for term, (planned, counted) in rank["memory"].items():
                assert planned == counted, (case, term)
    return by_case


GRADIENT_SAMPLE_SIZE = {2: 7, 4: 3, 8: 1}


@pytest.mark.parametrize("num_ranks", GRADIENT_SAMPLE_SIZE)
def test_gradients_equal_one_process(num_ranks: int, cache: Path) -> None:
    """In float64, for a sample of the plans: the first step's gradients, its loss, and the validation loss after it."""
    cases = random.Random(num_ranks).sample(CASES[num_ranks], GRADIENT_SAMPLE_SIZE[num_ranks])
    check_parity(num_ranks, [with_two_layers(case) | {"precision": "fp64", "steps": 1} for case in cases], cache)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_ranks", SOAK_CASES)
def test_gradients_of_every_plan_equal_one_process(num_ranks: int, cache: Path) -> None:
    check_parity(num_ranks, [case | {"precision": "fp64", "steps": 1} for case in SOAK_CASES[num_ranks]], cache)


SAMPLE_SIZE = {1: 1, 2: 1, 4: 1, 8: 1}


@pytest.mark.parametrize("num_ranks", quick_sample(list(CASES), 0, 1))
def test_losses_equal_one_process(num_ranks: int, cache: Path) -> None:
    """In float32, over 8 steps, for a sample of the plans."""
    cases = random.Random(num_ranks).sample(CASES[num_ranks], SAMPLE_SIZE[num_ranks])
    check_parity(num_ranks, [case | {"precision": "fp32", "steps": 8} for case in cases], cache)


def test_compiled_blocks_equal_one_process(cache: Path) -> None:
    """In float64; each rank compiles for seconds, so one plan of one rank stands for all in make test."""
    case = {"plan": "dp1-rfull", "packing": "next_fit", "changes": {"compile": True}}
    check_parity(1, [case | {"precision": "fp64", "steps": 1, "layers": 2}], cache)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_more_compiled_blocks_equal_one_process(cache: Path) -> None:
    """With more layers than a function may be compiled anew: all must share one compilation."""
    check_parity(2, [case | {"precision": "fp64", "steps": 1, "layers": 12} for case in COMPILED], cache)
    check_parity(2, [case | {"precision": "fp32"} for case in COMPILED], cache)
    check_parity(2, [case | {"precision": "fp64", "steps": 1} for case in COMPILED_FAMILIES], cache)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_ranks", SOAK_CASES)
def test_losses_of_every_plan_equal_one_process(num_ranks: int, cache: Path) -> None:
    """In float32, over 20 steps, for every plan."""
    check_parity(num_ranks, [case | {"precision": "fp32"} for case in SOAK_CASES[num_ranks]], cache)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_words_on_8_ranks_equal_one_process(cache: Path) -> None:
    check_parity(8, [case | {"precision": "fp64", "steps": 1} for case in SPREAD_OVER_8], cache)


def test_twice_the_same_bits(cache: Path) -> None:
    check_same_bits([{"plan": plan, "steps": 3, "layers": 2} for plan in ("dp2-pp2-z1", "dp2-pp2-z3-sgpipe")], cache)


@pytest.mark.soak
def test_five_steps_twice_the_same_bits(cache: Path) -> None:
    check_same_bits([{"plan": plan, "steps": 5} for plan in ("dp2-pp2-z1", "dp2-pp2-z3-sgpipe")], cache)


def check_same_bits(cases: list[dict[str, Any]], cache: Path) -> None:
    found = run(4, [*cases, *cases], cache)
    assert found[: len(cases)] == found[len(cases) :]


HOST_UPDATES = [
    ("dp2-rfull", "oopt", {"precision": "bf16", "layers": 2}),
    ("dp2-rfull", "ooptd-oparamd", {"precision": "bf16", "layers": 2}),
    ("pp2-relem", "oopt-oparam", {"tied": True, "precision": "fp64"}),
    ("cp2u", "oact", {"precision": "fp64", "layers": 2}),
    ("pp2-relem", "oactd", {"tied": True, "precision": "fp64"}),
]
LAST_LAYER_STAYS = {"overrides": [{"start": 3, "count": 1, "strategy": {"offload": "none"}}]}
MORE_HOST_UPDATES = [
    ("dp2-z3", "oopt", {"optim": "adamw"}),
    ("pp2-relem", "oopt", {"tied": True, "precision": "fp64"}),
    ("dp2-rfull", "ooptd-oparamd", {"precision": "bf16"}),
    ("pp2", "oopt-oparam", {"tied": True, "precision": "fp64"}),
    ("dp2-rfull-tile2", "oopt-oparam-oact", {"precision": "bf16"}),
    ("cp2u", "oact", {"precision": "fp64"}),
    ("pp2-relem", "oactd", {"precision": "fp64"}),
    ("tp2-sp", "ooptd", {}),
    *(
        (plan, word, {"precision": name})
        for plan in ("dp2-z1", "dp2-z2-rfull", "dp2-z3", "tp2-sp")
        for word in ("oopt", "ooptd")
        for name in ("fp64", "fp32")
    ),
    ("pp2v2-szbv", "ooptd", {"tied": True}),
    ("pp2-sgpipe-oact", "oopt", {"precision": "fp64"}),
    ("dp2-z3", "oopt", {"precision": "bf16"}),
    ("tp2", "ooptd", {"precision": "bf16", "tied": True}),
    ("dp2", "oopt", {"changes": by_layer("none", "none", offload_optimizer="disk")}),
    ("dp2-z2", "oopt0.5", {}),
    *(
        (plan, "oactd", {})
        for plan in ("dp2-z1", "dp2-z2-rfull", "dp2-z3", "tp2-sp-relem", "pp2-szbh1", "cp2", "pp2-vocab")
    ),
    *(
        (plan, "oact", {"packing": packing})
        for plan in (
            "dp2-z1",
            "dp2-z2-rfull",
            "dp2-tile2-rfull",
            "tp2-sp-relem",
            "cp2",
            "cp2a-rfull",
            "cp2u-tile2-rfull",
        )
        for packing in ("concatenate", "document_mask")
    ),
    ("cp2u-tile2-rfull", "oact", {"precision": "bf16"}),
    ("dp2-z3", "oact", {"precision": "bf16"}),
    ("dp2", "oopt-oparam-oact", {"precision": "fp64"}),
    ("tp2-sp", "ooptd-oparamd-oact", {}),
    ("dp2", "oopt", {"changes": by_layer("none", "none", offload="activations")}),
    ("pp2v2-szbv", "ooptd-oactd", {"tied": True}),
    ("dp2-z3", "oactd", {"precision": "bf16"}),
    *((plan, "oactd", {"changes": LAST_LAYER_STAYS}) for plan in ("dp2-z3", "cp2-rfull")),  # the third is written late
    ("pp2-sgpipe", "oactd", {"precision": "bf16", "packing": "next_fit"}),
    ("dp2", "oopt", {"changes": by_layer("none", "none", offload="activations_on_disk")}),
    *(
        (plan, word, {"precision": name})
        for plan in ("dp2", "dp2-rfull", "tp2-sp", "pp2-relem", "cp2")
        for word in ("oopt-oparam", "ooptd-oparam", "ooptd-oparamd")
        for name in ("fp64", "fp32")
    ),
    ("dp2", "oopt-oparam", {"precision": "bf16"}),
    ("pp2", "ooptd-oparamd", {"precision": "bf16"}),
    ("tp2", "ooptd-oparamd", {"precision": "bf16", "tied": True}),
    ("dp2", "oopt0.5-oparam0.5", {}),
    ("pp2v2-sinterleaved", "oopt0.5d-oparam0.5d", {"tied": True}),
    ("pp2-sgpipe", "ooptd-oactd-oparamd", {"packing": "next_fit"}),
    ("dp2", "ooptd-oactd-oparamd", {"precision": "fp64"}),
    ("dp2", "ooptd-oparamd", {"changes": {"prefetch_buckets": 2}}),
]


DELAYED_UPDATES = [("pp2-relem", "ooptd", {"tied": True, "precision": "fp64", "layers": 2})]
MORE_DELAYED_UPDATES = [
    ("pp2-relem", "ooptd", {"tied": True, "precision": "fp64"}),
    ("dp2-z3", "oopt", {}),
    *((plan, word, {}) for plan in ("dp2-z1", "dp2-z2-rfull", "tp2-sp", "cp2") for word in ("oopt", "ooptd")),
    ("pp2v2-szbv", "ooptd", {"tied": True}),
    ("pp2-sgpipe-oact", "oopt", {"precision": "fp64"}),
    ("dp2-z3", "oopt", {"precision": "bf16"}),
    ("pp2-vocab", "oopt", {}),
    ("dp2", "oopt-oactd", {"precision": "fp64"}),
]


def check_delayed_updates(plans: list[tuple[str, str, dict[str, Any]]], cache: Path) -> None:
    """Losses and parameters of delayed updates have the bits of the serial form."""
    late = {"steps": 5, "delay_after": 2}
    pairs = [({"plan": plan} | fields, {"plan": f"{plan}-{word}"} | fields) for plan, word, fields in plans]
    faulty = pairs[0][1] | late | {"fault": "halved late gradients"}
    *found, wrong = run(2, [*(case | late for pair in pairs for case in pair), faulty], cache)
    for place, pair in enumerate(pairs):
        for serial, delayed in zip(*found[2 * place : 2 * place + 2], strict=True):
            assert (serial["losses"], serial["parameters"]) == (delayed["losses"], delayed["parameters"]), pair
            planned, counted = delayed["waiting_bytes"]
            assert 0.99 * planned < counted <= planned, pair  # the first of uneven shards is the largest
    late_losses, wrong_losses = found[0][0]["losses"], wrong[0]["losses"]
    assert (late_losses[:4], late_losses[4] != wrong_losses[4]) == (wrong_losses[:4], True)


def test_delayed_updates_have_the_bits_of_the_serial_form(cache: Path) -> None:
    check_delayed_updates(DELAYED_UPDATES, cache)


@pytest.mark.soak
def test_delayed_updates_of_more_plans_have_the_bits_of_the_serial_form(cache: Path) -> None:
    check_delayed_updates(MORE_DELAYED_UPDATES, cache)


UPDATES_IN_BACKWARD = [("dp2-z3", "ooptd-oparamd", {"precision": "fp64", "layers": 2})]
MORE_UPDATES_IN_BACKWARD = [
    ("dp2-z3", "ooptd-oparamd", {"precision": "fp64"}),
    ("dp2-z3", "oopt", {}),
    ("dp2-z3", "ooptd", {"precision": "bf16"}),
    ("dp2-z3", "oopt-oparam", {}),
    ("dp2-z3-rfull", "ooptd-oparamd", {"optim": "lion"}),
    *((f"dp2-{zero}", "ooptd", {"precision": "fp64"}) for zero in ("z1", "z2")),
    *((f"dp2-{zero}", "oopt", {}) for zero in ("z1", "z2")),
    ("dp2", "oopt0.5-oparam0.5", {}),
    ("dp2", "oopt0.5d", {}),
    ("dp2", "ooptd-oactd-oparamd", {}),
    ("dp2", "ooptd-oactd", {"changes": {"bucket_layers": 2}}),
    ("tp2", "ooptd-oparamd", {"tied": True}),
    ("cp2", "ooptd", {}),
    ("pp2", "ooptd-oparamd", {"precision": "bf16", "tied": True}),
    ("pp2-relem", "oopt", {"precision": "bf16"}),
    ("pp2-sgpipe-oact", "oopt", {"precision": "fp64"}),
    ("pp2v2-sinterleaved", "oopt", {"tied": True}),
    ("pp2v2-sinterleaved", "ooptd-oparamd", {}),
]


def check_updates_in_backward(num_ranks: int, plans: list[tuple[str, str, dict[str, Any]]], cache: Path) -> None:
    """Losses and parameters of updates within the backward have the bits of the same clipping without a tier."""
    steps = {"steps": 5, "in_backward": True}
    pairs = [({"plan": plan} | fields, {"plan": f"{plan}-{word}"} | fields) for plan, word, fields in plans]
    faulty = {"plan": "dp2-z3-oopt" if num_ranks == 2 else "dp2x2-z3-oopt", "layers": plans[0][2].get("layers", 4)}
    faults = [faulty | {"fault": fault} for fault in ("early gradients", "norm of an earlier step")]
    *found, early, other_norm = run(num_ranks, [case | steps for case in [*chain(*pairs), *faults]], cache)
    for place, pair in enumerate(pairs):
        for serial, within in zip(*found[2 * place : 2 * place + 2], strict=True):
            assert (serial["losses"], serial["parameters"]) == (within["losses"], within["parameters"]), pair
            assert within["updates_in_backward"] > 0, pair
            assert serial["updates_in_backward"] == 0
    right = found[0][0]["losses"]
    for losses, first in ((early[0]["losses"], 2), (other_norm[0]["losses"], 3)):  # steps before a fault are right
        assert losses[:first] == pytest.approx(right[:first], abs=1e-5)
        assert losses[first] != pytest.approx(right[first], abs=1e-5)


def test_updates_within_the_backward_have_the_bits_of_those_after_it(cache: Path) -> None:
    check_updates_in_backward(2, UPDATES_IN_BACKWARD, cache)


@pytest.mark.soak
def test_updates_within_the_backward_of_more_plans_have_the_bits_of_those_after_it(cache: Path) -> None:
    check_updates_in_backward(2, MORE_UPDATES_IN_BACKWARD, cache)


@pytest.mark.soak
def test_updates_within_the_backward_of_replicas_have_the_bits_of_those_after_it(cache: Path) -> None:
    plans = {"dp2x2": "oopt", "dp2x2-z2": "ooptd", "dp4-zp2g4": "oopt", "dp2-tp2": "ooptd-oparamd"}
    check_updates_in_backward(4, [(plan, word, {}) for plan, word in plans.items()], cache)


def test_updates_within_the_backward_of_one_rank(cache: Path) -> None:
    precisions = {"oopt": "fp32", "ooptd-oparamd": "bf16", "ooptd": "bf16"}
    cases = [
        {"plan": plan, "precision": precision}
        for word, precision in precisions.items()
        for plan in ("dp1", f"dp1-{word}")
    ]
    found = run(1, [case | {"steps": 4, "in_backward": True} for case in cases], cache)
    for (serial,), (within,) in zip(found[::2], found[1::2], strict=True):
        assert (serial["losses"], serial["parameters"]) == (within["losses"], within["parameters"])
        assert within["updates_in_backward"] == 12
    planned, counted = found[3][0]["param_buffers"]
    assert 0 < counted <= planned


OFFLOADED_PARAMS = {"ooptd-oparamd": "stale parameters", "oopt-oparam": "stale shard"}
"""Words of plans with parameters off the device, each with a bug that is sown."""


def check_host_updates(plans: list[tuple[str, str, dict[str, Any]]], cache: Path) -> None:
    """Without and with state in host memory or on disk, losses and parameters have the same bits."""
    pairs = [({"plan": plan} | fields, {"plan": f"{plan}-{word}"} | fields) for plan, word, fields in plans]
    serial = [own for place, (own, _) in enumerate(pairs) if own not in [one for one, _ in pairs[:place]]]
    cases = [case | {"steps": 3} for case in serial] + [own | {"steps": 3, "profile": True} for _, own in pairs]
    faults = [pairs[0][1] | {"fault": "lost return"}]
    faults += [next(own for _, own in pairs if own["plan"].endswith("-oact")) | {"fault": "lost layer"}]
    faults += [pairs[-1][1] | {"fault": "lost read"}]
    at = {word: next(place for place, (_, own, _) in enumerate(plans) if own == word) for word in OFFLOADED_PARAMS}
    stale = [pairs[at[word]][1] | {"fault": fault} for word, fault in OFFLOADED_PARAMS.items()]
    *found, wrong, lost, unread, old, ahead = run(2, [*cases, *(case | {"steps": 3} for case in faults + stale)], cache)
    right, away = [found[serial.index(own)] for own, _ in pairs], found[len(serial) :]
    for word, bad in zip(OFFLOADED_PARAMS, (old, ahead), strict=True):
        assert bad[0]["parameters"] != right[at[word]][0]["parameters"], word
    for pair, *both in zip(pairs, right, away, strict=True):
        for without, offloaded in zip(*both, strict=True):
            assert (without["losses"], without["parameters"]) == (offloaded["losses"], offloaded["parameters"]), pair
            assert all(planned == counted for planned, counted in offloaded["memory"].values()), pair
            assert not offloaded["untimed"], pair
    assert wrong[0]["parameters"] != right[0][0]["parameters"]
    offloaded = next(place for place, (_, own) in enumerate(pairs) if own["plan"].endswith("-oact"))
    assert lost[0]["parameters"] != right[offloaded][0]["parameters"]
    assert unread[0]["parameters"] != away[-1][0]["parameters"]
    assert away[0][0]["memory"]["optimizer"] == [0, 0]


def test_host_updates_leave_the_same_bits(cache: Path) -> None:
    check_host_updates(HOST_UPDATES, cache)


@pytest.mark.soak
def test_host_updates_of_more_plans_leave_the_same_bits(cache: Path) -> None:
    check_host_updates(MORE_HOST_UPDATES, cache)


FAULTS: dict[str, dict[str, Any]] = {
    "dropped gradient": {"plan": "pp2"},
    "wrong divisor": {"plan": "pp2"},
    "lost reload": {"plan": "pp2-sgpipe-oact"},
    "lost copies": {"plan": "tp2-sp", "family": "qwen3", "layers": 2},
}
MORE_FAULTS: dict[str, dict[str, Any]] = {
    "swapped micro-batches": {"plan": "pp2"},
    "ranks count alike": {"plan": "dp2-z1-uneven3.1"},
    "wrong recompute": {"plan": "tp2-sp-relem"},
    "a rank's words unheard": {"plan": "pp2-vocab"},
    "doubled bias": {"plan": "tp2-sp", "family": "gpt2"},
}
CUT = {"plan": "pp2-sp", "changes": unequal((2, {"tp": 2}), (2, {})), "precision": "fp64", "steps": 1}


def check_faults(num_ranks: int, cases: list[dict[str, Any]], cache: Path) -> None:
    cases = [{"precision": "fp64", "steps": 1} | case for case in cases]
    for case, found in zip(cases, run(num_ranks, cases, cache), strict=True):
        if case["precision"] == "fp64":
            assert max(rank["gradient_error"] for rank in found) > 1e4 * GRADIENT_TOLERANCE, case
        else:
            assert max(rank["loss_error"] for rank in found) > 10 * LOSS_TOLERANCE, case


def test_sown_bugs_are_caught(cache: Path) -> None:
    """The last one by losses in float32."""
    by_losses = FAULTS["dropped gradient"] | {"fault": "dropped gradient", "precision": "fp32", "layers": 2, "steps": 8}
    check_faults(2, [*(case | {"fault": fault} for fault, case in FAULTS.items()), by_losses], cache)


def test_a_sown_bug_between_unequal_stages_is_caught(cache: Path) -> None:
    good, bad = run(3, [CUT, CUT | {"fault": "half a boundary"}], cache)
    assert max(rank["gradient_error"] for rank in good) < GRADIENT_TOLERANCE
    assert max(rank["gradient_error"] for rank in bad) > 1e4 * GRADIENT_TOLERANCE


@pytest.mark.soak
def test_more_sown_bugs_are_caught(cache: Path) -> None:
    check_faults(2, [case | {"fault": fault} for fault, case in MORE_FAULTS.items()], cache)
    check_faults(3, [CUT | {"fault": "doubled boundary"}], cache)
    check_faults(2, [{"plan": "pp2", "fault": "dropped gradient", "precision": "fp32", "steps": 20}], cache)
