"""Updates that host and device share, with optimizer state in host memory (`devupdateR`): the same bits, program,
checks, executor, prediction, memory, plans, checkpoints, refusals."""

import json
import math
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.cost.comm_volume import step_comm_bytes
from muster.cost.memory.forecast import forecast_memory
from muster.parallel.executor import Executor
from muster.planner.memory.trim_offload import trim_offload
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest, with_tier, with_tier_sizes
from muster.planner.search import search
from muster.planner.search_budget import SearchBudget
from muster.schedule.action import Action, Kind, Lane
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.host_update import PARTS_AHEAD
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.program import Program, ProgramError
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.simulate.predict import predict
from muster.simulate.resource_load import busy_seconds
from muster.spec.cluster import ClusterSpec, single_node_cluster
from muster.spec.device import DeviceSpec
from muster.spec.model import layer_parameter_shapes
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from tests import test_resume
from tests.test_parity import cache, run
from tests.train_runs import QUICK, train

__all__ = ["cache"]  # a fixture

MODEL, WORK = load_model("demo"), Workload(seq_len=256, global_batch_size=16)
EARLY = ("--train.update_in_backward", "true", "--optim.clip_by_previous_norm", "true")
FAULTS = ("unreturned state", "repeated update by the device", "update before its state")
SAMPLE: list[tuple[str, str, dict[str, Any]]] = [
    ("dp2-z3", "oopt-devupdate0.5", {"layers": 2}),
]
MORE: list[tuple[str, str, dict[str, Any]]] = [
    ("dp2-z3", "oopt-devupdate0.5", {}),
    *(
        (plan, f"oopt-devupdate{ratio}", {"precision": precision})
        for plan in ("dp2-z1", "dp2-z2-rfull", "dp2-z3", "tp2-sp")
        for ratio, precision in ((0.5, "fp64"), (1, "fp32"))
    ),
    ("dp2-z3", "oopt-devupdate0.75", {"precision": "bf16"}),
    ("pp2-relem", "oopt-devupdate0.5", {"tied": True, "precision": "fp64"}),
    ("dp2-z3", "oopt0.5-devupdate0.5", {}),
    ("pp2v2-szbv", "oopt-devupdate1", {"tied": True}),
    ("pp2v2-sinterleaved", "oopt-devupdate1", {"precision": "fp64"}),
    ("pp2-sgpipe-oact", "oopt-devupdate0.5", {}),
    ("pp2-vocab", "oopt-devupdate0.5", {}),
    ("cp2", "oopt-devupdate0.5", {"optim": "lion"}),
    ("dp2-z3-oactd", "oopt-devupdate0.5", {}),
]


def check_shared_updates(plans: list[tuple[str, str, dict[str, Any]]], cache: Path) -> None:
    """Losses, parameters and states have the bits of the plan without a tier; and bugs that are sown change them."""
    pairs = [({"plan": plan} | fields, {"plan": f"{plan}-{word}"} | fields) for plan, word, fields in plans]
    cases = [case | {"steps": 3, "profile": case is pair[1]} for pair in pairs for case in pair]
    faults = [pairs[0][1] | {"steps": 3, "fault": fault} for fault in FAULTS]
    *found, lost, twice, early = run(2, [*cases, *faults], cache)
    keys = ("losses", "parameters", "states")
    for place, pair in enumerate(pairs):
        for without, shared in zip(*found[2 * place : 2 * place + 2], strict=True):
            assert [without[key] for key in keys] == [shared[key] for key in keys], pair
            assert all(planned == counted for planned, counted in shared["memory"].values()), pair
            assert not shared["untimed"], pair
    right = found[0][0]
    for wrong in (lost, twice, early):
        assert wrong[0]["parameters"] != right["parameters"]
        assert wrong[0]["losses"][0] == right["losses"][0]  # before the first update


def test_shared_updates_leave_the_same_bits(cache: Path) -> None:
    check_shared_updates(SAMPLE, cache)


@pytest.mark.soak
def test_shared_updates_of_more_plans_leave_the_same_bits(cache: Path) -> None:
    check_shared_updates(MORE, cache)


def program_of(name: str) -> Program:
    return build_program(parse_plan_name(name), MODEL, WORK)


