"""Message liveness: the buffers of sends and receives that a rank holds while its compute lane runs.

A receive is posted once the entries of its lane before it have begun, about a pass ahead of its reader
(`transfers.PREFETCH`). The buffer of a received activation becomes the reader's saved input; that of a gradient is
free after its reader. A sent tensor exists from the pass that makes it until a message that came back proves that it
has been read (`send_completion`), or until the end of the step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from muster.schedule.action import SENDS, Action, Kind
from muster.schedule.program import Program
from muster.schedule.schedule import Schedule
from muster.schedule.transfers import Transfers, schedule_transfers

Column = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _Messages:
    """Messages of one rank in the order of its p2p lane, as columns."""

    is_sent: NDArray[np.bool_]
    is_gradient: NDArray[np.bool_]
    stage: Column
    """Stage of this rank that makes or reads the message."""
    peer: Column
    wait: Column
    """Index of the compute instruction that the lane waits for before it begins the message, or -1."""
    own: Column
    """Index in this rank's compute lane of the pass that makes or reads it."""
    others: Column
    """The same on the peer."""


def schedule_message_counts(schedule: Schedule) -> list[dict[int, Column]]:
    """Return, for each rank, stage → number of its message buffers before and during each pass, and after the last."""
    transfers = schedule_transfers(schedule)
    lengths = [len(order) for order in schedule.ranks]
    return [_counts(_of_schedule(transfers, rank), length) for rank, length in enumerate(lengths)]


def program_message_counts(program: Program) -> list[dict[int, Column]]:
    """Return the same for each rank of a Program, by its compute instructions."""
    if program.transfers is not None:
        lengths = [len(lanes.get("compute", ())) for lanes in program.ranks]
        return [_counts(_of_schedule(program.transfers, rank), length) for rank, length in enumerate(lengths)]
    ends = _message_ends(program)
    counts = []
    for lanes in program.ranks:
        rows = []
        for action, peer, waits in lanes.get("p2p", ()):
            is_sent, is_gradient, stage = action.kind in SENDS, action.kind in _OF_GRADIENTS, action.stage
            made, read = ends[_message_key(program, action)]
            pair = (made, read) if is_sent else (read, made)
            rows.append((is_sent, is_gradient, stage, peer, max((w.index for w in waits), default=-1), *pair))
        columns = np.array(rows, np.intp).reshape(-1, 7).T
        messages = _Messages(columns[0].astype(bool), columns[1].astype(bool), *columns[2:])
        counts.append(_counts(messages, len(lanes.get("compute", ()))))
    return counts


_OF_GRADIENTS = (Kind.SEND_B, Kind.RECV_B)


def _message_key(program: Program, action: Action) -> tuple[int, ...]:
    """Return what both ends of a message say: is it a gradient, the reader's stage, micro-batch, slice, version."""
    reader = program.other_end(action).stage if action.kind in SENDS else action.stage
    return (action.kind in _OF_GRADIENTS, reader, *action[2:])


def _message_ends(program: Program) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return for each message (`_message_key`) the indices, in their ranks' compute lanes, of the passes that make and
    read it."""
    made: dict[tuple[int, ...], int] = {}
    read: dict[tuple[int, ...], int] = {}
    for lanes in program.ranks:
        p2p = lanes.get("p2p", ())
        readers = {
            wait.index: place
            for place, item in enumerate(lanes.get("compute", ()))
            for wait in item.waits
            if wait.lane == "p2p"
        }
        for index, (action, _, waits) in enumerate(p2p):
            if action.kind in SENDS:
                made[_message_key(program, action)] = waits[-1].index
            else:
                read[_message_key(program, action)] = readers[index]
    return {message: (place, read[message]) for message, place in made.items()}


def _of_schedule(t: Transfers, rank: int) -> _Messages:
    mine = np.flatnonzero((t.source == rank) | (t.target == rank))
    is_sent = t.source[mine] == rank
    own, others = (np.where(is_sent, *ends) for ends in _ends(t, mine))
    wait = t.waits(mine, is_sent)
    stage = np.where(is_sent, t.stage[mine], t.target_stage[mine])
    peer = np.where(is_sent, t.target[mine], t.source[mine])
    return _Messages(is_sent, t.backward[mine] > 0, stage, peer, wait, own, others)


def _ends(t: Transfers, mine: Column) -> tuple[tuple[Column, Column], tuple[Column, Column]]:
    made, read = t.producer[mine], t.consumer[mine]
    return (made, read), (read, made)


def _counts(messages: _Messages, length: int) -> dict[int, Column]:
    """Return stage → number of buffers before and during each of `length` compute instructions, and after the last.

    Element 2i is the time before instruction i, when the instructions of other lanes begin; 2i + 1 the time during it.
    """
    change: dict[int, Column] = {}
    received = ~messages.is_sent
    posted = np.maximum.accumulate(messages.wait) + 1 if len(messages.wait) else messages.wait
    freed = 2 * messages.own + 1 + messages.is_gradient
    _add(change, length, messages.stage[received], 2 * np.minimum(posted, messages.own)[received], freed[received])
    for peer in np.unique(messages.peer[messages.is_sent]):
        own = np.flatnonzero(messages.is_sent & (messages.peer == peer))
        replies = np.flatnonzero(received & (messages.peer == peer))
        replies = replies[np.argsort(messages.others[replies], kind="stable")]
        proof = np.searchsorted(messages.others[replies], messages.others[own])
        known = np.append(2 * messages.own[replies] + 1, 2 * length + 1)[proof]
        _add(change, length, messages.stage[own], 2 * messages.own[own] + 2, known)
    return {stage: np.cumsum(changes)[:-1] for stage, changes in change.items()}


def _add(change: dict[int, Column], length: int, stages: Column, first: Column, freed: Column) -> None:
    """Add buffers of `stages` that are held from the times `first` until just before the times `freed`."""
    for stage in np.unique(stages).tolist():
        own = stages == stage
        changes = change.setdefault(stage, np.zeros(2 * length + 2, np.intp))
        np.add.at(changes, first[own], 1)
        np.add.at(changes, freed[own], -1)
