"""Gradients of a stage that is done are reduced beside passes of the others, as the Program says (z1)."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from muster.cost.time.op_times import OpTimes
from muster.parallel.pending_reduction import PendingReduction
from muster.schedule.build import build_program
from muster.schedule.program import Program
from muster.schedule.resolve import resolve_schedule
from muster.simulate.simulator import simulate
from tests.fake_gpu_plans import plan_of
from tests.parity import small_run
from tests.ranks import run_ranks
from tests.sampling import quick_sample
from tests.stream_check import StreamCheck
from tests.test_executed_order import LAYER_BYTES, LAYER_NUMEL, TimedStreams
from tests.test_fake_gpu import fake_factories, watch_step
from tests.test_parity import cache, check_parity

__all__ = ["cache", "fake_factories"]

PLANS = ("dp2-pp2v2-sinterleaved-z1", "dp2-pp2v2-szbv-z1")
MORE_PLANS = (PLANS[0], "dp2-pp2v2-sdualpipev-z1", "dp2-pp2v2-sbreadthfirst-z1", "dp2-pp2v2-svhalf-z1-gbf16", "dp4-z1")


def check_order(cases: list[tuple[str, str | None]], tmp_path: Path) -> None:
    for rank in run_ranks(4, "tests.eager_reduction_ranks:trace", {"cases": cases, "cache": str(tmp_path)}):
        for plan, fault, executed, predicted in rank:
            assert (executed == predicted) == (fault is None), (plan, fault, executed, predicted)


def test_reductions_start_and_are_awaited_where_the_program_says(tmp_path: Path) -> None:
    check_order([(PLANS[1], None), (PLANS[0], "waiting collectives")], tmp_path)


@pytest.mark.soak
def test_reductions_of_more_plans_start_and_are_awaited_where_the_program_says(tmp_path: Path) -> None:
    faults = [(PLANS[0], fault) for fault in ("awaited at once", "started late")]
    check_order([*((plan, None) for plan in MORE_PLANS), *faults], tmp_path)


@pytest.mark.soak
def test_gradients_reduced_beside_passes_equal_one_process(cache: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"plan": PLANS[0], "tied": True},
        {"plan": PLANS[1]},
        {"plan": PLANS[0], "overlaps": True},
        {"plan": "dp2x1-pp2v2-szbv-z1"},
    ]
    check_parity(4, [case | {"precision": "fp64", "steps": 2} for case in cases], cache)


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU in name only

LAYERS = 8
GPU_CASES = [
    {"plan": plan, "layers": LAYERS, "batch": 8}
    for plan in (*PLANS, "dp2-pp2v2-sbreadthfirst-z1", "dp2-pp2v2-svhalf-z1", "dp2-pp2v2-szbv-z1-gbf16")
]
SMALL_CASE = {"plan": PLANS[1], "layers": 4, "batch": 4}
END_LAYERS = 257 * 32 / LAYER_NUMEL
"""Embedding or head in layers."""


class SlowReductions(TimedStreams):
    """A watch in whose time a reduction takes as long as passes, and a gather nothing."""

    reduce_s = 3.0
    """Seconds of the reduction of a layer's gradients in float32."""

    def _duration_s(self, name: str, reads: list[Any], writes: list[Any]) -> float:
        if name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
            return self.reduce_s * max(x.numel() * x.element_size() for x in (*reads, *writes)) / (2 * LAYER_BYTES)
        return 0.0 if name == "_allgather_base_" else super()._duration_s(name, reads, writes)


class NoReductions(SlowReductions):
    reduce_s = 0.0


def of_one_rank(program: Program, pp_rank: int) -> Program:
    """Return the part of a Program that a rank with neighbours in name only runs: their messages are there at once."""
    lanes = {
        lane: tuple(
            item._replace(waits=tuple(wait for wait in item.waits if wait.lane != "p2p"), peer=None) for item in items
        )
        for lane, items in program.ranks[pp_rank].items()
        if lane != "p2p"
    }
    return replace(program, ranks=(lanes,), placement=(0,) * len(program.placement), transfers=None)


@pytest.mark.parametrize(
    "case", quick_sample([SMALL_CASE, *GPU_CASES], 0), ids=lambda case: f"{case['plan']}-{case['layers']}"
)
def test_no_stream_reads_what_a_reduction_under_way_writes(case: dict[str, Any]) -> None:
    for rank in (0, 2):  # of either pipeline rank
        assert not watch_step(case, rank, StreamCheck).races


@pytest.mark.soak
def test_gradients_that_nobody_waits_for_are_found() -> None:
    with patch("muster.parallel.pending_reduction.wait_for_reductions"):
        assert watch_step(GPU_CASES[1], 0, StreamCheck).races


@pytest.mark.parametrize("case", quick_sample([SMALL_CASE, GPU_CASES[1]], 0), ids=lambda case: str(case["layers"]))
def test_reductions_are_hidden_as_simulated(case: dict[str, Any]) -> None:
    """The second stage's reduction begins beside the first one's passes, in logical time as in the simulation."""
    config, stage_layers = small_run(layers=case["layers"]), case["layers"] // 4
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": case["batch"]})})
    program = build_program(
        resolve_schedule(plan_of(case), config.model, config.workload), config.model, config.workload
    )

    def simulated_s(reduce_s: float) -> float:
        passes_s = {(kind, stage): stage_layers + END_LAYERS * (stage == 3) for kind in "FIW" for stage in (0, 3)}
        times = OpTimes(passes_s | {("REDUCE_GRAD", -1): reduce_s})
        return simulate(of_one_rank(program, 0), times).makespan_s

    def executed_s() -> float:
        return watch_step(case, 0, SlowReductions).step_s

    alone_s = watch_step(case, 0, NoReductions).step_s
    travels_s = (stage_layers + END_LAYERS) * SlowReductions.reduce_s
    assert alone_s == pytest.approx(simulated_s(0.0), rel=0.02)
    assert executed_s() == pytest.approx(simulated_s(travels_s), rel=0.05)
    wait = PendingReduction.__init__

    def waits(self: PendingReduction, *given: Any) -> None:
        wait(self, *given)
        self.wait()

    with patch.object(PendingReduction, "__init__", waits):
        assert executed_s() > simulated_s(travels_s) * 1.1
