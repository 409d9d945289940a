"""Four ranks on three nodes in the tests of in-memory checkpoints; each node is a folder."""

import os
import pickle
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist

from muster.checkpoint.async_saver import AsyncSaver, SaveRequest
from muster.checkpoint.checkpoint_dir import RetentionPolicy
from muster.checkpoint.in_memory.checkpointer import InMemoryCheckpointer
from muster.checkpoint.in_memory.directory import (
    InMemoryDirectory,
    StepHeader,
    claim_run_id,
    remove_stale,
    stored_ranks,
)
from muster.checkpoint.in_memory.recovery import RecoverySearch, find_newest
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.rank_file import rank_file_name
from muster.launch.store_waits import wait_for_keys
from muster.layout.tensor_layout import Box, TensorLayout
from muster.spec.errors import InfeasibleError
from tests.saver_ranks import COLUMNS, ROWS, shards_of

NODE_OF = (0, 0, 1, 2)
FAR = 10**9


class Rank:
    """One rank through several launches of the same run."""

    def __init__(self, rank: int, size: int, store: dist.Store, root: Path) -> None:
        self.rank, self.size, self.store, self.root = rank, size, store, root
        self.place = root / f"node-{NODE_OF[rank]}"
        self.run = root / "run"
        self._meetings, self._launches = 0, 0
        if rank == 0:
            self.run.mkdir()
            claim_run_id(self.run, "settings", resumes=False)
        self.id = self.gather(claim_run_id(self.run, "settings", resumes=False) if rank == 0 else "")[0]

    def gather(self, value: Any) -> list[Any]:
        self._meetings += 1
        keys = [f"gather/{self._meetings}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], pickle.dumps(value))
        wait_for_keys(self.store, keys, timedelta(seconds=300))
        return [pickle.loads(self.store.get(key)) for key in keys]

    def launch(self, run_id: str | None = None) -> None:
        """Launch again, as after all processes were killed."""
        if self._launches:
            self.saver.close()
            self.copies.close(delete=False)
        self._launches += 1
        folder = InMemoryDirectory(self.place, self.run, run_id or self.id)
        self.copies = InMemoryCheckpointer(self.rank, folder, "127.0.0.1", f"launch {self._launches}", self.gather)
        self.saver = AsyncSaver(
            self.rank, self.size, dist.PrefixStore(f"launch-{self._launches}", self.store), self.copies
        )

    def save(self, step: int, staged: bool = False) -> str | None:
        """Save in memory; `staged`: by the writer process, and the tensors change as soon as they may."""
        shards = shards_of(self.rank, self.size, step)
        info = {"plan": {}, "model": {}, "counters": {"step": step}}
        self.saver.start(SaveRequest(None, step, info, RetentionPolicy(), in_memory=True), shards, stage=staged)
        self.saver.wait_staged()
        assert staged or self.saver.wait(300)
        for shard in shards:
            shard.tensor.fill_(-1)
        assert self.saver.wait(300)
        self.gather(None)
        return self.saver.error

    def find(self) -> tuple[RecoverySearch, str | int | None]:
        """Search after another launch; return the result and the step of all elements that each rank reads."""
        self.launch()
        found = find_newest(self.copies, self.gather, FAR)
        read = None
        if found.newest is not None:
            read = self.read(found)
        self.gather(None)
        return found, read

    def read(self, found: RecoverySearch) -> str | int:
        """Under another plan: every rank wants all of it."""
        assert found.newest is not None
        shapes = {"model/w": (ROWS, COLUMNS), "model/v": (100_000,)}
        wanted = [
            LocalShard(name, TensorLayout(name, shape, (Box((0,) * len(shape), shape),)), torch.zeros(shape))
            for name, shape in shapes.items()
        ]
        found.newest.load(wanted)
        values = {value for shard in wanted for value in shard.tensor.unique().tolist()}
        assert found.newest.manifest.counters["step"] == found.newest.step
        return int(values.pop()) if len(values) == 1 else f"mixed: {values}"

    def lose(self, *nodes: int) -> None:
        """Remove the memory of these nodes."""
        if self.copies.is_node_leader and NODE_OF[self.rank] in nodes:
            self.copies.directory.delete()
        self.gather(None)

    def flip(self, node: int, rank: int) -> None:
        """One byte of a rank's copy on a node."""
        if self.copies.is_node_leader and NODE_OF[self.rank] == node:
            (step,) = self.place.glob("muster-*/step-????????")
            data = bytearray((step / rank_file_name(rank)).read_bytes())
            data[-1] ^= 1
            (step / rank_file_name(rank)).write_bytes(data)
        self.gather(None)


def outcome(found: tuple[RecoverySearch, Any]) -> tuple[int | None, list, Any]:
    survey, read = found
    return survey.newest and survey.newest.step, [list(gap) for gap in survey.incomplete], read


def lives_on(rank: int, size: int, store: dist.Store, payload: dict) -> dict[str, Any]:
    """Return the results of searches after various losses."""
    me, found = Rank(rank, size, store, Path(payload["root"])), {}
    me.launch()
    found["nothing"] = outcome(me.find())
    found["saved"] = [me.save(1, staged=True), me.save(2, staged=True)]
    (step,) = me.place.glob("muster-*/step-*")
    found["kept"] = [step.name, stored_ranks(step)]
    found["all killed"] = outcome(search := me.find())
    newest = search[0].newest
    found["received"] = 0 if newest is None else newest.files.received_bytes
    for node in range(3):
        me.lose(node)
        found[f"node {node} lost"] = outcome(me.find())
        found[f"after node {node}"] = me.save(2)
    me.flip(0, 0)
    found["a byte"] = outcome(me.find())
    me.flip(1, 0)
    found["both bytes"] = outcome(me.find())
    found["mended"] = me.save(3)
    found["half"] = half_written(me)
    found["killed"] = killed(me)
    found["vanished"] = vanished(me)
    found["copied again"] = copied_again(me)
    found["after all"] = [me.save(9), outcome(me.find())]
    me.lose(0, 1)
    found["two nodes lost"] = outcome(me.find())
    found["too little room"] = room(me)
    found["another run"] = another_run(me)
    me.copies.close(delete=True)
    me.gather(None)
    found["left"] = [path.name for path in me.place.iterdir()]
    return found


def half_written(me: Rank) -> list[Any]:
    """The last node fails when it should give the copies their name; some others have done so, and nobody the rest."""
    commit = MagicMock(side_effect=OSError(28, "No space left")) if me.rank == 3 else me.copies.directory.commit
    with patch.object(me.copies.directory, "commit", commit):
        problem = me.save(4)
    me.lose(0)
    first = outcome(me.find())  # of step 4 there is what node 1 has: the ranks 2, 0 and 1
    me.lose(1)
    return [problem, first, outcome(me.find())]


def killed(me: Rank) -> list[Any]:
    """A rank's writer is killed, which is noticed only when it doesn't answer."""
    saved = me.save(5, staged=True)
    writer = me.saver._writer
    assert writer is not None
    if me.rank == 2:
        os.kill(writer._process.pid, signal.SIGKILL)
    with patch.object(type(writer), "is_alive", True):
        problem = me.save(6, staged=True)
    return [saved, problem, outcome(me.find())]


def vanished(me: Rank) -> list[Any]:
    """The folder of the next node goes while copies are made."""
    begin = me.copies.directory.begin

    def and_lose(step: int, head: Any) -> None:
        begin(step, head)
        shutil.rmtree(me.copies.directory.tmp_dir(step))

    with patch.object(me.copies.directory, "begin", and_lose if me.rank == 3 else begin):
        problem = me.save(7)
    return [problem, outcome(me.find())]


def copied_again(me: Rank) -> list[Any]:
    """Nodes are lost one after the other, without another save between; the first had a part of another launch."""
    problem = me.save(8)
    me.lose(0)
    me.launch()
    if me.rank == 0:
        me.copies.directory.begin_parts(8, StepHeader(attempt="another", world_size=4, about={"step": 8}))
        (me.copies.directory.step_dir(8) / "rank-00002.json").write_text("{}")
    found, _ = me.find()
    assert found.newest is not None
    found.newest.copy_to_other_nodes(me.copies, me.gather)
    me.gather(None)
    kept = stored_ranks(me.copies.directory.step_dir(8))
    me.gather(None)
    me.lose(1)
    return [problem, kept, outcome(me.find())]


def room(me: Rank) -> str:
    try:
        me.copies.require_capacity(10**15, me.gather, "train.in_memory_checkpoint_every", "set it to 0")
    except InfeasibleError as error:
        return str(error)
    return "there is room"


def another_run(me: Rank) -> list[Any]:
    """One that has begun anew in the same place finds nothing, and clears what is left once nobody holds it."""
    old = me.copies.directory.path
    if me.rank == 0:
        claim_run_id(me.run, "other settings", resumes=False)
    me.gather(None)
    held = [left.path.name for left in remove_stale(me.place)]
    me.launch("another")
    newest = find_newest(me.copies, me.gather, FAR).newest
    if me.copies.is_node_leader:
        removed = [left.path for left in remove_stale(me.place)]
        assert removed == [old], removed
    me.gather(None)
    return [held, newest, old.exists()]
