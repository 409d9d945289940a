"""Saving beside the training: what changes the tensors waits until they are copied to host memory, and nothing else.

They change only at the end of a step, so that the copy is made beside the next one's passes. It is written by a process
of the rank's own, watched by a thread; the ranks agree through the launcher's store, so nothing here uses the
communication of the training. A save that fails, or a writer that dies, is told to all ranks and leaves the training
and the earlier checkpoints alone.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint.folder import Keep
from muster.checkpoint.memory.copies import Copies, send
from muster.checkpoint.memory.wire import Address
from muster.checkpoint.mirror import Mirror, copy_beside
from muster.checkpoint.piece import Piece
from muster.checkpoint.save import about, parts_of, save_with, write_rank
from muster.checkpoint.staging import Staging, mark_of
from muster.checkpoint.write import Part, file_name
from muster.checkpoint.writer_process import job_of
from muster.spec.errors import MusterError

WAIT_LIMIT = timedelta(minutes=30)
"""How long a rank that has written its part waits for the others before it gives the save up."""


@dataclass(frozen=True)
class Target:
    """What is to be saved beside the tensors."""

    root: Path | None
    """The folder of the checkpoints; None: only copies in memory are wanted."""
    step: int
    info: Mapping[str, Any]
    keep: Keep
    mirror: str | None = None
    """The URL below which a copy is to lie."""
    in_memory: bool = False
    """Whether copies in memory are wanted."""


class Saver:
    """One rank's part in saving. All ranks call `begin` for the same steps, and only when all of them are idle."""

    def __init__(self, rank: int, world_size: int, store: dist.Store, copies: Copies | None = None) -> None:
        self._rank, self._world_size, self._copies = rank, world_size, copies
        # A connection of its own: waiting on it holds up nobody.
        self._meeting = _Meeting(store.clone(), world_size)  # type: ignore[attr-defined]
        self._staging: Staging | None = None
        self._writer: _Writer | None = None
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._problem: str | None = None
        """Why the last save failed; None while it is under way and when it succeeded."""
        self._untold: str | None = None
        self.on_disk = False
        """Whether the last save is complete on disk, whatever becomes of its copy at the mirror."""

    @property
    def busy(self) -> bool:
        """Whether a save is under way here."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def problem(self) -> str | None:
        """Why the last save failed; None when it succeeded. Not to be asked while one is under way."""
        return self._problem

    def take_failure(self) -> str | None:
        """Why a save failed, once for each that did."""
        found, self._untold = self._untold, None
        return found

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """Makes the host memory for copies of `pieces`, and starts the writer, ahead of the first save."""
        with contextlib.suppress(OSError):  # the save itself will say so
            self._writer = _Writer(self._rank, self._staging_for(parts_of(pieces)).handle)

    def begin(self, target: Target, pieces: Sequence[Piece], copy: bool = True) -> None:
        """Begins a save of `pieces`, which must not change before `wait_copied` has returned.

        Without `copy` they are written from where they lie, and must not change before `wait` has returned.
        """
        self.wait()
        self._problem, self.on_disk = None, False
        self._copied.clear()
        ready = mark_of(piece.tensor for piece in pieces)
        self._thread = threading.Thread(target=self._run, args=(target, pieces, copy, ready), name="saver", daemon=True)
        self._thread.start()

    def wait_copied(self) -> None:
        """Waits until the tensors may change: not at all where no copy is being made."""
        self._copied.wait()

    def wait(self, limit_s: float | None = None) -> bool:
        """Waits until no save is under way; False when one still is after `limit_s` seconds."""
        if self._thread is not None:
            self._thread.join(limit_s)
        return not self.busy

    def close(self) -> None:
        """Ends the writer's process and lets the memory go."""
        if self._writer is not None:
            self._writer.end()
        self._staging = self._writer = None

    def _staging_for(self, parts: Mapping[Part, Tensor]) -> Staging:
        """The buffer for these parts. A writer inherits it when it starts, so another buffer wants another writer."""
        if self._staging is None or not self._staging.fits(parts):
            self.close()
            self._staging = Staging(parts)
        return self._staging

    def _run(self, target: Target, pieces: Sequence[Piece], copy: bool, ready: "torch.cuda.Event | None") -> None:
        """One save to its end, from a copy of the pieces or from where they lie."""
        lacking = self._take_copy(pieces, ready) if copy else None
        self._copied.set()

        def write(beside: Path, send_to: Address | None = None) -> None:
            if lacking is not None:
                raise MusterError(lacking)
            if copy:
                self._write_copy(beside, send_to)
                return
            write_rank(beside, self._rank, pieces)
            if send_to is not None:
                send(beside, self._rank, send_to)

        problems = []
        for save in (self._save_in_memory, self._save_on_disk):
            self._meeting.begin()
            try:
                save(target, write)
            except MusterError as error:
                problems.append(str(error))
            except Exception as error:  # the thread must end with a word, or the training would wait for it
                problems.append(f"the checkpoint of step {target.step} was not saved: {type(error).__name__}: {error}")
        self._problem = self._untold = "; ".join(problems) or None

    def _take_copy(self, pieces: Sequence[Piece], ready: "torch.cuda.Event | None") -> str | None:
        """Why no copy could be made; the other ranks must hear of it, or they wait in vain."""
        try:
            parts = parts_of(pieces)
            self._staging_for(parts).take(parts, ready)
        except OSError as error:
            return f"no host memory for a copy of the tensors: {error.strerror}"
        except Exception as error:
            return f"no copy of the tensors could be made: {type(error).__name__}: {error}"
        return None

    def _save_in_memory(self, target: Target, write: Callable[[Path, Address | None], None]) -> None:
        if not target.in_memory or (copies := self._copies) is None:
            return
        head, size = about(target.step, target.info), self._world_size
        copies.save(target.step, head, size, lambda beside: write(beside, copies.partner), self._meeting.exchange)

    def _save_on_disk(self, target: Target, write: Callable[[Path], None]) -> None:
        if target.root is None:
            return
        folder = save_with(
            write,
            target.root,
            target.step,
            target.info,
            rank=self._rank,
            world_size=self._world_size,
            exchange=self._meeting.exchange,
            keep=target.keep,
        )
        self.on_disk = True
        if target.mirror is not None:
            self._copy(folder, target, target.mirror)

    def _copy(self, folder: Path, target: Target, url: str) -> None:
        """Copies the checkpoint to the mirror: each rank its own file, and the manifest when all are there."""

        def together(action: Callable[[], None]) -> None:
            problem = None
            try:
                action()
            except MusterError as error:
                problem = str(error)
            if problems := [text for text in self._meeting.exchange(problem) if text]:
                raise MusterError(f"the checkpoint of step {target.step} was saved, but not copied: {problems[0]}")

        own, first = folder / file_name(self._rank), self._rank == 0
        together(lambda: Mirror(url).begin(target.step) if first else None)
        together(lambda: copy_beside(own, target.step, url) if own.exists() else None)
        together(lambda: Mirror(url).finish(folder, target.keep) if first else None)

    def _write_copy(self, beside: Path, send_to: Address | None) -> None:
        assert self._staging is not None
        if self._writer is None or not self._writer.alive:
            self._writer = _Writer(self._rank, self._staging.handle)
        self._writer.write(beside, self._staging, send_to)


