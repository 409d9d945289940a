"""Every schedule, executed by real processes, does what the simulator and the checker say."""

from importlib.util import find_spec

import pytest

from tests.logical_clock import schedules_that_run
from tests.ranks import run_ranks

OFFLOADED = ("gpipe", "1f1b", "interleaved", "zb-v", "dualpipe")


def check_schedules(num_ranks: int, num_micro_batches: int) -> None:
    cases = schedules_that_run(num_ranks, num_micro_batches)
    names = {case["name"] for case in cases}
    assert {"gpipe", "1f1b", "interleaved", "zb-v", "dualpipe", "bitpipe", "auto", "auto-bidirectional"} <= names
    assert "exact" in names or find_spec("ortools") is None
    cases += [{**case, "offload": True} for case in cases if case["name"] in OFFLOADED]
    by_rank = run_ranks(num_ranks, "tests.logical_clock:on_rank", cases)
    for index, case in enumerate(cases):
        for rank, found in enumerate(by_rank):
            assert found[index]["executed"]
            assert found[index]["executed"] == found[index]["simulated"], (case["name"], rank)
            assert found[index]["counted"] == found[index]["predicted"], (case["name"], rank)


def test_executed_timelines_and_activations_equal_the_predicted_ones() -> None:
    check_schedules(2, 4)


@pytest.mark.soak
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(4, 8), (4, 12), (8, 16)])
def test_more_executed_timelines(num_ranks: int, num_micro_batches: int) -> None:
    check_schedules(num_ranks, num_micro_batches)
