"""Optimizer post-validation: steps that don't wait for the global gradient norm, and are rolled back where it says so.

A rank steps as soon as its own gradients are complete and goes on with the next step's passes while the all-reduce of
the norm is under way; it reads the norm before its next step (Qi et al. 2023, arXiv:2401.10241, §4). Where the norm
says that the step should have been clipped or skipped, every rank restores its state from before that step and takes
it again as it should have been, bit for bit as if it had waited. The passes of the following step, computed with wrong
parameters, are thrown away:

    step 7: passes, step | step 8: passes, read the norm of 7: clip! -> restore, clipped step 7 | step 8: passes, ...
"""

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from muster.schedule.action import Action, Kind
from muster.train.step_result import StepResult
from muster.train.step_state import StepState
from muster.train.trainer import Trainer

MIN_UNCLIPPED_STEPS = 10
"""Successive steps, neither clipped nor skipped, after which steps no longer wait (as in sail-sg's runtime)."""


@dataclass
class PendingStep:
    """A step that was taken before its gradient norm was known."""

    state: StepState
    work: dist.Work
    """The all-reduce of `sums`."""
    sums: Tensor
    time_s: float = 0.0
    data_s: float = 0.0


class PostValidation:
    """Runs the steps of a trainer whose plan has `post_validation`."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.updater = trainer.updater
        self.executor = trainer.make_executor(
            trainer.program, {Kind.GRAD_NORM_ASYNC: self._start_norm_sum, Kind.STEP: self._step_without_waiting}
        )
        self.num_rollbacks = 0
        """Steps that were taken again."""
        self._unclipped_steps = 0
        self._pending: PendingStep | None = None
        self._rejected: PendingStep | None = None
        """The step before, where its norm says that it has to be taken again."""
        self._finished: list[StepResult] = []
        self._saved_state: list[Tensor] = []
        """Parameters and optimizer state from before the last step that didn't wait."""
        self._saved_gradients: list[tuple[Tensor, Tensor]] = []
        """Local parameters with the gradients of that step."""
        self._saved_step_count = 0

    @property
    def is_settled(self) -> bool:
        """True when the outcome of every step is known."""
        return self._pending is None

    def advance(self, settle: bool) -> Iterator[StepResult]:
        """Run one more step, and yield the results of the steps whose outcome is known by then; with `settle`, of all.

        A step that has to be taken again costs the passes of the step that followed it, which then counts as not run.
        """
        if settle or self._unclipped_steps < MIN_UNCLIPPED_STEPS:
            yield from self.settle()
            result = self.trainer.step()
            self._count_unclipped(result)
            yield result
            return
        start_s = perf_counter()
        self.trainer.load_batch()
        data_s = perf_counter() - start_s
        record = self.executor.run()
        if self._rejected is not None:
            self._redo_step(self._rejected)
        else:
            assert self._pending is not None
            self.trainer.count_finished_step(record)
            self._pending.time_s = perf_counter() - start_s
            self._pending.data_s = data_s
        yield from self._pop_finished()

    def settle(self) -> Iterator[StepResult]:
        """Wait until the outcome of the last step is known; afterwards the trainer's state is that after it."""
        if self._pending is not None:
            self._validate(self._pending)
            if self._rejected is not None:
                self._redo_step(self._rejected)
        yield from self._pop_finished()

    def _pop_finished(self) -> list[StepResult]:
        finished, self._finished = self._finished, []
        return finished

    # ------------------------------------------------------------------------------------------------------------------
    # Instructions

    def _start_norm_sum(self, action: Action) -> None:
        """Read the norm of the step before, and start the all-reduce for this one."""
        if self._pending is not None:
            self._validate(self._pending)
        sums = self.updater.local_statistics()
        if self._rejected is None:
            work = self.trainer.world.all_reduce_async(sums)
            self._pending = PendingStep(self.updater.state, work, sums)

    def _step_without_waiting(self, action: Action) -> None:
        if self._rejected is None:
            self._save_state()
            self.updater.optimizer_step()
        self.updater.drop_gradients()

    # ------------------------------------------------------------------------------------------------------------------

    def _validate(self, step: PendingStep) -> None:
        step.work.wait()
        self.updater.decide_step(step.state, step.sums)
        self._pending = None
        if step.state.skip_reason is None and self.updater.clip_factor(step.state) == 1:
            self._finish(step)
        else:
            self._rejected = step

    def _finish(self, step: PendingStep) -> None:
        result = self.trainer.result(step.state, step.time_s, step.data_s)
        self._finished.append(result)
        self._count_unclipped(result)

    def _count_unclipped(self, result: StepResult) -> None:
        clip_norm = self.trainer.config.optim.clip_norm
        is_unclipped = result.skip_reason is None and not (clip_norm and result.grad_norm > clip_norm)
        self._unclipped_steps = self._unclipped_steps + 1 if is_unclipped else 0

    def _state(self) -> list[Tensor]:
        optimizer_state = (tensor for _, tensor in self.updater.optimizer.state().values())
        return [*self.updater.parameters.values(), *optimizer_state]

    @torch.no_grad()
    def _save_state(self) -> None:
        state = self._state()
        if not self._saved_state:
            self._saved_state = [torch.empty_like(tensor) for tensor in state]
        torch._foreach_copy_(self._saved_state, state)
        self._saved_step_count = self.updater.optimizer.step_count
        locals_ = [local for stage in self.trainer.stages.values() for local in stage.parameters.values()]
        self._saved_gradients = [(local, local.grad) for local in locals_ if local.grad is not None]

    @torch.no_grad()
    def _redo_step(self, step: PendingStep) -> None:
        """Take a step once more, from the state before it and with its own gradients: clipped, or not at all."""
        torch._foreach_copy_(self._state(), self._saved_state)
        self.updater.optimizer.step_count = self._saved_step_count
        self.updater.sync_tied_copies()
        for local, gradient in self._saved_gradients:
            local.grad = gradient
        self.updater.state = step.state
        self.updater.apply()
        self._rejected = None
        self.num_rollbacks += 1
        self._finish(step)