class _Writer:
    """The rank's writing process, seen from the rank."""

    def __init__(self, rank: int, handle: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "muster.checkpoint.writer_process", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(handle,),
            text=True,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def write(self, folder: Path, staging: Staging, send_to: Address | None) -> None:
        """Returns when the file is on disk. Raises MusterError when it could not be written."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = job_of(folder, staging.handle, staging.nbytes, staging.parts, send_to)
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer.endswith("\n"):
            code = self._process.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise MusterError(f"the process that writes it {how}")
        if problem := json.loads(answer):
            raise MusterError(problem)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class _Meeting:
    """Where the ranks' savers meet, through the store: any thread may wait here, beside all other communication."""

    def __init__(self, store: dist.Store, size: int) -> None:
        self._store, self._size = store, size
        self._attempt, self._count, self._former = 0, 0, ""

    def begin(self) -> None:
        """The next save. Should a rank have given the last one up early, all count anew."""
        self._attempt, self._count = self._attempt + 1, 0

    def exchange(self, text: str | None) -> list[str | None]:
        """Waits for all ranks; what any of them has to say (one of the texts, if there are several)."""
        self._count += 1
        key = f"checkpoint/{self._attempt}/{self._count}"
        if text is not None:
            self._store.set(f"{key}/problem", text)
        if self._store.add(f"{key}/arrived", 1) == self._size:
            for word in ("arrived", "all", "problem"):  # of the meeting that all have left
                self._store.delete_key(f"{self._former}/{word}")
            self._store.set(f"{key}/all", "")
        self._former = key
        try:
            self._store.wait([f"{key}/all"], WAIT_LIMIT)
        except dist.DistStoreError:
            minutes = WAIT_LIMIT.total_seconds() / 60
            return [f"some rank's saver did not answer within {minutes:.0f} minutes"]
        return [self._store.get(f"{key}/problem").decode()] if self._store.check([f"{key}/problem"]) else []
