"""Work of each rank in the tests of asynchronous pipelines, and the serial emulator that they are held to."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from muster.config.run_config import EvalConfig, RunConfig
from muster.parallel import op_profile
from muster.parallel.master_weights import master_weights
from muster.parallel.stage import DecoderStage
from muster.parallel.weight_versions import WeightVersions
from muster.parallel.world import open_world
from muster.schedule.action import Action, Kind
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.train.async_pipeline import AsyncPipeline
from muster.train.loop import TrainingLoop
from muster.train.memory_limit import limit_of_run
from muster.train.step_state import StepState
from muster.train.trainer import Trainer
from tests.parity import open_data, small_run


@contextmanager
def newest_weights() -> Iterator[None]:
    """Backwards use the newest weights instead of those of their forwards."""
    use = WeightVersions._use
    with patch.object(WeightVersions, "_use", lambda self, version: use(self, self.newest)):
        yield


@contextmanager
def no_stash() -> Iterator[None]:
    """The optimizer changes the weights in the memory that passes under way read."""

    def faulty(self: WeightVersions) -> None:
        self._kept[self.newest] = self._newest
        self.newest += 1

    with patch.object(WeightVersions, "begin_update", faulty):
        yield


@contextmanager
def gradients_mixed() -> Iterator[None]:
    """A step's gradients stay among those of the following one."""
    set_aside = AsyncPipeline._set_aside

    def faulty(self: AsyncPipeline, step: Any) -> None:
        with patch.object(DecoderStage, "zero_grad"):
            set_aside(self, step)

    with patch.object(AsyncPipeline, "_set_aside", faulty):
        yield


@contextmanager
def predicted_for_good() -> Iterator[None]:
    """The optimizer goes on from predicted weights."""
    end = WeightVersions.end_update

    def faulty(self: WeightVersions) -> None:
        end(self)
        for local, tensor in zip(self._local.values(), self._newest, strict=True):
            local.data = tensor

    with patch.object(WeightVersions, "end_update", faulty):
        yield


@contextmanager
def not_predicted() -> Iterator[None]:
    """Passes use the weights as the optimizer leaves them."""

    def faulty(self: WeightVersions) -> None:
        self._before = {name: tensor.clone() for name, tensor in self._local.items()}
        end(self)

    end = WeightVersions.end_update
    with patch.object(WeightVersions, "end_update", faulty):
        yield


@contextmanager
def stashed() -> Iterator[None]:
    """Backwards use the weights of their forwards."""
    init = WeightVersions.__init__

    def faulty(self: WeightVersions, *args: Any) -> None:
        init(self, *args[:3])

    with patch.object(WeightVersions, "__init__", faulty), patch.object(WeightVersions, "enter", stale_enter):
        yield


def stale_enter(self: WeightVersions, micro_batch: int, version: int) -> None:
    """Enter a version; a backward, that of its forward."""
    version = self._in_flight.setdefault(micro_batch, version)
    self._use(version)


@contextmanager
def not_reduced() -> Iterator[None]:
    """Replicas keep their own gradients."""
    with patch.object(DecoderStage, "sum_over_replicas", lambda self, gradients: None):
        yield


@contextmanager
def versions_mixed() -> Iterator[None]:
    """The second replica adds the gradients of the version before to those of the first."""
    start = AsyncPipeline._start_reduction

    def faulty(self: AsyncPipeline, action: Action) -> Any:
        step = self._steps[action.version - 1]
        own = {name: gradient.clone() for name, gradient in step.gradients.items()}
        if self.trainer.world.at.dp_replicate and action.version > 1:
            step.gradients = self.before  # type: ignore[attr-defined]
        self.before = own  # type: ignore[attr-defined]
        return start(self, action)

    with patch.object(AsyncPipeline, "_start_reduction", faulty):
        yield


@contextmanager
def copies_apart() -> Iterator[None]:
    """Tensor-parallel ranks keep their own gradients of the weights that they have copies of."""
    with patch.object(AsyncPipeline, "_start_replicated", lambda self, action: None):
        yield


