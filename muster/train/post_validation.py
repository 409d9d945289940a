"""Steps that don't wait for the gradient norm of all ranks: taken at once, and taken back where the norm says so.

A rank steps as soon as its own gradients are complete and goes on with the next step's passes, while the sum over all
ranks is on its way; it reads the sum before its next step (optimizer post-validation, Qi et al. 2023, arXiv:2401.10241,
§4). Where the sum says that the step should have been clipped or skipped, every rank goes back to what it kept from
before that step and takes it again as it should have been: to the bit as if it had waited.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from muster.schedule.action import Action
from muster.train.step_result import StepResult

if TYPE_CHECKING:
    from muster.parallel.executor import Executor
    from muster.train.trainer import Trainer

MIN_UNCLIPPED_STEPS = 10
"""Steps in a row that were neither clipped nor skipped, after which steps are taken at once (as sail-sg's runtime)."""


@dataclass
class PendingStep:
    """A step that was taken before its norm was known."""

    work: dist.Work
    sums: Tensor
    step: int
    num_valid: int
    num_tokens: int
    learning_rate: float
    time_s: float = 0.0
    data_s: float = 0.0


class PostValidation:
    """Makes the steps of a trainer whose plan has `post_validation`."""

    def __init__(
        self, trainer: "Trainer", make_executor: "Callable[[dict[str, Callable[[Action], None]]], Executor]"
    ) -> None:
        self.trainer = trainer
        self.executor = make_executor({"VOTE": self._start_norm_sum, "STEP": self._step})
        self.num_rollbacks = 0
        """Steps that were taken again."""
        self._unclipped_steps = 0
        self._pending: PendingStep | None = None
        self._must_redo = False
        """The step before this round was wrong, so this round's passes are too."""
        self._finished: list[StepResult] = []
        self._saved_state: list[Tensor] = []
        """Parameters and optimizer state from before the last step that was taken at once."""
        self._saved_gradients: list[tuple[Tensor, Tensor]] = []
        """Local parameters with the gradients that it was taken with."""
        self._saved_step_count = 0

    @property
    def is_settled(self) -> bool:
        """Whether the outcome of every step is known."""
        return self._pending is None

    def advance(self, settle: bool) -> Iterator[StepResult]:
        """Makes one more step and gives those whose outcome is known by now; with `settle`, all. A step that has to be
        taken again costs the round that followed it, which then counts as not made."""
        if settle or self._unclipped_steps < MIN_UNCLIPPED_STEPS:
            yield from self.settle()
            result = self.trainer.step()
            self._count_unclipped(result)
            yield result
            return
        start_s = perf_counter()
        self.trainer.load_batch()
        data_s = perf_counter() - start_s
        events = self.executor.run()
        if self._must_redo:
            self._redo_step()
        else:
            assert self._pending is not None
            self.trainer.count_finished_step(events)
            self._pending.time_s, self._pending.data_s = perf_counter() - start_s, data_s
        known, self._finished = self._finished, []
        yield from known

    def settle(self) -> Iterator[StepResult]:
        """Waits until the outcome of the last step is known; afterwards the trainer's state is that after it."""
        if self._pending is not None:
            self._validate(self._pending)
            if self._must_redo:
                self._redo_step()
        known, self._finished = self._finished, []
        yield from known

    # ------------------------------------------------------------------------------------------------------------------
    # Instructions

    def _start_norm_sum(self, action: Action) -> None:
        """Begins the sum over all ranks, after that of the step before has been read."""
        trainer = self.trainer
        if self._pending is not None:
            self._validate(self._pending)
        sums = trainer.local_statistics()
        if not self._must_redo:
            work = trainer.world.all_reduce_async(sums)
            self._pending = PendingStep(
                work, sums, trainer.step_count + 1, trainer.num_valid, trainer.num_tokens, trainer.learning_rate
            )

    def _step(self, action: Action) -> None:
        trainer = self.trainer
        if not self._must_redo:
            self._save_state()
            trainer.optimizer_step()
        trainer.drop_gradients()

    # ------------------------------------------------------------------------------------------------------------------

    def _validate(self, taken: PendingStep) -> None:
        taken.work.wait()
        self.trainer.decide_step(taken.sums, taken.num_valid)
        self._pending = None
        if self.trainer.is_unmodified:
            self._finish(taken)
        else:
            self._must_redo, self._rejected = True, taken

    def _finish(self, taken: PendingStep) -> None:
        result = self.trainer.result(taken.step, taken.learning_rate, taken.num_tokens, taken.time_s, taken.data_s)
        self._finished.append(result)
        self._count_unclipped(result)

    def _count_unclipped(self, result: StepResult) -> None:
        clip_norm = self.trainer.config.optim.clip_norm
        calm = result.skip_reason is None and not (clip_norm and result.grad_norm > clip_norm)
        self._unclipped_steps = self._unclipped_steps + 1 if calm else 0

    def _state(self) -> list[Tensor]:
        trainer = self.trainer
        return [*trainer.parameters.values(), *(tensor for _, tensor in trainer.optimizer.state().values())]

    @torch.no_grad()
    def _save_state(self) -> None:
        state = self._state()
        if not self._saved_state:
            self._saved_state = [torch.empty_like(tensor) for tensor in state]
        torch._foreach_copy_(self._saved_state, state)
        self._saved_step_count = self.trainer.optimizer.step_count
        locals_ = [local for stage in self.trainer.stages.values() for local in stage.parameters.values()]
        self._saved_gradients = [(local, local.grad) for local in locals_ if local.grad is not None]

    @torch.no_grad()
    def _redo_step(self) -> None:
        """Takes the last step once more, from the state before it, with its own gradients: clipped, or not at all."""
        trainer, taken = self.trainer, self._rejected
        torch._foreach_copy_(self._state(), self._saved_state)
        trainer.optimizer.step_count = self._saved_step_count
        trainer.sync_tied_copies()
        for local, gradient in self._saved_gradients:
            local.grad = gradient
        trainer.learning_rate = taken.learning_rate
        trainer.handlers["STEP"](Action("STEP"))
        self._must_redo, self.num_rollbacks = False, self.num_rollbacks + 1
        self._finish(taken)
