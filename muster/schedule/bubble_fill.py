"""Bubble filling: moves passes of an order ahead into slots in which their rank would idle.

Idea: follow the order in an event-driven run with the given times; whenever a rank becomes free, it takes the first
pass of its order that is ready, instead of waiting for the very next one. With the order `F0 B0 F1` on a rank whose B0
waits for another rank, F1 runs first. A memory limit keeps such forwards from piling up: one may overtake only if the
rank, going on in its order afterwards, would never save more activations than the limit.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from muster.schedule.action import Action, Kind
from muster.schedule.program import ProgramError
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.gc_pause import gc_paused

_BEHIND_ALL = 1 << 40
"""Number larger than that of any action: puts a queue behind all others."""


def run_ready_first(schedule: Schedule, spec: ScheduleSpec, limit: float = inf) -> Schedule:
    """Return the schedule in the order of a run in which a free rank takes the first ready pass of its order.

    Passes of the same kind and stage keep their order. A forward overtakes others only if the rank, going on in its
    order, would then never save more than `limit` activations of a stage each: if the order can be followed within the
    limit, so can the result. Raises ProgramError if no rank could follow the order.
    """
    return _reorder(schedule, spec, limit, weights_fill=False)


def fill_bubbles(schedule: Schedule, spec: ScheduleSpec, limit: float = inf) -> Schedule:
    """Return the schedule with its W placed where a rank would idle; F and I keep their order.

    A W also runs if the rank would exceed `limit` activations, or has nothing else left. Raises as `run_ready_first`.
    """
    return _reorder(schedule, spec, limit, weights_fill=True)


def _reorder(schedule: Schedule, spec: ScheduleSpec, limit: float, weights_fill: bool) -> Schedule:
    with gc_paused():
        orders = EventRun(schedule, spec, limit, weights_fill).orders()
    return Schedule(schedule.name, schedule.placement, schedule.num_micro_batches, orders, schedule.replicas)


class EventRun:
    """Event-driven run of a schedule.

    Actions are numbered rank by rank in the schedule's order. Events are moments at which a rank may find something to
    do.
    """

    def __init__(self, schedule: Schedule, spec: ScheduleSpec, limit: float, weights_fill: bool) -> None:
        self.actions = [action for order in schedule.ranks for action in order]
        self.rank_by_number = [rank for rank, order in enumerate(schedule.ranks) for _ in order]
        self.ranks = [RankQueue(limit, weights_fill) for _ in schedule.ranks]
        for number, action in reversed(list(enumerate(self.actions))):
            self.ranks[self.rank_by_number[number]].push_front(number, action)
        self.ready_s = [inf] * len(self.actions)
        """Seconds from which the input of each action is there, as far as known."""
        self.numbers: dict[tuple, int] = {action: number for number, action in enumerate(self.actions)}
        self.events: list[tuple[float, int]] = []
        self.spec, self.depth = spec, schedule.depth
        self.backward = Kind.I if any(action.kind == Kind.I for action in self.actions) else Kind.B
        both_s = [sum(times) for times in zip(spec.input_backward_s, spec.weight_backward_s, strict=True)]
        self.seconds: dict[Kind, Sequence[float]] = dict(
            zip(
                (Kind.F, Kind.I, Kind.W, Kind.B),
                (spec.forward_s, spec.input_backward_s, spec.weight_backward_s, both_s),
                strict=True,
            )
        )
        self.seconds_of = [self.seconds[kind][stage % self.depth] for kind, stage, *_ in self.actions]
        self.tolerance_s = 1e-9 * (sum(spec.forward_s) + sum(both_s))
        """Tolerance: sums of the same times differ by rounding."""

    def orders(self) -> tuple[tuple[Action, ...], ...]:
        self._begin()
        while self.events:
            self._step(*heappop(self.events))
        for number, rank in enumerate(self.rank_by_number):
            if self.ready_s[number] == inf:
                raise ProgramError(f"{self.actions[number]} on rank {rank} never gets what it takes in")
        return tuple(tuple(self.actions[number] for number in rank.done) for rank in self.ranks)

    def _begin(self) -> None:
        for number, action in enumerate(self.actions):
            if action.kind == Kind.F and action.stage % self.depth == 0:
                self._set_ready(number, 0.0)

    def _step(self, time_s: float, index: int) -> None:
        rank = self.ranks[index]
        if rank.free_s > time_s + self.tolerance_s:
            return
        number = rank.pop_ready(self.ready_s, time_s + self.tolerance_s)
        if number is None:
            return
        begin_s = max(time_s, rank.free_s, self.ready_s[number])
        rank.free_s = end_s = begin_s + self.seconds_of[number]
        heappush(self.events, (end_s, index))
        for follower in self._dependents(self.actions[number]):
            self._set_ready(follower, end_s if self.rank_by_number[follower] == index else end_s + self.spec.p2p_s)

    def _set_ready(self, number: int, ready_s: float) -> None:
        self.ready_s[number] = ready_s
        index = self.rank_by_number[number]
        if self.ranks[index].free_s <= ready_s + self.tolerance_s:  # else there is an event when the rank is free
            heappush(self.events, (ready_s, index))

    def _dependents(self, action: Action) -> list[int]:
        """Return the actions that become ready when `action` is over."""
        kind, stage, micro_batch, *_ = action
        level = stage % self.depth
        numbers = self.numbers
        if kind == Kind.F:
            last = level == self.depth - 1
            return [
                numbers[(self.backward, stage, micro_batch, 0, 0) if last else (Kind.F, stage + 1, micro_batch, 0, 0)]
            ]
        own = [numbers[Kind.W, stage, micro_batch, 0, 0]] if kind == Kind.I else []
        return [*own, numbers[kind, stage - 1, micro_batch, 0, 0]] if level and kind != Kind.W else own


class RankQueue:
    """State of one rank: its finished and its pending actions."""

    def __init__(self, limit: float, weights_fill: bool) -> None:
        self.limit, self.weights_fill = limit, weights_fill
        self.free_s = 0.0
        self.activations = 0
        self.done: list[int] = []
        self.pending: list[int] = []
        """Pending actions, the first at the end; a finished one stays until all before it are finished."""
        self.queues: dict[tuple[str, int], list[int]] = {}
        """Queues of actions that keep their order among themselves, the first at the end."""
        self.queues_with_offset: list[tuple[int, list[int]]] = []
        """Each queue with an offset that puts it behind others."""
        self.activation_change: dict[int, int] = {}
        """Change of the number of saved activations by each pending action."""

    def push_front(self, number: int, action: Action) -> None:
        key = (Kind.W if action.kind == Kind.W else "FBI", -1) if self.weights_fill else (action.kind, action.stage)
        if key not in self.queues:
            self.queues[key] = []
            self.queues_with_offset.append(
                (_BEHIND_ALL if self.weights_fill and action.kind == Kind.W else 0, self.queues[key])
            )
        self.queues[key].append(number)
        self.pending.append(number)
        self.activation_change[number] = {Kind.F: 1, Kind.I: 0}.get(action.kind, -1)

    def pop_ready(self, ready_s: list[float], until_s: float) -> int | None:
        """Remove and return the first ready action that fits in memory, None if there is none."""
        change, best, found = self.activation_change, 2 * _BEHIND_ALL, None
        for after, queue in self.queues_with_offset:
            if queue and ready_s[queue[-1]] <= until_s and queue[-1] + after < best:
                number = queue[-1]
                if change[number] < 1 or self._fits(number):
                    best, found = number + after, queue
        if found is None:
            return None
        number = found.pop()
        self.activations += change.pop(number)
        self.done.append(number)
        while self.pending and self.pending[-1] not in change:
            self.pending.pop()
        return number

    def _fits(self, number: int) -> bool:
        """Return True if the rank, after this forward and all pending ones before it, never exceeds the limit."""
        if self.limit == inf:
            return True
        kept = self.activations + 1
        if self.weights_fill:  # all that is pending before it are W, which free memory
            return kept <= self.limit
        for earlier in reversed(self.pending):
            if kept > self.limit or earlier >= number:
                break
            kept += self.activation_change.get(earlier, 0)
        return kept <= self.limit
