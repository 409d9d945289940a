"""Timeline: the begin and end of each rank's instructions, as the simulator predicts them or as ranks measured them."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from muster.config.migrations import INSTRUCTIONS, LANES
from muster.schedule.action import Action, Kind, Lane, parse_action
from muster.schedule.schedule import Schedule
from muster.schedule.timing import Timing

VERSION = 2
"""Version of timelines as plain data: 2 since instructions have the names of torch.distributed.pipelining."""


class Event(NamedTuple):
    """Run of one instruction on one rank, in seconds from the start of the step."""

    rank: int
    lane: Lane
    action: Action
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events of one step, or of several without a flush; `rank` is a pipeline rank if the timeline is predicted, a
    world rank if it is measured."""

    source: Literal["predicted", "measured"]
    num_ranks: int
    events: tuple[Event, ...]
    pairs: frozenset[Action] = frozenset()
    """Forwards that run as one with the backward after them (`Program.pairs`)."""

    @property
    def makespan_s(self) -> float:
        """Time from the first start to the last end on any rank."""
        if not self.events:
            return 0.0
        return max(event.end_s for event in self.events) - min(event.start_s for event in self.events)

    @property
    def num_steps(self) -> int:
        """Optimizer steps: several in the timeline of an asynchronous Program."""
        return len({event.action.version for event in self.events if event.action.kind == Kind.STEP}) or 1


def schedule_timeline(schedule: Schedule, timing: Timing) -> Timeline:
    """Return the timeline of a schedule's passes at the times of `timing`."""
    events = (
        Event(rank, "compute", *row)
        for rank, order in enumerate(schedule.ranks)
        for row in zip(order, timing.begin_s[rank], timing.end_s[rank], strict=True)
    )
    return Timeline("predicted", len(schedule.ranks), tuple(events))


def timeline_to_json(timeline: Timeline) -> dict[str, Any]:
    """Return plain data, with events as [rank, lane, action, start_s, end_s], and the forwards of pairs, if any."""
    events = [[e.rank, e.lane, str(e.action), round(e.start_s, 9), round(e.end_s, 9)] for e in timeline.events]
    data = {"version": VERSION, "source": timeline.source, "num_ranks": timeline.num_ranks, "events": events}
    return data | ({"pairs": sorted(map(str, timeline.pairs))} if timeline.pairs else {})


def timeline_from_json(data: dict[str, Any]) -> Timeline:
    """Return the timeline of `timeline_to_json`'s data, or of its version 1, with former names of kinds and lanes.

    Raises ValueError for a later version.
    """
    version = data.get("version", 1)
    if version > VERSION:
        raise ValueError(f"the timeline has version {version}, of a newer Muster; this one reads up to {VERSION}")
    kinds, lanes = (INSTRUCTIONS, LANES) if version == 1 else ({}, {})
    events = (
        Event(rank, cast(Lane, lanes.get(lane, lane)), parse_action(action, kinds), start_s, end_s)
        for rank, lane, action, start_s, end_s in data["events"]
    )
    pairs = frozenset(map(parse_action, data.get("pairs", ())))
    return Timeline(data["source"], data["num_ranks"], tuple(events), pairs)
