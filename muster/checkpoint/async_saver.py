"""Asynchronous saving: training continues while a checkpoint is written from a copy in host memory.

Tensors change only at the end of a step, so they are copied (staged) during the next step's passes, and only the next
update waits for the copy. The copy is written by a separate process of each rank, which a thread watches; ranks agree
through the launcher's store, so saving uses none of the training's communication. A failed save, or a writer that dies,
is reported to all ranks; training and earlier checkpoints are unaffected.
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
from muster.launch.store_waits import wait_for_keys
from muster.spec.errors import MusterError

BARRIER_TIMEOUT = timedelta(minutes=30)
"""Time for which a rank that has written its part waits for the others before it gives up the save."""


@dataclass(frozen=True)
class SaveRequest:
    """Destination and metadata of a save."""

    root: Path | None
    """Directory of the checkpoints; None: only an in-memory checkpoint is wanted."""
    step: int
    info: Mapping[str, Any]
    retention: RetentionPolicy
    remote_url: str | None = None
    """URL of the remote checkpoint directory that receives a copy; None: none."""
    in_memory: bool = False
    """True if an in-memory checkpoint is wanted."""


class AsyncSaver:
    """One rank's part in saving. All ranks call `start` for the same steps, and only if none of them is saving."""

    def __init__(
        self, rank: int, world_size: int, store: dist.Store, in_memory: InMemoryCheckpointer | None = None
    ) -> None:
        self._rank, self._world_size, self._in_memory = rank, world_size, in_memory
        self._barrier = _StoreBarrier(store, world_size)
        self._staging: StagingBuffer | None = None
        self._writer: _WriterProcess | None = None
        self._thread: threading.Thread | None = None
        self._staged = threading.Event()
        self._staged.set()
        self._error: str | None = None
        """Message of the last save's failure; None while it is under way and if it succeeded."""
        self._unreported: str | None = None
        self.on_disk = False
        """True if the last save is complete on disk, whether or not its remote copy is."""

    @property
    def is_saving(self) -> bool:
        """True while a save is under way on this rank."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def error(self) -> str | None:
        """Message of the last save's failure; None if it succeeded. Undefined while one is under way."""
        return self._error

    def pop_error(self) -> str | None:
        """Return the message of a failed save, once for each."""
        message = self._unreported
        self._unreported = None
        return message

    def preallocate(self, shards: Sequence[LocalShard]) -> None:
        """Allocate the staging buffer for `shards` and start the writer process, ahead of the first save."""
        with contextlib.suppress(OSError):  # the save itself will report it
            self._writer = _WriterProcess(self._rank, self._staging_for(write_items(shards)).fd)

    def start(self, request: SaveRequest, shards: Sequence[LocalShard], stage: bool = True) -> None:
        """Start a save of `shards`, which must not change before `wait_staged` has returned.

        Without `stage` they are written in place, and must not change before `wait` has returned.
        """
        self.wait()
        self._error = None
        self.on_disk = False
        self._staged.clear()
        ready = record_event(shard.tensor for shard in shards)
        self._thread = threading.Thread(
            target=self._run, args=(request, shards, stage, ready), name="saver", daemon=True
        )
        self._thread.start()

    def wait_staged(self) -> None:
        """Wait until the tensors may change; return at once if none are being staged."""
        self._staged.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is under way; return False if one still is after `timeout_s` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_saving

    def close(self) -> None:
        """End the writer process and free the staging buffer."""
        if self._writer is not None:
            self._writer.kill()
        self._staging = self._writer = None

    def _staging_for(self, items: Mapping[WriteItem, Tensor]) -> StagingBuffer:
        """Return the staging buffer for these items.

        A writer inherits the buffer when it starts, so a new buffer needs a new writer.
        """
        if self._staging is None or not self._staging.fits(items):
            self.close()
            self._staging = StagingBuffer(items)
        return self._staging

    def _run(
        self, request: SaveRequest, shards: Sequence[LocalShard], stage: bool, ready: "torch.cuda.Event | None"
    ) -> None:
        """Run one save to its end, from staged copies or in place."""
        staging_error = self._stage(shards, ready) if stage else None
        self._staged.set()

        def write(tmp_dir: Path, send_to: PeerAddress | None = None) -> None:
            if staging_error is not None:
                raise MusterError(staging_error)
            if stage:
                self._write_staged(tmp_dir, send_to)
                return
            write_local_shards(tmp_dir, self._rank, shards)
            if send_to is not None:
                send_to_partner(tmp_dir, self._rank, send_to)

        problems = []
        for save in (self._save_in_memory, self._save_on_disk):
            self._barrier.start_round()
            try:
                save(request, write)
            except MusterError as error:
                problems.append(str(error))
            except Exception as error:  # any error must be recorded, or training would wait for the thread
                problems.append(f"the checkpoint of step {request.step} was not saved: {type(error).__name__}: {error}")
        self._error = self._unreported = "; ".join(problems) or None

    def _stage(self, shards: Sequence[LocalShard], ready: "torch.cuda.Event | None") -> str | None:
        """Copy the shards to the staging buffer; return an error message for all ranks if that fails."""
        try:
            items = write_items(shards)
            self._staging_for(items).copy_from(items, ready)
        except OSError as error:
            return f"no host memory for a copy of the tensors: {error.strerror}"
        except Exception as error:
            return f"no copy of the tensors could be made: {type(error).__name__}: {error}"
        return None

    def _save_in_memory(self, request: SaveRequest, write: Callable[[Path, PeerAddress | None], None]) -> None:
        checkpointer = self._in_memory
        if not request.in_memory or checkpointer is None:
            return
        checkpointer.save(
            request.step,
            manifest_header(request.step, request.info),
            self._world_size,
            lambda tmp_dir: write(tmp_dir, checkpointer.partner_address),
            self._barrier.exchange,
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
        """Upload the checkpoint: each rank its own file, and rank 0 the manifest once all files are there."""

        def together(action: Callable[[], None]) -> None:
            problem = None
            try:
                action()
            except MusterError as error:
                problem = str(error)
            if problems := [text for text in self._barrier.exchange(problem) if text]:
                raise MusterError(f"the checkpoint of step {request.step} was saved, but not uploaded: {problems[0]}")

        rank_file = folder / rank_file_name(self._rank)
        is_first = self._rank == 0
        together(lambda: RemoteCheckpoints(url).begin_upload(request.step) if is_first else None)
        together(lambda: upload_in_subprocess(rank_file, request.step, url) if rank_file.exists() else None)
        together(lambda: RemoteCheckpoints(url).commit(folder, request.retention) if is_first else None)

    def _write_staged(self, tmp_dir: Path, send_to: PeerAddress | None) -> None:
        assert self._staging is not None
        if self._writer is None or not self._writer.is_alive:
            self._writer = _WriterProcess(self._rank, self._staging.fd)
        self._writer.write(tmp_dir, self._staging, send_to)


class _WriterProcess:
    """Handle of a rank's writer process (`muster.checkpoint.writer_process`)."""

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
        """Have the staged tensors written; return once the file is on disk. Raises MusterError if that fails."""
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
    """Barrier of the ranks' savers through the store, independent of all other communication."""

    def __init__(self, store: dist.Store, size: int) -> None:
        self._store, self._size = store, size
        self._attempt, self._count, self._previous = 0, 0, ""

    def start_round(self) -> None:
        """Begin the next save: barriers are counted anew, since a rank may have given up the last save early."""
        self._attempt += 1
        self._count = 0

    def exchange(self, text: str | None) -> list[str | None]:
        """Wait for all ranks; return the error of one of those that have one."""
        self._count += 1
        key = f"checkpoint/{self._attempt}/{self._count}"
        if text is not None:
            self._store.set(f"{key}/problem", text)
        if self._store.add(f"{key}/arrived", 1) == self._size:
            for word in ("arrived", "all", "problem"):  # of the previous barrier, which all have left
                self._store.delete_key(f"{self._previous}/{word}")
            self._store.set(f"{key}/all", "")
        self._previous = key
        try:
            wait_for_keys(self._store, [f"{key}/all"], BARRIER_TIMEOUT)
        except dist.DistStoreError:
            minutes = BARRIER_TIMEOUT.total_seconds() / 60
            return [f"some rank's saver did not answer within {minutes:.0f} minutes"]
        return [self._store.get(f"{key}/problem").decode()] if self._store.check([f"{key}/problem"]) else []
