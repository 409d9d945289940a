"""Vocabulary parallelism: adds to a schedule the passes of each rank's vocabulary shard.

Embedding and head are split evenly over all pipeline ranks (Yeung et al. 2024, arXiv:2411.05288, algorithm 2: one
barrier between the logits, S, and the backward that starts from them). The collectives are overlapped with compute, so
that the last stage can run another forward while the statistics of a micro-batch's logits are still under way.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, replace
from heapq import heappush
from itertools import accumulate, islice

from muster.schedule.action import BACKWARDS, Action, Kind
from muster.schedule.bubble_fill import EventRun
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.timing import PassTimes, Timing, time_passes
from muster.spec.errors import InfeasibleError
from muster.spec.schedules import SCHEDULES

LOOKAHEAD = 2
"""Micro-batches whose embeddings are looked up before the first stage needs them."""
MAX_DEFERRED = 2
"""Backward passes T or EMB_W that may wait until a rank is idle; a waiting T keeps its logits."""


@dataclass(frozen=True, slots=True)
class VocabTimes:
    """Times of one vocabulary shard for one micro-batch; the forward of a rank's whole share takes 1."""

    embedding: float = 0.05
    logits: float = 0.5
    backward: float = 0.25
    """Time of T, the backward of the head; EMB_W takes as long as the lookup."""

    def of_kind(self, kind: Kind) -> float:
        times = {Kind.S: self.logits, Kind.T: self.backward}
        return times.get(kind, self.embedding)

    def scaled(self, unit_s: float) -> "VocabTimes":
        """Return the times scaled so that the forward of a rank's whole share takes `unit_s`."""
        return VocabTimes(self.embedding * unit_s, self.logits * unit_s, self.backward * unit_s)


@dataclass(frozen=True, slots=True)
class VocabSchedule:
    """Schedule with vocabulary passes."""

    schedule: Schedule
    """Passes of the schedule, in their new order."""
    orders: tuple[tuple[Action, ...], ...]
    """Per rank, these passes and the vocabulary passes."""
    ends_s: tuple[tuple[float, ...], ...]
    """Per rank, when each pass of `schedule` nominally ends."""
    order_ends_s: tuple[tuple[float, ...], ...]
    """Per rank, when each pass of `orders` nominally ends."""
    collectives: tuple[tuple[Kind, int], ...]
    """(kind, micro-batch) of the collectives, in the order common to all ranks."""


def add_vocab_passes(schedule: Schedule, times: VocabTimes, spec: ScheduleSpec | None = None) -> VocabSchedule:
    """Return a schedule of one replica with vocabulary passes on every rank.

    The order is that of an event-driven run in nominal times (in the times of `spec`, if given) in which no rank idles
    while it has something to do: logits once the hidden state is there, then the next embedding lookup, then the first
    ready pass of the schedule's order, then deferred T and EMB_W. A rank saves at most one micro-batch's activations of
    a stage more than under `schedule`.
    """
    if spec is None:
        chunks = schedule.num_stages // len(schedule.ranks)
        spec = ScheduleSpec(len(schedule.ranks), schedule.num_micro_batches, chunks)
    return _VocabRun(schedule, times.scaled(sum(spec.forward_s) / spec.num_ranks), spec).result()


