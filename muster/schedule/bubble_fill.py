"""Moves actions ahead in a schedule's order into slots in which their rank would wait."""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from muster.schedule.action import Action, Kind
from muster.schedule.gc_pause import gc_paused
from muster.schedule.program import ProgramError
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec

_BEHIND_ALL = 1 << 40
"""More than there are actions."""


def run_ready_first(schedule: Schedule, spec: ScheduleSpec, limit: float = inf) -> Schedule:
    """The schedule in the order of a run with the setting's times, in which a free rank does the first action of its
    order that is ready.

    Actions of the same kind and stage keep their order. A forward overtakes others only where the rank, if it went on
    in its order, would then never keep more than `limit` activations of a stage each: if the order can be followed
    within the limit, so can the result. Raises ProgramError where it can't.
    """
    return _reorder(schedule, spec, limit, weights_fill=False)


def fill_bubbles(schedule: Schedule, spec: ScheduleSpec, limit: float = inf) -> Schedule:
    """The schedule in the order of such a run, in which forwards and input backwards keep their order and weight
    backwards are done where the rank would wait, or keep more than `limit` activations, or has nothing else left."""
    return _reorder(schedule, spec, limit, weights_fill=True)


def _reorder(schedule: Schedule, spec: ScheduleSpec, limit: float, weights_fill: bool) -> Schedule:
    with gc_paused():
        orders = EventRun(schedule, spec, limit, weights_fill).orders()
    return Schedule(schedule.name, schedule.placement, schedule.num_micro_batches, orders, schedule.replicas)


class EventRun:
    """Actions have numbers, rank by rank in the schedule's order. Events are moments at which a rank may find
    something to do."""

    def __init__(self, schedule: Schedule, spec: ScheduleSpec, limit: float, weights_fill: bool) -> None:
        self.actions = [action for order in schedule.ranks for action in order]
        self.rank_by_number = [rank for rank, order in enumerate(schedule.ranks) for _ in order]
        self.ranks = [RankQueue(limit, weights_fill) for _ in schedule.ranks]
        for number, action in reversed(list(enumerate(self.actions))):
            self.ranks[self.rank_by_number[number]].push_front(number, action)
        self.ready_s = [inf] * len(self.actions)
        """When what an action takes in is there, as far as that is known."""
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
        """Sums of the same times differ by rounding."""

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
        """The actions that are ready when `action` is over."""
        kind, stage, micro_batch, *_ = action
        level, numbers = stage % self.depth, self.numbers
        if kind == Kind.F:
            last = level == self.depth - 1
            return [
                numbers[(self.backward, stage, micro_batch, 0, 0) if last else (Kind.F, stage + 1, micro_batch, 0, 0)]
            ]
        own = [numbers[Kind.W, stage, micro_batch, 0, 0]] if kind == Kind.I else []
        return [*own, numbers[kind, stage - 1, micro_batch, 0, 0]] if level and kind != Kind.W else own


class RankQueue:
    """What a rank has done and still has to do."""

    def __init__(self, limit: float, weights_fill: bool) -> None:
        self.limit, self.weights_fill = limit, weights_fill
        self.free_s = 0.0
        self.activations = 0
        self.done: list[int] = []
        self.pending: list[int] = []
        """What is not done, the first at the end; what is done lies there too until all before it is."""
        self.queues: dict[tuple[str, int], list[int]] = {}
        """What is done in order among itself, the first at the end."""
        self.queues_with_offset: list[tuple[int, list[int]]] = []
        """Each queue with what puts it after others."""
        self.activation_change: dict[int, int] = {}
        """By how many more activations are kept after each action that is not done."""

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
        """Takes the first action of the order that is ready and fits; None if there is none."""
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
        """Whether the rank, after this forward and what stands before it, never keeps too many activations."""
        if self.limit == inf:
            return True
        kept = self.activations + 1
        for earlier in reversed(self.pending):
            if kept > self.limit or earlier >= number:
                break
            kept += self.activation_change.get(earlier, 0)
        return kept <= self.limit
