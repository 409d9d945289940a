"""Asynchronous pipelines: their programs, and that they train as a serial emulator of the same delays, to the bit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from benchmarks.late_gradient_stability import steepest
from muster.checkpoint.checkpoint_dir import find_latest
from muster.config.cluster_files import load_cluster
from muster.config.optim_config import OptimConfig
from muster.cost.comm_volume import step_comm_bytes
from muster.cost.memory.forecast import forecast_memory
from muster.cost.time.op_times import OpTimes
from muster.launch.rank_errors import EXIT_STOPPED
from muster.layout.tensor_layout import rank_layouts
from muster.parallel.axis import PendingTensor, TensorAxis
from muster.parallel.tensor_parallel import all_reduce_replicated_grads
from muster.report.run_files import read_metrics
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.program import Program, ProgramError, parse_program
from muster.schedule.versions import report_versions
from muster.simulate.simulator import simulate
from muster.spec.legality import plan_violations
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.supported import unsupported_features
from muster.spec.workload import Workload
from muster.train.resume_check import changed_delays_note
from tests.ranks import run_ranks

MODEL = ModelSpec(vocab_size=32, hidden_size=8, num_layers=4, num_heads=2, num_kv_heads=2, intermediate_size=16)
WORKLOAD = Workload(seq_len=8, global_batch_size=8)


def check_same(num_ranks: int, cases: list[dict[str, Any]], folder: Path) -> None:
    """Cases with a fault must end otherwise than the emulator, the others with the same bits."""
    payload = {"cases": cases, "folder": str(folder)}
    by_rank = run_ranks(num_ranks, "tests.version_ranks:run_cases", payload)
    (emulated,) = run_ranks(1, "tests.version_ranks:emulate_cases", payload)
    for index, (case, wanted) in enumerate(zip(cases, emulated, strict=True)):
        digests: dict[str, str] = {}
        for found in by_rank:
            assert found[index]["steps"] == wanted["steps"]
            assert found[index]["losses"] == by_rank[0][index]["losses"]
            assert found[index]["kept"] == 0 or "fault" in case
            digests |= found[index]["digests"]
        same = (by_rank[0][index]["losses"], digests) == (wanted["losses"], wanted["digests"])
        assert same == ("fault" not in case), case


FAULTS = ("newest weights", "no stash", "gradients mixed")
PREDICTED = {"delay_compensation": "predict"}
PREDICTED_FAULTS = ("predicted for good", "not predicted", "newest weights")


def test_to_the_bit_as_the_serial_emulator(tmp_path: Path) -> None:
    """And one whose backwards use other weights than their forwards, or whose steps mix, is found out."""
    plan, late = "pp2-mb4-spipedream2bw-flush4", {"optim": "sgd", "delay_compensation": "spike"}
    faults = [{"plan": plan, "steps": 5, "fault": fault} for fault in FAULTS]
    faults.append({"plan": plan, "steps": 5, "fault": PREDICTED_FAULTS[1]} | PREDICTED)
    unstashed = {"plan": "pp2-mb4-spipelinedbackprop"} | late
    sound = [{"plan": plan, "nesterov": True} | PREDICTED, {"plan": plan}, {"plan": "pp2-mb4-spipedream"} | late]
    sound.append(unstashed)
    faults.append(unstashed | {"steps": 5, "fault": "stashed"})
    check_same(2, [*(case | {"steps": 5} for case in sound), *faults], tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_to_the_bit_as_the_serial_emulator_in_more_cases(tmp_path: Path) -> None:
    late = {"optim": "sgd", "delay_compensation": "spike"}
    plans = ("pp2-mb2-spipedream2bw-flush4-fp64", "pp2-mb4-spipedream2bw-flush3-bf16", "pp2-mb8-spipedream-flush3-bf16")
    wide = {"plan": "pp2-mb4-spipedream2bw-flush4-bf16", "steps": 5} | PREDICTED
    wrong = [{"plan": "pp2-mb4-spipedream2bw-flush4", "steps": 5, "fault": one} | PREDICTED for one in PREDICTED_FAULTS]
    ahead_of_late = wide | {"nesterov": True}
    check_same(2, [{"plan": "pp2-mb2-spipelinedbackprop-flush3-bf16"}, wide, ahead_of_late, *wrong], tmp_path)
    faults = [{"plan": "pp2-mb2-spipedream", "fault": fault} for fault in FAULTS]
    ahead = [{"plan": plan} | PREDICTED for plan in plans] + [{"plan": plans[0], "optim": "sgd"} | PREDICTED]
    check_same(2, [*({"plan": plan} for plan in plans), {"plan": plans[0]} | late, *ahead, *faults], tmp_path)
    check_same(4, [{"plan": f"pp4-mb{size}-spipelinedbackprop-fp64"} for size in (8, 4, 2)], tmp_path)
    plans = ("pp4-spipedream2bw-flush5", "pp4-mb2-spipedream2bw-relem", "pp4-mb8-spipedream", "pp4-mb4-spipedream")
    check_same(4, [{"plan": plan} | more for plan in plans for more in ({}, PREDICTED)], tmp_path)


def check_close(num_ranks: int, cases: list[dict[str, Any]], folder: Path) -> None:
    """Cases with a fault differ from the emulator, the others equal it but for the order of sums, in float64."""
    payload = {"cases": cases, "folder": str(folder)}
    by_rank = run_ranks(num_ranks, "tests.version_ranks:run_cases", payload)
    (emulated,) = run_ranks(1, "tests.version_ranks:emulate_cases", payload)
    for index, (case, wanted) in enumerate(zip(cases, emulated, strict=True)):
        errors = []
        for found in (own[index] for own in by_rank):
            assert found["steps"] == wanted["steps"]
            assert found["kept"] == 0
            if "fault" not in case:  # a profile times reductions, though each is of a version
                reduced = ["ALL_REDUCE_TP"] if "tp2-sp" in case["plan"] else []
                reduced += ["REDUCE_GRAD"] if "dp2x1" in case["plan"] else []
                assert found["timed"] == reduced
            for key in ("losses", "norms"):
                errors += [abs(one / other - 1) for one, other in zip(found[key], wanted[key], strict=True)]
            if "tp" not in case["plan"]:  # else ranks have parts
                errors += [abs(total / wanted["sums"][name] - 1) for name, total in found["sums"].items() if total]
        assert (max(errors) < 1e-10) == ("fault" not in case), (case, max(errors))


def test_with_several_ranks_for_a_stage_as_the_serial_emulator(tmp_path: Path) -> None:
    """Gradients that replicas don't sum, or of different versions, and copies of a weight that differ are found out."""
    cases = [{"plan": "dp2x1-pp2-mb2-spipedream2bw-fp64"}, {"plan": "tp2-sp-pp2-mb4-spipedream2bw-fp64"}]
    faults = [cases[0] | {"fault": fault} for fault in ("not reduced", "versions mixed")]
    faults.append(cases[1] | {"fault": "copies apart"})
    check_close(4, [case | {"steps": 3} for case in (*cases, *faults)], tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_with_several_ranks_for_a_stage_in_more_cases(tmp_path: Path) -> None:
    late = {"optim": "sgd", "delay_compensation": "spike"}
    plans = [f"{mesh}-pp2-{size}" for mesh, size in (("dp2x1", "mb2"), ("dp2x1", "mb1"), ("tp2", "mb4"))]
    names = ("spipedream2bw-flush4", "spipedream", "spipelinedbackprop-flush5")
    cases = [{"plan": f"{plan}-{name}-fp64"} for plan in plans for name in names]
    cases += [cases[0] | late, cases[1] | late, cases[0] | PREDICTED, cases[1] | PREDICTED]
    check_close(4, cases, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_with_replicas_of_tensor_parallel_stages(tmp_path: Path) -> None:
    """Ranks of a stage begin their sums over one another beside different passes."""
    names = ("spipedream2bw-flush4", "spipedream", "spipelinedbackprop-flush5")
    cases = [{"plan": f"dp2x1-tp2-sp-pp2-mb2-{name}-fp64"} for name in names]
    check_close(8, [*cases, cases[0] | {"steps": 3, "fault": "copies apart"}], tmp_path)


def test_a_sum_of_copies_beside_passes_is_seen_to_be_over_without_waiting_for_it() -> None:
    """A rank that waited for it would keep its neighbours waiting in their passes."""
    work = cast("dist.Work", SimpleNamespace(wait=lambda: None))
    axis = SimpleNamespace(size=2, index=0, all_reduce=lambda x: PendingTensor([work], lambda: x.mul_(2)))
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    pending = all_reduce_replicated_grads(cast("TensorAxis", axis), {"w": weight}, {"w": 2}, torch.device("cpu"))
    assert pending is not None
    assert list(pending.works) == [work]
    assert weight.grad.tolist() == [1.0] * 3
    pending.wait()
    assert weight.grad.tolist() == [2.0] * 3


def check_resumed(num_ranks: int, plan: str, tmp_path: Path) -> None:
    """Asked to stop in step 6, a run does so at the next flush, after step 8; saves and validations flush, too."""
    attempts = [("whole", 0), ("stopped", 6), ("stopped", 0)]
    payload = {"plan": plan, "folder": str(tmp_path), "attempts": attempts}
    codes = run_ranks(num_ranks, "tests.version_ranks:run_attempts", payload)
    assert codes == [[0, EXIT_STOPPED, 0]] * num_ranks
    whole, stopped = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "stopped"))
    keys = ("step", "train/loss", "train/grad_norm", "train/lr", "eval/loss")
    assert [[row.get(key) for key in keys] for row in whole] == [[row.get(key) for key in keys] for row in stopped]
    one, other = (find_latest(tmp_path / name / "checkpoints") for name in ("whole", "stopped"))
    assert one is not None
    assert other is not None
    files = sorted(path.name for path in one.glob("*.safetensors"))
    assert files
    assert all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_run_with_replicas_that_stops_and_goes_on_has_the_bits_of_one_that_does_not(tmp_path: Path) -> None:
    check_resumed(4, "dp2x1-pp2-mb1-spipedream2bw-flush4", tmp_path)


