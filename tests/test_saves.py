"""The end of a run: it waits for its checkpoint, not for ever, and knows what is on disk."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from muster.spec.errors import MusterError
from muster.spec.run import TrainConfig
from muster.train.saves import Saves


class ScriptedSaver:
    """Whose saves end as `outcomes` says: (whether in time, whether on disk, the problem)."""

    def __init__(self, outcomes: list[tuple[bool, bool, str | None]], said: list[str]) -> None:
        self.outcomes, self.said, self.begun = outcomes, said, 0
        self.on_disk, self.problem = False, None

    def begin(self, *_: object) -> None:
        self.begun += 1

    def wait_copied(self) -> None:
        raise AssertionError("nothing changes at the end")

    def wait(self, _: float) -> bool:
        assert self.said == ["save"] * (self.begun + 1), "waiting for a disk is no hang"
        if not self.begun:
            return True
        done, self.on_disk, self.problem = self.outcomes[self.begun - 1]
        return done


def save_at_end(outcomes: list[tuple[bool, bool, str | None]], run: Path, monkeypatch: Any) -> tuple[str | None, int]:
    """What is said, or raised as `error: …`, and how many saves were begun."""
    said: list[str] = []
    saver = ScriptedSaver(outcomes, said)
    monkeypatch.setattr("muster.train.saves.Saver", lambda *_: saver)
    monkeypatch.setattr("muster.train.saves.PAUSE_S", 0.0)
    where = SimpleNamespace(say=said.append)
    world = SimpleNamespace(rank=0, size=1, store=None, where=where, exchange=lambda value: [value])
    trainer = SimpleNamespace(step_count=3, pieces=list)
    train = TrainConfig(steps=3, seq_len=8, global_batch_size=1, mirror="file:///there")
    saves = Saves(train, cast(Any, trainer), cast(Any, world), run)
    try:
        return saves.now({}), saver.begun
    except MusterError as error:
        return f"error: {error}", saver.begun


def test_the_end_says_what_is_on_disk_and_does_not_wait_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = "there is no checkpoint, so all steps are lost"
    full, uncopied, silent = (False, "full"), (True, "not copied"), "the disk or the mirror answers nothing"
    for outcomes, expected in (
        ([(True, *full), (True, True, None)], (None, 2)),
        ([(True, *full)] * 3, (f"error: full; {none}", 3)),
        ([(True, *uncopied)] * 3, ("not copied; step 3 is complete in the run directory", 3)),
        ([(True, *uncopied)] + [(True, *full)] * 2, ("full; step 3 is complete in the run directory", 3)),
        ([(False, False, None)], (f"error: {silent}; {none}", 1)),
        ([(False, True, None)], (f"{silent}; step 3 is complete in the run directory", 1)),
    ):
        assert save_at_end(outcomes, tmp_path, monkeypatch) == expected
