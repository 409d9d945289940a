"""Schedules from a building block: one micro-batch's passes on a grid of unit slots, repeated every period.

Source: Qi et al. 2024 (arXiv:2405.15362, §3 and §4.1), for two stages per rank placed as a V. Every pass takes one
slot, and a period has six: F, I and W of both stages. V-Min's block on two ranks, with the near stage in capitals:

    slot    0 1 2 3 4 5 6 7
    rank 0  F . . f i . . I
    rank 1  . F f . . i I .

Shifted by six slots for each micro-batch, no two passes of a rank meet, and W take the free slots. A rank's peak memory
is about the lifespan of its two activations (F to W) divided by the period: blocks that hold them for a shorter time
need less memory, at the price of a bubble where times are unequal. At both ends, while the pipeline fills and drains,
slots of missing micro-batches are free; there passes move ahead as long as the block's own peak is not exceeded.
"""

from collections.abc import Sequence
from functools import lru_cache

PERIOD = 6
"""Slots per period: F, I and W of both stages of a rank."""

BlockRow = tuple[int, int, int, int]
"""Block of one rank: slots of F on the near stage, F and I on the far one, and I on the near one, for micro-batch 0."""

F_NEAR, F_FAR, I_FAR, I_NEAR, W_FAR, W_NEAR = range(PERIOD)
_CHANGE = (1, 1, 0, 0, -1, -1)
"""Change of the number of saved activations by each kind of pass."""
_MARGIN = 8
"""Periods beyond one block for a run to have a middle that only repeats."""


def repeat_block(rows: Sequence[BlockRow], count: int) -> list[list[list[int]]]:
    """Return one or two orders of the passes: of each rank, as lists of the kinds above, each for its next micro-batch;
    `count` in all.

    While the pipeline fills and drains, passes move ahead into free slots, as long as no rank then exceeds the block's
    own peak; in between the block repeats as it is. W take the slots that are left. So few micro-batches that nothing
    is in between have a second order, for which two periods are held: which of them is shorter depends on the times.
    """
    fewer = max(row[I_NEAR] for row in rows) // PERIOD + _MARGIN
    if count > fewer:
        orders = _extend_middle(*_pack_block(tuple(rows), fewer)[0], count - fewer)
        if orders:
            return [orders]
    return [orders for orders, _ in _pack_block(tuple(rows), count)]


def _extend_middle(orders: list[list[int]], slots: list[list[int]], more: int) -> list[list[int]] | None:
    """Return the orders with one period of the middle repeated `more` times; None if the middle is not periodic."""
    last = max(slot for slot, kind in zip(slots[0], orders[0], strict=True) if kind == F_NEAR)
    begin = last - 2 * PERIOD
    found = []
    for order, at in zip(orders, slots, strict=True):
        places = [
            next((i for i, slot in enumerate(at) if slot >= begin + step), len(at)) for step in (-PERIOD, 0, PERIOD)
        ]
        before, period = (order[one:other] for one, other in zip(places, places[1:], strict=False))
        if before != period or sorted(period) != list(range(PERIOD)):
            return None
        found.append([*order[: places[2]], *period * more, *order[places[2] :]])
    return found


