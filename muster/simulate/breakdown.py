"""Breakdown of a step's time, by the same rules for predicted and measured timelines."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from muster.schedule.action import (
    COPIES,
    COPY_LANES,
    HOST_LANE_UPDATES,
    KINDS,
    PASSES,
    RECEIVES,
    Action,
    Kind,
)
from muster.schedule.offload import PASSES_FOR_COPY
from muster.schedule.paths import Paths, other_end
from muster.simulate.spans import BUBBLE, P2P, RankSpans, time_by_part
from muster.simulate.timeline import Event, Timeline

TimeSpan = tuple[float, float]
"""(begin, end) in seconds."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Means over the ranks, in seconds. The parts from `forward_s` to `bubble_s` sum to `step_s`.

    Every moment of a rank counts once. While it computes, the moment belongs to that instruction. While it is idle, the
    moment belongs to the first of these that applies: the collective that it takes part in (from the arrival of the
    last rank), the transfer that its next pass waits for (from the begin of the send), the host copy that it waits for,
    and otherwise the bubble: the rank waits for compute of other ranks. Communication that overlaps with compute
    counts nothing.
    """

    step_s: float
    """Time from the first start to the last end on any rank."""
    forward_s: float
    backward_s: float
    send_s: float
    """Time of p2p transfers and of host copies."""
    gather_s: float
    """Time of parameter gathers, gradient reductions, all-reduces of tied embeddings and replicas, and waits for other
    islands."""
    optimizer_s: float
    """Time of the gradient norm and the optimizer step."""
    bubble_s: float

    @property
    def bubble_fraction(self) -> float:
        """Share of the bubble in the step."""
        return self.bubble_s / self.step_s if self.step_s else 0.0


_KINDS_BY_PART = {
    "forward": (Kind.F, Kind.EMB_F, Kind.S),
    "backward": (Kind.B, Kind.I, Kind.W, Kind.T, Kind.EMB_W),
    "send": (P2P, Kind.EMB_REDUCE, Kind.HIDDEN_BCAST, Kind.LOGIT_STATS, Kind.EMB_GRAD_BCAST, *COPIES),
    "gather": (
        *(Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.ALL_REDUCE_TP, Kind.ALL_REDUCE_REPLICAS, Kind.ALL_REDUCE_TIED),
        *(Kind.UNSHARD_BUCKET, Kind.RESHARD, Kind.OUTER_WAIT, Kind.MOVE_EXPERTS),
    ),
    "optimizer": (
        *(Kind.GRAD_NORM, Kind.GRAD_NORM_ASYNC, Kind.GRAD_NORM_BESIDE),
        *(Kind.CLIP, Kind.UPDATE, Kind.DEVICE_UPDATE, *HOST_LANE_UPDATES, Kind.STEP_BUCKET, Kind.STEP, Kind.OUTER_STEP),
    ),
    "bubble": (BUBBLE,),
}
"""Part of a step → kinds of instructions that belong to it."""

_COPY_READERS = {
    Kind.OFFLOAD: ((Kind.F,), PASSES_FOR_COPY),
    Kind.RELOAD: ((Kind.B, Kind.I), -1),
    Kind.OFFLOAD_ACT: ((Kind.F,), 0),
    Kind.RELOAD_ACT: ((Kind.B, Kind.I), 0),
    Kind.WRITE_ACT: ((Kind.F,), 0),
    Kind.WRITE_ACT_LATE: ((Kind.F,), 1),
    Kind.READ_ACT: ((Kind.B, Kind.I), 0),
    Kind.LOAD_F: ((Kind.F,), 0),
    Kind.READ_F: ((Kind.F,), 0),
    Kind.LOAD_B: ((Kind.B, Kind.I), 0),
    Kind.READ_B: ((Kind.B, Kind.I), 0),
    Kind.OFFLOAD_GRAD: ((Kind.UPDATE, Kind.STEP), -1),
    Kind.RELOAD_PARAM: ((Kind.STEP,), -1),
    Kind.READ_STATE: ((Kind.UPDATE, Kind.STEP), -1),
    Kind.RELOAD_STATE: ((Kind.STEP,), -1),
    Kind.OFFLOAD_STATE: ((Kind.STEP,), -1),
    **dict.fromkeys(HOST_LANE_UPDATES, ((Kind.STEP,), -1)),
}
"""Kind of a host copy → kinds of an instruction of the same unit, and the place relative to it of the last one that
needn't wait for the copy."""

