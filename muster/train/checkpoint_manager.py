"""When a run saves its checkpoints, and what follows a failure. All ranks decide alike, from the sums of each step."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

from muster.checkpoint.async_saver import AsyncSaver, SaveRequest
from muster.checkpoint.checkpoint_dir import BEST, RetentionPolicy, find_latest, link_best, step_of
from muster.checkpoint.in_memory.checkpointer import InMemoryCheckpointer
from muster.checkpoint.save import manifest_header, write_local_shards
from muster.config.run_config import TrainConfig
from muster.parallel.allocation_meter import host_memory
from muster.parallel.world import COLLECTIVE_TIMEOUT, World
from muster.spec.errors import MusterError
from muster.train.step_result import StepResult
from muster.train.trainer import Trainer

T = TypeVar("T")

CHECKPOINTS_FOLDER = "checkpoints"
MAX_RETRY_STEPS = 64
"""Largest number of steps between attempts at a save that keeps failing."""
FINAL_ATTEMPTS = 3
"""Attempts to save at the end of the training, after which there is no later step."""
RETRY_PAUSE_S = 1.0
"""Pause between the final attempts."""
DISK_TIMEOUT_S = 600.0
"""Longest wait for an unresponsive disk at the end of a run."""
ABANDON_TIMEOUT_S = 10.0
"""Longest wait for a save that is given up."""
UPLOAD_TIMEOUT_S = 2400.0
"""Longest wait for a disk and a remote directory: longer than the ranks wait for one another's uploads."""


