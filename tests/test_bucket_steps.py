"""Optimizer steps bucket by bucket, each gathered for the next step beside the updates behind it (stepgather)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muster.api.verbs import predict
from muster.config.load_config import load_run_config
from muster.config.named_model import load_model
from muster.cost.time.op_times import OpTimes
from muster.planner.auto import resolve_plan
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.program import Program, ProgramError
from muster.schedule.resolve import resolve_schedule
from muster.simulate.simulator import simulate
from muster.spec.errors import InfeasibleError
from muster.spec.nearest_plans import nearest_plans, require_runnable
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.workload import Workload
from tests.parity import small_run
from tests.sampling import quick_sample
from tests.stream_check import StreamCheck
from tests.test_fake_gpu import fake_factories, watch_step
from tests.test_parity import cache, run

__all__ = ["cache", "fake_factories"]


def program_of(name: str) -> Program:
    config = small_run()
    return build_program(
        resolve_schedule(parse_plan_name(name), config.model, config.workload), config.model, config.workload
    )


def check_bits(num_ranks: int, cases: list[dict[str, Any]], cache: Path) -> None:
    """Losses, parameters and optimizer state have the bits of the step that gathers behind the updates; a bucket that
    is gathered before its update is found."""
    named = [case | {"plan": f"{case['plan']}-stepgather"} for case in cases]
    common = {"steps": 3, "precision": "fp32"}
    faulty = named[0] | {"fault": "gathered before the update"}
    found = run(num_ranks, [common | case for case in (*cases, *named, faulty)], cache)
    keys = ("losses", "parameters", "states")
    bits = [[{key: rank[key] for key in keys} for rank in ranks] for ranks in found]
    for case, without, with_it in zip(cases, bits, bits[len(cases) :], strict=False):
        assert without == with_it, case
    assert bits[-1] != bits[0]


def test_steps_have_the_bits_of_those_that_gather_behind_the_updates(cache: Path) -> None:
    check_bits(2, [{"plan": "dp2-z2", "tied": True, "layers": 2}], cache)


@pytest.mark.soak
def test_steps_of_more_plans_have_the_bits_of_those_that_gather_behind_the_updates(cache: Path) -> None:
    cases = [
        {"plan": "dp2-pp2v2-szbv-z1", "tied": True},
        {"plan": "dp2-pp2v2-sinterleaved-z1"},
        {"plan": "dp2-tp2-z1", "optim": "lion"},
        {"plan": "dp2x2-z2"},
        {"plan": "dp4-z1", "changes": {"bucket_layers": 3}},
        {"plan": "dp2-pp2-z1", "overlaps": True},
    ]
    check_bits(4, cases, cache)
    check_bits(2, [{"plan": "dp2-z1"}, {"plan": "dp2-z2", "tied": True}], cache)


@pytest.mark.parametrize("level", quick_sample(["z1", "z2"], 0))
def test_no_stream_reads_what_an_update_or_a_gather_writes(level: str) -> None:
    watch = watch_step({"plan": f"dp2-{level}-stepgather", "layers": 2, "batch": 4}, 0, StreamCheck)
    assert not watch.races


def test_a_gather_is_simulated_beside_the_updates_behind_it() -> None:
    program = program_of("dp2-z1-stepgather")
    check(program)
    own_s = {("STEP_BUCKET", 0): (1.0,) * 5, ("UNSHARD_BUCKET", 0): (2.0,) * 5}
    assert simulate(program, OpTimes({}, bucket_s=own_s)).makespan_s == 1 + 5 * 2


def test_a_gather_before_its_update_is_refused() -> None:
    program = program_of("dp2-z1-stepgather")
    lanes = program.ranks[0]
    gathers = [
        item._replace(waits=item.waits[:0] if item.action.slice == 2 else item.waits)
        if item.action.kind == "UNSHARD_BUCKET"
        else item
        for item in lanes["collective"]
    ]
    gathers.sort(key=lambda item: item.action.kind == "UNSHARD_BUCKET" and item.action.slice != 2)
    with pytest.raises(ProgramError, match=r"0UNSHARD_BUCKET\.2 on rank 0 frees|reads the updated parameters"):
        check(replace(program, ranks=({**lanes, "collective": tuple(gathers)},)))


def test_a_name_says_it() -> None:
    plan = parse_plan_name("dp2-mb1-z1-stepgather-bf16")
    assert plan.overlap_param_gather_with_optimizer_step
    assert format_plan_name(plan) == "dp2-mb1-z1-stepgather-bf16"
    assert plan.hash != parse_plan_name("dp2-mb1-z1-bf16").hash


def test_the_nearest_plan_to_one_under_z3_has_z1_and_gathers_beside_the_step() -> None:
    model, workload = load_model("tiny"), Workload(seq_len=128, global_batch_size=24)
    (first, *others) = nearest_plans(parse_plan_name("dp2-stepgather"), model, workload, 2)
    assert format_plan_name(first) == "dp2-mb1-z1-stepgather-bf16"
    assert not any(plan.overlap_param_gather_with_optimizer_step for plan in others)
    (units, *_) = nearest_plans(parse_plan_name("dp2-pp2v2-sinterleaved-active1-stepgather"), model, workload, 4)
    assert format_plan_name(units) == "dp2-pp2v2-mb1-active1-sinterleaved-bf16"


def test_a_prediction_says_of_experts_what_a_run_refuses() -> None:
    plan, sentence = "dp2-z1-mb4-stepgather", "stepgather with experts (whose biases move behind the update)"
    found = predict("tiny-moe", "2xh100", plan, seq_len=128, global_batch=24)
    assert found.not_yet == [f"{sentence} can't be run yet"]
    with pytest.raises(InfeasibleError) as refused:
        require_runnable(parse_plan_name(plan), found.model, found.workload, 2)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ("optim: {name: muon}", "optim.name muon: take adamw"),
        ("optim: {ema_decay: 0.9}", "optim.ema_decay, whose average follows all updates: set it to 0"),
        ("train: {elastic: true}", "train.elastic (not tested yet): leave stepgather out"),
    ],
)
def test_a_prediction_refuses_the_run_files_that_a_run_refuses(tmp_path: Path, changes: str, sentence: str) -> None:
    (file := tmp_path / "run.yaml").write_text(f"extends: tiny\nparallel: dp2-z1-stepgather\n{changes}\n")
    with pytest.raises(InfeasibleError) as predicted:
        predict(None, "2xh100", file)
    assert sentence in str(predicted.value)
    with pytest.raises(InfeasibleError) as executed:
        resolve_plan(load_run_config(None, file, ()), 2)
    assert str(predicted.value) in str(executed.value)
