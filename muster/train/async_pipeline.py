"""Asynchronous pipelines at run time: a segment of several steps without a flush, by one Program.

At a segment's end all ranks have the same version of the weights, and no pass is under way: that is where the run
validates, saves and stops. Within it a step's gradients are set aside when they are complete, while those of the
following step accumulate, while they are reduced over the ranks with other data, until the optimizer step that makes
the next version.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from muster.parallel.axis import PendingTensor
from muster.parallel.executor import Executor, Handler
from muster.parallel.stage import NUM_LOSSES
from muster.parallel.stage_inputs import StageInputs, join_steps
from muster.parallel.weight_versions import WeightVersions
from muster.schedule.action import Action, Kind
from muster.schedule.check import check
from muster.spec.errors import MusterError
from muster.train.step_result import StepResult
from muster.train.step_state import StepState
from muster.train.trainer import Trainer


@dataclass
class _StepUnderWay:
    """One step of a segment, from its data to its update."""

    state: StepState
    fed: object
    """Samples that the batch loader fed, for their hash."""
    sums: Tensor = field(default_factory=lambda: torch.empty(0))
    """Statistics of this rank, and of all once their all-reduce is over."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Complete gradients of this rank that wait for their update."""
    losses: Tensor = field(default_factory=lambda: torch.empty(0))
    """Sums of the losses of its micro-batches on this rank."""
    backwards: int = 0
    """Backwards that are over."""
    total_skips: int = 0
    consecutive_skips: int = 0


