"""Schedules that are searched for: found once for a plan, kept with it, executed as they are kept."""

from pathlib import Path

import pytest

from muster.checkpoint.checkpoint_dir import find_latest
from muster.checkpoint.manifest import read_manifest
from muster.config.load_config import load_plan, plan_yaml
from muster.cost.time.op_times import OpTimes
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.program import ProgramError
from muster.schedule.resolve import refine_schedule, resolve_schedule
from muster.schedule.unit_costs import nominal_pass_times
from muster.spec.errors import MusterError
from muster.spec.legality import plan_violations
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec
from muster.spec.plan import PinnedSchedule, Plan, StageSpec
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.stage_placement import looped_placement, wave_placement
from muster.spec.workload import Workload
from tests.train_runs import QUICK, rows_of, train

MODEL = ModelSpec(vocab_size=64, hidden_size=8, num_layers=8, num_heads=2, num_kv_heads=2, intermediate_size=16)
WORKLOAD = Workload(seq_len=8, global_batch_size=8)


def found(name: str) -> Plan:
    return resolve_schedule(parse_plan_name(name), MODEL, WORKLOAD)


@pytest.mark.parametrize(
    "name",
    ["pp4-sauto", "pp4v2-sauto-inflight2", "pp2v4-sauto-inflight1.5", "dp2-pp2-sauto-vocab-z1", "isl2-pp2-sauto"],
)
def test_a_found_schedule_is_kept_in_the_plan_and_hashed_into_it(name: str, tmp_path: Path) -> None:
    asked, plan = parse_plan_name(name), found(name)
    assert plan.pinned_schedule is not None
    assert plan.hash != asked.hash
    assert format_plan_name(plan).endswith(f"+{plan.hash}")
    assert plan.model_copy(update={"pinned_schedule": None}) == asked
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan))
    again = load_plan(tmp_path / "plan.yaml")
    assert (again, again.hash) == (plan, plan.hash)
    assert not plan_violations(plan, MODEL, WORKLOAD, plan.world_size)
    program = build_program(plan, MODEL, WORKLOAD)
    assert program.placement == plan.pinned_schedule.placement
    stages = plan.max_in_flight_micro_batches or plan.pp
    assert max(check(program).peak_activations) <= stages * plan.vpp + (plan.vocab_parallel is True)
    assert found(name) == plan


def test_an_unresolved_schedule_is_not_run() -> None:
    plan = parse_plan_name("pp2v2-sauto")
    with pytest.raises(MusterError, match="schedule auto is yet to be found for the plan"):
        build_program(plan, MODEL, WORKLOAD)
    with pytest.raises(MusterError, match="where schedule auto puts stages is unknown until it is resolved"):
        plan.pp_rank(0)
    assert resolve_schedule(parse_plan_name("pp2"), MODEL, WORKLOAD).pinned_schedule is None


def test_an_order_that_does_not_fit_is_refused() -> None:
    plan = found("pp4-sauto")
    assert plan.pinned_schedule is not None
    said = {
        "its pinned_schedule is for 8 micro-batches, now of 2 sequences, but": plan.model_copy(
            update={"micro_batch_size": 2}
        ),
        "its pinned_schedule is for 4 stages on 4 pipeline ranks": plan.model_copy(update={"pp": 2}),
        "pinned_schedule is for searched schedules": plan.model_copy(update={"schedule": "1f1b"}),
        "max_in_flight_micro_batches is for searched schedules (skippipe, ": parse_plan_name("pp4-inflight2"),
        "max_in_flight_micro_batches 0.5 doesn't hold one micro-batch's activations": parse_plan_name(
            "pp4-sauto-inflight0.5"
        ),
    }
    for sentence, wrong in said.items():
        assert any(sentence in one for one in plan_violations(wrong, MODEL, WORKLOAD, wrong.world_size)), sentence
    first, *rest = plan.pinned_schedule.ranks
    cases = {
        "3I7 on rank 3 has no 3F7 before it": (first, *rest[:2], rest[2].replace("3F7 ", "")),
        "'nonsense' is not an action": ("nonsense", *rest),
        "is on rank 0 twice": (first + " 0F0", *rest),
    }
    for sentence, ranks in cases.items():
        order = PinnedSchedule(micro_batches=8, placement=plan.pinned_schedule.placement, ranks=ranks)
        with pytest.raises(ProgramError, match=sentence):
            check(build_program(plan.model_copy(update={"pinned_schedule": order}), MODEL, WORKLOAD))


