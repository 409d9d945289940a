"""Ranks of the tests of asynchronous saving: they save, and their writers are killed or refused."""

import os
import random
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muster.checkpoint import async_saver as saver_module
from muster.checkpoint.async_saver import AsyncSaver, SaveRequest
from muster.checkpoint.checkpoint_dir import RetentionPolicy, find_damage, find_latest, list_checkpoints
from muster.checkpoint.load import load, read_full
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import read_manifest
from muster.launch.store_waits import wait_for_keys
from muster.layout.tensor_layout import Box, TensorLayout, chunk_bounds

ROWS, COLUMNS = 4096, 64


def shards_of(rank: int, size: int, step: int) -> list[LocalShard]:
    """This rank's rows of a matrix and of a vector that two ranks share, full of the step's number."""
    first, rows = chunk_bounds(ROWS, size, rank)
    matrix = TensorLayout("model/w", (ROWS, COLUMNS), (Box((first, 0), (rows, COLUMNS)),))
    vector = TensorLayout("model/v", (100_000,), (Box((0,), (100_000,)),), size, rank, size)
    return [
        LocalShard("model/w", matrix, torch.full((rows, COLUMNS), float(step))),
        LocalShard("model/v", vector, torch.full((100_000,), float(step))),
    ]


class Rank:
    """A rank and its saver; the ranks meet at `barrier` as they would in the sum of a step."""

    def __init__(self, rank: int, size: int, store: dist.Store, root: Path) -> None:
        self.rank, self.size, self.store, self.root = rank, size, store, root
        self.saver = AsyncSaver(rank, size, store)
        self._meetings = 0

    def barrier(self) -> None:
        self._meetings += 1
        key = f"test/{self._meetings}"
        if self.store.add(f"{key}/here", 1) == self.size:
            self.store.set(f"{key}/all", "")
        wait_for_keys(self.store, [f"{key}/all"], timedelta(seconds=300))

    def begin(self, step: int, root: Path | None = None, keep: RetentionPolicy | None = None) -> list[LocalShard]:
        """Start a save; the tensors change at once, as they would in the next step."""
        shards = shards_of(self.rank, self.size, step)
        info = {"plan": {}, "model": {}, "counters": {"step": step}}
        self.saver.start(SaveRequest(root or self.root, step, info, keep or RetentionPolicy()), shards)
        self.saver.wait_staged()
        for shard in shards:
            shard.tensor.fill_(-1)
        return shards

    def save(self, step: int, **options: Any) -> str | None:
        """Save, wait, and return the error."""
        self.begin(step, **options)
        assert self.saver.wait(300)
        self.barrier()
        return self.saver.error

    def writer_pid(self) -> int | None:
        writer = self.saver._writer
        return writer._process.pid if writer is not None and writer.is_alive else None


def all_equal(folder: Path) -> int:
    """The step of a checkpoint all of whose numbers are that step's; an AssertionError where they aren't."""
    step = read_manifest(folder).step
    for name in ("model/w", "model/v"):
        assert (read_full(folder, name) == step).all(), f"{folder} is mixed"
    return step


def saves_beside_the_training(rank: int, size: int, store: dist.Store, payload: dict) -> dict[str, Any]:
    """Return the outcomes of saves that succeed, are killed, are refused and are overtaken."""
    root = Path(payload["root"])
    me, found = Rank(rank, size, store, root), {}
    me.saver.preallocate(shards_of(rank, size, 0))
    pid, staging = me.writer_pid(), me.saver._staging
    found["first"] = me.save(1)
    found["again"] = me.save(2)
    found["same writer and memory"] = (me.writer_pid(), me.saver._staging) == (pid, staging)
    wanted = shards_of(rank, size, 7)
    load(root / "step-00000002", wanted)
    found["read"] = all((shard.tensor == 2).all().item() for shard in wanted)
    found["killed"] = killed_while_it_writes(me, 3)
    found["after the kill"] = me.save(4)
    found["refused"] = refused(me, 5)
    found["vanished"] = me.save(6, root=root / "gone" / "checkpoints")
    found["after all"] = me.save(7)
    me.saver.close()
    if rank == 0:
        found["steps"] = [all_equal(folder) for folder in list_checkpoints(root)]
        found["rubbish"] = [path.name for path in root.glob("*.tmp*")]
    return found


