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

from muster.checkpoint.checkpoint_dir import RetentionPolicy
from muster.checkpoint.in_memory.checkpointer import InMemoryCheckpointer, send_to_partner
from muster.checkpoint.in_memory.transport import PeerAddress
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.rank_file import WriteItem, rank_file_name
from muster.checkpoint.remote import RemoteCheckpoints, upload_in_subprocess
from muster.checkpoint.save import manifest_header, save_using, write_items, write_local_shards
from muster.checkpoint.staging import StagingBuffer, record_event
from muster.checkpoint.writer_process import make_job
from muster.spec.errors import MusterError

BARRIER_TIMEOUT = timedelta(minutes=30)
"""How long a rank that has written its part waits for the others before it gives the save up."""


@dataclass(frozen=True)
class SaveRequest:
    """What is to be saved beside the tensors."""

    root: Path | None
    """The folder of the checkpoints; None: only copies in memory are wanted."""
    step: int
    info: Mapping[str, Any]
    retention: RetentionPolicy
    remote_url: str | None = None
    """The URL below which a copy is to lie."""
    in_memory: bool = False
    """Whether copies in memory are wanted."""


class AsyncSaver:
    """One rank's part in saving. All ranks call `begin` for the same steps, and only when all of them are idle."""

    def __init__(
        self, rank: int, world_size: int, store: dist.Store, in_memory: InMemoryCheckpointer | None = None
    ) -> None:
        self._rank, self._world_size, self._in_memory = rank, world_size, in_memory
        # A connection of its own: waiting on it holds up nobody.
        self._barrier = _StoreBarrier(store.clone(), world_size)  # type: ignore[attr-defined]
        self._staging: StagingBuffer | None = None
        self._writer: _WriterProcess | None = None
        self._thread: threading.Thread | None = None
        self._staged = threading.Event()
        self._staged.set()
        self._error: str | None = None
        """Why the last save failed; None while it is under way and when it succeeded."""
        self._unreported: str | None = None
        self.on_disk = False
        """Whether the last save is complete on disk, whatever becomes of its copy at the mirror."""

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way here."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def error(self) -> str | None:
        """Why the last save failed; None when it succeeded. Not to be asked while one is under way."""
        return self._error

    def pop_error(self) -> str | None:
        """Why a save failed, once for each that did."""
        found, self._unreported = self._unreported, None
        return found

    def preallocate(self, shards: Sequence[LocalShard]) -> None:
        """Makes the host memory for copies of `pieces`, and starts the writer, ahead of the first save."""
        with contextlib.suppress(OSError):  # the save itself will say so
            self._writer = _WriterProcess(self._rank, self._staging_for(write_items(shards)).fd)

    def start(self, request: SaveRequest, shards: Sequence[LocalShard], stage: bool = True) -> None:
        """Begins a save of `pieces`, which must not change before `wait_copied` has returned.

        Without `copy` they are written from where they lie, and must not change before `wait` has returned.
        """
        self.wait()
        self._error, self.on_disk = None, False
        self._staged.clear()
        ready = record_event(piece.tensor for piece in shards)
        self._thread = threading.Thread(
            target=self._run, args=(request, shards, stage, ready), name="saver", daemon=True
        )
        self._thread.start()

    def wait_staged(self) -> None:
        """Waits until the tensors may change: not at all where no copy is being made."""
        self._staged.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until no save is under way; False when one still is after `limit_s` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_saving

    def close(self) -> None:
        """Ends the writer's process and lets the memory go."""
        if self._writer is not None:
            self._writer.kill()
        self._staging = self._writer = None

    def _staging_for(self, items: Mapping[WriteItem, Tensor]) -> StagingBuffer:
        """The buffer for these parts. A writer inherits it when it starts, so another buffer wants another writer."""
        if self._staging is None or not self._staging.fits(items):
            self.close()
            self._staging = StagingBuffer(items)
        return self._staging

    def _run(
        self, request: SaveRequest, shards: Sequence[LocalShard], stage: bool, ready: "torch.cuda.Event | None"
    ) -> None:
        """One save to its end, from a copy of the pieces or from where they lie."""
        lacking = self._stage(shards, ready) if stage else None
        self._staged.set()

        def write(beside: Path, send_to: PeerAddress | None = None) -> None:
            if lacking is not None:
                raise MusterError(lacking)
            if stage:
                self._write_staged(beside, send_to)
                return
            write_local_shards(beside, self._rank, shards)
            if send_to is not None:
                send_to_partner(beside, self._rank, send_to)

        problems = []
        for save in (self._save_in_memory, self._save_on_disk):
            self._barrier.start_round()
            try:
                save(request, write)
            except MusterError as error:
                problems.append(str(error))
            except Exception as error:  # the thread must end with a word, or the training would wait for it
                problems.append(f"the checkpoint of step {request.step} was not saved: {type(error).__name__}: {error}")
        self._error = self._unreported = "; ".join(problems) or None

    def _stage(self, shards: Sequence[LocalShard], ready: "torch.cuda.Event | None") -> str | None:
        """Why no copy could be made; the other ranks must hear of it, or they wait in vain."""
        try:
            parts = write_items(shards)
            self._staging_for(parts).copy_from(parts, ready)
        except OSError as error:
            return f"no host memory for a copy of the tensors: {error.strerror}"
        except Exception as error:
            return f"no copy of the tensors could be made: {type(error).__name__}: {error}"
        return None

    def _save_in_memory(self, request: SaveRequest, write: Callable[[Path, PeerAddress | None], None]) -> None:
        if not request.in_memory or (copies := self._in_memory) is None:
            return
        head, size = manifest_header(request.step, request.info), self._world_size
        copies.save(
            request.step, head, size, lambda beside: write(beside, copies.partner_address), self._barrier.exchange
        )

    def _save_on_disk(self, request: SaveRequest, write: Callable[[Path], None]) -> None:
        if request.root is None:
            return
        folder = save_using(
            write,
            request.root,
            request.step,
            request.info,
            rank=self._rank,
            world_size=self._world_size,
            exchange=self._barrier.exchange,
            retention=request.retention,
        )
        self.on_disk = True
        if request.remote_url is not None:
            self._upload(folder, request, request.remote_url)

    def _upload(self, folder: Path, request: SaveRequest, url: str) -> None:
        """Copies the checkpoint to the mirror: each rank its own file, and the manifest when all are there."""

        def together(action: Callable[[], None]) -> None:
            problem = None
            try:
                action()
            except MusterError as error:
                problem = str(error)
            if problems := [text for text in self._barrier.exchange(problem) if text]:
                raise MusterError(f"the checkpoint of step {request.step} was saved, but not copied: {problems[0]}")

        own, first = folder / rank_file_name(self._rank), self._rank == 0
        together(lambda: RemoteCheckpoints(url).begin_upload(request.step) if first else None)
        together(lambda: upload_in_subprocess(own, request.step, url) if own.exists() else None)
        together(lambda: RemoteCheckpoints(url).commit(folder, request.retention) if first else None)

    def _write_staged(self, tmp_dir: Path, send_to: PeerAddress | None) -> None:
        assert self._staging is not None
        if self._writer is None or not self._writer.is_alive:
            self._writer = _WriterProcess(self._rank, self._staging.fd)
        self._writer.write(tmp_dir, self._staging, send_to)


class _WriterProcess:
    """The rank's writing process, seen from the rank."""

    def __init__(self, rank: int, fd: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "muster.checkpoint.writer_process", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(fd,),
            text=True,
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def write(self, folder: Path, staging: StagingBuffer, send_to: PeerAddress | None) -> None:
        """Returns when the file is on disk. Raises MusterError when it could not be written."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = make_job(folder, staging.fd, staging.nbytes, staging.items, send_to)
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

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class _StoreBarrier:
    """Where the ranks' savers meet, through the store: any thread may wait here, beside all other communication."""

    def __init__(self, store: dist.Store, size: int) -> None:
        self._store, self._size = store, size
        self._attempt, self._count, self._previous = 0, 0, ""

    def start_round(self) -> None:
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
                self._store.delete_key(f"{self._previous}/{word}")
            self._store.set(f"{key}/all", "")
        self._previous = key
        try:
            self._store.wait([f"{key}/all"], BARRIER_TIMEOUT)
        except dist.DistStoreError:
            minutes = BARRIER_TIMEOUT.total_seconds() / 60
            return [f"some rank's saver did not answer within {minutes:.0f} minutes"]
        return [self._store.get(f"{key}/problem").decode()] if self._store.check([f"{key}/problem"]) else []
