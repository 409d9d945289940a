"""Liveness walk: the memory that one rank holds after each instruction of its order, and its peak.

Every instruction adds bytes when it begins (`before`), adds or frees bytes when it ends (`after`), and reaches a
temporary `peak` in between. With those three columns the memory at the peak of instruction i is

    resident + sum of (before + after) over all instructions up to i − after[i] + peak[i]

Example: one stage, activations of 10 bytes per micro-batch, a peak of 3 bytes in F and 5 in B:

    instruction       F0   F1   B0   F2   B1   B2
    before           +10  +10    0  +10    0    0
    after              0    0  −10    0  −10  −10
    held inside       10   20   20   20   20   10
    held with peak    13   23   25   23   25   15      → the peak is 25 bytes, first in B0

An order is turned into index arrays once. The peaks of plans that differ only in sizes then are a few cumulative sums,
which a search computes thousands of times.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from muster.cost.memory.stage_memory import PeakCandidate, StageMemory
from muster.cost.memory.terms import MemoryTerms
from muster.schedule.action import PARAMETER_KINDS, Action, Kind, Lane
from muster.schedule.message_liveness import program_message_counts, schedule_message_counts
from muster.schedule.offload import order_with_copies
from muster.schedule.program import Instruction, Program
from muster.schedule.schedule import Schedule
from muster.schedule.vocab_buffers import vocab_buffer_counts

InstructionKey = tuple[Kind, int, int]
"""Kind, stage and slice of an instruction."""
IndexArray = NDArray[np.intp]
"""Positions of instructions in an order."""

_COPY_PEAKS = (PeakCandidate("copying", MemoryTerms()),)
_COMPUTE = frozenset((Kind.F, Kind.B, Kind.I, Kind.W, Kind.S, Kind.T, Kind.EMB_W))
_PASSES = _COMPUTE | {Kind.OFFLOAD, Kind.RELOAD}
_GRADIENT_COLLECTIVES = frozenset((Kind.REDUCE_GRAD, Kind.ALL_REDUCE_REPLICAS, Kind.ALL_REDUCE_TIED))
_PLACED_COLLECTIVES = _GRADIENT_COLLECTIVES | {Kind.UNSHARD, Kind.RESHARD}
_WEIGHT_BACKWARDS = frozenset((Kind.B, Kind.W))
_NEEDS_PARAMS = frozenset((Kind.F, Kind.B, Kind.I, Kind.UNSHARD))
"""Instructions that use the unsharded parameters of their stage."""
_RESHARDS = frozenset((Kind.B, Kind.I))
"""Instructions at whose end z3 drops them."""


class AllocationOrder:
    """Instructions of one rank that allocate or free memory, in order: UNSHARD first, or for each unit of passes, each
    gradient reduction once the gradients are complete.

    A RELOAD allocates at the earliest begin of its copy; an OFFLOAD frees at the pass that waits for its copy.
    """

    def __init__(self, actions: Sequence[Action], messages: Mapping[int, IndexArray] | None = None) -> None:
        """Index the instructions; `messages`: stage → buffers (`schedule_message_counts`)."""
        self.actions = actions
        keys = list(map(itemgetter(0, 1, 3), actions))
        alike = {key: (*key[:2], 0) if key[0] in PARAMETER_KINDS else key for key in dict.fromkeys(keys)}
        self.keys: tuple[InstructionKey, ...] = tuple(dict.fromkeys(alike.values()))
        numbers = {key: code for code, key in enumerate(self.keys)}
        codes = {key: numbers[one] for key, one in alike.items()}
        self.codes: IndexArray = np.fromiter(map(codes.__getitem__, keys), np.intp, len(keys))
        """Index into `keys` of each action."""
        is_pass = np.array([kind in _COMPUTE for kind, *_ in self.keys], np.intp)[self.codes]
        # A host copy is counted with the pass that comes after it.
        times = 2 * (np.cumsum(is_pass) - is_pass) + 1
        self.messages: dict[int, IndexArray] = {
            stage: held[np.minimum(times, len(held) - 1)] for stage, held in (messages or {}).items()
        }
        """Stage → number of buffers of sends and receives held during each action."""
        self._gathers: dict[tuple[int, bool], tuple[IndexArray, IndexArray]] = {}
        self._pending: dict[tuple[int, bool], tuple[IndexArray, IndexArray]] = {}

    def positions(self, stage: int, kinds: frozenset[str]) -> IndexArray:
        """Return the positions of a stage's instructions of some kinds."""
        wanted = np.array([kind in kinds and key_stage == stage for kind, key_stage, _ in self.keys], bool)
        return np.flatnonzero(wanted[self.codes]) if len(wanted) else np.empty(0, np.intp)

    @cached_property
    def backward_units(self) -> dict[int, list[tuple[int, int]]]:
        """Stage → positions of the first and the last of its backwards for weights before each REDUCE_GRAD; of all of
        them where there is none."""
        found: dict[int, list[tuple[int, int]]] = {}
        for stage in {stage for _, stage, _ in self.keys}:
            positions = self.positions(stage, _WEIGHT_BACKWARDS)
            ends = np.searchsorted(positions, self.reductions.get(stage, []))
            units = [unit for unit in np.split(positions, ends) if len(unit)]
            if units:
                found[stage] = [(int(unit[0]), int(unit[-1])) for unit in units]
        return found

    @cached_property
    def reductions(self) -> dict[int, list[int]]:
        """Stage → positions of its REDUCE_GRAD."""
        stages = {stage for kind, stage, _ in self.keys if kind == Kind.REDUCE_GRAD}
        return {stage: self.positions(stage, frozenset((Kind.REDUCE_GRAD,))).tolist() for stage in stages}

    def first_position(self, kind: Kind) -> int:
        """Return the position of the rank's first instruction of a kind, or the number of instructions."""
        wanted = np.array([own == kind for own, *_ in self.keys], bool)
        found = np.flatnonzero(wanted[self.codes]) if wanted.any() else np.empty(0, np.intp)
        return int(found[0]) if len(found) else len(self.codes)

    def pending_positions(self, stage: int, accumulates: bool) -> tuple[IndexArray, IndexArray]:
        """Return the positions of the I that make pending gradients of a stage, and of the first instructions that run
        without them: the next W, or the instruction after the next B.

        `accumulates`: gradients stay unreduced until REDUCE_GRAD, so that only those before the first W or B behind it
        are pending.
        """
        key = stage, accumulates
        if not any(own[:2] == (Kind.I, stage) for own in self.keys):
            return np.empty(0, np.intp), np.empty(0, np.intp)
        if key not in self._pending:
            used = self.positions(stage, _WEIGHT_BACKWARDS | {Kind.I})
            kinds = [self.keys[code][0] for code in self.codes[used].tolist()]
            pairs = list(zip([Kind.W, *kinds], kinds, used.tolist(), strict=False))
            made = [place for before, kind, place in pairs if kind == Kind.I and before != Kind.I]
            taken = [place + (kind == Kind.B) for before, kind, place in pairs if kind != Kind.I and before == Kind.I]
            if accumulates:
                bounds = [-1, *self.reductions.get(stage, [])]
                firsts = [first for first, _ in self.backward_units.get(stage, [])]
                own = [(begin, first) for begin, first in zip(bounds, firsts, strict=False)]
                runs = [(one, next((end for end in taken if end > one), len(self.codes))) for one in made]
                pairs = [next((run for run in runs if begin < run[0] < first), None) for begin, first in own]
                kept = [run for run in pairs if run is not None] if firsts else runs[:1]
                made, taken = [one for one, _ in kept], [end for _, end in kept]
            taken = [place for place in taken if place < len(self.codes)]
            self._pending[key] = np.array(made, np.intp), np.array(taken, np.intp)
        return self._pending[key]

    def gather_positions(self, stage: int, reshards: bool) -> tuple[IndexArray, IndexArray]:
        """Return the positions that gather a stage's parameters, and those at whose end they are resharded: the end of
        each backward if `reshards`, else none. Where units of passes have them, UNSHARD and RESHARD do both."""
        key = stage, reshards
        if key not in self._gathers and len(dropped := self.positions(stage, frozenset((Kind.RESHARD,)))):
            self._gathers[key] = self.positions(stage, frozenset((Kind.UNSHARD,))), dropped
        if key not in self._gathers:
            # Where passes gather, UNSHARD makes copies from which they do.
            used = self.positions(stage, _NEEDS_PARAMS - {Kind.UNSHARD} if reshards else _NEEDS_PARAMS)
            if reshards:
                # An instruction gathers if the one before it that used the parameters resharded them.
                resharded = self.positions(stage, _RESHARDS)
                gathers = np.isin(np.append(-1, used[:-1]), np.append(-1, resharded))[: len(used)]
                self._gathers[key] = used[gathers], resharded
            else:
                self._gathers[key] = used[:1], np.empty(0, np.intp)
        return self._gathers[key]

    @cached_property
    def live_micro_batches(self) -> dict[int, int]:
        """Stage → its in-flight micro-batches (forward begun, backward not ended) when the rank has most of them."""
        return self._counts_at_most({Kind.F: 1, Kind.B: -1, Kind.W: -1})

    @cached_property
    def on_device_micro_batches(self) -> dict[int, int]:
        """Stage → its in-flight micro-batches with activations on the device when most are; the others are in host
        memory."""
        return self._counts_at_most({Kind.F: 1, Kind.B: -1, Kind.W: -1, Kind.OFFLOAD: -1, Kind.RELOAD: 1})

    def _counts_at_most(self, changes: Mapping[str, int]) -> dict[int, int]:
        """Return stage → count at the moment of the rank's largest total; `changes`: kind → change of the count. Of
        slices, as many as make up a micro-batch count as one."""
        change = np.array([changes.get(kind, 0) for kind, *_ in self.keys], np.intp)
        stages = {stage for kind, stage, _ in self.keys if kind == Kind.F}
        if not stages:
            return {}
        place = int(np.argmax(np.cumsum(change[self.codes])))
        counts = np.bincount(self.codes[: place + 1], minlength=len(self.keys)) * change
        most = dict.fromkeys(sorted(stages), 0)
        for (_, stage, _), count in zip(self.keys, counts.tolist(), strict=True):
            if count:
                most[stage] += count
        num_slices = 1 + max(part for _, _, part in self.keys)
        return {stage: -(-count // num_slices) for stage, count in most.items()}

    def max_away_bytes(self, sizes: Mapping[int, int]) -> int:
        """Return the peak bytes of activations on a tier where they leave within passes; `sizes`: stage → bytes of a
        micro-batch there."""
        if not any(sizes.values()):
            return 0
        signs = {Kind.F: 1, Kind.B: -1, Kind.I: -1}
        change = np.array([signs.get(kind, 0) * sizes.get(stage, 0) for kind, stage, _ in self.keys], np.int64)
        return int(np.cumsum(change[self.codes]).max(initial=0))

    def max_host_bytes(self, sizes: Mapping[int, Sequence[int]]) -> int:
        """Return the peak bytes of offloaded activations in host memory, where they stay from their forward to their
        backward; `sizes`: stage → offloaded bytes of each slice of a micro-batch."""
        if not any(kind == Kind.OFFLOAD for kind, *_ in self.keys):
            return 0
        change = np.zeros(len(self.codes) + 1, np.int64)
        # Looking up a member of an enumeration costs more than the rest of the loop.
        offload = Kind.OFFLOAD
        forward = Kind.F
        passes = (Kind.F, Kind.B, Kind.I)
        offloaded = {action[1:4] for action in self.actions if action[0] == offload}
        for position, (kind, stage, *unit, _) in enumerate(self.actions):
            if (stage, *unit) in offloaded and kind in passes:
                size = sizes[stage][unit[1]] if stage in sizes else 0
                change[position] += size * (1 if kind == forward else -1)
        return int(np.cumsum(change).max(initial=0))


def allocation_orders(program: Program) -> tuple[AllocationOrder, ...]:
    """Return the allocation order of each pipeline rank of a Program."""
    orders = []
    has_vocab_passes = any(item.action.kind == Kind.S for lanes in program.ranks for item in lanes.get("compute", ()))
    for rank, (lanes, messages) in enumerate(zip(program.ranks, program_message_counts(program), strict=True)):
        if has_vocab_passes:
            stage = program.placement.index(rank)
            messages[stage] = messages.get(stage, np.intp(0)) + vocab_buffer_counts(program, rank)
        kept = [place for place, item in enumerate(lanes.get("compute", ())) if item.action.kind in _PASSES]
        places = np.array([*(time for place in kept for time in (2 * place, 2 * place + 1)), -1], np.intp)
        orders.append(
            AllocationOrder(_allocating_actions(lanes), {stage: held[places] for stage, held in messages.items()})
        )
    return tuple(orders)


def schedule_allocation_order(
    schedule: Schedule,
    rank: int,
    gathers: bool,
    reduces: bool,
    offloads: Collection[int] = (),
    messages: Sequence[Mapping[int, IndexArray]] | None = None,
) -> AllocationOrder:
    """Return the allocation order of a rank of a schedule, the same as of its Program, without lowering it.

    For plans without vocabulary-parallel layers, pipeline replicas and updates that host and device share. `gathers`,
    `reduces`: the Program has UNSHARD, REDUCE_GRAD. `offloads`: stages whose activations are offloaded where there is
    time for the copies. `messages`: the schedule's `schedule_message_counts`, if they have been computed already.
    """
    stages = [stage for stage, holder in enumerate(schedule.placement) if holder == rank]
    before = [Action(Kind.UNSHARD, stage) for stage in stages if gathers]
    passes = schedule.ranks[rank]
    reductions = {}
    if reduces:
        last = {action[1]: action for action in passes if action[0] in _WEIGHT_BACKWARDS}
        reductions = {action: [Action(Kind.REDUCE_GRAD, stage)] for stage, action in last.items()}
    ends = 0, schedule.depth - 1
    after = []
    if schedule.placement[0] != schedule.placement[-1]:
        after += [Action(Kind.ALL_REDUCE_TIED, stage) for stage in stages if stage in ends]
    compute = order_with_copies(passes, offloads) if offloads else passes
    actions = [*before, *_insert_after(compute, reductions), *after]
    return AllocationOrder(actions, (messages or schedule_message_counts(schedule))[rank])


def _insert_after(order: Sequence[Action], inserted: Mapping[Action, Sequence[Action]]) -> Sequence[Action]:
    """Return an order with further actions after some of its own."""
    if not inserted:
        return order
    return [each for action in order for each in (action, *inserted.get(action, ()))]


def _allocating_actions(lanes: Mapping[Lane, Sequence[Instruction]]) -> list[Action]:
    collectives = lanes.get("collective", ())
    copied = {action.stage for action, _, _ in lanes.get("host_copy", ()) if action.kind == Kind.OFFLOAD}
    passes = [action for action, _, _ in lanes.get("compute", ())]
    placed = defaultdict[Action, list[Action]](list)
    before: list[Action] = []
    begin = -1  # the lane is walked in order
    for action, _, waits in collectives:
        if action[0] in _PLACED_COLLECTIVES and not action[4]:  # gradients of a version are summed where they are
            begin = max(begin, *(wait.index for wait in waits if wait.lane == "compute"), -1)
            (placed[passes[begin]] if begin >= 0 else before).append(action)
    compute = _insert_after(order_with_copies(passes, copied), placed)
    kept = _PASSES | _PLACED_COLLECTIVES
    updates = {
        action.stage: Action(Kind.DEVICE_UPDATE, action.stage) for action in passes if action[0] == Kind.DEVICE_UPDATE
    }
    return [*before, *(action for action in compute if action[0] in kept), *updates.values()]


# ----------------------------------------------------------------------------------------------------------------------
# Bytes


@dataclass(frozen=True, slots=True)
class InstructionMemory:
    """Changes that one kind of instruction of one stage makes to the bytes held on a rank."""

    before: int
    """Bytes added when it begins."""
    after: int
    """Bytes added when it ends; negative if it frees memory."""
    peak_candidates: tuple[PeakCandidate, ...]
    peak: int
    """Largest temporary bytes among the candidates."""
    first_backward_peak: int
    """Same in the stage's first backward of a step, less the gradients that remain after it; 0 for other kinds."""
    last_backward_peak: int
    """Same in the stage's last backward before its first reduction of a step, or of a step without any."""
    later_peak: int
    """Same before later reductions of a step, and in these."""
    gather_peak: int
    """Largest temporary bytes if it gathers parameters."""
    pending_peak: int
    """Largest temporary bytes if it makes pending gradients."""


InstructionMemoryCache = dict[tuple[Kind, StageMemory], InstructionMemory]
"""Computed entries; a StageMemory is a key by identity (`eq=False`), and the cache keeps it alive."""


def _instruction_memory(kind: Kind, memory: StageMemory, cache: InstructionMemoryCache) -> InstructionMemory:
    key = kind, memory
    if key not in cache:
        cache[key] = _make_instruction_memory(kind, memory)
    return cache[key]


def _make_instruction_memory(kind: Kind, memory: StageMemory) -> InstructionMemory:
    candidates = _COPY_PEAKS if kind in (Kind.OFFLOAD, Kind.RELOAD) else memory.peak_candidates.get(kind, ())
    offloaded = memory.offloaded.total
    saved = memory.saved.total
    deferred = memory.deferred.total
    logits = memory.vocab_parallel.total
    first = 0
    if kind in _WEIGHT_BACKWARDS:
        first = max((one.extra.total + one.first_gradients for one in candidates), default=0) - memory.gradients
    before = {Kind.F: saved, Kind.S: logits, Kind.RELOAD: offloaded}
    made, freed = (
        memory.kept_gradients * is_so for is_so in (memory.makes_kept_gradients, memory.frees_kept_gradients)
    )
    away = memory.away.total
    before |= {Kind.B: made + away, Kind.I: made + away}
    after = {
        Kind.F: -away,
        Kind.OFFLOAD: -offloaded,
        Kind.B: -saved - freed,
        Kind.I: deferred - saved - freed,
        Kind.W: -deferred,
        Kind.T: -logits,
        Kind.REDUCE_GRAD: -memory.freed_by_reduction,
    }
    peak = max((candidate.extra.total for candidate in candidates), default=0)
    return InstructionMemory(
        before=before.get(kind, 0),
        after=after.get(kind, 0),
        peak_candidates=candidates,
        peak=peak,
        first_backward_peak=first,
        last_backward_peak=max((one.extra.total for one in _last_candidates(kind, memory)), default=peak),
        later_peak=max((one.extra.total for one in _later_candidates(kind, memory)), default=peak),
        gather_peak=max((candidate.extra.total for candidate in _gather_candidates(kind, memory)), default=0),
        pending_peak=max((one.extra.total for one in memory.peak_candidates.get("pending", ())), default=0),
    )


def _gather_candidates(kind: Kind, memory: StageMemory) -> tuple[PeakCandidate, ...]:
    return memory.peak_candidates.get("gather F" if kind == Kind.F else "gather B", ())


def _last_candidates(kind: Kind, memory: StageMemory) -> tuple[PeakCandidate, ...]:
    return memory.peak_candidates.get("last B", ()) if kind == Kind.B else ()


def _later_candidates(kind: Kind, memory: StageMemory) -> tuple[PeakCandidate, ...]:
    name = {Kind.B: "later last B", Kind.REDUCE_GRAD: "later REDUCE_GRAD"}.get(kind, "")
    return memory.peak_candidates.get(name, ())


def _first_head_candidates(memory: StageMemory) -> tuple[PeakCandidate, ...]:
    return memory.peak_candidates.get("first T", ())


def _memory_of_stage(stages: Mapping[int, StageMemory], stage: int) -> StageMemory:
    """Return a stage's memory; for a stage of another rank, the memory of this rank's first stage."""
    return stages[stage] if stage in stages else next(iter(stages.values()))


def find_peak(
    order: AllocationOrder, stages: Mapping[int, StageMemory], cache: InstructionMemoryCache
) -> tuple[int, int]:
    """Return the position of the peak in the order, and its bytes."""
    resident = sum(stage.resident.total for stage in stages.values())
    if not len(order.codes):
        return 0, resident
    by_key = [
        _instruction_memory(kind, _memory_of_stage(stages, stage).of_slice(part), cache)
        for kind, stage, part in order.keys
    ]
    table = np.array([(memory.before, memory.after, memory.peak) for memory in by_key], np.int64)
    before, after, peak = table[order.codes].T
    # Gradients are allocated by the first backward of a step and stay until the optimizer step; where units of passes
    # reduce them, those of each, which are added to shards from the second unit on.
    for stage, units in order.backward_units.items():
        memory = _memory_of_stage(stages, stage)
        for number, (first, last) in enumerate(units):
            peak[first] = by_key[order.codes[first]].first_backward_peak
            before[first] += memory.gradients
            if last != first:
                own = by_key[order.codes[last]]
                peak[last] = max(peak[last], own.later_peak if number else own.last_backward_peak)
        for position in order.reductions.get(stage, [])[1:]:
            peak[position] = by_key[order.codes[position]].later_peak
            after[position] -= memory.gradients - memory.freed_by_reduction
    gather_peak = np.array([memory.gather_peak for memory in by_key], np.int64)
    pending_peak = np.array([memory.pending_peak for memory in by_key], np.int64)
    for stage, memory in stages.items():
        if memory.gathered_params:
            gathered, resharded = order.gather_positions(stage, not memory.keeps_gathered)
            before[gathered] += memory.gathered_params
            peak[gathered] = np.maximum(peak[gathered], gather_peak[order.codes[gathered]])
            after[resharded] -= memory.gathered_params
        if memory.head_gradients and (position := order.first_position(Kind.T)) < len(before):
            after[position] += memory.head_gradients
            peak[position] = max([peak[position], *(one.extra.total for one in _first_head_candidates(memory))])
        if memory.embedding_gradients and (position := order.first_position(Kind.EMB_W)) < len(before):
            (before if memory.accumulates_gradients else after)[position] += memory.embedding_gradients
        if memory.pending_gradients:
            made, taken = order.pending_positions(stage, memory.accumulates_gradients)
            after[made] += memory.pending_gradients
            before[taken] -= memory.pending_gradients
            peak[made] = np.maximum(peak[made], pending_peak[order.codes[made]])
    held = np.cumsum(before + after) - after + peak
    for stage, memory in stages.items():
        if memory.message_bytes and stage in order.messages:
            held += order.messages[stage] * memory.message_bytes
    position = int(np.argmax(held))
    return position, resident + int(held[position])


def peak_terms(
    order: AllocationOrder, stages: Mapping[int, StageMemory], cache: InstructionMemoryCache | None = None
) -> tuple[str, MemoryTerms]:
    """Return the peak of one rank: its instruction with the moment within it, and the memory held then, by term."""
    cache = {} if cache is None else cache
    position, _ = find_peak(order, stages, cache)
    moment, terms = _terms_at(order, position, stages, cache)
    return f"{order.actions[position]}, {moment}", terms


def _terms_at(
    order: AllocationOrder, position: int, stages: Mapping[int, StageMemory], cache: InstructionMemoryCache
) -> tuple[str, MemoryTerms]:
    """Return the memory held at the peak of one instruction, by term, and the name of the moment.

    The same sums as in `find_peak`, but by term and for a single position: counts of the instructions done so far give
    the numbers of micro-batches that are saved, deferred, offloaded.
    """
    counts = np.bincount(order.codes[:position], minlength=len(order.keys)).tolist()
    done = defaultdict(int, zip(order.keys, counts, strict=True))
    kind, stage, part = order.keys[order.codes[position]]
    own = _memory_of_stage(stages, stage).of_slice(part)
    units = order.backward_units.get(stage, [])
    is_first = any(first == position for first, _ in units)
    candidates = list(_instruction_memory(kind, own, cache).peak_candidates)
    if position in order.reductions.get(stage, [])[1:]:
        candidates = list(_later_candidates(kind, own))
    for number, (first, last) in enumerate(units):
        if first != last == position:
            candidates += _later_candidates(kind, own) if number else _last_candidates(kind, own)
    if own.gathered_params and stage in stages:
        gathered, _ = order.gather_positions(stage, not own.keeps_gathered)
        if position in gathered:
            candidates += _gather_candidates(kind, own)
    if (
        own.pending_gradients
        and stage in stages
        and position in order.pending_positions(stage, own.accumulates_gradients)[0]
    ):
        candidates += own.peak_candidates.get("pending", ())
    if position == order.first_position(Kind.T):
        candidates += _first_head_candidates(own)
    done[kind, stage, part] += kind in (Kind.F, Kind.S, Kind.RELOAD)
    in_vocab_passes = sum(done[Kind.S, index, 0] - done[Kind.T, index, 0] for index in stages)
    peak = max(candidates, key=lambda one: one.extra.total + (one.first_gradients if is_first else 0))
    terms = peak.extra + MemoryTerms(gradients=peak.first_gradients if is_first else 0)
    reduce = Kind.REDUCE_GRAD
    for index, memory in stages.items():
        gathered, resharded = order.gather_positions(index, not memory.keeps_gathered)
        is_gathered = np.count_nonzero(gathered <= position) > np.count_nonzero(resharded < position)
        with_gradients = sum(first < position for first, _ in order.backward_units.get(index, []))
        with_gradients -= max(0, done[reduce, index, 0] - 1)
        made_at = position + memory.accumulates_gradients  # reduced ones are made as the pass ends
        of_head = memory.head_gradients * (order.first_position(Kind.T) < position)
        of_embedding = memory.embedding_gradients * (order.first_position(Kind.EMB_W) < made_at)
        made, taken = order.pending_positions(index, memory.accumulates_gradients)
        is_pending = np.count_nonzero(made < position) > np.count_nonzero(taken <= position)
        terms += memory.resident
        for number, one in enumerate(memory.slices or (memory,)):
            terms += _terms_of_slice(one, index, number, done)
        if index == stage and kind in (Kind.F, Kind.B, Kind.I):  # what is away before and after is here
            terms += memory.away
        if memory.slices:
            begun = done[Kind.B, index, len(memory.slices) - 1] + done[Kind.I, index, len(memory.slices) - 1]
            begun += (kind, stage, part) in [(one, index, len(memory.slices) - 1) for one in (Kind.B, Kind.I)]
            summing = begun - done[Kind.B, index, 0] - done[Kind.I, index, 0]
            terms += MemoryTerms(workspace=summing * memory.slices[0].kept_gradients)
        terms += memory.vocab_parallel.scaled(in_vocab_passes) + MemoryTerms(
            workspace=memory.pending_gradients if is_pending else 0,
            communication=int(order.messages[index][position]) * memory.message_bytes if index in order.messages else 0,
            gathered_parameters=memory.gathered_params if is_gathered else 0,
            gradients=memory.gradients * with_gradients
            + of_head
            + of_embedding
            - memory.freed_by_reduction * min(1, done[reduce, index, 0]),
        )
    return peak.name, terms


def _terms_of_slice(memory: StageMemory, stage: int, part: int, done: Mapping[InstructionKey, int]) -> MemoryTerms:
    """Return what a stage holds of one slice, or of whole micro-batches, after so many instructions of each kind."""
    forwards, backwards = done[Kind.F, stage, part], done[Kind.B, stage, part] + done[Kind.I, stage, part]
    deferred = done[Kind.I, stage, part] - done[Kind.W, stage, part]
    returned = done[Kind.RELOAD, stage, part] - done[Kind.OFFLOAD, stage, part]
    return (
        (memory.saved + memory.away.scaled(-1)).scaled(forwards - backwards)
        + memory.deferred.scaled(deferred)
        + memory.offloaded.scaled(returned)
    )