def test_a_run_that_stops_and_goes_on_has_the_bits_of_one_that_does_not(tmp_path: Path) -> None:
    check_resumed(2, "pp2-mb2-spipedream2bw-flush4", tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# The plan and its program


def program_of(name: str) -> Program:
    return build_program(parse_plan_name(name), MODEL, WORKLOAD)


def test_delays_and_versions_are_those_of_the_papers() -> None:
    """Delay 1 and two versions under 2BW; under PipeDream, one micro-batch a step, rank r is p − 1 − r steps late."""
    for name, delays, versions in (
        ("pp4-mb1-spipedream2bw", [1, 1, 1, 1], [2, 2, 2, 1]),
        ("pp4-mb8-spipedream", [3, 2, 1, 0], [4, 3, 2, 1]),
        ("pp4-mb4-spipedream", [2, 1, 1, 0], [3, 2, 2, 1]),
        ("pp4-mb8-spipelinedbackprop", [3, 2, 1, 0], [1, 1, 1, 1]),
        ("pp4-mb4-spipelinedbackprop", [2, 1, 1, 0], [1, 1, 1, 1]),
    ):
        program = program_of(name)
        check(program)
        assert parse_program(str(program)) == program
        found = [report_versions(program, rank) for rank in range(4)]
        assert [one.max_delay for one in found] == delays
        assert [one.most_versions for one in found] == versions


def test_steps_follow_each_other_without_a_bubble() -> None:
    """From flush to flush there is the bubble of one step, and the gradient norm is hidden."""
    seconds = {("F", -1): 1.0, ("B", -1): 2.0, ("GRAD_NORM", -1): 1.5, ("STEP", -1): 0.0}
    for name, end_s in (("pp4-mb1-spipedream2bw-flush5", 1.5), ("pp4-mb8-spipedream-flush5", 1.5)):
        program = program_of(name)
        passes_s = 3 * program.num_micro_batches
        assert simulate(program, OpTimes(seconds)).makespan_s == pytest.approx(passes_s + 3 * 3 + end_s)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0B4v1@", "0B4v2@", "0B4v2 on rank 0 uses version 2 of the weights, but its forward used version 1"),
        ("0F4v1", "0F4", "0F4 on rank 0 uses version 0 of the weights, but the newest is 1"),
        ("STEPv1@collective:0", "STEPv1", "STEPv1 on rank 0 begins before GRAD_NORM_BESIDEv1 is known to be over"),
        ("STEPv2", "STEPv4", "STEPv4 on rank 0 comes after version 1: expected 2"),
    ],
)
def test_what_a_program_does_wrong_is_found(old: str, new: str, said: str) -> None:
    text = str(program_of("pp2-mb4-spipedream2bw-flush3"))
    assert old in text
    with pytest.raises(ProgramError, match=said):
        check(parse_program(text.replace(old, new, 1)))