FAULTS = {
    "stashed": stashed,
    "not reduced": not_reduced,
    "versions mixed": versions_mixed,
    "copies apart": copies_apart,
    None: nullcontext,
    "newest weights": newest_weights,
    "no stash": no_stash,
    "gradients mixed": gradients_mixed,
    "predicted for good": predicted_for_good,
    "not predicted": not_predicted,
}


def run_cases(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Each case of `payload["cases"]` in turn, in a world of its own."""
    cases = payload["cases"]
    return [_run_case(rank, world_size, store, index, payload["folder"], **case) for index, case in enumerate(cases)]


def _run_case(
    rank: int,
    world_size: int,
    store: dist.Store,
    generation: int,
    folder: str,
    plan: str,
    steps: int = 10,
    fault: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    config = _config(steps, **more)
    full_plan = parse_plan_name(plan, Plan(precision="fp32", micro_batch_size=1))
    require_runnable(full_plan, config.model, config.workload, world_size)
    with open_world(store, rank, world_size, full_plan, generation) as world, FAULTS[fault]():
        trainer = Trainer(config, full_plan, world, open_data(config, folder))
        timed: list[str] = []
        if world_size > full_plan.pp and fault is None:
            with patch.multiple(op_profile, REPEATS=2, PASS_REPEATS=1):
                seconds = trainer.profile().times.seconds
            timed = sorted({kind for kind, _ in seconds if kind in (Kind.REDUCE_GRAD, Kind.ALL_REDUCE_TP)})
        pipeline = AsyncPipeline(trainer)
        results = []
        while trainer.step_count < steps:
            results += pipeline.run(min(full_plan.flush_every, steps - trainer.step_count))
        kept = sum(versions.stashed_bytes for versions in pipeline.versions.values())
        return _found(trainer, results) | {"kept": kept, "timed": timed}


def run_attempts(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[int | None]:
    """Train each run of `payload["attempts"]` as `muster train` does; returns the exit codes."""
    codes = []
    for generation, (name, stop_at) in enumerate(payload["attempts"]):
        config = _config(12)
        quick = {"save_every": 5, "async_save": False}
        config = config.model_copy(
            update={"train": config.train.model_copy(update=quick), "eval": EvalConfig(batches=1, every=4)}
        )
        plan = parse_plan_name(payload["plan"], Plan(precision="fp32"))
        run_dir = Path(payload["folder"]) / name
        run_dir.mkdir(exist_ok=True)
        with open_world(store, rank, world_size, plan, generation) as world:
            data = open_data(config, payload["folder"])
            loop = TrainingLoop(config, plan, world, data, run_dir, limit_of_run(config, plan, world))
            load_batch = loop.trainer.load_batch

            def load_and_ask(
                ahead: int = 0, loop: TrainingLoop = loop, load: Any = load_batch, at: int = stop_at
            ) -> Any:
                loop.carried.stop_requested |= loop.trainer.step_count + ahead + 1 == at
                return load(ahead)

            loop.trainer.load_batch = load_and_ask  # type: ignore[method-assign]
            codes.append(loop.run())
    return codes


def _load_and_ask(loop: TrainingLoop, load: Callable[[int], StepState], stop_at: int, ahead: int = 0) -> StepState:
    """Load the batch of a step, and ask to stop in the one `stop_at`."""
    loop.carried.stop_requested |= loop.trainer.step_count + ahead + 1 == stop_at
    return load(ahead)


def emulate_cases(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """The same cases on one process, step after step, with explicit numbers of versions."""
    found = []
    for index, case in enumerate(payload["cases"]):
        more = {key: value for key, value in case.items() if key not in ("plan", "fault")}
        plan = parse_plan_name(case["plan"], Plan(precision="fp32", micro_batch_size=1))
        config = _config(more.pop("steps", 10), **more)
        serial = Plan(precision=plan.precision, micro_batch_size=plan.micro_batch_size)
        with open_world(store, rank, world_size, serial, index) as world:
            found.append(_emulate(Trainer(config, serial, world, open_data(config, payload["folder"])), plan))
    return found


def _emulate(trainer: Trainer, plan: Plan) -> dict[str, Any]:
    """Train step after step; a pass of step t, counted from the last flush, uses the weights before step t − delay."""
    parameters = trainer.updater.parameters
    versions: list[dict[str, Tensor]] = []
    per_step = trainer.batch_loader.num_micro_batches // plan.dp_replicate
    layers = [plan.layers(stage, trainer.config.model.num_layers) for stage in range(plan.pp)]
    since_flush, predicts = 0, trainer.config.optim.delay_compensation == "predict"

    def stages_after(name: str) -> int:
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0 if name.startswith("embed") else 10**6
        return sum(layer < own.start for own in layers)

    def version(name: str, micro_batch: int) -> int:
        if plan.schedule == "pipedream-2bw":
            return max(since_flush - 1, 0)
        return max((since_flush * per_step + micro_batch - stages_after(name)) // per_step, 0)

    @torch.no_grad()
    def load(micro_batch: int | None) -> None:
        for name, tensor in parameters.items():
            number = since_flush if micro_batch is None else version(name, micro_batch)
            tensor.data.copy_(versions[number][name])  # as autograd, which may have saved it, mustn't know
            if predicts and micro_batch is not None and number:
                tensor.add_(tensor - versions[number - 1][name], alpha=delay(name))
        for stage in trainer.stages.values():
            stage.reshard()  # copies of the weights are out of date

    def delay(name: str) -> float:
        return 1.0 if plan.schedule == "pipedream-2bw" else stages_after(name) / per_step

    def step(action: Action) -> None:
        load(None)
        is_last_alone = since_flush == 0 and trainer.step_count + 1 == trainer.config.train.num_steps
        trainer.updater.optimizer.delays = {} if is_last_alone else {name: delay(name) for name in parameters}
        trainer.updater.apply()

    (stage,) = trainer.stages.values()
    forward = stage.forward

    def forward_of_version(micro_batch: int, x: Tensor | None) -> Tensor:
        load(micro_batch % per_step)  # ranks number their own from 0, and one after the other has its share
        return forward(micro_batch, x)

    backward = stage.backward

    def backward_of_version(micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        if plan.schedule == "pipelined-backprop":
            load(None)
            if (masters := master_weights(stage.module)) is not None:
                masters.refresh()
        return backward(micro_batch, gradient)

    stage.forward = forward_of_version  # type: ignore[method-assign]
    stage.backward = backward_of_version  # type: ignore[method-assign]
    executor = trainer.make_executor(trainer.program, {Kind.STEP: step})
    results = []
    for count in range(trainer.config.train.num_steps):
        since_flush = count % plan.flush_every
        newest = {name: tensor.detach().clone() for name, tensor in parameters.items()}
        versions = [*versions, newest] if since_flush else [newest]
        state = trainer.load_batch()
        trainer.count_finished_step(executor.run())
        results.append(trainer.result(state, 0.0, 0.0))
    return _found(trainer, results)


def _found(trainer: Trainer, results: list[Any]) -> dict[str, Any]:
    updater = trainer.updater
    tensors = dict(updater.parameters) | {key: one for key, (_, one) in updater.optimizer.state().items()}
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "steps": [result.step for result in results],
        "digests": {name: hashlib.sha256(one.numpy().tobytes()).hexdigest() for name, one in tensors.items()},
        "sums": {name: float(one.double().square().sum()) for name, one in tensors.items()},
    }


def _config(
    steps: int,
    layers: int = 4,
    optim: str = "adamw",
    clip_norm: float = 50.0,
    batch: int = 8,
    delay_compensation: str = "none",
    nesterov: bool = False,
) -> RunConfig:
    config = small_run(False, steps, layers, optim=optim)
    return config.model_copy(
        update={
            "train": config.train.model_copy(update={"sample_tokens": 0, "global_batch_size": batch}),
            "optim": config.optim.model_copy(
                update={"clip_norm": clip_norm, "delay_compensation": delay_compensation, "nesterov": nesterov}
            ),
        }
    )
