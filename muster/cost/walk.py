"""What one rank holds as it follows its order of passes, and when that is most.

An order is turned into numbers once. Plans that differ in their sizes alone then have their peaks by a few sums over
arrays, which is what a search does thousands of times.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from muster.cost.memory import MemoryTerms
from muster.cost.stage_memory import Moment, StageMemory
from muster.schedule.action import Action, Lane
from muster.schedule.offload import with_copies
from muster.schedule.program import Instruction, Program
from muster.schedule.schedule import Schedule

Key = tuple[str, int]
"""Kind and stage of an instruction."""
Places = NDArray[np.intp]
"""Of instructions in an order."""

_COPYING = (Moment("copying", MemoryTerms()),)
_PASSES = frozenset(("F", "B", "I", "W", "S", "T", "OFFLOAD", "RELOAD"))
_GATHERED = frozenset(("F", "B", "I", "W", "UNSHARD"))
"""What needs its stage's parameters whole."""


class RankOrder:
    """What makes or frees memory on one rank, in its order: gathers come first, sums over ranks last; what comes back
    from the host takes its memory when its copy may begin, and what goes there frees it when a pass waits for that."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = actions
        pairs = list(map(itemgetter(0, 1), actions))
        self.keys: tuple[Key, ...] = tuple(dict.fromkeys(pairs))
        numbers = {key: number for number, key in enumerate(self.keys)}
        self.codes: Places = np.fromiter(map(numbers.__getitem__, pairs), np.intp, len(pairs))
        """Of each action, which of `keys` it is."""
        self._gathers: dict[tuple[int, bool], tuple[Places, Places]] = {}

    def places(self, stage: int, kinds: frozenset[str]) -> Places:
        """Of a stage's instructions of some kinds."""
        wanted = np.array([kind in kinds and own == stage for kind, own in self.keys], bool)
        return np.flatnonzero(wanted[self.codes]) if len(wanted) else np.empty(0, np.intp)

    @cached_property
    def first_backwards(self) -> dict[int, int]:
        """Stage → the place of its first backward."""
        found = {}
        for stage in {stage for _, stage in self.keys}:
            places = self.places(stage, frozenset("BI"))
            if len(places):
                found[stage] = int(places[0])
        return found

    def gathers(self, stage: int, drops: bool) -> tuple[Places, Places]:
        """Where a stage's parameters are gathered, and where they are dropped: by every backward's end, or never."""
        key = stage, drops
        if key not in self._gathers:
            used, last = self.places(stage, _GATHERED), np.empty(0, np.intp)
            if drops:
                last = self.places(stage, frozenset("BW"))
                again = np.isin(np.append(-1, used[:-1]), np.append(-1, last))[: len(used)]
                self._gathers[key] = used[again], last
            else:
                self._gathers[key] = used[:1], last
        return self._gathers[key]

    @cached_property
    def live(self) -> dict[int, int]:
        """Stage → its micro-batches between their forward and their backward's end when the rank keeps most of them."""
        return self._most({"F": 1, "B": -1, "W": -1})

    @cached_property
    def resident(self) -> dict[int, int]:
        """Stage → those of them that are on the device when most are, where others are in the host's memory."""
        return self._most({"F": 1, "B": -1, "W": -1, "OFFLOAD": -1, "RELOAD": 1})

    def _most(self, changes: Mapping[str, int]) -> dict[int, int]:
        """Stage → how many there are when the rank has most; `changes`: by each kind of instruction."""
        change = np.array([changes.get(kind, 0) for kind, _ in self.keys], np.intp)
        stages = {stage for kind, stage in self.keys if kind == "F"}
        if not stages:
            return {}
        place = int(np.argmax(np.cumsum(change[self.codes])))
        counts = np.bincount(self.codes[: place + 1], minlength=len(self.keys)) * change
        most = dict.fromkeys(sorted(stages), 0)
        for (_, stage), count in zip(self.keys, counts.tolist(), strict=True):
            if count:
                most[stage] += count
        return most

    def away_bytes(self, sizes: Mapping[int, int]) -> int:
        """The most that the host's memory holds of the rank's micro-batches, from the end of a forward to the backward
        that needs it; `sizes`: of a micro-batch, by stage."""
        if not any(kind == "OFFLOAD" for kind, _ in self.keys):
            return 0
        change = np.zeros(len(self.codes) + 1, np.int64)
        leave = {action[1:3] for action in self.actions if action.kind == "OFFLOAD"}
        for place, (kind, stage, micro_batch, *_) in enumerate(self.actions):
            if (stage, micro_batch) in leave and kind in ("F", "B", "I"):
                change[place] += sizes.get(stage, 0) * (1 if kind == "F" else -1)
        return int(np.cumsum(change).max(initial=0))


