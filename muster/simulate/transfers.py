"""P2p transfers of a Program, numbered, as arrays."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from muster.cost.time.op_times import OpTimes
from muster.schedule.action import SENDS, Kind
from muster.schedule.paths import reader_stages
from muster.schedule.program import Instruction, Program

IndexColumn = NDArray[np.int64]

NO_TRANSFER, SEVERAL_WAITS = -1, -2


class Transfers:
    """Transfers of a Program: their stages, the entries of p2p lanes that belong to them, and the passes that wait.

    The n-th send from rank a to rank b and the n-th receive from a on b are the two ends of one transfer.
    """

    def __init__(self, program: Program) -> None:
        lanes = [lanes.get("p2p", ()) for lanes in program.ranks]
        lengths = [len(lane) for lane in lanes]
        rank, ends = np.repeat(np.arange(len(lanes)), lengths), np.cumsum(lengths)[:-1]
        actions, peers, waits = zip(*chain.from_iterable(lanes), strict=True) if sum(lengths) else ((), (), ())
        peer, sends = np.array(peers, np.int64), np.array([action[0] in SENDS for action in actions], bool)
        numbers, self.count = _pair_transfers(
            np.where(sends, rank * len(lanes) + peer, peer * len(lanes) + rank), sends
        )
        after = np.array([own[0][1] if len(own) == 1 else max((i for _, i in own), default=-1) for own in waits])
        backward, stage = np.array([action[0] == Kind.SEND_B for action in actions]), np.array([a[1] for a in actions])
        self.stages: NDArray[np.int64] = np.zeros((self.count, 3), np.int64)
        """The sender's and the receiver's stage of each transfer, and its slice."""
        if sends.any():
            self.stages[numbers[sends], 0] = stage[sends]
            readers = stage + 1 - 2 * backward
            if program.paths:
                units = np.array([action[2] for action in actions])
                readers = reader_stages(program.paths, program.num_stages)[backward.astype(np.int64), stage, units]
            self.stages[numbers[sends], 1] = readers[sends]
            if program.num_slices > 1:
                self.stages[numbers[sends], 2] = np.array([action[3] for action in actions])[sends]
        self.numbers: list[IndexColumn] = np.split(numbers, ends)
        """Per rank, the number of each entry of its p2p lane."""
        self.sends: list[list[int]] = []
        """Per rank, the numbers of its sends in order."""
        self.send_after: list[list[int]] = []
        """Per rank, the compute instruction at whose end each send begins; −1: at the start."""
        for mine, own, begins in zip(self.numbers, np.split(sends, ends), np.split(after, ends), strict=True):
            self.sends.append(mine[own].tolist())
            self.send_after.append(np.maximum.accumulate(begins)[own].tolist())

    def durations_s(self, times: OpTimes) -> tuple[list[float], list[float]]:
        """Return for each transfer its duration, and the time for which it occupies its sender's outgoing link."""
        kinds, inverse = np.unique(self.stages, axis=0, return_inverse=True)
        durations = np.array([times.p2p_time(*kind) for kind in kinds.tolist()]).reshape(-1, 2)[inverse.reshape(-1)]
        return durations[:, 0].tolist(), durations[:, 1].tolist()

    def awaited(self, rank: int, compute: Sequence[Instruction]) -> list[int]:
        """Return for each compute instruction the transfer that it waits for, NO_TRANSFER, or SEVERAL_WAITS if it waits
        for several or for other instructions."""
        numbers = self.numbers[rank].tolist()
        awaited = []
        for _, _, waits in compute:
            if not waits:
                awaited.append(NO_TRANSFER)
            elif len(waits) == 1 and waits[0][0] == "p2p":
                awaited.append(numbers[waits[0][1]])
            else:
                awaited.append(SEVERAL_WAITS)
        return awaited


def _pair_transfers(pair: IndexColumn, sends: NDArray[np.bool_]) -> tuple[IndexColumn, int]:
    """Return the transfer numbers of all p2p entries, equal for both ends of a transfer, and the number of transfers.

    `pair`: source · ranks + target of each entry; `sends`: True for sends. Transfers of one pair are consecutive.
    """
    size = int(pair.max(initial=-1)) + 1
    counts = np.maximum(np.bincount(pair[sends], minlength=size), np.bincount(pair[~sends], minlength=size))
    first = np.cumsum(counts) - counts
    numbers = np.empty_like(pair)
    for side in (sends, ~sends):
        at = np.flatnonzero(side)
        order = at[np.argsort(pair[at], kind="stable")]
        ordered = pair[order]
        numbers[order] = first[ordered] + np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return numbers, int(counts.sum())
