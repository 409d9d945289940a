"""Sends and receives between ranks, for all passes at once: by columns, since a large schedule has a million."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from muster.schedule.action import Action, Kind, Lane
from muster.schedule.paths import reader_stages
from muster.schedule.program import Instruction, Wait
from muster.schedule.schedule import Schedule
from muster.schedule.timing import PassTimes, time_passes

PREFETCH = 1
"""Compute instructions between posting a receive and its reader: early enough to hide a transfer behind a pass, late
enough to hold one waiting tensor at a time."""

NOMINAL_S = 1.0
"""Seconds of F, I and W (B: twice that) for deciding which of two transfers is ready first. They only choose between
correct orders."""

_PASSES = {Kind.F: 0, Kind.B: 1, Kind.I: 2, Kind.W: 3}
_TRANSFERS = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)

Column = NDArray[np.int64]


def lanes_with_transfers(
    schedule: Schedule, transfers: "Transfers"
) -> list[tuple[list[Instruction], list[Instruction]]]:
    """Return the compute lane and the p2p lane of each rank; `transfers`: those of the schedule
    (`schedule_transfers`)."""
    longest = max(map(len, schedule.ranks))
    after_compute = _waits("compute", longest)
    after_p2p = _waits("p2p", 4 * longest)
    lanes = [
        _lanes(order, rank, transfers, schedule.num_slices, after_compute, after_p2p)
        for rank, order in enumerate(schedule.ranks)
    ]
    for compute, _ in lanes if schedule.pairs else ():
        _join_waits_of_pairs(compute, schedule.pairs)
    return lanes


def _join_waits_of_pairs(compute: list[Instruction], pairs: Collection[Action]) -> None:
    """Let the forward of each pair wait for the inputs of both passes."""
    for index, item in enumerate(compute):
        if item.action in pairs:
            backward = compute[index + 1]
            compute[index] = item._replace(waits=item.waits + backward.waits)
            compute[index + 1] = backward._replace(waits=())


def _waits(lane: Lane, count: int) -> list[tuple[Wait, ...]]:
    """Return a wait for each entry of a lane, shared by all waiting instructions; index −1 is no wait."""
    return [*((Wait(lane, index),) for index in range(count)), ()]


@dataclass(frozen=True, slots=True)
class Transfers:
    """Transfers between ranks as columns, in the one order common to all ranks."""

    backward: Column
    stage: Column
    """Stage of the sender; that of the receiver is `target_stage`."""
    target_stage: Column
    unit: Column
    """Number of the slice among those of all micro-batches; without slices the micro-batch."""
    source: Column
    target: Column
    producer: Column
    """Index, in the source's order, of the pass that makes the message; `consumer`: in the target's, of its reader."""
    consumer: Column
    made_by: Column
    """Pass after which the source has the message: the producer, or the backward of the producer's pair."""
    posted_after: Column
    """Pass after which the target may post the receive: `PREFETCH` passes ahead of the consumer or of its pair."""

    def waits(self, mine: Column, is_sent: NDArray[np.bool_]) -> Column:
        """Return the pass that each transfer of one rank waits for, or -1; `mine`: indices of these transfers."""
        begins = np.where(is_sent, self.made_by[mine], self.posted_after[mine])
        earliest = np.minimum.accumulate(begins[::-1])[::-1]
        return np.where(is_sent, begins, np.maximum(earliest, -1))