@pytest.mark.parametrize(
    ("name", "on_device"),
    [
        ("dp1-mb4-oopt-devupdate0.5", [1, 3, 5]),
        ("dp1-mb4-oopt-devupdate1", [0, 1, 2, 3, 4, 5]),
        ("dp1-mb4-oopt0.5-devupdate0.34", [2]),
        ("dp2-pp2-mb2-oopt-devupdate0.5", [1]),
        ("pp2v2-sinterleaved-mb2-oopt-devupdate1", [0, 1]),
    ],
)
def test_the_device_updates_its_share_while_the_host_updates_the_rest(name: str, on_device: list[int]) -> None:
    """State of the device's parts comes and goes between the host's copies, of two parts at most at a time."""
    program = program_of(name)
    check(program)
    lanes = program.ranks[0]
    parts = [item.action.slice for item in lanes["compute"] if item.action[:2] == (Kind.DEVICE_UPDATE, 0)]
    assert parts == on_device
    by_host = [item.action[1:4] for item in lanes["host"]]
    assert {item.action.kind for item in lanes["host"]} == {Kind.HOST_UPDATE}
    updated = [item.action[1:4] for item in lanes["compute"] if item.action.kind == Kind.DEVICE_UPDATE]
    assert not set(by_host) & set(updated)
    held = 0
    for item in lanes["host_copy"]:
        held += {Kind.RELOAD_STATE: 1, Kind.OFFLOAD_STATE: -1}.get(item.action.kind, 0)
        assert held <= PARTS_AHEAD + 1
    assert lanes["host_copy"][0].action.kind == Kind.OFFLOAD_GRAD, "the host begins first"
    assert lanes["host_copy"][-1].action.kind == Kind.RELOAD_PARAM


def without(program: Program, lane: Lane, kind: Kind, **fields: Any) -> Program:
    """The program with other fields of the first instruction of a kind."""
    (lanes,) = program.ranks
    place = next(n for n, item in enumerate(lanes[lane]) if item.action.kind == kind)
    changed = lanes[lane][place]._replace(**fields)
    return replace(program, ranks=({**lanes, lane: (*lanes[lane][:place], changed, *lanes[lane][place + 1 :])},))


@pytest.mark.parametrize(
    ("lane", "kind", "fields", "sentence"),
    [
        ("compute", Kind.DEVICE_UPDATE, {"waits": ()}, "0DEVICE_UPDATE.1 on rank 0 reads the optimizer state on the"),
        ("host_copy", Kind.OFFLOAD_GRAD, {"waits": ()}, "0OFFLOAD_GRAD on rank 0 begins before"),
        ("host", Kind.HOST_UPDATE, {"waits": ()}, "0HOST_UPDATE on rank 0 begins before"),
        (
            "host",
            Kind.HOST_UPDATE,
            {"action": Action(Kind.HOST_UPDATE, 0, slice=1)},
            "0HOST_UPDATE.1 and 0DEVICE_UPDATE.1 on rank 0 update the same part",
        ),
        (
            "host_copy",
            Kind.OFFLOAD_STATE,
            {"action": Action(Kind.RELOAD_STATE, 0, slice=99)},
            "is on the device at the end: no 0OFFLOAD_STATE.1 takes it back to host memory",
        ),
    ],
)
def test_the_checker_refuses_updates_without_their_state(
    lane: Lane, kind: Kind, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ProgramError, match=sentence.replace("(", "\\(")):
        check(without(program_of("dp1-mb4-oopt-devupdate0.5"), lane, kind, **fields))


def test_a_step_needs_the_state_in_host_memory() -> None:
    program = program_of("dp1-mb4-oopt-devupdate0.5")
    *_, last_state, last_params = program.ranks[0]["host_copy"]
    assert [item.action.kind for item in (last_state, last_params)] == [Kind.OFFLOAD_STATE, Kind.RELOAD_PARAM]
    waits = program.ranks[0]["compute"][-1].waits
    for fewer in (waits[:-1], (*waits[:-2], waits[-1])):
        with pytest.raises(ProgramError, match="STEP on rank 0 begins before"):
            check(without(program, "compute", Kind.STEP, waits=fewer))


