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

from muster.cost.memory.stage_memory import PeakCandidate, StageMemory
from muster.cost.precision_bytes import MemoryTerms
from muster.schedule.action import BACKWARDS, Action, Kind, Lane
from muster.schedule.offload import order_with_copies
from muster.schedule.program import Instruction, Program
from muster.schedule.schedule import Schedule

InstructionKey = tuple[Kind, int]
"""Kind and stage of an instruction."""
IndexArray = NDArray[np.intp]
"""Of instructions in an order."""

_COPY_PEAKS = (PeakCandidate("copying", MemoryTerms()),)
_PASSES = frozenset((Kind.F, Kind.B, Kind.I, Kind.W, Kind.S, Kind.T, Kind.OFFLOAD, Kind.RELOAD))
_NEEDS_PARAMS = frozenset((Kind.F, Kind.B, Kind.I, Kind.W, Kind.UNSHARD))
"""What needs its stage's parameters whole."""


class AllocationOrder:
    """What makes or frees memory on one rank, in its order: gathers come first, sums over ranks last; what comes back
    from the host takes its memory when its copy may begin, and what goes there frees it when a pass waits for that."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = actions
        pairs = list(map(itemgetter(0, 1), actions))
        self.keys: tuple[InstructionKey, ...] = tuple(dict.fromkeys(pairs))
        numbers = {key: number for number, key in enumerate(self.keys)}
        self.codes: IndexArray = np.fromiter(map(numbers.__getitem__, pairs), np.intp, len(pairs))
        """Of each action, which of `keys` it is."""
        self._gathers: dict[tuple[int, bool], tuple[IndexArray, IndexArray]] = {}

    def positions(self, stage: int, kinds: frozenset[str]) -> IndexArray:
        """Of a stage's instructions of some kinds."""
        wanted = np.array([kind in kinds and own == stage for kind, own in self.keys], bool)
        return np.flatnonzero(wanted[self.codes]) if len(wanted) else np.empty(0, np.intp)

    @cached_property
    def first_backwards(self) -> dict[int, int]:
        """Stage → the place of its first backward."""
        found = {}
        for stage in {stage for _, stage in self.keys}:
            places = self.positions(stage, frozenset(BACKWARDS))
            if len(places):
                found[stage] = int(places[0])
        return found

    def gather_positions(self, stage: int, reshards: bool) -> tuple[IndexArray, IndexArray]:
        """Where a stage's parameters are gathered, and where they are dropped: by every backward's end, or never."""
        key = stage, reshards
        if key not in self._gathers:
            used, last = self.positions(stage, _NEEDS_PARAMS), np.empty(0, np.intp)
            if reshards:
                last = self.positions(stage, frozenset((Kind.B, Kind.W)))
                again = np.isin(np.append(-1, used[:-1]), np.append(-1, last))[: len(used)]
                self._gathers[key] = used[again], last
            else:
                self._gathers[key] = used[:1], last
        return self._gathers[key]

    @cached_property
    def live_micro_batches(self) -> dict[int, int]:
        """Stage → its micro-batches between their forward and their backward's end when the rank keeps most of them."""
        return self._counts_at_most({Kind.F: 1, Kind.B: -1, Kind.W: -1})

    @cached_property
    def on_device_micro_batches(self) -> dict[int, int]:
        """Stage → those of them that are on the device when most are, where others are in the host's memory."""
        return self._counts_at_most({Kind.F: 1, Kind.B: -1, Kind.W: -1, Kind.OFFLOAD: -1, Kind.RELOAD: 1})

    def _counts_at_most(self, changes: Mapping[str, int]) -> dict[int, int]:
        """Stage → how many there are when the rank has most; `changes`: by each kind of instruction."""
        change = np.array([changes.get(kind, 0) for kind, _ in self.keys], np.intp)
        stages = {stage for kind, stage in self.keys if kind == Kind.F}
        if not stages:
            return {}
        place = int(np.argmax(np.cumsum(change[self.codes])))
        counts = np.bincount(self.codes[: place + 1], minlength=len(self.keys)) * change
        most = dict.fromkeys(sorted(stages), 0)
        for (_, stage), count in zip(self.keys, counts.tolist(), strict=True):
            if count:
                most[stage] += count
        return most

    def max_host_bytes(self, sizes: Mapping[int, int]) -> int:
        """The most that the host's memory holds of the rank's micro-batches, from the end of a forward to the backward
        that needs it; `sizes`: of a micro-batch, by stage."""
        if not any(kind == Kind.OFFLOAD for kind, _ in self.keys):
            return 0
        change = np.zeros(len(self.codes) + 1, np.int64)
        leave = {action[1:3] for action in self.actions if action.kind == Kind.OFFLOAD}
        for place, (kind, stage, micro_batch, *_) in enumerate(self.actions):
            if (stage, micro_batch) in leave and kind in (Kind.F, Kind.B, Kind.I):
                change[place] += sizes.get(stage, 0) * (1 if kind == Kind.F else -1)
        return int(np.cumsum(change).max(initial=0))