def test_the_gradients_of_each_step_are_reduced_beside_the_next() -> None:
    """Once on each stage, before its update; the exchange is hidden behind passes but for the last one."""
    plan = parse_plan_name("dp2x1-tp2-sp-pp2-mb1-spipedream2bw-flush3")
    text = str(program := build_program(plan, MODEL, WORKLOAD))
    check(program)
    assert parse_program(text) == program
    assert "rank 1 collective: 1REDUCE_GRADv1@compute:7 1ALL_REDUCE_TPv1@collective:0 GRAD_NORM_BESIDEv1@" in text
    with pytest.raises(ProgramError, match="1REDUCE_GRADv2 is missing on rank 1, though the gradients of other stages"):
        check(parse_program(text.replace("1REDUCE_GRADv2", "1REDUCE_GRADv4")))
    seconds = {("F", -1): 1.0, ("B", -1): 2.0, ("REDUCE_GRAD", -1): 2.0, ("STEP", -1): 0.0}
    passes_s, bubble_s = 3 * program.num_micro_batches, 3
    assert simulate(program, OpTimes(seconds)).makespan_s == pytest.approx(passes_s + bubble_s + 2)
    alone = str(build_program(parse_plan_name("dp2x1-pp2-mb1-spipedream-flush3"), MODEL, WORKLOAD))
    assert "STEPv1@collective:0" in alone
    with pytest.raises(ProgramError, match="STEPv1 on rank . begins before .REDUCE_GRADv1 is known to be over"):
        check(parse_program(alone.replace("STEPv1@collective:0", "STEPv1")))