def test_stages_of_their_own_kind_lie_where_the_order_says() -> None:
    stages = (StageSpec(layers=5, mesh=Mesh(tp=2)), StageSpec(layers=3))
    plan = resolve_schedule(Plan(pp=2, schedule="auto", stages=stages), MODEL, WORKLOAD)
    assert not plan_violations(plan, MODEL, WORKLOAD, 3)
    chunks = Plan(pp=2, vpp=2, schedule="auto", stages=stages * 2)
    assert any("has yet to find" in problem for problem in plan_violations(chunks, MODEL, WORKLOAD, 6))


def test_nominal_times_know_head_recompute_and_cuts() -> None:
    plan = parse_plan_name("pp4-l1.2.3.2-rfull")
    times = nominal_pass_times(plan, MODEL, WORKLOAD)
    layer, head = (4 * 8 * 8 + 3 * 8 * 16), 64 * 8
    attention = 8 * 8
    whole = [layer + attention, 2 * (layer + attention), 3 * (layer + attention), 2 * (layer + attention) + head]
    assert times.forward_s == pytest.approx([4 * one / sum(whole) for one in whole])
    assert times.weight_backward_s[0] == pytest.approx(4 * layer / sum(whole))
    assert times.input_backward_s[0] == pytest.approx(4 * (2 * layer + 3 * attention) / sum(whole))
    spread = nominal_pass_times(parse_plan_name("pp4-vocab"), MODEL, WORKLOAD)
    assert spread.forward_s == [1.0] * 4


def test_measured_times_give_an_order_of_their_own_on_the_same_ranks() -> None:
    plan = found("pp2v2-sauto-inflight2")
    assert plan.pinned_schedule is not None
    times = OpTimes({("F", -1): 1.0, ("B", -1): 3.0, ("F", 3): 2.0}, p2p_s=0.5)
    passes = times.pass_times(4)
    assert passes.forward_s == [1, 1, 1, 2]
    assert passes.input_backward_s == passes.weight_backward_s == [1.5] * 4
    for placement in (wave_placement(2, 2), looped_placement(2, 2)):
        bound = plan.model_copy(
            update={"pinned_schedule": plan.pinned_schedule.model_copy(update={"placement": placement})}
        )
        order = refine_schedule(bound, passes)
        assert (order.times, order.placement, order.micro_batches) == ("measured", placement, 8)
        check(build_program(plan.model_copy(update={"pinned_schedule": order}), MODEL, WORKLOAD))


def test_the_exact_schedule_is_kept_too() -> None:
    pytest.importorskip("ortools")
    plan = found("pp2-sexact")
    assert plan.pinned_schedule is not None
    check(build_program(plan, MODEL, WORKLOAD))


def test_a_run_keeps_the_order_that_it_measured(tmp_path: Path) -> None:
    """It finds it once, and goes on with it."""
    run = tmp_path / "run"
    command = ["--preset", "tiny", *QUICK, "--run", run, "--parallel", "pp2-sauto-mb4"]
    ended = train(*command, "--train.steps", "2")
    assert ended.code == 0, ended.err
    text, plan = (run / "plan.yaml").read_text(), load_plan(run / "plan.yaml")
    assert plan.pinned_schedule is not None
    assert plan.pinned_schedule.times == "measured"
    assert " order:" not in (run / "config.yaml").read_text()
    latest = find_latest(run / "checkpoints")
    assert latest is not None
    assert read_manifest(latest).plan["pinned_schedule"]["ranks"] == list(plan.pinned_schedule.ranks)
    ended = train(*command, "--train.steps", "3")
    assert ended.code == 0, ended.err
    assert "resuming" in ended.out
    assert (run / "plan.yaml").read_text() == text
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3]
