"""Where the time of a round goes; the same sums for predicted and measured timelines."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from muster.schedule.action import KINDS, RECEIVES, Action, Kind, matching_transfer
from muster.schedule.offload import PASSES_FOR_COPY
from muster.simulate.spans import BUBBLE, P2P, RankSpans, time_by_part
from muster.simulate.timeline import Event, Timeline

TimeSpan = tuple[float, float]
"""From when to when, in seconds."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Means over the ranks, in seconds. The parts from `forward_s` to `bubble_s` add up to `step_s`.

    While a rank computes, that is what its time goes to. While it doesn't, the time goes to the collective that it
    takes part in (counted from when the last of its ranks has come), else to the transfer that its next pass waits for
    (counted from when the sender has begun), else to the copy to or from the host's memory that it waits for, else to
    the bubble: it waits for others to compute.
    What runs beside the compute costs nothing.
    """

    step_s: float
    """From the first start to the last end on any rank."""
    forward_s: float
    backward_s: float
    send_s: float
    """Also to the host's memory and back."""
    gather_s: float
    """Parameters gathered, gradients reduced and added up between stages."""
    optimizer_s: float
    """The gradient norm and the optimizer step."""
    bubble_s: float

    @property
    def bubble_fraction(self) -> float:
        """The bubble's part of the step."""
        return self.bubble_s / self.step_s if self.step_s else 0.0


_KINDS_BY_PART = {
    "forward": (Kind.F, Kind.EMB_F, Kind.S),
    "backward": (Kind.B, Kind.I, Kind.W, Kind.T, Kind.EMB_W),
    "send": (P2P, Kind.EMB_REDUCE, Kind.HIDDEN_BCAST, Kind.LOGIT_STATS, Kind.EMB_GRAD_BCAST, Kind.OFFLOAD, Kind.RELOAD),
    "gather": (Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.ALL_REDUCE_TP, Kind.ALL_REDUCE_REPLICAS, Kind.ALL_REDUCE_TIED),
    "optimizer": (Kind.GRAD_NORM, Kind.GRAD_NORM_ASYNC, Kind.STEP),
    "bubble": (BUBBLE,),
}
"""What makes up each part of a step."""

_READERS = {Kind.RECV_F: (Kind.F,), Kind.RECV_B: (Kind.B, Kind.I)}


def breakdown(timeline: Timeline) -> Breakdown:
    """Where the timeline's time goes, as a mean over its ranks."""
    if not timeline.events:
        return Breakdown(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    first_s = min(event.start_s for event in timeline.events)
    last_s = max(event.end_s for event in timeline.events)
    found_s = time_by_part(spans_of(timeline), first_s, last_s)
    return Breakdown(
        last_s - first_s, *(sum(found_s.get(one, 0.0) for one in kinds) for kinds in _KINDS_BY_PART.values())
    )


def spans_of(timeline: Timeline) -> Iterator[RankSpans]:
    """The ranks of a timeline, measured or predicted, as spans."""
    compute: list[list[Event]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        if event.lane == "compute":
            compute[event.rank].append(event)
    for events in compute:
        events.sort(key=lambda event: event.start_s)
    collectives, flights = _collective_spans(timeline.events), _transfer_spans(timeline.events, compute)
    copies = _copy_spans(timeline, compute)
    for rank, events in enumerate(compute):
        compute_s: defaultdict[str, float] = defaultdict(float)
        for event in events:
            compute_s[event.action.kind] += event.duration_s
        begin_s, end_s = (np.array([event[edge] for event in events]) for edge in (3, 4))
        waits = [*collectives[rank].items(), (P2P, flights[rank]), *copies[rank].items()]
        columns = [(kind, np.array(spans, float).reshape(-1, 2)) for kind, spans in waits]
        yield RankSpans(compute_s, begin_s, end_s, [(kind, pairs[:, 0], pairs[:, 1]) for kind, pairs in columns])


def _collective_spans(events: Iterable[Event]) -> defaultdict[int, dict[str, list[TimeSpan]]]:
    """Rank → kind → when a collective was under way with all its ranks present.

    Ranks that take part in the same collective record the same action, but for those of words, which name a stage of
    the rank, and TIE, which names its own stage: there the n-th of each rank, which is that of the n-th replica.
    """
    together: defaultdict[tuple[Action, int], list[Event]] = defaultdict(list)
    ties: Counter[int] = Counter()
    for event in events:
        if event.lane == "collective":
            tie = event.action.kind == Kind.ALL_REDUCE_TIED
            name = event.action._replace(stage=-1) if tie or KINDS[event.action.kind].overlapped else event.action
            together[name, ties[event.rank] if tie else 0].append(event)
            ties[event.rank] += tie
    spans: defaultdict[int, dict[str, list[TimeSpan]]] = defaultdict(dict)
    for (action, _), group in together.items():
        all_there_s = max(event.start_s for event in group)
        for event in group:
            spans[event.rank].setdefault(action.kind, []).append((all_there_s, event.end_s))
    return spans


def _copy_spans(timeline: Timeline, compute: Sequence[Sequence[Event]]) -> list[dict[str, list[TimeSpan]]]:
    """By rank, kind → when a copy was under way while the rank stood still before the pass that waits for it; where the
    rank itself copies, as it does on a CPU, a measured timeline shows it between its passes."""
    spans: list[dict[str, list[TimeSpan]]] = [{} for _ in compute]
    copying = [event for event in timeline.events if event.lane == "host_copy"]
    place = {(event.rank, event.action): n for passes in compute for n, event in enumerate(passes)} if copying else {}
    for event in copying:
        since_s = event.start_s
        if timeline.source == "predicted":
            kinds, later = ((Kind.F,), PASSES_FOR_COPY) if event.action.kind == Kind.OFFLOAD else ((Kind.B, Kind.I), -1)
            named = next(
                n for kind in kinds if (n := place.get((event.rank, event.action._replace(kind=kind)))) is not None
            )
            since_s = max(since_s, compute[event.rank][named + later].end_s)
        spans[event.rank].setdefault(event.action.kind, []).append((since_s, event.end_s))
    return spans


def _transfer_spans(events: Iterable[Event], compute: Sequence[Sequence[Event]]) -> defaultdict[int, list[TimeSpan]]:
    """Rank → when a transfer was on its way to it while it stood still before the pass that takes it in.

    On a measured timeline each of a stage's ranks sends the same action, to the receiver of the same place among its
    stage's ranks. `compute` gives each rank's passes in order.
    """
    idle_since_s = {
        (event.rank, event.action): before.end_s for passes in compute for before, event in pairwise(passes)
    }
    ends: defaultdict[Action, list[Event]] = defaultdict(list)
    for event in events:
        if event.lane == "p2p":
            ends[event.action].append(event)
    spans: defaultdict[int, list[TimeSpan]] = defaultdict(list)
    for action, receives in ends.items():
        if action.kind in RECEIVES:
            sends = sorted(ends.get(matching_transfer(action), ()))
            for send, receive in zip(sends, sorted(receives), strict=False):
                readers = [(receive.rank, Action(kind, *action[1:])) for kind in _READERS[action.kind]]
                since_s = [idle_since_s[reader] for reader in readers if reader in idle_since_s]
                spans[receive.rank].append((max([send.start_s, *since_s]), receive.end_s))
    return spans