@lru_cache(maxsize=16)
def _pack_block(rows: tuple[BlockRow, ...], count: int) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Return the passes of each rank and their slots, once or twice as `repeat_block` says."""
    lines = [_rank_line(row, count) for row in rows]
    limit = max(_peak_activations(line) for line in lines)
    full = rows[0][I_NEAR]
    empty = PERIOD * (count - 1)
    """Slots: before `full` the pipeline fills, after `empty` it drains."""
    found = []
    for drained_from in dict.fromkeys((empty, max(empty, full + 2 * PERIOD))):
        packed = _SlotGrid(lines, full, drained_from, limit).run()
        assert packed, "a block's own order can be followed"
        orders, slots = packed
        # Run again with W wherever a slot is free: F and I of the middle keep their slots.
        again = [list(zip(at, order, strict=True)) for at, order in zip(slots, orders, strict=True)]
        drains = [{kind: _first_after(row[kind], drained_from) for kind in range(4)} for row in rows]
        found.append(_WeightFillGrid(again, drains, limit).run() or (orders, slots))
    return found


def _first_after(first: int, empty: int) -> int:
    """Return the first micro-batch whose pass (one per period from slot `first`) lies after slot `empty`."""
    return max(0, (empty - first) // PERIOD + 1)


def _rank_line(row: BlockRow, count: int) -> list[tuple[int, int]]:
    """Return (slot, kind) of one rank by slot: blocks a period apart, and W in the slots between, oldest first."""
    taken = {first + PERIOD * index: kind for kind, first in enumerate(row) for index in range(count)}
    line = []
    pending = []
    slot = 0
    while taken or pending:
        kind = taken.pop(slot, -1)
        if kind >= 0:
            line.append((slot, kind))
            if kind in (I_FAR, I_NEAR):
                pending.append(W_FAR if kind == I_FAR else W_NEAR)
        elif pending:
            line.append((slot, pending.pop(0)))
        slot += 1
    return line


def _peak_activations(line: list[tuple[int, int]]) -> int:
    kept = peak = 0
    for _, kind in line:
        kept += _CHANGE[kind]
        peak = max(peak, kept)
    return peak


def _dependencies(rank: int, last: int) -> list[tuple[int, int]]:
    """Return for each kind the rank and kind that make its input; kind −1: the data."""
    near = (rank - 1, F_NEAR) if rank else (rank, -1)
    turn = (rank, F_NEAR) if rank == last else (rank + 1, F_FAR)
    far = (rank - 1, I_FAR) if rank else (rank, F_FAR)
    back = (rank, I_FAR) if rank == last else (rank + 1, I_NEAR)
    return [near, turn, far, back, (rank, I_FAR), (rank, I_NEAR)]


class _SlotGrid:
    """Run with passes of one slot each: a rank does the first pass of its line that can begin, if allowed."""

    def __init__(self, lines: list[list[tuple[int, int]]], full: int, empty: int, limit: int) -> None:
        self.lines, self.full, self.empty, self.limit = lines, full, empty, limit
        self.positions: list[list[list[int]]] = []
        """Per rank and kind, positions of its passes in the line."""
        for line in lines:
            places: list[list[int]] = [[] for _ in range(PERIOD)]
            for place, (_, kind) in enumerate(line):
                places[kind].append(place)
            self.positions.append(places)
        self.count = len(self.positions[0][F_NEAR])
        self.sources = [_dependencies(rank, len(lines) - 1) for rank in range(len(lines))]
        self.done = [[0] * PERIOD for _ in lines]
        self.activations = [0] * len(lines)
        self.first_open = [0] * len(lines)
        self.done_flags = [bytearray(len(line)) for line in lines]

    def run(self) -> tuple[list[list[int]], list[list[int]]] | None:
        """Return passes and slots; None if the ranks wait for each other."""
        orders: list[list[int]] = [[] for _ in self.lines]
        slots: list[list[int]] = [[] for _ in self.lines]
        left = sum(map(len, self.lines))
        slot = 0
        latest = max(line[-1][0] for line in self.lines)
        while left:
            waits = True
            before = [done.copy() for done in self.done]
            for rank in range(len(self.lines)):
                kind = self.choose(rank, slot, before)
                if kind >= 0:
                    self._do(rank, kind)
                    orders[rank].append(kind)
                    slots[rank].append(slot)
                    left -= 1
                    waits = False
            if waits and slot > latest and not self.relax():
                return None
            slot += 1
        return orders, slots

    def relax(self) -> bool:
        """Relax the rules if no rank can go on; return True if anything changed."""
        return False

    def _do(self, rank: int, kind: int) -> None:
        over, first = self.done_flags[rank], self.first_open[rank]
        over[self.positions[rank][kind][self.done[rank][kind]]] = 1
        self.done[rank][kind] += 1
        self.activations[rank] += _CHANGE[kind]
        while first < len(over) and over[first]:
            first += 1
        self.first_open[rank] = first

    def ready(self, rank: int, kind: int, before: list[list[int]]) -> bool:
        """Return True if the input of the next pass of a kind was made before this slot."""
        next_one = self.done[rank][kind]
        if next_one == self.count:
            return False
        other, source = self.sources[rank][kind]
        return source < 0 or before[other][source] > next_one

    def choose(self, rank: int, slot: int, before: list[list[int]]) -> int:
        """Return the kind that the rank does now; −1: none."""
        line, first, best, found = self.lines[rank], self.first_open[rank], len(self.lines[rank]), -1
        for kind, places in enumerate(self.positions[rank]):
            if self.ready(rank, kind, before):
                place = places[self.done[rank][kind]]
                moves = place == first or not self.full < line[place][0] <= self.empty
                if place < best and moves and (_CHANGE[kind] < 1 or self._fits(rank, place)):
                    best, found = place, kind
        return found

    def _fits(self, rank: int, place: int) -> bool:
        """Return True if the rank, after this F and all before it, never exceeds the limit."""
        line = self.lines[rank]
        over = self.done_flags[rank]
        kept = self.activations[rank] + 1
        for earlier in range(self.first_open[rank], place):
            if kept > self.limit:
                break
            if not over[earlier]:
                kept += _CHANGE[line[earlier][1]]
        return kept <= self.limit


class _WeightFillGrid(_SlotGrid):
    """Run with F and I no earlier than in the line, and W in the slots that they leave, in the order of I.

    Exempt are the micro-batches that drain: per rank and kind from `drains[rank][kind]` on.
    """

    def __init__(self, lines: list[list[tuple[int, int]]], drains: list[dict[int, int]], limit: int) -> None:
        super().__init__(lines, 0, 0, limit)
        self.drains = drains

    def relax(self) -> bool:
        bound = any(any(first.values()) for first in self.drains)
        self.drains = [dict.fromkeys(range(4), 0) for _ in self.drains]
        return bound

    def choose(self, rank: int, slot: int, before: list[list[int]]) -> int:
        line, places, done = self.lines[rank], self.positions[rank], self.done[rank]
        heads = [(places[kind][done[kind]], kind) for kind in range(4) if done[kind] < len(places[kind])]
        first = min(heads, default=(0, 0))[0]
        full = self.activations[rank] >= self.limit
        waiting = [(places[kind][done[kind]], kind) for kind in (W_FAR, W_NEAR) if self.ready(rank, kind, before)]
        next_f = min((place for place, kind in heads if _CHANGE[kind]), default=len(line)) if waiting else len(line)
        best, found = len(line), -1
        for place, kind in heads:
            free = done[kind] >= self.drains[rank][kind]
            blocked = full and (_CHANGE[kind] or (place != first and next_f < place))
            may = free or place == first and line[place][0] <= slot
            if place < best and may and not blocked and self.ready(rank, kind, before):
                best, found = place, kind
        return found if found >= 0 else min(waiting, default=(0, -1))[1]