def allocation_orders(program: Program) -> tuple[AllocationOrder, ...]:
    """Of each pipeline rank of a Program."""
    return tuple(AllocationOrder(_allocating_actions(lanes)) for lanes in program.ranks)


def schedule_allocation_order(
    schedule: Schedule, rank: int, gathers: bool, reduces: bool, offloads: Collection[int] = ()
) -> AllocationOrder:
    """The same as of a rank of the Program that a schedule is lowered to, without making that: where the vocabulary
    isn't spread and there are no replicas. `gathers`, `reduces`: whether it has UNSHARD and REDUCE; `offloads`: the
    stages whose activations wait in the host's memory where there is time."""
    stages = [stage for stage, holder in enumerate(schedule.placement) if holder == rank]
    before = [Action(Kind.UNSHARD, stage) for stage in stages if gathers]
    after = [Action(Kind.REDUCE_GRAD, stage) for stage in stages if reduces]
    own = schedule.ranks[rank]
    return AllocationOrder([*before, *(order_with_copies(own, offloads) if offloads else own), *after])


def _allocating_actions(lanes: Mapping[Lane, Sequence[Instruction]]) -> list[Action]:
    collectives = [action for action, _, _ in lanes.get("collective", ())]
    copied = {action.stage for action, _, _ in lanes.get("host_copy", ())}
    compute = order_with_copies([action for action, _, _ in lanes.get("compute", ())], copied)
    return [
        *(action for action in collectives if action[0] == Kind.UNSHARD),
        *(action for action in compute if action[0] in _PASSES),
        *(action for action in collectives if action[0] in (Kind.REDUCE_GRAD, Kind.ALL_REDUCE_REPLICAS)),
    ]


# ----------------------------------------------------------------------------------------------------------------------
# The bytes that go with it


@dataclass(frozen=True, slots=True)
class InstructionMemory:
    """What one kind of instruction of one stage does to the bytes that a rank holds."""

    before: int
    """Added when it begins."""
    after: int
    """Added when it ends."""
    peak_candidates: tuple[PeakCandidate, ...]
    peak: int
    """The most that a moment adds."""
    first_backward_peak: int
    """That in the stage's first backward of a step, without the gradients that it leaves; 0 for what is no backward."""
    gather_peak: int
    """The most that a moment adds where it gathers parameters."""


InstructionMemoryCache = dict[tuple[Kind, int], InstructionMemory]
"""By kind and identity of the stage's memory: what was worked out already."""


def _instruction_memory(kind: Kind, own: StageMemory, known: InstructionMemoryCache) -> InstructionMemory:
    key = kind, id(own)
    if key not in known:
        known[key] = _make_instruction_memory(kind, own)
    return known[key]


def _make_instruction_memory(kind: Kind, own: StageMemory) -> InstructionMemory:
    moments = _COPY_PEAKS if kind in (Kind.OFFLOAD, Kind.RELOAD) else own.peak_candidates.get(kind, ())
    away = own.offloaded.total
    kept, deferred, words = own.saved.total, own.deferred.total, own.vocab_parallel.total
    first = (
        max((m.extra.total + m.first_gradients for m in moments), default=0) - own.gradients if kind in BACKWARDS else 0
    )
    return InstructionMemory(
        before={Kind.F: kept, Kind.S: words, Kind.RELOAD: away}.get(kind, 0),
        after={Kind.OFFLOAD: -away, Kind.B: -kept, Kind.I: deferred - kept, Kind.W: -deferred, Kind.T: -words}.get(
            kind, 0
        ),
        peak_candidates=moments,
        peak=max((moment.extra.total for moment in moments), default=0),
        first_backward_peak=first,
        gather_peak=max((moment.extra.total for moment in _gather_candidates(kind, own)), default=0),
    )