def orders_of(program: Program) -> tuple[RankOrder, ...]:
    """Of each pipeline rank of a Program."""
    return tuple(RankOrder(_order(lanes)) for lanes in program.ranks)


def order_of_schedule(
    schedule: Schedule, rank: int, gathers: bool, reduces: bool, offloads: Collection[int] = ()
) -> RankOrder:
    """The same as of a rank of the Program that a schedule is lowered to, without making that: where the vocabulary
    isn't spread and there are no replicas. `gathers`, `reduces`: whether it has UNSHARD and REDUCE; `offloads`: the
    stages whose activations wait in the host's memory where there is time."""
    stages = [stage for stage, holder in enumerate(schedule.placement) if holder == rank]
    before = [Action("UNSHARD", stage) for stage in stages if gathers]
    after = [Action("REDUCE", stage) for stage in stages if reduces]
    own = schedule.ranks[rank]
    return RankOrder([*before, *(with_copies(own, offloads) if offloads else own), *after])


def _order(lanes: Mapping[Lane, Sequence[Instruction]]) -> list[Action]:
    collectives = [action for action, _, _ in lanes.get("collective", ())]
    copied = {action.stage for action, _, _ in lanes.get("copy", ())}
    compute = with_copies([action for action, _, _ in lanes.get("compute", ())], copied)
    return [
        *(action for action in collectives if action[0] == "UNSHARD"),
        *(action for action in compute if action[0] in _PASSES),
        *(action for action in collectives if action[0] in ("REDUCE", "MERGE")),
    ]


# ----------------------------------------------------------------------------------------------------------------------
# The bytes that go with it


@dataclass(frozen=True, slots=True)
class Step:
    """What one kind of instruction of one stage does to the bytes that a rank holds."""

    before: int
    """Added when it begins."""
    after: int
    """Added when it ends."""
    moments: tuple[Moment, ...]
    highest: int
    """The most that a moment adds."""
    first: int
    """That in the stage's first backward of a step, without the gradients that it leaves; 0 for what is no backward."""
    gathering: int
    """The most that a moment adds where it gathers parameters."""


Steps = dict[tuple[str, int], Step]
"""By kind and identity of the stage's memory: what was worked out already."""


def _step(kind: str, own: StageMemory, known: Steps) -> Step:
    key = kind, id(own)
    if key not in known:
        known[key] = _make_step(kind, own)
    return known[key]


def _make_step(kind: str, own: StageMemory) -> Step:
    moments = _COPYING if kind in ("OFFLOAD", "RELOAD") else own.moments.get(kind, ())
    away = own.offloaded.total
    kept, deferred, words = own.kept.total, own.deferred.total, own.words.total
    first = max((m.extra.total + m.gradients for m in moments), default=0) - own.gradients if kind in "BI" else 0
    return Step(
        before={"F": kept, "S": words, "RELOAD": away}.get(kind, 0),
        after={"OFFLOAD": -away, "B": -kept, "I": deferred - kept, "W": -deferred, "T": -words}.get(kind, 0),
        moments=moments,
        highest=max((moment.extra.total for moment in moments), default=0),
        first=first,
        gathering=max((moment.extra.total for moment in _gather_moments(kind, own)), default=0),
    )