def test_state_returns_once_it_is_updated() -> None:
    program = program_of("dp1-mb8-oopt-devupdate1")
    with pytest.raises(ProgramError, match="0OFFLOAD_STATE on rank 0 reads the updated optimizer state on the device"):
        check(without(program, "host_copy", Kind.OFFLOAD_STATE, waits=()))


def test_the_executor_lets_host_and_device_update_side_by_side() -> None:
    """The first update of each waits for that of the other, which no single thread could outlast."""
    options = LoweringOptions(
        host_updates=(("host", "host", "host", "host"),), device_updates=((False, True, False, True),)
    )
    check(program := lower(make_schedule("1f1b", ScheduleSpec(1, 1)), options))
    begun = {Kind.HOST_UPDATE: Event(), Kind.DEVICE_UPDATE: Event()}

    def update(action: Action) -> None:
        begun[action.kind].set()
        assert all(event.wait(60) for event in begun.values())

    handlers = dict.fromkeys((Kind.GRAD_NORM, Kind.CLIP, Kind.STEP), lambda action: None)
    kinds = (Kind.OFFLOAD_GRAD, Kind.RELOAD_PARAM, Kind.RELOAD_STATE, Kind.OFFLOAD_STATE)
    copies: dict[Kind, Any] = dict.fromkeys(kinds, lambda action: lambda: None)
    stage: Any = SimpleNamespace(forward=lambda *_: torch.zeros(1), backward=lambda *_: None)
    executor = Executor(program, 0, 0, {0: stage}, {}, handlers | dict.fromkeys(begun, update), copies=copies)
    events = executor.run().events()
    assert sorted(event.action for event in events) == sorted(
        item.action for items in program.ranks[0].values() for item in items
    )


def test_a_prediction_has_host_and_device_update_side_by_side() -> None:
    """On a node whose cores are slow for its devices; the state of two layers is on the device at a time."""
    model, workload = load_model("llama3-8b"), Workload(seq_len=2048, global_batch_size=16)
    cluster = load_cluster("16xv100-32-sxm")
    plain, shared = (
        predict(model, parse_plan_name(f"dp16-z3-rfull-fp16-mb1-oopt{word}"), workload, cluster)
        for word in ("", "-devupdate0.7")
    )
    waits = [found.parts.optimizer_s + found.parts.communication_s["host"] for found in (plain, shared)]
    busy = busy_seconds(shared.timeline)
    longest = max(busy["host cores"], busy["host link"])
    assert longest < waits[1] < 1.05 * longest
    assert waits[1] < 0.6 * waits[0]
    assert shared.step_time_s - plain.step_time_s == pytest.approx(waits[1] - waits[0], rel=0.01)
    assert shared.parts.bubble_s < 0.001 * shared.step_time_s
    assert busy["host cores"] < 0.5 * busy_seconds(plain.timeline)["host cores"]
    sent = step_comm_bytes(model, shared.plan, workload, 0)["host"]
    layers = 22 / 32 * (model.num_parameters - 2 * model.vocab_size * model.hidden_size) / 16
    assert sent[Kind.RELOAD_STATE] == sent[Kind.OFFLOAD_STATE] == pytest.approx(8 * layers, rel=0.01)
    assert sent[Kind.OFFLOAD_GRAD] == pytest.approx(8 * (model.num_parameters / 16 - layers), rel=0.01)


def test_state_on_the_device_is_forecast_and_counted(tmp_path: Path) -> None:
    """In steps so short that the updates hold more than the passes."""
    words = ("dp1-mb1-rfull-oopt-devupdate1-fp32", "--train.seq_len", "16", "--train.global_batch_size", "1")
    own = ("--preset", "tiny", *QUICK, "--train.steps", "2", "--memory-limit", "1G", *words[1:])
    assert (ended := train(*own, "--parallel", words[0], "--run", tmp_path / "run")).code == 0, ended.err
    model, workload = load_model("tiny"), Workload(seq_len=16, global_batch_size=1)
    cpu = single_node_cluster(DeviceSpec(name="cpu", kind="cpu"), 1)
    plan = parse_plan_name(words[0])
    held = forecast_memory(model, plan, workload, cpu, build_program(plan, model, workload)).fullest
    assert held.peak_instruction.startswith("0DEVICE_UPDATE")
    layer = sum(math.prod(shape) for _, shape in layer_parameter_shapes(model, 0))
    assert held.terms.optimizer == 2 * 8 * layer, "AdamW's state of two layers"
    row = json.loads((tmp_path / "run" / "result.json").read_text())["comparison"]["memory: allocated"]
    assert row["measured"] == pytest.approx(row["predicted"], rel=0.02)