class AsyncPipeline:
    """Steps of a trainer whose schedule is asynchronous, segment by segment."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.updater = trainer.updater
        self._executors: dict[int, Executor] = {}
        """Executors by the number of steps of a segment."""
        self._steps: list[_StepUnderWay] = []
        plan, entry = trainer.plan, trainer.plan.schedule_entry
        self._steps_alone = entry.steps_alone
        delay = entry.mean_delay(trainer.world.at.pp, plan.pp, trainer.batch_loader.num_micro_batches)
        self._delays = dict.fromkeys(self.updater.parameters, delay)
        """Steps by which gradients of this rank's stage come late."""
        ahead = delay if trainer.config.optim.delay_compensation == "predict" else 0.0
        self.versions = {
            index: WeightVersions(one.module, one.parameters, ahead, entry.stashes_weights)
            for index, one in trainer.stages.items()
        }
        """Versions of the weights of this rank's stages."""

    def run(self, num_steps: int) -> Iterator[StepResult]:
        """Run a segment of so many steps, and yield their results."""
        if num_steps == 1:
            self.updater.optimizer.delays = {}
            yield self.trainer.step()
            return
        trainer, loader = self.trainer, self.trainer.batch_loader
        start_s = perf_counter()
        self.updater.optimizer.delays = self._delays
        inputs = self._load(num_steps)
        data_s = perf_counter() - start_s
        for stage in trainer.stages.values():
            stage.inputs = inputs
        record = self._executor(num_steps).run()
        for versions in self.versions.values():
            versions.restart()
        trainer.count_finished_step(record, num_steps)
        if self._steps_alone:
            self._read_sums()
        time_s = (perf_counter() - start_s) / num_steps
        for one in self._steps:
            loader.last_fed = one.fed  # type: ignore[assignment]
            skips = {"total_skips": one.total_skips, "consecutive_skips": one.consecutive_skips}
            yield trainer.result(one.state, time_s, data_s / num_steps, **skips)

    def _load(self, num_steps: int) -> StageInputs:
        """Load the batches of a segment; returns their data as one."""
        trainer, loader = self.trainer, self.trainer.batch_loader
        self._steps, feeds = [], list[StageInputs]()
        for ahead in range(num_steps):
            state = trainer.load_batch(ahead)
            inputs = next(iter(trainer.stages.values())).inputs
            assert inputs is not None
            feeds.append(inputs)
            self._steps.append(_StepUnderWay(state, loader.last_fed))
        return join_steps(feeds, loader.num_micro_batches)

    def _executor(self, num_steps: int) -> Executor:
        if num_steps not in self._executors:
            check(program := self.trainer.program_of_steps(num_steps))
            handlers: dict[Kind, Handler] = {
                Kind.REDUCE_GRAD: self._start_reduction,
                Kind.ALL_REDUCE_TP: self._start_replicated,
                Kind.GRAD_NORM_BESIDE: self._start_norm_sum,
                Kind.STEP: self._make_version,
            }
            executor = self._executors[num_steps] = self.trainer.make_executor(program, handlers)
            executor.versions = self.versions
            executor.on_backward = self._note_backward
        return self._executors[num_steps]

    def _read_sums(self) -> None:
        """Read the statistics of steps that no rank has waited for. Raises MusterError where one would have been
        skipped: its gradients are in the weights."""
        for step in self._steps:
            self.updater.decide_step(step.state, step.sums)
            if step.state.skip_reason is not None:
                raise MusterError(
                    f"step {step.state.step} can't be skipped, though {step.state.skip_reason}: under schedule"
                    f" {self.trainer.plan.schedule} ranks step before they know; resume from the last checkpoint with a"
                    " lower optim.lr, or take schedule pipedream-2bw"
                )

    # ------------------------------------------------------------------------------------------------------------------
    # Instructions

    def _note_backward(self, action: Action) -> None:
        """Count a backward; behind the last one of a step on this rank, set aside its gradients and losses."""
        per_step, stages = self.trainer.batch_loader.num_micro_batches, self.trainer.stages
        step = self._steps[action.micro_batch // per_step]
        step.backwards += 1
        if step.backwards == per_step * len(stages):
            self._set_aside(step)

    def _set_aside(self, step: _StepUnderWay) -> None:
        step.losses = torch.zeros(NUM_LOSSES, dtype=torch.float64, device=self.trainer.world.device)
        for stage in self.trainer.stages.values():
            stage.attach_local_gradients()
            step.losses += stage.pop_losses()
        step.gradients = {n: local.grad for n, local in self.updater.parameters.items() if local.grad is not None}
        for stage in self.trainer.stages.values():
            stage.zero_grad()

    @contextmanager
    def _gradients_of(self, step: _StepUnderWay) -> Iterator[None]:
        """Let the parameters have the gradients of a step in place of those that accumulate."""
        parameters = self.updater.parameters
        accumulating = {name: local.grad for name, local in parameters.items()}
        for name, local in parameters.items():
            local.grad = step.gradients.get(name)
        try:
            yield
        finally:
            for name, local in parameters.items():
                local.grad = accumulating[name]

    def _start_reduction(self, action: Action) -> PendingTensor | None:
        """Start to sum a step's gradients over the ranks that hold the same weights."""
        gradients, stage = self._steps[action.version - 1].gradients, self.trainer.stages[action.stage]
        return stage.sum_over_replicas([gradients[name] for name in stage.parameters if name in gradients])

    def _start_replicated(self, action: Action) -> PendingTensor | None:
        """Start to sum a step's gradients of weights of which tensor-parallel ranks hold copies."""
        with self._gradients_of(self._steps[action.version - 1]):
            return self.trainer.stages[action.stage].start_replicated_grads()

    def _start_norm_sum(self, action: Action) -> PendingTensor:
        """Start to sum the statistics of a step whose gradients are complete on all ranks with other data."""
        step = self._steps[action.version - 1]
        self._count_statistics(step)
        works = [self.trainer.world.all_reduce_async(step.sums)] if self.trainer.world.size > 1 else []
        return PendingTensor(works, lambda: step.sums)

    def _count_statistics(self, step: _StepUnderWay) -> None:
        """Fill a step's statistics from this rank's reduced gradients, once."""
        self.updater.state = step.state
        if not step.sums.numel():
            with self._gradients_of(step):
                step.sums = self.updater.local_statistics(step.losses)

    def _make_version(self, action: Action) -> None:
        """Step the optimizer with the gradients of a step, beside those of the following one."""
        step = self._steps[action.version - 1]
        updater = self.updater
        self._count_statistics(step)  # ranks that step alone may not have begun to sum them
        if not self._steps_alone:
            updater.decide_step(step.state, step.sums)
            step.total_skips = updater.step_skipper.total
            step.consecutive_skips = updater.step_skipper.consecutive
        for versions in self.versions.values():
            versions.begin_update()
        if step.state.skip_reason is None:
            with self._gradients_of(step):
                if not self._steps_alone:
                    updater.clip()
                updater.optimizer_step()
        for versions in self.versions.values():
            versions.end_update()
        step.gradients = {}
