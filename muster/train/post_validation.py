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

CALM = 10
"""Steps in a row that were neither clipped nor skipped, after which steps are taken at once (as sail-sg's runtime)."""


@dataclass
class Taken:
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
        self.executor = make_executor({"VOTE": self._vote, "STEP": self._step})
        self.taken_back = 0
        """Steps that were taken again."""
        self._calm = 0
        self._taken: Taken | None = None
        self._wrong = False
        """The step before this round was wrong, so this round's passes are too."""
        self._known: list[StepResult] = []
        self._kept: list[Tensor] = []
        """Parameters and optimizer state from before the last step that was taken at once."""
        self._kept_gradients: list[tuple[Tensor, Tensor]] = []
        """Local parameters with the gradients that it was taken with."""
        self._kept_count = 0

    @property
    def is_settled(self) -> bool:
        """Whether the outcome of every step is known."""
        return self._taken is None

    def advance(self, settle: bool) -> Iterator[StepResult]:
        """Makes one more step and gives those whose outcome is known by now; with `settle`, all. A step that has to be
        taken again costs the round that followed it, which then counts as not made."""
        if settle or self._calm < CALM:
            yield from self.settle()
            result = self.trainer.step()
            self._note(result)
            yield result
            return
        start_s = perf_counter()
        self.trainer.feed_step()
        data_s = perf_counter() - start_s
        events = self.executor.run()
        if self._wrong:
            self._take_again()
        else:
            assert self._taken is not None
            self.trainer.count_step(events)
            self._taken.time_s, self._taken.data_s = perf_counter() - start_s, data_s
        known, self._known = self._known, []
        yield from known

    def settle(self) -> Iterator[StepResult]:
        """Waits until the outcome of the last step is known; afterwards the trainer's state is that after it."""
        if self._taken is not None:
            self._judge(self._taken)
            if self._wrong:
                self._take_again()
        known, self._known = self._known, []
        yield from known

    # ------------------------------------------------------------------------------------------------------------------
    # Instructions

    def _vote(self, action: Action) -> None:
        """Begins the sum over all ranks, after that of the step before has been read."""
        trainer = self.trainer
        if self._taken is not None:
            self._judge(self._taken)
        sums = trainer.local_sums()
        if not self._wrong:
            work = trainer.world.begin_sum(sums)
            self._taken = Taken(
                work, sums, trainer.step_count + 1, trainer.num_valid, trainer.num_tokens, trainer.learning_rate
            )

    def _step(self, action: Action) -> None:
        trainer = self.trainer
        if not self._wrong:
            self._keep()
            trainer.take_step()
        trainer.drop_gradients()

    # ------------------------------------------------------------------------------------------------------------------

    def _judge(self, taken: Taken) -> None:
        taken.work.wait()
        self.trainer.conclude(taken.sums, taken.num_valid)
        self._taken = None
        if self.trainer.is_as_computed:
            self._add(taken)
        else:
            self._wrong, self._again = True, taken

    def _add(self, taken: Taken) -> None:
        result = self.trainer.result(taken.step, taken.learning_rate, taken.num_tokens, taken.time_s, taken.data_s)
        self._known.append(result)
        self._note(result)

    def _note(self, result: StepResult) -> None:
        clip_norm = self.trainer.config.optim.clip_norm
        calm = result.skipped is None and not (clip_norm and result.grad_norm > clip_norm)
        self._calm = self._calm + 1 if calm else 0

    def _state(self) -> list[Tensor]:
        trainer = self.trainer
        return [*trainer.parameters.values(), *(tensor for _, tensor in trainer.optimizer.state().values())]

    @torch.no_grad()
    def _keep(self) -> None:
        state = self._state()
        if not self._kept:
            self._kept = [torch.empty_like(tensor) for tensor in state]
        torch._foreach_copy_(self._kept, state)
        self._kept_count = self.trainer.optimizer.step_count
        locals_ = [local for stage in self.trainer.stages.values() for local in stage.parameters.values()]
        self._kept_gradients = [(local, local.grad) for local in locals_ if local.grad is not None]

    @torch.no_grad()
    def _take_again(self) -> None:
        """Takes the last step once more, from the state before it, with its own gradients: clipped, or not at all."""
        trainer, taken = self.trainer, self._again
        torch._foreach_copy_(self._state(), self._kept)
        trainer.optimizer.step_count = self._kept_count
        trainer.update_copies()
        for local, gradient in self._kept_gradients:
            local.grad = gradient
        trainer.learning_rate = taken.learning_rate
        trainer.handlers["STEP"](Action("STEP"))
        self._wrong, self.taken_back = False, self.taken_back + 1
        self._add(taken)