@pytest.mark.parametrize(
    ("plan", "more", "code", "sentence"),
    [
        ("dp1-devupdate0.5", (), 3, "optimizer state that is all on the device (they need oopt)"),
        ("dp1-ooptd-devupdate0.5", (), 3, "state on disk (only the host reads ooptd)"),
        ("dp1-oopt-oparam-devupdate0.5", (), 3, "parameters off the device (the host updates oparam where it lies)"),
        ("dp1-oopt-devupdate1.5", (), 2, "devupdate1.5 is no share of the layers"),
        ("dp1-oopt-devupdate0", (), 2, "devupdate0 is no share of the layers"),
        (
            "dp1-oopt-devupdate0.5",
            ("--train.delayed_update", "true"),
            3,
            "leave train.delayed_update or devupdateR out",
        ),
        ("dp1-oopt-devupdate0.5", EARLY, 3, "devupdateR, whose updates by the device"),
        ("dp1-oopt-devupdate0.5", ("--optim.name", "muon"), 3, "can't step in host memory"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    plan: str, more: tuple[str, ...], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--preset", "tiny", *more, "--parallel", plan, "--dry-run"]) == code
    assert sentence in capsys.readouterr().err


@pytest.mark.soak
def test_a_run_goes_on_with_and_without_shared_updates(tmp_path: Path) -> None:
    words = ("dp1", "dp2-oopt-devupdate0.5", "pp2-oopt-devupdate1", "dp2-ooptd-oparamd", "tp2-sp-oopt")
    chain = test_resume.ladder_chain(test_resume.all_pairs(words))
    assert test_resume.check([chain], test_resume.run(tmp_path, [chain], most=2)) == 20


def test_the_planner_takes_the_share_that_is_fastest_where_the_host_is_slow() -> None:
    """Among all shares in twentieths; none with a fast host, nor where the answer would differ by the tolerance."""
    cluster = with_tier_sizes(load_cluster("1xrtx4090"), 10**10, None)
    slow = ClusterSpec(groups=(cluster.groups[0].model_copy(update={"host_update_bytes_per_s": 15e9}),))
    shares = {}
    for name, own in (("slow", slow), ("fast", cluster)):
        asked = PlanRequest(MODEL, own, WORK, memory_limit_bytes=633_000_000, runnable=True)
        evaluator = PlanEvaluator(with_tier(asked, "oopt"))
        found = search(evaluator.request, 1, evaluator=evaluator)
        (best,) = trim_offload(found, SearchBudget()).best
        assert evaluator.memory_budget.fits(best.plan)
        shares[name] = best.plan.default_strategy.device_update_ratio
        if name == "slow":
            layers = range(1, 21)
            others = [with_share(found.best[0].plan, share / 20) for share in layers]
            least = min(evaluator.evaluate(one).value for one in others if evaluator.memory_budget.fits(one))
            assert best.value == pytest.approx(least, rel=0.01)
            assert best.value * (1 + asked.tolerance) < found.best[0].value
            (kept,) = trim_offload(replace(found, evaluator=lenient(evaluator)), SearchBudget()).best
            assert kept.plan.default_strategy.device_update_ratio == 0
    assert shares["slow"] > shares["fast"] == 0


def with_share(plan: Plan, share: float) -> Plan:
    strategy = plan.default_strategy.model_copy(update={"device_update_ratio": share})
    return plan.model_copy(update={"default_strategy": strategy})


def lenient(evaluator: PlanEvaluator) -> PlanEvaluator:
    """An evaluator of the same request whose tolerance no plan exceeds."""
    return PlanEvaluator(replace(evaluator.request, tolerance=99.0))