def test_backwards_without_stashing_use_the_newest_weights() -> None:
    text = str(program_of("pp2-mb8-spipelinedbackprop-flush3"))
    assert "0F1 0B0@p2p:2 STEPv1 0F2v1 0B1v1@" in text
    said = "0B1 on rank 0 uses version 0 of the weights, but the newest is 1"
    with pytest.raises(ProgramError, match=said):
        check(parse_program(text.replace("0B1v1@", "0B1@", 1)))


def test_weights_that_are_older_than_promised_are_found() -> None:
    """PipeDream's program under the name of 2BW, whose promise is a delay of one step."""
    text = str(program_of("pp4-mb8-spipedream-flush6")).replace("schedule=pipedream", "schedule=pipedream-2bw")
    said = "rank 0 computes gradients on weights that are 3 steps old, but schedule pipedream-2bw promises at most 1"
    with pytest.raises(ProgramError, match=said):
        check(parse_program(text))
    one_step = str(build_program(Plan(pp=2), MODEL, WORKLOAD)).replace("0F0 ", "0F0v1 ", 1)
    with pytest.raises(ProgramError, match="0F0v1 on rank 0 is of a version, which a program of one step has not"):
        check(parse_program(one_step))


def test_memory_counts_versions_and_waiting_gradients() -> None:
    def held(schedule: str, rank: int, compensation: str = "none", replicas: int = 1) -> dict[str, int]:
        plan = parse_plan_name(f"dp{replicas}x1-pp4-mb1{schedule}-fp32")
        optim = OptimConfig(lr=1.0, delay_compensation=compensation)
        program = build_program(plan, MODEL, WORKLOAD)
        terms = forecast_memory(MODEL, plan, WORKLOAD, load_cluster("8xh100"), program, optim=optim).ranks[rank].terms
        return terms.by_name()

    assert held("-spipedream2bw-flush1", 1) == held("", 1), "steps of their own"
    plain, double, stashed = (held(schedule, 1) for schedule in ("", "-spipedream2bw", "-spipedream"))
    assert double["gradients"] == 2 * plain["gradients"]
    assert stashed["gradients"] == plain["gradients"]
    assert stashed["parameters"] == 2 * plain["parameters"]  # eight micro-batches a step: one older version
    assert held("-spipedream2bw", 1, replicas=2)["gradients"] == double["gradients"]
    assert held("-spipelinedbackprop", 1)["parameters"] == plain["parameters"]
    assert held("-spipedream", 3)["parameters"] == held("", 3)["parameters"]
    predicted = held("-spipedream", 1, "predict")
    assert predicted["parameters"] == stashed["parameters"] + plain["parameters"]


def test_replicas_sum_whole_gradients_once_a_step() -> None:
    plan = parse_plan_name("dp2x1-pp2-mb1-spipedream2bw-fp32")
    held = [sum(layout.numel for layout in rank_layouts(MODEL, plan, rank)) for rank in (0, plan.world_size - 1)]
    sent = [step_comm_bytes(MODEL, plan, WORKLOAD, rank) for rank in (0, plan.world_size - 1)]
    assert [one["dp_replicate"] for one in sent] == [{"all_reduce": 4 * numel} for numel in held]
    assert all("dp_shard" not in one for one in sent)


