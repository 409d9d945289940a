"""Gradients of both copies of a stage are summed beside passes of other stages, as the Program says."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muster.cost.time.op_times import OpTimes
from muster.parallel.axis import PendingTensor
from muster.schedule.action import Action, Kind
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.lower import COPY_LANES, LoweringOptions, lower
from muster.schedule.program import Program
from muster.schedule.registry import make_schedule
from muster.simulate.simulator import simulate
from muster.spec.plan_name import parse_plan_name
from muster.spec.schedules import SCHEDULES
from muster.spec.workload import Workload
from tests.parity import small_run
from tests.ranks import run_ranks
from tests.replica_reduction_ranks import run_of
from tests.sampling import quick_sample
from tests.stream_check import StreamCheck
from tests.test_fake_gpu import check as check_on_gpus
from tests.test_fake_gpu import fake_factories, watch_step
from tests.test_parity import cache
from tests.test_schedules import setting_of

__all__ = ["cache", "fake_factories"]

BIDIRECTIONAL = sorted(name for name, entry in SCHEDULES.items() if entry.default_replicas > 1)
PASSES_S = {("F", -1): 1.0, ("B", -1): 2.0, ("I", -1): 1.0, ("W", -1): 1.0}


def lowered(name: str, ranks: int, micro_batches: int, **options) -> Program:
    return lower(make_schedule(name, setting_of(name, ranks, micro_batches)), LoweringOptions(**options))


@pytest.mark.parametrize("words", ["z3-oopt-oparam", "oact", "oopt"])
def test_sums_come_behind_copies_beside_the_last_backward(words: str) -> None:
    """Those of parameters, which a sum mustn't begin before; optimizer state moves later."""
    plan = parse_plan_name(f"dp1-tp2-sp-pp2v2-mb1-sdualpipe-{words}")
    model = small_run(False).model.model_copy(update={"num_layers": 4})
    program = build_program(plan, model, Workload(seq_len=8, global_batch_size=4))
    check(program)
    for lanes in program.ranks:
        copies = {lane for lane in lanes if lane in COPY_LANES}
        sums = [item for item in lanes["collective"] if item.action.kind == Kind.ALL_REDUCE_REPLICAS]
        waited = [{wait.lane for wait in item.waits} & copies for item in sums]
        assert all(waited) == ("oparam" in words)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(BIDIRECTIONAL),
    st.sampled_from([2, 4, 6]),
    st.integers(2, 13),
    st.sampled_from(["z1", "z2", "z3"]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.booleans(),
)
@example("bitpipe", 4, 5, "z1", 1, False, False)  # whose two copies are done at different times
@example("bitpipe", 4, 5, "z3", 2, True, True)
def test_no_schedule_gets_stuck(name, ranks, micro_batches, zero, data_ranks, tied, replicated):
    if name == "auto-bidirectional":
        ranks, micro_batches = min(ranks, 4), min(micro_batches, 8)
    options = {"tied_embeddings": tied, "tp_replicated_weights": replicated}
    program = lowered(name, ranks, micro_batches, zero=zero, data_ranks=data_ranks, **options)
    check(program)
    simulate(program, OpTimes(PASSES_S | {("ALL_REDUCE_REPLICAS", -1): 3.0, ("ALL_REDUCE_TP", -1): 0.5}))


