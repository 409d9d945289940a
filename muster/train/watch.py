"""The launcher's eye on its ranks: where each of them is, for how long, and whether the job hangs."""

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muster.parallel.whereabouts import BRISK, Page, Place
from muster.schedule.action import Action
from muster.train.connections import lost_connection
from muster.train.diagnosis import Sighting

LOOK_S = 0.25
"""Between looks."""
PAUSE_S = 5.0
"""Between looks when it is longer, the launcher itself was kept from running, and so may its ranks have been."""


class Watched:
    """One rank's process and page."""

    def __init__(self, rank: int, page: Page | None = None, process: int = 0) -> None:
        self.rank, self.page, self.process = rank, page or Page(), process
        self._place: Place | None = None
        self._since = self._looked = time.monotonic()
        self._asked = False

    def look(self, hang_s: float | None) -> Sighting:
        """Where it is now. One that stands still for half of `hang_s` is asked for its stacks, once."""
        place, now = self.page.read(), time.monotonic()
        self._since += max(0.0, now - self._looked - PAUSE_S)
        self._looked = now
        if place != self._place:
            self._place, self._since, self._asked = place, now, False
        still_s, state = now - self._since, state_of(self.process)
        if place is not None and hang_s is not None and still_s > hang_s / 2 and not self._asked and state not in "TtX":
            self._ask()
        stacks = self.page.stacks() if self._asked else ""
        lost = lost_connection(self.process) if self._asked else ""
        return Sighting(self.rank, socket.gethostname(), self.process, state, still_s, place, stacks, lost)

    def _ask(self) -> None:
        self._asked = True
        with contextlib.suppress(ProcessLookupError):
            self.page.ask(self.process)


def sighting_to_json(seen: Sighting) -> dict[str, Any]:
    """Plain data; `sighting_of_json` reads it."""
    return asdict(seen)


def sighting_of_json(row: dict[str, Any]) -> Sighting:
    """What another launcher saw of one of its ranks."""
    place = row["place"] and Place(**{**row["place"], "action": Action(*row["place"]["action"])})
    return Sighting(**{**row, "place": place})


def state_of(process: int) -> str:
    """The letter of a process's state; X where there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def hangs(sightings: Sequence[Sighting], hang_s: float) -> bool:
    """Whether no rank has begun anything for so long, and none does what may take that long.

    A process that is stopped does nothing, whatever it was about.
    """
    return bool(sightings) and all(
        seen.still_s > hang_s and seen.place is not None and (seen.place.phase in BRISK or seen.state in "Tt")
        for seen in sightings
    )
