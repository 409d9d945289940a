"""A timeline made ready to be drawn: which ranks, which lanes, how long, how much bubble."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from muster.schedule.action import LANES, Lane
from muster.simulate.breakdown import breakdown
from muster.simulate.timeline import Event, Timeline

MAX_EVENTS = 30_000
MAX_RANKS = 64
"""A timeline with more events or ranks is shown for some of its ranks only: a report stays a small file to look at."""


@dataclass(frozen=True, slots=True)
class TimelineRows:
    """The part of a timeline that is drawn, its times counted from the first start of any rank."""

    source: str
    num_ranks: int
    ranks: tuple[int, ...]
    """The ranks shown: all of them, or some at even distances with the first and the last."""
    lanes: tuple[Lane, ...]
    """The lanes on which anything happened, the compute lane first."""
    events: dict[tuple[int, Lane], list[Event]]
    start_s: float
    length_s: float
    bubble: float
    """The part of the ranks' time in which they wait for others to compute."""

    @property
    def row_name(self) -> str:
        """What a row stands for: the simulator's rank or the executor's."""
        return "pipeline rank" if self.source == "predicted" else "world rank"


def timeline_rows(timeline: Timeline) -> TimelineRows:
    """The timeline in rows; instructions that took no time are left out."""
    events = [event for event in timeline.events if event.end_s > event.start_s]
    most = min(MAX_RANKS, timeline.num_ranks * MAX_EVENTS // max(1, len(events)))
    ranks = evenly_spaced(timeline.num_ranks, max(2, most))
    shown, by_lane = set(ranks), defaultdict(list)
    for event in sorted(events, key=lambda event: event.start_s):
        if event.rank in shown:
            by_lane[event.rank, event.lane].append(event)
    return TimelineRows(
        timeline.source,
        timeline.num_ranks,
        ranks,
        tuple(lane for lane in LANES if lane == "compute" or any(event.lane == lane for event in events)),
        dict(by_lane),
        min((event.start_s for event in timeline.events), default=0.0),
        timeline.makespan_s,
        breakdown(timeline).bubble_fraction,
    )


def median_pass_s(all_rows: Sequence[TimelineRows]) -> float:
    """The median time of a pass with a micro-batch number, over several timelines; 0 without any."""
    times = [
        event.duration_s
        for rows in all_rows
        for events in rows.events.values()
        for event in events
        if event.lane == "compute" and event.action.micro_batch >= 0
    ]
    return median(times) if times else 0.0


def evenly_spaced(count: int, most: int) -> tuple[int, ...]:
    """All of `count` ranks, or `most` of them at even distances, the first and the last among them."""
    if count <= most:
        return tuple(range(count))
    return tuple(sorted({round(i * (count - 1) / (most - 1)) for i in range(most)}))