def _gather_moments(kind: str, own: StageMemory) -> tuple[Moment, ...]:
    return own.moments.get("gather F" if kind == "F" else "gather B", ())


def _own(stages: Mapping[int, StageMemory], stage: int) -> StageMemory:
    """A stage's memory; of a stage of another rank, that of the first here."""
    return stages[stage] if stage in stages else next(iter(stages.values()))


def peak(order: RankOrder, stages: Mapping[int, StageMemory], known: Steps) -> tuple[int, int]:
    """The place in the order at which most is held, and how many bytes that is."""
    total = sum(stage.resident.total for stage in stages.values())
    if not len(order.codes):
        return 0, total
    steps = [_step(kind, _own(stages, stage), known) for kind, stage in order.keys]
    table = np.array([(step.before, step.after, step.highest) for step in steps], np.int64)
    before, after, high = table[order.codes].T
    for stage, place in order.first_backwards.items():
        high[place] = steps[order.codes[place]].first
        before[place] += _own(stages, stage).gradients
    gathering = np.array([step.gathering for step in steps], np.int64)
    for stage, own in stages.items():
        if own.gathered:
            gathered, dropped = order.gathers(stage, not own.stays)
            before[gathered] += own.gathered
            high[gathered] = np.maximum(high[gathered], gathering[order.codes[gathered]])
            after[dropped] -= own.gathered
    held = np.cumsum(before + after) - after + high
    place = int(np.argmax(held))
    return place, total + int(held[place])


def walk(order: RankOrder, stages: Mapping[int, StageMemory], known: Steps | None = None) -> tuple[str, MemoryTerms]:
    """The peak of one rank as it follows its order: when it is, and what is held then."""
    known = {} if known is None else known
    place, _ = peak(order, stages, known)
    moment, terms = _terms_at(order, place, stages, known)
    kind, stage, micro_batch = order.actions[place][:3]
    return f"{stage}{kind}{micro_batch if micro_batch >= 0 else ''}, {moment}", terms


def _terms_at(order: RankOrder, place: int, stages: Mapping[int, StageMemory], known: Steps) -> tuple[str, MemoryTerms]:
    """What is held at one place of the order, by term, and the name of the moment."""
    counts = np.bincount(order.codes[:place], minlength=len(order.keys)).tolist()
    done = defaultdict(int, zip(order.keys, counts, strict=True))
    kind, stage = order.keys[order.codes[place]]
    own = _own(stages, stage)
    is_first = order.first_backwards.get(stage) == place
    moments = list(_step(kind, own, known).moments)
    if own.gathered and stage in stages and place in order.gathers(stage, not own.stays)[0]:
        moments += _gather_moments(kind, own)
    done[kind, stage] += kind in ("F", "S", "RELOAD")
    words = sum(done["S", index] - done["T", index] for index in stages)
    moment = max(moments, key=lambda one: one.extra.total + (one.gradients if is_first else 0))
    terms = moment.extra + MemoryTerms(gradients=moment.gradients if is_first else 0)
    for index, memory in stages.items():
        backwards = done["B", index] + done["I", index]
        deferred = done["I", index] - done["W", index]
        gathered, dropped = order.gathers(index, not memory.stays)
        is_there = np.count_nonzero(gathered <= place) > np.count_nonzero(dropped < place)
        begun = order.first_backwards.get(index, place) < place
        terms += memory.resident + memory.kept.times(done["F", index] - backwards) + memory.deferred.times(deferred)
        terms += memory.offloaded.times(done["RELOAD", index] - done["OFFLOAD", index])
        terms += memory.words.times(words) + MemoryTerms(
            gathered_parameters=memory.gathered if is_there else 0,
            gradients=memory.gradients if begun else 0,
        )
    return moment.name, terms