_READERS = {Kind.RECV_F: (Kind.F,), Kind.RECV_B: (Kind.B, Kind.I)}


def breakdown(timeline: Timeline) -> Breakdown:
    """Return the breakdown of a step of a timeline, as means over its ranks and its steps."""
    if not timeline.events:
        return Breakdown(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    first_s = min(event.start_s for event in timeline.events)
    last_s = max(event.end_s for event in timeline.events)
    by_kind_s = time_by_part(spans_of(timeline), first_s, last_s)
    steps = timeline.num_steps
    parts_s = (sum(by_kind_s.get(kind, 0.0) for kind in kinds) / steps for kinds in _KINDS_BY_PART.values())
    return Breakdown((last_s - first_s) / steps, *parts_s)


def spans_of(timeline: Timeline) -> Iterator[RankSpans]:
    """Yield the spans of each rank of a measured or predicted timeline."""
    compute: list[list[Event]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        if event.lane == "compute":
            compute[event.rank].append(event)
    for events in compute:
        events.sort(key=lambda event: event.start_s)
    collectives = _collective_spans(timeline.events)
    transfers = _transfer_spans(timeline, compute)
    copies = _copy_spans(timeline, compute)
    exchanges: defaultdict[int, list[TimeSpan]] = defaultdict(list)
    for event in timeline.events:
        if event.action.kind == Kind.OUTER_WAIT:
            exchanges[event.rank].append((event.start_s, event.end_s))
    for rank, events in enumerate(compute):
        compute_s: defaultdict[str, float] = defaultdict(float)
        for event in events:
            compute_s[event.action.kind] += event.duration_s
        begin_s, end_s = (np.array([event[edge] for event in events]) for edge in (3, 4))
        waits = [*collectives[rank].items(), (P2P, transfers[rank]), *copies[rank].items()]
        if rank in exchanges:
            waits.append((Kind.OUTER_WAIT, exchanges[rank]))
        columns = [(kind, np.array(spans, float).reshape(-1, 2)) for kind, spans in waits]
        yield RankSpans(compute_s, begin_s, end_s, [(kind, pairs[:, 0], pairs[:, 1]) for kind, pairs in columns])


def _collective_spans(events: Iterable[Event]) -> defaultdict[int, dict[str, list[TimeSpan]]]:
    """Return rank → kind → spans in which a collective ran with all its ranks present.

    Ranks of one collective record the same action, with two exceptions. Collectives of the vocabulary-parallel layers
    name a stage of the rank; the stage is ignored. ALL_REDUCE_TIED names its own stage; the n-th of each rank belong
    together, which is that of the n-th replica.
    """
    together: defaultdict[tuple[Action, int], list[Event]] = defaultdict(list)
    num_tied: Counter[int] = Counter()
    for event in events:
        if event.lane == "collective":
            is_tied = event.action.kind == Kind.ALL_REDUCE_TIED
            action = event.action
            if is_tied or KINDS[action.kind].overlapped:
                action = action._replace(stage=-1)
            together[action, num_tied[event.rank] if is_tied else 0].append(event)
            num_tied[event.rank] += is_tied
    spans: defaultdict[int, dict[str, list[TimeSpan]]] = defaultdict(dict)
    for (action, _), group in together.items():
        last_arrival_s = max(event.start_s for event in group)
        for event in group:
            spans[event.rank].setdefault(action.kind, []).append((last_arrival_s, event.end_s))
    return spans


def _copy_spans(timeline: Timeline, compute: Sequence[Sequence[Event]]) -> list[dict[str, list[TimeSpan]]]:
    """Return for each rank kind → spans in which a host copy ran while the rank was idle before the pass that waits for
    it.

    On a CPU the rank itself copies: a measured timeline shows the copy between its passes, and all of it counts.
    """
    spans: list[dict[str, list[TimeSpan]]] = [{} for _ in compute]
    copying = [event for event in timeline.events if event.lane in (*COPY_LANES, "host")]
    place = {(event.rank, event.action): n for passes in compute for n, event in enumerate(passes)} if copying else {}
    last_pass_s = [max((one.end_s for one in own if one.action.kind in PASSES), default=0.0) for own in compute]
    for event in copying:
        since_s = event.start_s
        # A write delays the next read, which waits for it in their lane: all of it counts where the rank is idle.
        if timeline.source == "predicted" and event.action.kind != Kind.WRITE_STATE:
            readers, later = _COPY_READERS[event.action.kind]
            actions = (Action(kind) if kind == Kind.STEP else event.action._replace(kind=kind) for kind in readers)
            reader = next(action for action in actions if (event.rank, action) in place)
            # The step waits for what lies beside the passes, and another part's update, before it, for the same lanes.
            before_s = compute[event.rank][place[event.rank, reader] + later].end_s
            since_s = max(since_s, last_pass_s[event.rank] if reader.kind == Kind.STEP else before_s)
        spans[event.rank].setdefault(event.action.kind, []).append((since_s, event.end_s))
    return spans


def _transfer_spans(timeline: Timeline, compute: Sequence[Sequence[Event]]) -> defaultdict[int, list[TimeSpan]]:
    """Return rank → spans in which a transfer to it ran while it was idle before the pass that reads the data, or
    before the first of the pair of passes that does.

    On a measured timeline all ranks of a stage record the same send; the n-th of them sends to the n-th rank of the
    receiving stage. `compute`: each rank's passes in order.
    """
    idle_since_s = {
        (event.rank, event.action._replace(version=0)): passes[begin - 1].end_s
        for passes in compute
        for begin, event in _with_begins(passes, timeline.pairs)
        if begin
    }
    paths = _paths_of_events(compute)
    ends: defaultdict[Action, list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.lane == "p2p":
            ends[event.action].append(event)
    spans: defaultdict[int, list[TimeSpan]] = defaultdict(list)
    for action, receives in ends.items():
        if action.kind in RECEIVES:
            sends = sorted(ends.get(other_end(action, paths), ()))
            for send, receive in zip(sends, sorted(receives), strict=False):
                readers = [(receive.rank, Action(kind, *action[1:])) for kind in _READERS[action.kind]]
                since_s = [idle_since_s[reader] for reader in readers if reader in idle_since_s]
                spans[receive.rank].append((max([send.start_s, *since_s]), receive.end_s))
    return spans


def _with_begins(passes: Sequence[Event], pairs: Collection[Action]) -> Iterator[tuple[int, Event]]:
    """Yield each pass of a rank with its place, or with that of the forward that it makes a pair with."""
    for number, event in enumerate(passes):
        is_second = number > 0 and passes[number - 1].action in pairs
        yield number - is_second, event


def _paths_of_events(compute: Sequence[Sequence[Event]]) -> Paths:
    """Return the paths of micro-batches that skip stages, by the order of their forwards; empty where none does."""
    begins: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for event in chain.from_iterable(compute):
        kind, stage, micro_batch, *_ = event.action
        if kind == Kind.F:
            begins[micro_batch].setdefault(stage, event.start_s)
    last = max((max(stages) for stages in begins.values()), default=0)
    is_whole = sorted(begins) == list(range(len(begins)))
    if not is_whole or any((min(stages), max(stages)) != (0, last) for stages in begins.values()):
        return ()  # of two replicas, through one of which each micro-batch runs
    paths = tuple(tuple(sorted(stages, key=stages.__getitem__)) for _, stages in sorted(begins.items()))
    return () if all(path == (*range(last + 1),) for path in paths) else paths