def _gather_candidates(kind: Kind, own: StageMemory) -> tuple[PeakCandidate, ...]:
    return own.peak_candidates.get("gather F" if kind == Kind.F else "gather B", ())


def _memory_of_stage(stages: Mapping[int, StageMemory], stage: int) -> StageMemory:
    """A stage's memory; of a stage of another rank, that of the first here."""
    return stages[stage] if stage in stages else next(iter(stages.values()))


def find_peak(
    order: AllocationOrder, stages: Mapping[int, StageMemory], cache: InstructionMemoryCache
) -> tuple[int, int]:
    """The place in the order at which most is held, and how many bytes that is."""
    total = sum(stage.resident.total for stage in stages.values())
    if not len(order.codes):
        return 0, total
    steps = [_instruction_memory(kind, _memory_of_stage(stages, stage), cache) for kind, stage in order.keys]
    table = np.array([(step.before, step.after, step.peak) for step in steps], np.int64)
    before, after, high = table[order.codes].T
    for stage, place in order.first_backwards.items():
        high[place] = steps[order.codes[place]].first_backward_peak
        before[place] += _memory_of_stage(stages, stage).gradients
    gathering = np.array([step.gather_peak for step in steps], np.int64)
    for stage, own in stages.items():
        if own.gathered_params:
            gathered, dropped = order.gather_positions(stage, not own.keeps_gathered)
            before[gathered] += own.gathered_params
            high[gathered] = np.maximum(high[gathered], gathering[order.codes[gathered]])
            after[dropped] -= own.gathered_params
    held = np.cumsum(before + after) - after + high
    place = int(np.argmax(held))
    return place, total + int(held[place])


def peak_terms(
    order: AllocationOrder, stages: Mapping[int, StageMemory], cache: InstructionMemoryCache | None = None
) -> tuple[str, MemoryTerms]:
    """The peak of one rank as it follows its order: when it is, and what is held then."""
    cache = {} if cache is None else cache
    place, _ = find_peak(order, stages, cache)
    moment, terms = _terms_at(order, place, stages, cache)
    kind, stage, micro_batch = order.actions[place][:3]
    return f"{stage}{kind}{micro_batch if micro_batch >= 0 else ''}, {moment}", terms


def _terms_at(
    order: AllocationOrder, place: int, stages: Mapping[int, StageMemory], known: InstructionMemoryCache
) -> tuple[str, MemoryTerms]:
    """What is held at one place of the order, by term, and the name of the moment."""
    counts = np.bincount(order.codes[:place], minlength=len(order.keys)).tolist()
    done = defaultdict(int, zip(order.keys, counts, strict=True))
    kind, stage = order.keys[order.codes[place]]
    own = _memory_of_stage(stages, stage)
    is_first = order.first_backwards.get(stage) == place
    moments = list(_instruction_memory(kind, own, known).peak_candidates)
    if own.gathered_params and stage in stages and place in order.gather_positions(stage, not own.keeps_gathered)[0]:
        moments += _gather_candidates(kind, own)
    done[kind, stage] += kind in (Kind.F, Kind.S, Kind.RELOAD)
    words = sum(done[Kind.S, index] - done[Kind.T, index] for index in stages)
    moment = max(moments, key=lambda one: one.extra.total + (one.first_gradients if is_first else 0))
    terms = moment.extra + MemoryTerms(gradients=moment.first_gradients if is_first else 0)
    for index, memory in stages.items():
        backwards = done[Kind.B, index] + done[Kind.I, index]
        deferred = done[Kind.I, index] - done[Kind.W, index]
        gathered, dropped = order.gather_positions(index, not memory.keeps_gathered)
        is_there = np.count_nonzero(gathered <= place) > np.count_nonzero(dropped < place)
        begun = order.first_backwards.get(index, place) < place
        terms += (
            memory.resident + memory.saved.scaled(done[Kind.F, index] - backwards) + memory.deferred.scaled(deferred)
        )
        terms += memory.offloaded.scaled(done[Kind.RELOAD, index] - done[Kind.OFFLOAD, index])
        terms += memory.vocab_parallel.scaled(words) + MemoryTerms(
            gathered_parameters=memory.gathered_params if is_there else 0,
            gradients=memory.gradients if begun else 0,
        )
    return moment.name, terms