def time_with_vocab_passes(schedule: Schedule, times: VocabTimes, spec: ScheduleSpec) -> tuple[Schedule, Timing]:
    """Return the schedule with its vocabulary passes and their timing, for `muster schedule`.

    Raises InfeasibleError for two replicas, an asynchronous schedule or paths, and if a rank then exceeds the spec's
    memory limit.
    """
    if schedule.replicas > 1:
        raise InfeasibleError(
            f"vocabulary parallelism needs a schedule of one replica; {schedule.name} has {schedule.replicas}"
        )
    entry = SCHEDULES.get(schedule.name)
    if schedule.paths or (entry is not None and entry.is_asynchronous):
        why = "whose micro-batches have paths of their own" if schedule.paths else "which has no flush after each step"
        raise InfeasibleError(f"vocabulary parallelism doesn't go with {schedule.name}, {why}")
    vocab_schedule = add_vocab_passes(schedule, times, spec)
    vocab_times = times.scaled(sum(spec.forward_s) / spec.num_ranks)
    passes_s = {Kind.F: spec.forward_s, Kind.I: spec.input_backward_s, Kind.W: spec.weight_backward_s}
    passes_s[Kind.B] = tuple(i + w for i, w in zip(passes_s[Kind.I], passes_s[Kind.W], strict=True))
    begins_s, work_s, peaks = [], [], []
    for order, ends_s in zip(vocab_schedule.orders, vocab_schedule.order_ends_s, strict=True):
        took_s = [passes_s[kind][stage] if kind in passes_s else vocab_times.of_kind(kind) for kind, stage, *_ in order]
        begins_s.append([end_s - time_s for end_s, time_s in zip(ends_s, took_s, strict=True)])
        work_s.append(sum(took_s))
        kept = accumulate({Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0) for action in order)
        peaks.append(max(kept) * spec.stage_activation)
    if max(peaks) > spec.memory_limit * (1 + 1e-9):
        raise InfeasibleError(
            f"{schedule.name} with vocabulary passes keeps {max(peaks):g} micro-batches' activations on a rank,"
            f" more than the limit of {spec.memory_limit:g}"
        )
    shown = replace(vocab_schedule.schedule, ranks=vocab_schedule.orders)
    return shown, Timing(tuple(begins_s), vocab_schedule.order_ends_s, tuple(work_s), tuple(peaks))


