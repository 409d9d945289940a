"""Moves actions ahead in a schedule's order into slots in which their rank would wait."""

from heapq import heappop, heappush
from math import inf

from muster.schedule.action import Action
from muster.schedule.collector import collector_paused
from muster.schedule.program import ProgramError
from muster.schedule.schedule import Schedule
from muster.schedule.setting import Setting

_LAST = 1 << 40
"""More than there are actions."""


def overtake(schedule: Schedule, setting: Setting, limit: float = inf) -> Schedule:
    """The schedule in the order of a run with the setting's times, in which a free rank does the first action of its
    order that is ready.

    Actions of the same kind and stage keep their order. A forward overtakes others only where the rank, if it went on
    in its order, would then never keep more than `limit` activations of a stage each: if the order can be followed
    within the limit, so can the result. Raises ProgramError where it can't.
    """
    return _run(schedule, setting, limit, fill=False)


def fill(schedule: Schedule, setting: Setting, limit: float = inf) -> Schedule:
    """The schedule in the order of such a run, in which forwards and input backwards keep their order and weight
    backwards are done where the rank would wait, or keep more than `limit` activations, or has nothing else left."""
    return _run(schedule, setting, limit, fill=True)


def _run(schedule: Schedule, setting: Setting, limit: float, fill: bool) -> Schedule:
    with collector_paused():
        orders = Run(schedule, setting, limit, fill).orders()
    return Schedule(schedule.name, schedule.placement, schedule.num_micro_batches, orders, schedule.replicas)


class Run:
    """Actions have numbers, rank by rank in the schedule's order. Events are moments at which a rank may find
    something to do."""

    def __init__(self, schedule: Schedule, setting: Setting, limit: float, fill: bool) -> None:
        self.actions = [action for order in schedule.ranks for action in order]
        self.rank_of = [rank for rank, order in enumerate(schedule.ranks) for _ in order]
        self.ranks = [RankOrder(limit, fill) for _ in schedule.ranks]
        for number, action in reversed(list(enumerate(self.actions))):
            self.ranks[self.rank_of[number]].put_first(number, action)
        self.ready_s = [inf] * len(self.actions)
        """When what an action takes in is there, as far as that is known."""
        self.numbers: dict[tuple, int] = {action: number for number, action in enumerate(self.actions)}
        self.events: list[tuple[float, int]] = []
        self.setting, self.depth = setting, schedule.depth
        self.backward = "I" if any(action.kind == "I" for action in self.actions) else "B"
        both_s = [sum(times) for times in zip(setting.input_backward_s, setting.weight_backward_s, strict=True)]
        self.seconds = dict(
            zip("FIWB", (setting.forward_s, setting.input_backward_s, setting.weight_backward_s, both_s), strict=True)
        )
        self.seconds_of = [self.seconds[kind][stage % self.depth] for kind, stage, *_ in self.actions]
        self.slack_s = 1e-9 * (sum(setting.forward_s) + sum(both_s))
        """Sums of the same times differ by rounding."""

    def orders(self) -> tuple[tuple[Action, ...], ...]:
        self._begin()
        while self.events:
            self._step(*heappop(self.events))
        for number, rank in enumerate(self.rank_of):
            if self.ready_s[number] == inf:
                raise ProgramError(f"{self.actions[number]} on rank {rank} never gets what it takes in")
        return tuple(tuple(self.actions[number] for number in rank.done) for rank in self.ranks)

    def _begin(self) -> None:
        for number, action in enumerate(self.actions):
            if action.kind == "F" and action.stage % self.depth == 0:
                self._announce(number, 0.0)

    def _step(self, time_s: float, index: int) -> None:
        rank = self.ranks[index]
        if rank.free_s > time_s + self.slack_s:
            return
        number = rank.take_next(self.ready_s, time_s + self.slack_s)
        if number is None:
            return
        begin_s = max(time_s, rank.free_s, self.ready_s[number])
        rank.free_s = end_s = begin_s + self.seconds_of[number]
        heappush(self.events, (end_s, index))
        for follower in self._followers(self.actions[number]):
            self._announce(follower, end_s if self.rank_of[follower] == index else end_s + self.setting.hop_s)

    def _announce(self, number: int, ready_s: float) -> None:
        self.ready_s[number] = ready_s
        index = self.rank_of[number]
        if self.ranks[index].free_s <= ready_s + self.slack_s:  # else there is an event when the rank is free
            heappush(self.events, (ready_s, index))

    def _followers(self, action: Action) -> list[int]:
        """The actions that are ready when `action` is over."""
        kind, stage, micro_batch, *_ = action
        level, numbers = stage % self.depth, self.numbers
        if kind == "F":
            last = level == self.depth - 1
            return [numbers[(self.backward, stage, micro_batch, 0, 0) if last else ("F", stage + 1, micro_batch, 0, 0)]]
        own = [numbers["W", stage, micro_batch, 0, 0]] if kind == "I" else []
        return [*own, numbers[kind, stage - 1, micro_batch, 0, 0]] if level and kind != "W" else own


class RankOrder:
    """What a rank has done and still has to do."""

    def __init__(self, limit: float, fill: bool) -> None:
        self.limit, self.fill = limit, fill
        self.free_s = 0.0
        self.kept = 0
        self.done: list[int] = []
        self.waiting: list[int] = []
        """What is not done, the first at the end; what is done lies there too until all before it is."""
        self.queues: dict[tuple[str, int], list[int]] = {}
        """What is done in order among itself, the first at the end."""
        self.rows: list[tuple[int, list[int]]] = []
        """Each queue with what puts it after others."""
        self.change: dict[int, int] = {}
        """By how many more activations are kept after each action that is not done."""

    def put_first(self, number: int, action: Action) -> None:
        key = ("W" if action.kind == "W" else "FBI", -1) if self.fill else (action.kind, action.stage)
        if key not in self.queues:
            self.queues[key] = []
            self.rows.append((_LAST if self.fill and action.kind == "W" else 0, self.queues[key]))
        self.queues[key].append(number)
        self.waiting.append(number)
        self.change[number] = {"F": 1, "I": 0}.get(action.kind, -1)

    def take_next(self, ready_s: list[float], until_s: float) -> int | None:
        """Takes the first action of the order that is ready and fits; None if there is none."""
        change, best, found = self.change, 2 * _LAST, None
        for after, queue in self.rows:
            if queue and ready_s[queue[-1]] <= until_s and queue[-1] + after < best:
                number = queue[-1]
                if change[number] < 1 or self._fits(number):
                    best, found = number + after, queue
        if found is None:
            return None
        number = found.pop()
        self.kept += change.pop(number)
        self.done.append(number)
        while self.waiting and self.waiting[-1] not in change:
            self.waiting.pop()
        return number

    def _fits(self, number: int) -> bool:
        """Whether the rank, after this forward and what stands before it, never keeps too many activations."""
        if self.limit == inf:
            return True
        kept = self.kept + 1
        for earlier in reversed(self.waiting):
            if kept > self.limit or earlier >= number:
                break
            kept += self.change.get(earlier, 0)
        return kept <= self.limit