class CheckpointManager:
    """One rank's view of the checkpoints of its run."""

    def __init__(
        self,
        train: TrainConfig,
        trainer: Trainer,
        world: World,
        run_dir: Path,
        in_memory_checkpoint: InMemoryCheckpointer | None = None,
    ) -> None:
        self._train = train
        self._trainer = trainer
        self._world = world
        self._run_dir = run_dir
        self._in_memory = in_memory_checkpoint
        in_background = None if train.elastic else in_memory_checkpoint
        self._saver = AsyncSaver(world.rank, world.size, world.store, in_background)
        regular_every = train.save_every if train.ephemeral_every else 0
        self._retention = RetentionPolicy(train.keep_last, train.keep_every, regular_every)
        self._failure: str | None = None
        self._is_saving = False
        self._disk_save_due = False
        self._memory_save_due = False
        self._last_targets = (False, False)
        """(the last save went to disk, it went to memory)."""
        self._num_failures = 0
        self._retry_step = 0
        self._num_exchanges = 0
        self._step_under_way: int | None = None
        """Step of the last checkpoint on disk that was started, until it is known to be complete."""
        self._saved_steps: list[int] = []

    @property
    def _saves_in_background(self) -> bool:
        """False for islands, which don't hear of one another in each step and so save together, and for swarms, whose
        state comes from peers."""
        return self._trainer.outer is None and self._trainer.swarm is None

    def keep_best(self, step: int) -> None:
        """Save and keep the checkpoint of a step, which is the one with the lowest validation loss."""
        self._retention = self._retention._replace(best_step=step)
        self._link_best()

    def pop_saved_steps(self) -> list[int]:
        """Return the steps whose checkpoints have become complete since the last call, the same on all ranks."""
        found, self._saved_steps = self._saved_steps, []
        return found

    def _note_saved(self) -> None:
        """Note that the last checkpoint that was started is complete."""
        self._link_best()
        if self._step_under_way is not None:
            self._saved_steps.append(self._step_under_way)
        self._step_under_way = None

    def _link_best(self) -> None:
        """Let `checkpoints/best` lead to the best checkpoint once that is complete."""
        if self._world.rank == 0 and (step := self._retention.best_step) is not None:
            with suppress(OSError):  # the run directory's disk fails: saves report that
                link_best(self._run_dir / CHECKPOINTS_FOLDER, step)

    def status(self) -> tuple[bool, bool]:
        """Return whether this rank is still saving, and whether rank 0 knows of a failure since the step before."""
        is_saving = self._saver.is_saving  # read first: a save that has ended by now reports its failure in this step
        self._failure = self._saver.pop_error() or self._failure
        return is_saving, self._failure is not None and self._world.rank == 0

    def wait_staged(self) -> None:
        """Wait until the tensors of a save under way have been copied, so that they may change."""
        self._saver.wait_staged()

    def prepare(self) -> None:
        """Allocate staging memory before the first save."""
        train = self._train
        every = (
            train.save_every
            or train.ephemeral_every
            or train.keep_every
            or train.keep_best
            or train.in_memory_checkpoint_every
        )
        if train.async_save and every and self._saves_in_background:
            self._saver.preallocate(self._trainer.local_shards())

    def after_step(self, result: StepResult, is_settled: bool, info: Callable[[], dict[str, Any]]) -> str | None:
        """Start a save if one is due and the last is done; returns a sentence when one has failed.

        `is_settled`: the trainer's state is that after this step, for good.
        """
        if not self._saves_in_background:
            return self.save_and_wait(info()) if self._is_disk_save_due(result.step) else None
        sentence = None
        if result.save_failed:
            self._num_failures += 1
            self._retry_step = result.step + min(2 ** (self._num_failures - 1), MAX_RETRY_STEPS)
            sentence = f"{self._failure}; training continues, and the save is tried again after step {self._retry_step}"
            self._failure = None
            self._step_under_way = None
        elif self._is_saving and not result.is_saving:
            self._num_failures = 0
            self._retry_step = 0
            self._note_saved()
        self._is_saving = self._is_saving and result.is_saving
        self._disk_save_due |= self._is_disk_save_due(result.step)
        self._memory_save_due |= self._is_memory_save_due(result.step)
        permanent = self._retention.is_permanent(result.step)
        if (self._disk_save_due or self._memory_save_due) and (permanent or not result.is_saving) and is_settled:
            if (
                result.is_saving
            ):  # a checkpoint to be kept for good is that of this step, so the last save is waited for
                self._world.heartbeat.update("save")
                self._saver.wait()
                self._failure = self._saver.pop_error() or self._failure
                self._note_saved()
            self._last_targets = self._disk_save_due, self._memory_save_due
            self._start_save(CHECKPOINTS_FOLDER, info(), self._train.async_save, *self._last_targets)
            if not self._train.async_save:
                self._saver.wait()
                self._link_best()
            self._disk_save_due = False
            self._memory_save_due = False
            self._is_saving = True
            self._retry_step = 0
        return sentence

    def best_step_on_disk(self) -> int | None:
        """Return the step of the checkpoint that the link `checkpoints/best` leads to; None where there is none."""
        best = self._run_dir / CHECKPOINTS_FOLDER / BEST
        return step_of(best.resolve()) if best.is_symlink() and best.is_dir() else None

    def save_again(self, info: Callable[[], dict[str, Any]]) -> None:
        """Start a save of the present state, where one was due since the newest checkpoint on disk and isn't there; all
        ranks call it before their first step."""
        latest = find_latest(self._run_dir / CHECKPOINTS_FOLDER) if self._world.rank == 0 else None
        newest = self._world.broadcast_object(0 if latest is None else step_of(latest))
        step = self._trainer.step_count
        if self._saves_in_background and any(map(self._is_regular_disk_save, range(newest + 1, step + 1))):
            self._last_targets = True, False
            self._start_save(CHECKPOINTS_FOLDER, info(), self._train.async_save)
            if not self._train.async_save:
                self._saver.wait()
                self._link_best()
            self._is_saving = True

    def keep_step(self, info: Callable[[], dict[str, Any]]) -> None:
        """Keep a copy of the present state in memory, from which all ranks go on when one is lost.

        It is complete before this rank takes part in the next step's sums, so that whoever has updated its parameters
        in that step knows that all ranks have kept this one.
        """
        if self._in_memory is not None:
            write = partial(write_local_shards, rank=self._world.rank, shards=self._trainer.local_shards())
            step = self._trainer.step_count
            self._in_memory.save_part(step, lambda: manifest_header(step, info()), self._world.size, write)

    def may_save_after(self, step: int) -> bool:
        """Return whether a save may start after a step to come."""
        return (
            self._disk_save_due
            or self._memory_save_due
            or self._is_disk_save_due(step)
            or self._is_memory_save_due(step)
        )

    def is_save_step(self, step: int) -> bool:
        """Return whether a save is due after a step by its number alone, whatever became of saves before."""
        train = self._train
        intervals = train.save_every, train.ephemeral_every, train.in_memory_checkpoint_every
        return any(every and step % every == 0 for every in intervals) or self._retention.is_permanent(step)

    def _is_memory_save_due(self, step: int) -> bool:
        every = self._train.in_memory_checkpoint_every
        return bool(every and step % every == 0) or (self._last_targets[1] and self._is_retry_due(step))

    def _is_retry_due(self, step: int) -> bool:
        return bool(self._retry_step and step >= self._retry_step)

    def _is_disk_save_due(self, step: int) -> bool:
        return self._is_regular_disk_save(step) or (self._last_targets[0] and self._is_retry_due(step))

    def _is_regular_disk_save(self, step: int) -> bool:
        train = self._train
        regular = any(every and step % every == 0 for every in (train.save_every, train.ephemeral_every))
        return regular or self._retention.is_permanent(step)

    def save_and_wait(self, info: dict[str, Any], folder: str = CHECKPOINTS_FOLDER) -> str | None:
        """Save the present state and wait until it is on disk; all ranks call it.

        Returns a sentence when it is on disk but could not be uploaded. Raises MusterError, which says what is lost,
        when it could not be saved.
        """
        self._world.heartbeat.update("save")
        timeout_s = UPLOAD_TIMEOUT_S if self._train.remote_checkpoint_dir else DISK_TIMEOUT_S
        if not all(self._gather(self._saver.wait(timeout_s), timeout_s)):
            raise MusterError(
                f"a checkpoint is still being written after {timeout_s / 60:.0f} minutes; {self._describe_lost_steps()}"
            )
        if self._saver.error is None:
            self._note_saved()
        problem = ""
        on_disk = False
        for attempt in range(FINAL_ATTEMPTS):
            if attempt:
                sleep(RETRY_PAUSE_S)
            self._start_save(folder, info, copy=False)
            done = self._saver.wait(timeout_s)
            error = self._saver.error if done else "the disk or the remote directory doesn't respond"
            statuses = self._gather((done, self._saver.on_disk, error), timeout_s)
            all_done, all_on_disk, errors = zip(*statuses, strict=True)
            problem = next((text for text in errors if text), "")
            on_disk = on_disk or all(all_on_disk)
            if not problem:
                self._note_saved()
                return None
            if not all(all_done):  # another attempt would wait for this one
                break
        if on_disk:
            return f"{problem}; step {self._trainer.step_count} is complete in the run directory"
        raise MusterError(f"{problem}; {self._describe_lost_steps()}")

    def _gather(self, value: T, timeout_s: float) -> list[T]:
        """Gather every rank's value over the store, as one rank may have waited for its saver all this time and another
        not at all."""
        self._num_exchanges += 1
        timeout = timedelta(seconds=timeout_s) + COLLECTIVE_TIMEOUT
        return self._world.all_gather_object_via_store(f"save {self._num_exchanges}", value, timeout)

    @host_memory()
    def _start_save(
        self, folder: str, info: dict[str, Any], copy: bool, to_disk: bool = True, to_memory: bool = False
    ) -> None:
        self._world.heartbeat.update("save")
        train = self._train
        step = self._trainer.step_count
        remote_dir = train.remote_checkpoint_dir if folder == CHECKPOINTS_FOLDER else None
        root = self._run_dir / folder if to_disk else None
        request = SaveRequest(root, step, info, self._retention, remote_dir, to_memory)
        self._step_under_way = step if to_disk and folder == CHECKPOINTS_FOLDER else None
        self._saver.start(request, self._trainer.local_shards(), copy)

    def _describe_lost_steps(self) -> str:
        """Describe what is lost when the run ends here."""
        latest = find_latest(self._run_dir / CHECKPOINTS_FOLDER)
        if latest is None:
            return "there is no checkpoint, so all steps are lost"
        step = step_of(latest)
        return (
            f"the last checkpoint is that of step {step}: the steps since are lost, and the same command goes on there"
        )

    def finish_save(self) -> str | None:
        """Wait until the save under way, if there is one, has ended on all ranks, which all call this; returns a
        sentence where it has failed."""
        self._world.heartbeat.update("save")
        timeout_s = UPLOAD_TIMEOUT_S if self._train.remote_checkpoint_dir else DISK_TIMEOUT_S
        self._saver.wait(timeout_s)
        problem = next(filter(None, self._gather(self._saver.pop_error(), timeout_s)), None)
        if self._is_saving and problem is None:
            self._note_saved()
        self._is_saving = False
        return problem

    def abandon(self) -> None:
        """Give up the saves under way, whose connections are broken, and leave complete copies in memory.

        Raises MusterError where a save doesn't end.
        """
        self._saver.close()
        if not self._saver.wait(ABANDON_TIMEOUT_S):
            raise MusterError("a save that was given up doesn't end: the disk or the remote directory doesn't respond")
        self._saver.close()  # it may have started its writer anew
        if self._in_memory is not None:
            self._in_memory.close(delete=False)

    def close(self) -> None:
        """End the saver's processes and delete in-memory checkpoints, at the end of a run whose last step is on
        disk."""
        self._saver.close()
        if self._in_memory is not None:
            self._in_memory.close(delete=True)
