"""Vocabulary parallelism: weaves into a schedule what every rank does for its part of the words.

Embedding and head lie in equal parts on all pipeline ranks (arXiv:2411.05288, algorithm 2: one barrier between the
scores, S, and the backward that starts from them). What the ranks say to each other runs beside the compute, so that
the last stage can do another forward before the backward of the one whose scores are still under way.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, replace
from heapq import heappush
from itertools import accumulate, islice

from muster.schedule.action import Action
from muster.schedule.keep_busy import Run
from muster.schedule.schedule import Schedule
from muster.schedule.setting import Setting
from muster.schedule.timing import PassTimes, Timing, time_passes
from muster.spec.errors import InfeasibleError

AHEAD = 2
"""Micro-batches whose words are looked up before the first stage's forward wants them."""
PUT_OFF = 2
"""Backwards for words of one kind that may wait for a rank to have nothing else to do: T keeps logits until then."""


@dataclass(frozen=True, slots=True)
class WordTimes:
    """Of one rank's part of the words, for one micro-batch, where the forward of a rank's whole share takes 1."""

    look_up: float = 0.05
    score: float = 0.5
    backward: float = 0.25
    """For output words; for input words it takes as long as to look them up."""

    def of(self, kind: str) -> float:
        return {"S": self.score, "T": self.backward}.get(kind, self.look_up)

    def times(self, unit_s: float) -> "WordTimes":
        """The same where the forward of a rank's whole share takes `unit_s`."""
        return WordTimes(self.look_up * unit_s, self.score * unit_s, self.backward * unit_s)


@dataclass(frozen=True, slots=True)
class Woven:
    """A schedule with words."""

    schedule: Schedule
    """Its passes in the order in which they come now."""
    orders: tuple[tuple[Action, ...], ...]
    """Per rank those and the passes of words."""
    ends_s: tuple[tuple[float, ...], ...]
    """Per rank, when each pass of `schedule` nominally ends."""
    order_ends_s: tuple[tuple[float, ...], ...]
    """The same for all of `orders`."""
    collectives: tuple[tuple[str, int], ...]
    """(kind, micro-batch) of the collectives, in the order that all ranks keep."""


def spread_words(schedule: Schedule, times: WordTimes, setting: Setting | None = None) -> Woven:
    """The schedule, of one replica, with words on every rank.

    The order is that of a run in nominal times in which no rank waits while it has something to do: scores as soon as
    the hidden state is there, then the next words to look up, then the first pass of the schedule's order that is
    ready, then what words' backwards have been put off. A rank keeps at most one micro-batch's activations of a stage
    more than under `schedule`. With a setting, the run is in its times, and what goes to other ranks takes its hop.
    """
    if setting is None:
        chunks = schedule.num_stages // len(schedule.ranks)
        setting = Setting(len(schedule.ranks), schedule.num_micro_batches, chunks)
    return _Weaving(schedule, times.times(sum(setting.forward_s) / setting.num_ranks), setting).woven()


def timed_with_words(schedule: Schedule, times: WordTimes, setting: Setting) -> tuple[Schedule, Timing]:
    """The schedule with the passes of words among its own, as `muster schedule` shows it.

    Raises InfeasibleError for two replicas, and where a rank then keeps more than the setting's limit.
    """
    if schedule.replicas > 1:
        raise InfeasibleError(f"words are woven into schedules of one replica; {schedule.name} has {schedule.replicas}")
    woven = spread_words(schedule, times, setting)
    words = times.times(sum(setting.forward_s) / setting.num_ranks)
    passes_s = {"F": setting.forward_s, "I": setting.input_backward_s, "W": setting.weight_backward_s}
    passes_s["B"] = tuple(i + w for i, w in zip(passes_s["I"], passes_s["W"], strict=True))
    begins_s, work_s, peaks = [], [], []
    for order, ends_s in zip(woven.orders, woven.order_ends_s, strict=True):
        took_s = [passes_s[kind][stage] if kind in passes_s else words.of(kind) for kind, stage, *_ in order]
        begins_s.append([end_s - time_s for end_s, time_s in zip(ends_s, took_s, strict=True)])
        work_s.append(sum(took_s))
        kept = accumulate({"F": 1, "B": -1, "W": -1}.get(action.kind, 0) for action in order)
        peaks.append(max(kept) * setting.activation)
    if max(peaks) > setting.memory_limit * (1 + 1e-9):
        raise InfeasibleError(
            f"{schedule.name} with words keeps {max(peaks):g} micro-batches' activations on a rank, more than the limit"
            f" of {setting.memory_limit:g}"
        )
    shown = replace(woven.schedule, ranks=woven.orders)
    return shown, Timing(tuple(begins_s), woven.order_ends_s, tuple(work_s), tuple(peaks))