def schedule_transfers(schedule: Schedule, ends_s: Sequence[Sequence[float]] | None = None) -> Transfers:
    """Return the transfers of a schedule.

    All ranks keep their transfers in one global order: that of the time at which each is nominally ready. This order
    agrees with every rank's order of compute, so that nothing can deadlock, even if a backend runs all transfers of a
    rank strictly one after another and a send ends only once its receive is posted (NCCL). A receive waits for an
    earlier compute instruction, so as not to be posted too early; that wait is never later than that of any later entry
    of its lane, so that a receive delays no send.

    `ends_s`: when each pass nominally ends, if more than passes takes time. Raises ProgramError if no rank could follow
    the schedule's order.
    """
    if ends_s is None:
        unit_s = [NOMINAL_S] * schedule.depth
        ends_s = time_passes(schedule, PassTimes(unit_s, unit_s, unit_s)).end_s
    rank = np.repeat(np.arange(len(schedule.ranks)), [len(order) for order in schedule.ranks])
    position = np.concatenate([np.arange(len(order)) for order in schedule.ranks])
    kinds, stages, micro_batches, slices, _ = zip(*chain.from_iterable(schedule.ranks), strict=True)
    is_paired = np.zeros(len(rank), np.int64)
    """1 for the forward of a pair."""
    if schedule.pairs:
        is_paired[[index for index, one in enumerate(chain.from_iterable(schedule.ranks)) if one in schedule.pairs]] = 1
    kind, stage, unit = (np.array(column) for column in ([_PASSES[k] for k in kinds], stages, micro_batches))
    if schedule.num_slices > 1:
        unit = unit * schedule.num_slices + np.array(slices)
    backward = np.minimum(kind, 1)
    level = stage % schedule.depth
    passes_on = np.where(backward, level > 0, level < schedule.depth - 1) & (kind < _PASSES[Kind.W])
    reader_stage = np.where(passes_on, stage + 1 - 2 * backward, stage)
    if schedule.paths:
        reader_stage = reader_stages(schedule.paths, schedule.num_stages)[backward, stage, unit]
        passes_on = (reader_stage != stage) & (kind < _PASSES[Kind.W])
    target = np.array(schedule.placement)[reader_stage]
    place = np.zeros((2, schedule.num_stages, schedule.num_units), np.int64)
    chains = kind < _PASSES[Kind.W]
    place[backward[chains], stage[chains], unit[chains]] = position[chains]
    moved = np.flatnonzero(passes_on & (target != rank))
    ready_s = np.fromiter(chain.from_iterable(ends_s), np.float64)
    ready_s = np.where(is_paired, np.append(ready_s[1:], 0.0), ready_s)
    moved = moved[np.lexsort((unit[moved], stage[moved], kind[moved], ready_s[moved]))]
    back, to, sent = backward[moved], reader_stage[moved], unit[moved]
    ends = position[moved], place[back, to, sent]
    first = np.zeros_like(place)
    first[backward[chains], stage[chains], unit[chains]] = (position - np.append(0, is_paired[:-1]))[chains]
    posted = first[back, to, sent] - 1 - PREFETCH
    if schedule.pairs:  # not within a pair
        offset = np.cumsum([0, *map(len, schedule.ranks)])[target[moved]]
        posted -= is_paired[offset + np.maximum(posted, 0)] * (posted >= 0)
    pairs = (position + is_paired)[moved], posted
    return Transfers(back, stage[moved], to, sent, rank[moved], target[moved], *ends, *pairs)


def _lanes(
    order: Sequence[Action],
    rank: int,
    all_transfers: Transfers,
    num_slices: int,
    after_compute: Sequence[tuple[Wait, ...]],
    after_p2p: Sequence[tuple[Wait, ...]],
) -> tuple[list[Instruction], list[Instruction]]:
    t = all_transfers
    mine = np.flatnonzero((t.source == rank) | (t.target == rank))
    sends = t.source[mine] == rank
    waits = t.waits(mine, sends)
    names = (_TRANSFERS[code] for code in (2 * t.backward[mine] + ~sends).tolist())
    stages = np.where(sends, t.stage[mine], t.target_stage[mine]).tolist()
    places = (column.tolist() for column in np.divmod(t.unit[mine], num_slices))
    actions = map(tuple.__new__, repeat(Action), zip(names, stages, *places, repeat(0), strict=False))
    peers = np.where(sends, t.target[mine], t.source[mine]).tolist()
    p2p = _instructions(actions, peers, [after_compute[index] for index in waits.tolist()])

    reads = np.full(len(order), -1)
    reads[t.consumer[mine[~sends]]] = np.flatnonzero(~sends)
    return _instructions(order, repeat(None), [after_p2p[index] for index in reads.tolist()]), p2p


def _instructions(
    actions: Iterable[Action], peers: Iterable[int | None], waits: Sequence[tuple[Wait, ...]]
) -> list[Instruction]:
    """Return instructions, made by `tuple.__new__` in a third of the time of Instruction(…)."""
    return list(map(tuple.__new__, repeat(Instruction), zip(actions, peers, waits, strict=False)))