def test_a_sum_begins_behind_the_last_backward_of_the_stage_unless_gradients_are_reduced_between():
    for name in BIDIRECTIONAL:
        for options in ({}, {"tp_replicated_weights": True}, {"zero": "z1", "data_ranks": 2}):
            program = lowered(name, 4, 8, **options)
            for rank, lanes in enumerate(program.ranks):
                compute = [item.action for item in lanes["compute"]]
                for item in lanes["collective"]:
                    if item.action.kind != Kind.ALL_REDUCE_REPLICAS:
                        continue
                    copies = [item.action.stage, item.action.stage + program.depth]
                    own = next(stage for stage in copies if program.placement[stage] == rank)
                    last = max(index for index, action in enumerate(compute) if action.stage == own)
                    begins = max(wait.index for wait in item.waits if wait.lane == "compute")
                    assert begins == (len(compute) - 2 if "data_ranks" in options else last), (name, item)


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_sums_are_hidden_on_devices_and_share_cores_of_a_cpu(name: str):
    program = lowered(name, 4, 8)
    late = after_all_passes(program)
    sums_s = {("ALL_REDUCE_REPLICAS", -1): 1.0}
    free, times = OpTimes(PASSES_S), OpTimes(PASSES_S | sums_s)
    num_sums = program.depth // 2  # on each rank, half of those of a copy, times two copies
    assert simulate(late, times).makespan_s >= simulate(late, free).makespan_s + num_sums
    assert simulate(program, times).makespan_s <= simulate(program, free).makespan_s + num_sums
    slowed = replace(times, overlap_slowdown=0.5)
    assert simulate(program, slowed).makespan_s > simulate(program, times).makespan_s
    one_core = replace(times, cores=1)
    assert simulate(program, one_core).makespan_s == pytest.approx(simulate(late, one_core).makespan_s, rel=0.02)


def after_all_passes(program: Program) -> Program:
    """Return the Program with all sums behind all passes."""
    ranks = []
    for lanes in program.ranks:
        passes = next(item.waits[0] for item in lanes["collective"] if item.action == Action(Kind.GRAD_NORM))
        sums = (item._replace(waits=(passes,)) for item in lanes["collective"])
        kept = zip(lanes["collective"], sums, strict=True)
        ranks.append(
            {**lanes, "collective": tuple(b if a.action.kind == Kind.ALL_REDUCE_REPLICAS else a for a, b in kept)}
        )
    return replace(program, ranks=tuple(ranks))


# ----------------------------------------------------------------------------------------------------------------------
# On ranks


@pytest.mark.parametrize(
    ("ranks", "batch", "plans"),
    [
        (2, 5, ["pp2v4-sbitpipe"]),  # whose two copies are done at different times
        (4, 8, ["dp2-pp2v2-z2-sdualpipe"]),
        pytest.param(4, 8, ["pp4v2-sdualpipe"], marks=pytest.mark.soak),
    ],
)
def test_sums_begin_where_the_program_says_and_leave_the_bits_of_an_exchange(
    ranks: int, batch: int, plans: list[str], tmp_path: Path
):
    payload = {"plans": plans, "batch": batch, "cache": str(tmp_path)}
    config = run_of(batch)
    for rank, by_plan in enumerate(run_ranks(ranks, "tests.replica_reduction_ranks:train", payload)):
        for name, seen, same in by_plan:
            assert same, name
            plan = parse_plan_name(name)
            program = build_program(plan, config.model, config.workload)
            assert seen == expected_order(program, rank // (ranks // plan.pp)), (name, rank)


def expected_order(program: Program, pp_rank: int) -> list[str]:
    """Return the passes of a rank with the sums that its Program lets begin before each; GRAD_NORM waits for them."""
    compute, collectives = (program.ranks[pp_rank][lane] for lane in ("compute", "collective"))
    waiting = [item for item in collectives if item.action.kind == Kind.ALL_REDUCE_REPLICAS]
    num_sums, found = len(waiting), list[str]()
    for index, item in enumerate(compute):
        while waiting and waiting[0].waits[-1].index < index:
            found.append(str(waiting.pop(0).action))
        found += [str(item.action)]
    return [*found[:-1], *["wait"] * num_sums, "GRAD_NORM", found[-1]]


@pytest.mark.parametrize("batch", quick_sample([2, 4], 0))
def test_on_a_gpu_ranks_meet_and_no_stream_reads_what_a_sum_writes(batch: int):
    check_on_gpus({"plan": "pp2v2-sdualpipe", "layers": 4, "batch": batch})


def test_on_a_gpu_sums_that_nobody_waits_for_are_found():
    class Unawaited(PendingTensor):
        def wait(self):
            return self.result()

    with patch("muster.train.gradients.PendingTensor", Unawaited):
        assert watch_step({"plan": "pp2v2-sdualpipe", "layers": 4, "batch": 2}, 0, StreamCheck).races