class _Weaving(Run):
    def __init__(self, schedule: Schedule, times: WordTimes, setting: Setting) -> None:
        super().__init__(schedule, setting, 0, fill=False)
        ones = [1.0] * schedule.depth
        for rank, peak in zip(
            self.ranks, time_passes(schedule, PassTimes(ones, ones, ones)).peak_activation, strict=True
        ):
            rank.limit = peak + 1
        self.schedule, self.times = schedule, times
        self.trains = any(action.kind in "BI" for action in self.actions)
        first = schedule.ranks[schedule.placement[0]]
        self.inputs = [action.micro_batch for action in first if action[:2] == ("F", 0)]
        """Micro-batches in the order in which the first stage wants them."""
        self.wanted = iter(self.inputs)
        self.waiting: list[dict[str, deque[tuple[float, int]]]] = [defaultdict(deque) for _ in schedule.ranks]
        """Per rank and kind of word pass, from when it can be done for which micro-batches."""
        self.missing = {(kind, unit): len(self.ranks) for kind in ("E", "S") for unit in self.inputs}
        """Ranks that have not done a pass yet whose results are brought together."""
        self.joined_s: dict[tuple[str, int], float] = {}
        """When each collective begins."""
        self.orders_s: list[list[tuple[Action, float]]] = [[] for _ in schedule.ranks]
        """Per rank all passes with their ends."""

    def woven(self) -> Woven:
        """Raises ProgramError where the schedule's order can't be followed."""
        self.orders()
        passes = [[(action, end_s) for action, end_s in order if action in self.numbers] for order in self.orders_s]
        old = self.schedule
        ranks = tuple(tuple(action for action, _ in order) for order in passes)
        return Woven(
            Schedule(old.name, old.placement, old.num_micro_batches, ranks),
            tuple(tuple(action for action, _ in order) for order in self.orders_s),
            tuple(tuple(end_s for _, end_s in order) for order in passes),
            tuple(tuple(end_s for _, end_s in order) for order in self.orders_s),
            tuple(sorted(self.joined_s, key=lambda key: (self.joined_s[key], key[1], key[0]))),
        )

    def _begin(self) -> None:
        for _ in range(AHEAD):
            self._want_next(0.0)

    def _want_next(self, time_s: float) -> None:
        for unit in islice(self.wanted, 1):
            self._offer("E", unit, time_s)

    # ------------------------------------------------------------------------------------------------------------------
    # One rank's next pass

    def _step(self, time_s: float, index: int) -> None:
        rank = self.ranks[index]
        if rank.free_s > time_s + self.slack_s:
            return
        until_s = time_s + self.slack_s
        word = self._take_word(index, until_s, urgent=True)
        number = None if word else rank.take_next(self.ready_s, until_s)
        word = word or (self._take_word(index, until_s, urgent=False) if number is None else None)
        if word is None and number is None:
            return
        action = word or self.actions[number or 0]
        seconds = self.times.of(action.kind) if word else self.seconds[action.kind][action.stage]
        rank.free_s = end_s = time_s + seconds
        heappush(self.events, (end_s, index))
        self.orders_s[index].append((action, end_s))
        if word:
            self._end_word(word.kind, word.micro_batch, end_s)
        else:
            self._end_pass(action, end_s)

    def _take_word(self, index: int, until_s: float, urgent: bool) -> Action | None:
        for kind, patience in (("S", 0), ("E", 0), ("T", PUT_OFF), ("EW", PUT_OFF)):
            waiting = self.waiting[index][kind]
            if sum(ready_s <= until_s for ready_s, _ in waiting) > (patience if urgent else 0):
                return Action(kind, self.schedule.placement.index(index), waiting.popleft()[1])
        return None

    # ------------------------------------------------------------------------------------------------------------------
    # What follows from it

    def _end_pass(self, action: Action, end_s: float) -> None:
        kind, stage, unit, *_ = action
        for follower in self._followers(action):
            away = self.rank_of[follower] != self.schedule.placement[stage]
            self._announce(follower, end_s + self.setting.hop_s * away)
        if kind == "F" and stage == 0:
            self._want_next(end_s)
        if kind == "F" and stage == self.depth - 1:
            self._join("HC", unit, end_s, "S")
        if kind in "BI" and stage == 0:
            self._join("DC", unit, end_s, "EW")

    def _end_word(self, kind: str, unit: int, end_s: float) -> None:
        if kind not in ("E", "S"):
            return
        self.missing[kind, unit] -= 1
        begin_s = self.joined_s[kind + "C", unit] = max(end_s, self.joined_s.get((kind + "C", unit), 0.0))
        if self.missing[kind, unit]:
            return
        begin_s += self.setting.hop_s
        if kind == "E":
            self._announce(self.numbers[Action("F", 0, unit)], begin_s)
        elif self.trains:
            self._announce(self._backward_of(self.depth - 1, unit), begin_s)
            self._offer("T", unit, begin_s)

    def _join(self, kind: str, unit: int, begin_s: float, then: str) -> None:
        self.joined_s[kind, unit] = begin_s
        self._offer(then, unit, begin_s + self.setting.hop_s)

    def _offer(self, kind: str, unit: int, time_s: float) -> None:
        for index, waiting in enumerate(self.waiting):
            waiting[kind].append((time_s, unit))
            heappush(self.events, (time_s, index))

    def _followers(self, action: Action) -> list[int]:
        """As without words, but for the last stage: its backward waits for all ranks' scores."""
        kind, stage, unit, *_ = action
        if kind == "F":
            return [self.numbers[Action("F", stage + 1, unit)]] if stage < self.depth - 1 else []
        own = [self.numbers[Action("W", stage, unit)]] if kind == "I" else []
        return own + ([self._backward_of(stage - 1, unit)] if kind in "BI" and stage else [])

    def _backward_of(self, stage: int, unit: int) -> int:
        whole = Action("B", stage, unit)
        return self.numbers[whole if whole in self.numbers else Action("I", stage, unit)]
