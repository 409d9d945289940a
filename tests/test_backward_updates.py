"""Updates by the host within a step's last backward: program, checks, executor, prediction, memory, refusals.

`test_parity.py` compares such steps with the same clipping without a tier.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from muster.api.verbs import predict
from muster.checkpoint.checkpoint_dir import checkpoint_path
from muster.checkpoint.load import read_full
from muster.checkpoint.manifest import read_manifest
from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.config.run_config import TrainConfig
from muster.cost.memory.forecast import forecast_memory
from muster.parallel.backward_updates import MAX_HELD, BackwardUpdates
from muster.parallel.executor import Executor
from muster.schedule.action import Action, Kind
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.program import Program, ProgramError, Wait
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.simulate.breakdown import breakdown
from muster.spec.device import DiskSpec
from muster.spec.errors import MusterError
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from muster.train.parameter_updater import ParameterUpdater
from muster.train.step_skipper import StepSkipper
from muster.train.step_state import no_step
from tests.train_runs import AT_ONCE, QUICK, train

MODEL, WORK = load_model("demo"), Workload(seq_len=256, global_batch_size=16)
EARLY = ("--train.update_in_backward", "true", "--optim.clip_by_previous_norm", "true")
TINY = ("--preset", "tiny", *QUICK, *AT_ONCE)


def program_of(name: str) -> Program:
    return build_program(parse_plan_name(name), MODEL, WORK, update_time="in_backward")


def test_layers_are_updated_beside_the_last_backward_and_the_rest_after_it() -> None:
    for name in ("dp1-mb4-oopt", "dp1-mb4-ooptd-oparamd", "dp2-pp2-mb2-ooptd", "pp2v2-sinterleaved-mb2-oopt-oparam"):
        program = program_of(name)
        check(program)
        updates = [item.action for lanes in program.ranks for item in lanes["host"]]
        assert {action.kind for action in updates} == {Kind.BACKWARD_UPDATE}
        assert len(updates) == MODEL.num_layers
        for lanes in program.ranks:
            compute = [item.action for item in lanes["compute"]]
            ends = {action.stage: place for place, action in enumerate(compute) if action.kind == Kind.B}
            for item in lanes["host"]:
                last = Wait("compute", ends[item.action.stage])
                assert (last in item.waits) == (item.action.slice == 0), (
                    "of a stage's layers the first waits for its end"
                )
                assert Wait("compute", last.index - 1) in item.waits
        first = [item.action.slice for item in program.ranks[0]["host"] if item.action.stage == 0]
        assert first == sorted(first, reverse=True)


@pytest.mark.parametrize(
    ("plan", "part", "waits", "sentence"),
    [
        ("dp1-mb4-oopt-oparam", MODEL.num_layers - 1, (), "begins before 0B1 is known to be over"),
        ("dp1-mb4-oopt-oparam", 0, (), "0BACKWARD_UPDATE on rank 0 begins before 0B3 is known to be over"),
        ("dp1-mb4-ooptd-oparamd", 2, ("compute",), "0BACKWARD_UPDATE.2 on rank 0 reads the optimizer state"),
    ],
)
def test_the_checker_refuses_updates_without_gradients_or_state(
    plan: str, part: int, waits: tuple[str, ...], sentence: str
) -> None:
    """`waits`: lanes that the update of a part still waits for."""
    program = program_of(plan)
    (lanes,) = program.ranks
    host = tuple(
        item._replace(waits=tuple(wait for wait in item.waits if wait.lane in waits))
        if item.action.slice == part
        else item
        for item in lanes["host"]
    )
    with pytest.raises(ProgramError, match=sentence):
        check(replace(program, ranks=({**lanes, "host": host},)))


def test_a_step_needs_the_updates_within_its_backward() -> None:
    program = program_of("dp1-mb4-oopt")
    (lanes,) = program.ranks
    *before, step = lanes["compute"]
    step = step._replace(waits=tuple(wait for wait in step.waits if wait.lane == "collective" or wait.index > 99))
    with pytest.raises(ProgramError, match="STEP on rank 0 begins before"):
        check(replace(program, ranks=({**lanes, "compute": (*before, step)},)))


class WaitingStage:
    """A stage whose last backward ends only once the host has begun to update its second layer."""

    def __init__(self, updates: BackwardUpdates, has_begun: Event) -> None:
        self.updates, self.has_begun, self.backwards = updates, has_begun, 0
        self.error: MusterError | None = None

    def forward(self, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(1)

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> None:
        self.backwards += 1
        if self.backwards % 2:
            return
        self.updates.note_complete(1)
        if self.error is not None:
            raise self.error
        assert self.has_begun.wait(60)
        self.updates.note_complete(0)


def executor_of(update: Callable[[Action], None], stage: Any, updates: BackwardUpdates) -> Executor:
    options = LoweringOptions(host_updates=(("disk", "disk", "disk"),), backward_updates=(2,))
    check(program := lower(make_schedule("1f1b", ScheduleSpec(1, 2)), options))
    handlers = dict.fromkeys((Kind.GRAD_NORM, Kind.CLIP, Kind.UPDATE, Kind.STEP), lambda action: None)
    kinds = (Kind.OFFLOAD_GRAD, Kind.RELOAD_PARAM, Kind.READ_STATE, Kind.WRITE_STATE)
    copies: dict[Kind, Any] = dict.fromkeys(kinds, lambda action: lambda: None)
    own = handlers | {Kind.BACKWARD_UPDATE: update}
    return Executor(program, 0, 0, {0: stage}, {}, own, copies=copies, on_failure=updates.fail)


def test_the_executor_updates_a_layer_while_its_backward_runs() -> None:
    updates, has_begun = BackwardUpdates([["a"], ["b"]]), Event()
    assert [updates.add_group([name]) for name in "ab"] == [0, 1]
    order: list[int] = []

    def update(action: Action) -> None:
        updates.wait_complete(action.slice)
        order.append(action.slice)
        has_begun.set()
        updates.note_updated()

    stage = WaitingStage(updates, has_begun)
    executor = executor_of(update, stage, updates)
    for _ in range(2):
        updates.begin_step()
        has_begun.clear()
        events = executor.run().events()
        assert sorted(event.action for event in events) == sorted(
            item.action for items in executor.program.ranks[0].values() for item in items
        )
    assert order == [1, 0, 1, 0]


def test_errors_end_whoever_waits() -> None:
    """A backward that waits for an update that has failed, and an update that waits for a backward that has."""
    updates, never = BackwardUpdates([["a"], ["b"]]), Event()
    assert [updates.add_group([name]) for name in "ab"] == [0, 1]

    def fail(action: Action) -> None:
        raise MusterError("the disk is gone")

    class FullStage(WaitingStage):
        def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> None:
            self.backwards += 1
            if self.backwards == 2:
                self.updates._wait(lambda: False)

    updates.begin_step()
    with pytest.raises(MusterError, match="the disk is gone"):
        executor_of(fail, FullStage(updates, never), updates).run()
    updates.begin_step()
    stage = WaitingStage(updates, never)
    stage.error = MusterError("a pass went wrong")
    with pytest.raises(MusterError, match="a pass went wrong"):
        executor_of(lambda action: updates.wait_complete(action.slice), stage, updates).run()


def test_a_backward_waits_while_host_memory_is_full() -> None:
    updates = BackwardUpdates([[str(part)] for part in range(MAX_HELD + 2)])
    for part in range(MAX_HELD + 2):
        updates.add_group([str(part)])
    updates.begin_step()
    for part in range(MAX_HELD):
        updates.note_complete(part)
        updates.wait_for_room()
    updates.note_complete(MAX_HELD)
    updates.fail(MusterError("still waiting"))
    with pytest.raises(MusterError, match="still waiting"):
        updates.wait_for_room()


def test_a_slow_disk_is_hidden_behind_the_last_backward(tmp_path: Path) -> None:
    """The predicted step is the passes and what follows from the last backward on, in less bytes."""
    cluster = load_cluster("1xrtx4090")
    disk = DiskSpec(read_bytes_per_s=2e9, write_bytes_per_s=2e9)
    cluster = cluster.model_copy(update={"groups": (cluster.groups[0].model_copy(update={"disk": disk}),)})
    file = tmp_path / "run.yaml"
    step = (
        "train: {seq_len: 256, global_batch_size: 16, update_in_backward: %s}\nparallel: dp1-mb4-ooptd-oparamd-bf16\n"
        "optim: {lr: 1e-3, clip_norm: 0}\n"
    )
    found = {}
    for early in ("true", "false"):
        file.write_text(step % early)
        found[early] = predict("demo", cluster, file)
    busy_s = {
        early: sum(event.duration_s for event in one.timeline.events if event.lane == "disk")
        for early, one in found.items()
    }
    assert breakdown(found["true"].timeline).bubble_s < 1e-9, "a rank alone waits for its host and its disk"
    assert busy_s["true"] < busy_s["false"], "the last sums of gradients stay in host memory"
    assert found["true"].step_time_s < found["false"].step_time_s
    plan, programs = found["true"].plan, {early: one.program for early, one in found.items()}
    held = {early: forecast_memory(MODEL, plan, WORK, cluster, one).fullest for early, one in programs.items()}
    assert held["true"].host_bytes > held["false"].host_bytes, "buffers of passes and updates at once"
    assert held["true"].terms == held["false"].terms


def test_a_step_that_cannot_be_skipped_ends_the_run() -> None:
    updater = cast(Any, ParameterUpdater.__new__(ParameterUpdater))
    updates = BackwardUpdates([])
    updater.stages = {0: cast(Any, type("Stage", (), {"backward_updates": updates}))}
    updater.step_skipper = StepSkipper(TrainConfig(steps=1, seq_len=1, global_batch_size=1))
    updater.loss_scale = None
    updater.config = SimpleNamespace(train=TrainConfig(steps=1, seq_len=1, global_batch_size=1))
    state = no_step()
    state.step, state.loss = 7, 1.0
    updater._read_sums = lambda *_: None
    state.grad_norm = math.inf
    updater.decide_step(state, torch.zeros(1))
    assert state.skip_reason == "its gradient norm is inf"
    updates.begin_step()
    with pytest.raises(MusterError, match="step 7 can't be skipped: its gradient norm is inf, and"):
        updater.decide_step(state, torch.zeros(1))


@pytest.mark.parametrize(
    ("plan", "more", "code", "sentence"),
    [
        ("dp1", EARLY, 3, "add oopth or ooptd to the plan, or leave train.update_in_backward out"),
        ("dp1-oopt", EARLY[:2], 2, "(optim.clip_by_previous_norm: true), or not at all (optim.clip_norm: 0)"),
        ("dp1-oopt", (*EARLY, "--train.spike_sigmas", "6"), 3, "train.spike_sigmas, which skips steps"),
        ("tp2-sp-oopt", EARLY, 3, "weights that tensor-parallel ranks hold copies of"),
        ("pp2-szbh1-oopt", EARLY, 3, "schedule zb-h1, which splits backwards"),
        ("tp2-domino-mb4-oopt", EARLY, 3, "domino, whose slices complete a layer's gradients one after the other"),
        ("pp2-slice4-oopt", EARLY, 3, "sequence_slices"),
        ("tp2-tile4-oopt", EARLY, 3, "sequence_tiles"),
        ("dp1-oopt", (*EARLY, "--train.delayed_update", "true"), 2, "expected one of them"),
    ],
)
def test_what_cannot_be_updated_in_a_backward_is_refused(
    plan: str, more: tuple[str, ...], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *TINY, *more, "--parallel", plan, "--dry-run"]) == code
    assert sentence in capsys.readouterr().err


def test_a_prediction_refuses_what_a_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text("model: llama3.2-1b\nparallel: dp1-mb1-oopt\ntrain: {seq_len: 512, update_in_backward: true}\n")
    flags = ["predict", "--plan", str(run_file), "--cluster", "1xh100", "--global-batch", "8"]
    assert main(flags) == 2
    assert "(optim.clip_by_previous_norm: true), or not at all" in capsys.readouterr().err


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = checkpoint_path(run / "checkpoints", step)
    return {name: read_full(folder, name) for name in read_manifest(folder).tensors}


@pytest.mark.soak
def test_a_run_goes_on_with_the_norm_that_clips(tmp_path: Path) -> None:
    """A checkpoint has it, so that a resumed run ends with the same bits, whether the host updates early or not."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    own = (*TINY, *EARLY, "--optim.clip_norm", "0.1", "--train.save_every", "1", "--train.keep_last", "9")
    first = (*own, "--train.steps", "4", "--parallel", "dp1-mb8-ooptd-oparamd")
    assert (ended := train(*first, "--run", run)).code == 0, ended.err
    shutil.copytree(run, copy)
    for step in (3, 4):
        shutil.rmtree(checkpoint_path(copy / "checkpoints", step))
    after = ("--train.update_in_backward", "false", "--allow-changes")
    ended = train(*own, "--train.steps", "4", "--parallel", "dp1-mb8", *after, "--run", copy)
    assert ended.code == 0, ended.err
    ours, theirs = tensors(copy, 4), tensors(run, 4)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.soak
def test_the_reference_of_verify_clips_by_the_norm_of_the_step_before(tmp_path: Path) -> None:
    (file := tmp_path / "run.yaml").write_text("extends: tiny\nparallel: dp1-ooptd-oparamd\n")
    asked = ("--against", "dp2-z3-oopt", "--steps", "3", *EARLY, "--optim.clip_norm", "0.1")
    assert main(["verify", str(file), *asked]) == 0