def killed_while_it_writes(me: Rank, step: int) -> str | None:
    """The last rank's writer is stopped before it can write, and killed when the save is under way."""
    pid = me.writer_pid()
    victim = me.rank == me.size - 1
    if victim and pid is not None:
        os.kill(pid, signal.SIGSTOP)
    me.barrier()
    me.begin(step)
    assert not me.saver.wait(0.3), "nobody is done while one rank isn't"
    if victim and pid is not None:
        os.kill(pid, signal.SIGKILL)
    assert me.saver.wait(300)
    me.barrier()
    first, second = me.saver.pop_error(), me.saver.pop_error()
    assert first == me.saver.error
    assert second is None, "a failure is told once"
    return first


def refused(me: Rank, step: int) -> str | None:
    """Rank 0's folder can't be made: a file lies in its place."""
    place = me.root / f"step-{step:08}.tmp"
    if me.rank == 0:
        original, saver_module.save_using = saver_module.save_using, _in_the_way(place)
    me.barrier()
    problem = me.save(step)
    if me.rank == 0:
        saver_module.save_using = original
        assert find_damage(me.root / "step-00000004") is None
    return problem


def _in_the_way(place: Path) -> Any:
    from muster.checkpoint.save import save_using

    def save(write: Any, *args: Any, **options: Any) -> Path:
        def into_a_file(tmp_dir: Path) -> None:
            place.rename(place.parent.with_name("aside"))  # at once, though other ranks write into it
            place.write_text("")
            write(tmp_dir)

        return save_using(into_a_file, *args, **options)

    return save


def random_kills(rank: int, size: int, store: dist.Store, payload: dict) -> dict[str, int]:
    """Save again and again; each time some rank's writer is killed at a random moment.

    After each, the last complete checkpoint is whole and no older than the last save that succeeded.
    """
    root, draw = Path(payload["root"]), random.Random(payload["seed"])
    me = Rank(rank, size, store, root)
    kills, failed = 0, 0
    problem = me.save(1)
    assert problem is None, problem
    saved = 1
    seconds = 0.05
    for step in range(2, payload["kills"] + 2):
        victim, delay = draw.randrange(size), draw.uniform(0, 1.2 * seconds)
        started = time.monotonic()
        me.begin(step, keep=RetentionPolicy(last=draw.choice([1, 2])))
        if rank == victim:
            time.sleep(delay)
            while (pid := me.writer_pid()) is None and me.saver.is_saving:
                time.sleep(0.001)  # it is being started anew
            if pid is not None:
                with suppress(ProcessLookupError):  # it ended by itself at this moment
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
        assert me.saver.wait(300), "a killed writer must not hang the save"
        if me.saver.error is None:
            saved = step
            seconds = 0.5 * seconds + 0.5 * min(time.monotonic() - started, 0.2)
        else:
            failed += 1
        me.barrier()
        if rank == 0:
            latest = find_latest(root)
            assert latest is not None
            assert all_equal(latest) == saved, f"the last one is {latest}, but step {saved} was saved"
        me.barrier()
    me.saver.close()
    return {"kills": kills, "failed": failed, "saved": saved}


def saves_for_ever(rank: int, size: int, store: dist.Store, payload: dict) -> None:
    """Resume from the last checkpoint, save every step, and report each, until killed."""
    root = Path(payload["root"])
    latest = find_latest(root)
    me, step = Rank(rank, size, store, root), all_equal(latest) if latest else 0
    while True:
        step += 1
        problem = me.save(step)
        assert problem is None, problem
        if rank == 0:
            Path(payload["saved"]).write_text(str(step))
