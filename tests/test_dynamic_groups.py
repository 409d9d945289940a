"""Plans whose sequences are assigned to groups of context-parallel ranks (`cpdyn`): parity, refusals, words."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muster.layout.context_parallel import kept_positions, packed_blocks
from muster.spec.errors import InfeasibleError
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.train.grouped_batches import GroupReader
from tests.parity import open_data, small_run, with_two_layers
from tests.test_context_parallel import in_float64
from tests.test_parity import GRADIENT_TOLERANCE, cache, check_parity, run  # noqa: F401

CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"plan": "cp2-cpdyn", "family": "gemma3", "profile": True},
        {"plan": "cp2-cpdyn-mb1-z1-rfull", "tied": True, "z_loss": 0.1},
    ],
    4: [
        {"plan": "cp4-cpdyn-mb1", "family": "qwen3"},
        {"plan": "cp4-cpdyn-mb1-z1", "family": "gpt2"},
        {"plan": "cp4-cpdyn-z2-relem", "family": "gemma2", "kv_heads": 4},
        {"plan": "tp2-cp2-cpdyn", "family": "llama"},
        {"plan": "cp4-cpdyn-mb4", "family": "olmo2"},
    ],
    8: [{"plan": "cp8-cpdyn-mb1"}, {"plan": "tp2-cp4-cpdyn-z1-mb1", "family": "qwen3"}],
}


def unpacked(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each sample is a document."""
    return in_float64([case | {"packing": "none"} for case in cases])


def test_gradients_of_groups_equal_one_process(cache: Path) -> None:  # noqa: F811
    check_parity(4, unpacked([with_two_layers(CASES[4][at]) for at in (1, 3)]), cache)


def test_samples_of_these_cases_are_in_groups_of_several_sizes(cache: Path) -> None:  # noqa: F811
    config = small_run(False, packing="none")
    lengths = open_data(config, str(cache)).lengths(np.arange(config.train.global_batch_size))
    assert lengths is not None
    for name in ("cp4-cpdyn-mb1", "cp4-cpdyn-mb1-z1", "cp4-cpdyn-mb2-z1"):
        found = GroupReader(config, parse_plan_name(name), 0).assign(lengths)
        assert len({group.degree for groups in found.micro_batches for group in groups}) > 1, name


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", CASES)
def test_gradients_of_all_groups_equal_one_process(num_ranks: int, cache: Path) -> None:  # noqa: F811
    check_parity(num_ranks, unpacked(CASES[num_ranks]), cache)


def test_sown_bugs_of_groups_are_caught(cache: Path) -> None:  # noqa: F811
    bugs = [{"plan": "cp2-cpdyn-mb1-z1", "fault": fault, "layers": 2} for fault in ("unshared keys", "padding counts")]
    for case, found in zip(bugs, run(2, unpacked(bugs), cache), strict=True):
        assert max(rank["gradient_error"] for rank in found) > 1e4 * GRADIENT_TOLERANCE, case


@pytest.mark.parametrize("window", [None, 5])
def test_blocks_of_packed_documents_are_those_of_each(window: int | None) -> None:
    lengths, cp = (8, 24, 4), 2
    held = [[(n, at) for n, length in enumerate(lengths) for run in kept_positions(length, cp, rank) for at in run]
            for rank in range(cp)]  # fmt: skip
    seen = set()
    for rank in range(cp):
        for other in range(cp):
            for block in packed_blocks(lengths, cp, rank, other, window):
                for row, query in enumerate(block.queries):
                    for column, key in enumerate(block.keys):
                        behind = row + block.offset - column
                        assert held[rank][query][1] - held[other][key][1] == behind
                        if block.mask == "none" or (behind >= 0 and (window is None or behind < window)):
                            seen.add((held[rank][query], held[other][key]))
    reach = window or max(lengths)
    assert seen == {
        ((n, query), (n, key))
        for n, length in enumerate(lengths)
        for query, key in np.ndindex(length, length)
        if 0 <= query - key < reach
    }


def test_words() -> None:
    plan = parse_plan_name("cp4-cpdyn-mb1-z1")
    assert plan.dynamic_context_parallel
    assert plan.cp == 4
    assert format_plan_name(plan) == "cp4-cpdyn-mb1-z1-bf16"
    assert plan.hash != parse_plan_name("cp4-mb1-z1").hash


@pytest.mark.parametrize(
    ("name", "ranks", "sentence"),
    [
        ("cp3-cpdyn", 3, "cpdyn halves the context-parallel ranks again and again, which cp 3 isn't made for"),
        ("dp2-cpdyn", 2, "but cp is 1"),
        ("cp2-cpdyn-pp2", 4, "cpdyn with pipeline ranks"),
        ("dp2-cp2-cpdyn", 4, "cp8-cpdyn stands for dp2-cp4-cpdyn"),
        ("cp2u-cpdyn", 2, "another kind of context parallelism than a single ring"),
        ("tp2-sp-cp2-cpdyn", 4, "cpdyn with sp"),
        ("cp2-cpdyn-tile2", 2, "cpdyn with sequence_tiles"),
    ],
)
def test_impossible_groups_are_refused(name: str, ranks: int, sentence: str) -> None:
    config = small_run(False)
    with pytest.raises(InfeasibleError, match=f"{sentence}.*; nearest"):
        require_runnable(parse_plan_name(name), config.model, config.workload, ranks)