class _VocabRun(EventRun):
    def __init__(self, schedule: Schedule, times: VocabTimes, spec: ScheduleSpec) -> None:
        super().__init__(schedule, spec, 0, weights_fill=False)
        ones = [1.0] * schedule.depth
        for rank, peak in zip(
            self.ranks, time_passes(schedule, PassTimes(ones, ones, ones)).peak_activation, strict=True
        ):
            rank.limit = peak + 1
        self.schedule, self.times = schedule, times
        self.trains = any(action.kind in BACKWARDS for action in self.actions)
        first = schedule.ranks[schedule.placement[0]]
        self.inputs = [action.micro_batch for action in first if action[:2] == (Kind.F, 0)]
        """Micro-batches in the order in which the first stage needs them."""
        self.remaining_inputs = iter(self.inputs)
        self.ready_vocab_passes: list[dict[str, deque[tuple[float, int]]]] = [
            defaultdict(deque) for _ in schedule.ranks
        ]
        """Per rank and kind of vocabulary pass: (seconds from which it is ready, micro-batch)."""
        self.missing_ranks = {
            (kind, micro_batch): len(self.ranks) for kind in (Kind.EMB_F, Kind.S) for micro_batch in self.inputs
        }
        """(kind, micro-batch) of a contribution to a collective → ranks that have not made it yet."""
        self.collective_begin_s: dict[tuple[Kind, int], float] = {}
        """(kind, micro-batch) of a collective → seconds at which it begins."""
        self.orders_s: list[list[tuple[Action, float]]] = [[] for _ in schedule.ranks]
        """Per rank, all passes with their ends."""

    def result(self) -> VocabSchedule:
        """Run the schedule. Raises ProgramError if no rank could follow its order."""
        self.orders()
        passes = [[(action, end_s) for action, end_s in order if action in self.numbers] for order in self.orders_s]
        old = self.schedule
        ranks = tuple(tuple(action for action, _ in order) for order in passes)
        return VocabSchedule(
            Schedule(old.name, old.placement, old.num_micro_batches, ranks),
            tuple(tuple(action for action, _ in order) for order in self.orders_s),
            tuple(tuple(end_s for _, end_s in order) for order in passes),
            tuple(tuple(end_s for _, end_s in order) for order in self.orders_s),
            tuple(sorted(self.collective_begin_s, key=lambda key: (self.collective_begin_s[key], key[1], key[0]))),
        )

    def _begin(self) -> None:
        for _ in range(LOOKAHEAD):
            self._request_next_embedding(0.0)

    def _request_next_embedding(self, time_s: float) -> None:
        for micro_batch in islice(self.remaining_inputs, 1):
            self._offer(Kind.EMB_F, micro_batch, time_s)

    # ------------------------------------------------------------------------------------------------------------------
    # One rank's next pass

    def _step(self, time_s: float, index: int) -> None:
        rank = self.ranks[index]
        if rank.free_s > time_s + self.tolerance_s:
            return
        until_s = time_s + self.tolerance_s
        vocab_pass = self._pop_vocab_pass(index, until_s, urgent=True)
        number = None if vocab_pass else rank.pop_ready(self.ready_s, until_s)
        vocab_pass = vocab_pass or (self._pop_vocab_pass(index, until_s, urgent=False) if number is None else None)
        if vocab_pass is None and number is None:
            return
        action = vocab_pass or self.actions[number or 0]
        seconds = self.times.of_kind(action.kind) if vocab_pass else self.seconds[action.kind][action.stage]
        rank.free_s = end_s = time_s + seconds
        heappush(self.events, (end_s, index))
        self.orders_s[index].append((action, end_s))
        if vocab_pass:
            self._end_vocab_pass(vocab_pass.kind, vocab_pass.micro_batch, end_s)
        else:
            self._end_pass(action, end_s)

    def _pop_vocab_pass(self, index: int, until_s: float, urgent: bool) -> Action | None:
        for kind, patience in ((Kind.S, 0), (Kind.EMB_F, 0), (Kind.T, MAX_DEFERRED), (Kind.EMB_W, MAX_DEFERRED)):
            waiting = self.ready_vocab_passes[index][kind]
            if sum(ready_s <= until_s for ready_s, _ in waiting) > (patience if urgent else 0):
                return Action(kind, self.schedule.placement.index(index), waiting.popleft()[1])
        return None

    # ------------------------------------------------------------------------------------------------------------------
    # Consequences of a finished pass

    def _end_pass(self, action: Action, end_s: float) -> None:
        kind, stage, micro_batch, *_ = action
        for follower in self._dependents(action):
            away = self.rank_by_number[follower] != self.schedule.placement[stage]
            self._set_ready(follower, end_s + self.spec.p2p_s * away)
        if kind == Kind.F and stage == 0:
            self._request_next_embedding(end_s)
        if kind == Kind.F and stage == self.depth - 1:
            self._begin_collective(Kind.HIDDEN_BCAST, micro_batch, end_s, Kind.S)
        if kind in BACKWARDS and stage == 0:
            self._begin_collective(Kind.EMB_GRAD_BCAST, micro_batch, end_s, Kind.EMB_W)

    def _end_vocab_pass(self, kind: Kind, micro_batch: int, end_s: float) -> None:
        if kind not in (Kind.EMB_F, Kind.S):
            return
        self.missing_ranks[kind, micro_batch] -= 1
        collective = Kind.EMB_REDUCE if kind == Kind.EMB_F else Kind.LOGIT_STATS
        begin_s = max(end_s, self.collective_begin_s.get((collective, micro_batch), 0.0))
        self.collective_begin_s[collective, micro_batch] = begin_s
        if self.missing_ranks[kind, micro_batch]:
            return
        begin_s += self.spec.p2p_s
        if kind == Kind.EMB_F:
            self._set_ready(self.numbers[Action(Kind.F, 0, micro_batch)], begin_s)
        elif self.trains:
            self._set_ready(self._backward_of(self.depth - 1, micro_batch), begin_s)
            self._offer(Kind.T, micro_batch, begin_s)

    def _begin_collective(self, kind: Kind, micro_batch: int, begin_s: float, then: Kind) -> None:
        self.collective_begin_s[kind, micro_batch] = begin_s
        self._offer(then, micro_batch, begin_s + self.spec.p2p_s)

    def _offer(self, kind: Kind, micro_batch: int, time_s: float) -> None:
        for index, waiting in enumerate(self.ready_vocab_passes):
            waiting[kind].append((time_s, micro_batch))
            heappush(self.events, (time_s, index))

    def _dependents(self, action: Action) -> list[int]:
        """Return the passes that become ready after `action`.

        Unlike in a plain run, the backward of the last stage waits for the logit statistics of all ranks.
        """
        kind, stage, micro_batch, *_ = action
        if kind == Kind.F:
            return [self.numbers[Action(Kind.F, stage + 1, micro_batch)]] if stage < self.depth - 1 else []
        own = [self.numbers[Action(Kind.W, stage, micro_batch)]] if kind == Kind.I else []
        return own + ([self._backward_of(stage - 1, micro_batch)] if kind in BACKWARDS and stage else [])

    def _backward_of(self, stage: int, micro_batch: int) -> int:
        whole = Action(Kind.B, stage, micro_batch)
        return self.numbers[whole if whole in self.numbers else Action(Kind.I, stage, micro_batch)]
