"""Updates by the host beside the passes of the next step: program, checks, prediction, memory, resuming, refusals.

`test_parity.py` compares such steps with their serial form.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch

from muster.api.verbs import predict
from muster.checkpoint.checkpoint_dir import checkpoint_path
from muster.checkpoint.load import read_full
from muster.checkpoint.manifest import read_manifest
from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.cost.memory.forecast import forecast_memory
from muster.parallel.executor import Executor
from muster.schedule.action import Action, Kind
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.program import Instruction, Program, ProgramError
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.simulate.resource_load import busy_seconds
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from tests.train_runs import AT_ONCE, QUICK, train

MODEL, WORK = load_model("demo"), Workload(seq_len=256, global_batch_size=16)
LATE = ("--train.delayed_update", "true", "--train.delayed_update_warmup_steps", "1")
TINY = ("--preset", "tiny", *QUICK, *AT_ONCE, *LATE, "--train.save_every", "1", "--train.keep_last", "9")


def program_of(name: str, delayed: bool = True) -> Program:
    return build_program(parse_plan_name(name), MODEL, WORK, update_time="delayed" if delayed else "after_passes")


def changed(program: Program, kind: Kind, **fields) -> Program:
    """The program with other fields of its first instructions of a kind."""
    lanes = {
        lane: tuple(item._replace(**fields) if item.action == Action(kind, 0) else item for item in items)
        for lane, items in program.ranks[0].items()
    }
    return replace(program, ranks=(lanes,))


def test_updates_run_beside_the_passes_and_return_after_them() -> None:
    for name in ("dp1-mb4-oopt", "dp1-mb4-ooptd", "dp2-pp2-mb2-ooptd", "pp2v2-szbv-mb2-oopt"):
        program = program_of(name)
        check(program)
        for lanes in program.ranks:
            assert not any(item.action.kind == Kind.UPDATE for item in lanes["compute"])
            assert all(wait.lane == "disk" for item in lanes["host"] for wait in item.waits)
            assert all(item.action.kind == Kind.DELAYED_UPDATE for item in lanes["host"])


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        (Kind.RELOAD_PARAM, {"waits": ()}, "0RELOAD_PARAM on rank 0 begins before 0B0 is known to be over"),
        (Kind.OFFLOAD_GRAD, {"waits": ()}, "begins before"),
        (Kind.OFFLOAD_GRAD, {"action": Action(Kind.OFFLOAD_GRAD, 0, slice=99)}, "of the next step has no gradients"),
    ],
)
def test_the_checker_refuses_races_of_delayed_updates(kind: Kind, fields: dict, sentence: str) -> None:
    with pytest.raises(ProgramError, match=sentence):
        check(changed(program_of("dp1-mb4-oopt"), kind, **fields))


def test_state_of_the_first_and_the_last_part_stays_in_memory_between_steps() -> None:
    """The host begins a step at once, and waits for no write at its end; the checker sees what would be missing."""
    program = program_of("dp1-mb4-ooptd")
    (lanes,) = program.ranks
    last = max(item.action.slice for item in lanes["disk"])
    assert lanes["host"][0].waits == ()
    assert lanes["disk"][0] == Instruction(Action(Kind.WRITE_STATE, 0, slice=last))
    assert lanes["disk"][-1] == Instruction(Action(Kind.READ_STATE, 0))
    with pytest.raises(ProgramError, match="the next step finds no state in memory for 0DELAYED_UPDATE on rank 0"):
        check(changed(program, Kind.READ_STATE, action=Action(Kind.READ_STATE, 0, slice=99)))


def test_a_slow_host_is_hidden_behind_the_passes(tmp_path: Path) -> None:
    """The predicted step is the longer of the two, where it is their sum without the delay."""
    cluster = load_cluster("1xrtx4090")
    group = cluster.groups[0].model_copy(update={"host_update_bytes_per_s": 1e10})
    cluster = cluster.model_copy(update={"groups": (group,)})
    file = tmp_path / "run.yaml"
    step = "train: {seq_len: 256, global_batch_size: 16, delayed_update: %s}\nparallel: dp1-mb4-oopt-bf16\n"
    found = {}
    for delays in ("true", "false"):
        file.write_text(step % delays)
        found[delays] = predict("demo", cluster, file)
    host_s, device_s = (busy_seconds(found["false"].timeline)[name] for name in ("host cores", "compute"))
    copies_s = busy_seconds(found["false"].timeline)["host link"]
    late_s, at_once_s = found["true"].step_time_s, found["false"].step_time_s
    step_s = sum(event.duration_s for event in found["true"].timeline.events if event.action.kind == Kind.STEP)
    passes_s = device_s - step_s
    assert at_once_s > host_s + passes_s + step_s
    assert max(host_s, passes_s) + step_s < late_s < max(host_s, passes_s) + step_s + copies_s
    plan, program = found["true"].plan, found["true"].program
    held = forecast_memory(MODEL, plan, WORK, cluster, program).fullest.host_bytes
    state = 8 * MODEL.num_parameters
    assert held == state + 8 * MODEL.num_parameters, "gradients and parameters wait in host memory"


class WaitingStage:
    """A stage whose first forward ends only once the host has begun an update."""

    def __init__(self, has_begun: Event, has_passed: Event) -> None:
        self.has_begun, self.has_passed = has_begun, has_passed

    def forward(self, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor:
        assert self.has_begun.wait(60)
        self.has_passed.set()
        return torch.zeros(1)

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> None: ...


def test_the_executor_runs_updates_beside_passes_and_reports_their_errors() -> None:
    """An update and a pass wait for each other, which no single thread could outlast."""
    options = LoweringOptions(host_updates=(("host", "disk"),), delayed_update=True)
    check(program := lower(make_schedule("1f1b", ScheduleSpec(1, 2)), options))
    has_begun, has_passed, order = Event(), Event(), list[Kind]()

    def update(action: Action) -> None:
        has_begun.set()
        assert has_passed.wait(60)
        if len(order) > 20:
            raise ValueError("the disk is gone")

    def copy(action: Action) -> Callable[[], None]:
        order.append(action.kind)
        return lambda: None

    handlers = dict.fromkeys((Kind.GRAD_NORM, Kind.CLIP, Kind.STEP), lambda action: order.append(action.kind))
    stages: dict = {0: WaitingStage(has_begun, has_passed)}
    kinds = (Kind.OFFLOAD_GRAD, Kind.RELOAD_PARAM, Kind.READ_STATE, Kind.WRITE_STATE)
    executor = Executor(
        program, 0, 0, stages, {}, handlers | {Kind.DELAYED_UPDATE: update}, copies=dict.fromkeys(kinds, copy)
    )
    events = executor.run().events()
    assert sorted(event.action for event in events) == sorted(
        item.action for items in program.ranks[0].values() for item in items
    )
    after = [kind for kind in order if kind not in (Kind.READ_STATE, Kind.WRITE_STATE)]
    pair = [Kind.RELOAD_PARAM, Kind.OFFLOAD_GRAD]
    assert after == [Kind.GRAD_NORM, Kind.CLIP, *pair, *pair, Kind.STEP]
    executor.run()
    order += [Kind.STEP] * 20
    with pytest.raises(ValueError, match="the disk is gone"):
        executor.run()


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = checkpoint_path(run / "checkpoints", step)
    return {name: read_full(folder, name) for name in read_manifest(folder).tensors}


@pytest.mark.soak
def test_a_run_goes_on_with_the_gradients_that_wait(tmp_path: Path) -> None:
    """A checkpoint has them, so that a resumed run ends with the same bits; without them it is refused."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    first = (*TINY, "--train.steps", "4", "--parallel", "dp1-mb8-oopt")
    assert (ended := train(*first, "--run", run)).code == 0, ended.err
    shutil.copytree(run, copy)
    for step in (3, 4):
        shutil.rmtree(checkpoint_path(copy / "checkpoints", step))
    waiting = {name for name in tensors(run, 2) if name.endswith(".pending_grad")}
    assert len(waiting) == len([name for name in tensors(run, 2) if name.startswith("model/")])
    assert not any(name.endswith(".pending_grad") for name in tensors(run, 1))
    changes = ("--train.delayed_update", "false", "--allow-changes")
    other = train(*TINY, "--train.steps", "4", "--parallel", "dp1-mb8", *changes, "--run", copy)
    assert other.code == 2
    assert "the checkpoint has gradients whose update is delayed" in other.err
    warmer = ("--train.delayed_update_warmup_steps", "40", "--allow-changes")  # which changes nothing any more
    ended = train(*TINY, "--train.steps", "4", "--parallel", "dp1-mb8-ooptd", *warmer, "--run", copy)
    assert ended.code == 0, ended.err
    assert "resuming" in ended.out or "step 2" in ended.out
    ours, theirs = tensors(copy, 4), tensors(run, 4)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ("dp1", "add oopth or ooptd to the plan, or leave train.delayed_update out"),
        ("dp1-oopt0.5", "take oopth or ooptd for all"),
        ("dp1-ooptd-oactd", "leave train.delayed_update or oactd out"),
    ],
)
def test_what_cannot_be_delayed_is_refused(plan: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY, "--parallel", plan, "--dry-run"]) == 3
    assert sentence in capsys.readouterr().err
