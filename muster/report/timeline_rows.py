"""Timelines prepared for drawing: ranks, lanes, length and bubble."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from muster.schedule.action import LANES, Lane
from muster.simulate.breakdown import breakdown
from muster.simulate.timeline import Event, Timeline
from muster.spec.formatting import format_seconds

MAX_EVENTS = 30_000
"""Most events that are drawn."""
MAX_RANKS = 64
"""Most ranks that are drawn. A timeline with more ranks or events is sampled by rank, so that a report stays small."""


@dataclass(frozen=True, slots=True)
class TimelineRows:
    """Drawn part of a timeline; times count from the first start on any rank."""

    source: str
    num_ranks: int
    ranks: tuple[int, ...]
    """Ranks shown: all, or some at even distances with the first and the last."""
    lanes: tuple[Lane, ...]
    """Lanes on which anything happened, the compute lane first."""
    events: dict[tuple[int, Lane], list[Event]]
    start_s: float
    length_s: float
    bubble: float
    """Fraction of the ranks' time spent waiting for others to compute."""
    num_steps: int

    @property
    def length_text(self) -> str:
        """Length in words; of several steps where none of them ends in a flush."""
        steps = f" for {self.num_steps} steps" if self.num_steps > 1 else ""
        return f"{format_seconds(self.length_s)}{steps}"

    @property
    def row_name(self) -> str:
        """Name of a row: rank of the simulator or of the executor."""
        return "pipeline rank" if self.source == "predicted" else "world rank"


def timeline_rows(timeline: Timeline) -> TimelineRows:
    """Return the timeline in rows, without instructions that took no time."""
    events = [event for event in timeline.events if event.end_s > event.start_s]
    most = min(MAX_RANKS, timeline.num_ranks * MAX_EVENTS // max(1, len(events)))
    ranks = evenly_spaced(timeline.num_ranks, max(2, most))
    shown = set(ranks)
    by_lane = defaultdict(list)
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
        timeline.num_steps,
    )


def median_pass_s(all_rows: Sequence[TimelineRows]) -> float:
    """Return the median time of passes with a micro-batch number over several timelines; 0 without any."""
    times = [
        event.duration_s
        for rows in all_rows
        for events in rows.events.values()
        for event in events
        if event.lane == "compute" and event.action.micro_batch >= 0
    ]
    return median(times) if times else 0.0


def evenly_spaced(count: int, most: int) -> tuple[int, ...]:
    """Return all of `count` ranks, or `most` of them at even distances with the first and the last."""
    if count <= most:
        return tuple(range(count))
    return tuple(sorted({round(i * (count - 1) / (most - 1)) for i in range(most)}))