def test_other_delays_on_resuming_are_said() -> None:
    before, plain = parse_plan_name("pp2-mb1-spipedream2bw-flush4-fp32"), parse_plan_name("pp2-mb1-fp32")

    def said(one: Plan, now: str) -> str | None:
        return changed_delays_note(one.model_dump(), parse_plan_name(now), 8)

    assert said(before, "pp2-mb1-spipedream2bw-flush4-fp32") is said(plain, "pp4-mb2-fp32") is None
    late = "from step 9 on, gradients are late by another number of steps"
    assert (said(before, "pp2-mb1-spipedream2bw-flush8-fp32") or "").startswith(f"flush_every was 4, now 8: {late}")
    assert "schedule was pipedream-2bw, now 1f1b" in (said(before, "pp2-mb1-fp32") or "")
    assert "schedule was 1f1b, now pipedream-2bw" in (said(plain, "pp2-mb1-spipedream2bw-fp32") or "")
    assert changed_delays_note({}, before, 8) is None, "of copies in memory the plan isn't known"


def test_where_it_is_refused() -> None:
    def said(name: str, model: ModelSpec = MODEL) -> str:
        plan = parse_plan_name(name, Plan(precision="fp32"))
        found = plan_violations(plan, model, WORKLOAD, plan.world_size) or unsupported_features(plan, model)
        return "; ".join(found)

    assert "lets pipeline ranks go on without a flush, but pp is 1" in said("dp2-spipedream2bw")
    assert "needs at least 4 micro-batches in a step on 4 pipeline ranks" in said("pp4-mb4-spipedream2bw")
    assert "flush_every 4 is of asynchronous schedules" in said("pp2-flush4")
    assert "with sharded data parallelism (each rank keeps whole versions" in said("dp2-pp2-spipedream2bw")
    uneven = said("dp2x1-pp2-mb1-uneven3.1-spipedream2bw")
    assert "with uneven_micro_batches" in uneven
    assert "z1" not in uneven
    assert "with context parallelism" in said("cp2-pp2-spipedream2bw")
    assert said("dp2x1-pp2-spipedream2bw") == said("tp2-sp-pp2-spipedream") == said("dp2x1-tp2-pp2-spipedream2bw") == ""
    assert "with another precision than fp64, fp32 and bf16" in said("pp2-spipedream2bw-fp16")
    assert "recompute (which would repeat forwards" in said("pp2-spipelinedbackprop-relem")
    assert "experts, tied embeddings" in said("pp2-spipedream", MODEL.model_copy(update={"tied_embeddings": True}))
    assert said("pp4-spipedream2bw") == said("pp2-mb8-spipedream-bf16") == ""
    plan = parse_plan_name("pp2-spipedream2bw-flush4")
    assert format_plan_name(plan) == "pp2-mb1-spipedream2bw-flush4-bf16"
    with pytest.raises(ValueError, match="delay_compensation spike needs sgd with momentum above 0"):
        OptimConfig(lr=1.0, delay_compensation="spike")


@pytest.mark.parametrize(("predicts", "nesterov"), [(False, False), (True, False), (False, True), (True, True)])
def test_late_gradients_diverge_above_the_limit_alone(predicts: bool, nesterov: bool) -> None:
    """By the recurrence itself, whose gradients are those of a quadratic loss two steps ago."""
    delay, beta = 2, 0.9
    limit = steepest(beta, delay, predicts, nesterov)

    def size_after_many_steps(steepness: float) -> float:
        weights, mean = [1.0] * (delay + 2), 0.0
        for _ in range(20_000):
            late, before = weights[-1 - delay], weights[-2 - delay]
            gradient = steepness * (late + predicts * delay * (late - before))
            mean = beta * mean + (1 - beta) * gradient
            step = beta * mean + (1 - beta) * gradient if nesterov else mean
            weights.append(weights[-1] - step)
            if abs(weights[-1]) > 1e6:
                break
        return max(map(abs, weights[-50:]))

    assert size_after_many_steps(0.98 * limit) < 1e-6
    assert size_after_many_steps(1.02 * limit) > 1e6


def test_the_limit_of_late_gradients_where_it_is_known() -> None:
    for beta in (0.5, 0.9, 0.99):
        assert steepest(beta, 0, False, False) == pytest.approx(2 * (1 + beta) / (1 - beta), rel=1e-3)
        assert steepest(beta, 1, False, False) == pytest.approx(1, rel=1e-3)  # a product of roots of β + (1 − β) h lr
