"""The end of a run: it waits for its checkpoint, not for ever, and knows what is on disk."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from muster.config.run_config import TrainConfig
from muster.parallel.world import World
from muster.spec.errors import MusterError
from muster.train.checkpoint_manager import UPLOAD_TIMEOUT_S, CheckpointManager


class ScriptedSaver:
    """Whose saves end as `outcomes` says: (whether in time, whether on disk, the problem)."""

    def __init__(self, outcomes: list[tuple[bool, bool, str | None]], said: list[str]) -> None:
        self.outcomes, self.said, self.begun = outcomes, said, 0
        self.on_disk, self.error = False, None

    def start(self, *_: object) -> None:
        self.begun += 1

    def wait_staged(self) -> None:
        raise AssertionError("nothing changes at the end")

    def wait(self, _: float) -> bool:
        assert self.said == ["save"] * (self.begun + 1), "waiting for a disk is no hang"
        if not self.begun:
            return True
        done, self.on_disk, self.error = self.outcomes[self.begun - 1]
        return done


def save_at_end(outcomes: list[tuple[bool, bool, str | None]], run: Path, monkeypatch: Any) -> tuple[str | None, int]:
    """Return the sentence, or `error: …` where it was raised, and the number of saves started."""
    said: list[str] = []
    saver = ScriptedSaver(outcomes, said)
    monkeypatch.setattr("muster.train.checkpoint_manager.AsyncSaver", lambda *_: saver)
    monkeypatch.setattr("muster.train.checkpoint_manager.RETRY_PAUSE_S", 0.0)
    heartbeat = SimpleNamespace(update=said.append)

    def alone(name: str, value: Any, limit: timedelta) -> list[Any]:
        assert name not in names, "a name twice would give the answer of the first time"
        assert limit > timedelta(seconds=UPLOAD_TIMEOUT_S), "a rank may wait for its disk so long before it comes"
        names.append(name)
        return [value]

    names: list[str] = []
    world = SimpleNamespace(rank=0, size=1, store=None, heartbeat=heartbeat, all_gather_object_via_store=alone)
    trainer = SimpleNamespace(step_count=3, local_shards=list, outer=None)
    train = TrainConfig(steps=3, seq_len=8, global_batch_size=1, remote_checkpoint_dir="file:///there")
    saves = CheckpointManager(train, cast(Any, trainer), cast(Any, world), run)
    try:
        return saves.save_and_wait({}), saver.begun
    except MusterError as error:
        return f"error: {error}", saver.begun


def test_the_end_says_what_is_on_disk_and_does_not_wait_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = "there is no checkpoint, so all steps are lost"
    full, uncopied, silent = (False, "full"), (True, "not copied"), "the disk or the remote directory doesn't respond"
    for outcomes, expected in (
        ([(True, *full), (True, True, None)], (None, 2)),
        ([(True, *full)] * 3, (f"error: full; {none}", 3)),
        ([(True, *uncopied)] * 3, ("not copied; step 3 is complete in the run directory", 3)),
        ([(True, *uncopied)] + [(True, *full)] * 2, ("full; step 3 is complete in the run directory", 3)),
        ([(False, False, None)], (f"error: {silent}; {none}", 1)),
        ([(False, True, None)], (f"{silent}; step 3 is complete in the run directory", 1)),
    ):
        assert save_at_end(outcomes, tmp_path, monkeypatch) == expected


def test_ranks_that_come_late_are_waited_for_without_a_collective() -> None:
    store = dist.HashStore()

    def come(rank: int) -> list[Any]:
        sleep(0.2 * rank)
        world = cast(Any, SimpleNamespace(rank=rank, size=3, store=store))  # there is no process group
        return World.all_gather_object_via_store(world, "save 1", (rank, None), timedelta(seconds=300))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(come, range(3))) == [[[0, None], [1, None], [2, None]]] * 3


@pytest.mark.parametrize("keep_every", [0, 6])
def test_a_checkpoint_that_is_kept_for_good_waits_for_the_save_before(
    keep_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save takes three steps: without the wait, that of step 5 would put step 6 off to step 8."""
    saved: list[int] = []
    waited: list[int] = []
    now = SimpleNamespace(step=0)

    class SlowSaver:
        is_saving = False

        def start(self, request: Any, *_: object) -> None:
            saved.append(request.step)

        def wait(self, *_: object) -> bool:
            waited.append(now.step)
            return True

        def pop_error(self) -> None:
            return None

    monkeypatch.setattr("muster.train.checkpoint_manager.AsyncSaver", lambda *_: SlowSaver())
    world = SimpleNamespace(rank=0, size=1, store=None, heartbeat=SimpleNamespace(update=lambda _: None))
    trainer = SimpleNamespace(step_count=0, local_shards=list, outer=None, swarm=None)
    train = TrainConfig(steps=9, seq_len=8, global_batch_size=1, save_every=5, keep_every=keep_every)
    manager = CheckpointManager(train, cast(Any, trainer), cast(Any, world), tmp_path)
    for step in range(1, 10):
        now.step = trainer.step_count = step
        is_saving = bool(saved) and step - saved[-1] < 3
        result = SimpleNamespace(step=step, is_saving=is_saving, save_failed=False)
        manager.after_step(cast(Any, result), True, dict)
    assert (saved, waited) == (([5, 6], [6]) if keep_every else ([5], []))
