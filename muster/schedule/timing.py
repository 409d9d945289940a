"""Timing of a Schedule: a walk of every rank through its passes, without lowering."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from muster.schedule.action import BACKWARDS, Action, Kind
from muster.schedule.paths import stage_along, wrong_path
from muster.schedule.program import ProgramError
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.units import pluralize


@dataclass(frozen=True, slots=True)
class Timing:
    """Begin and end of each action of a schedule in seconds, and the figures that follow.

    `begin_s[rank][i]` and `end_s[rank][i]` belong to `schedule.ranks[rank][i]`. Definitions: a *span bubble* is a
    rank's idle time between its first begin and its last end; the *bubble* is the makespan minus the work of the
    busiest rank.
    """

    begin_s: tuple[Sequence[float], ...]
    end_s: tuple[Sequence[float], ...]
    work_s: tuple[float, ...]
    """Per rank, the sum of its passes' times."""
    peak_activation: tuple[float, ...]
    """Per rank, the most activations saved for backwards at once, in the unit of `ScheduleSpec.memory_limit`."""

    @property
    def makespan_s(self) -> float:
        """Seconds from the first begin to the last end on any rank."""
        return max(ends[-1] for ends in self.end_s if ends) - min(begins[0] for begins in self.begin_s if begins)

    @property
    def sort_key(self) -> tuple[float, float]:
        """Makespan to nine digits, as equal sums of times differ by rounding, then peak of memory."""
        return float(f"{self.makespan_s:.9g}"), max(self.peak_activation)

    @property
    def bubble_s(self) -> float:
        return self.makespan_s - max(self.work_s)

    @property
    def span_bubble_s(self) -> tuple[float, ...]:
        rows = zip(self.begin_s, self.end_s, self.work_s, strict=True)
        return tuple(ends[-1] - begins[0] - work_s if ends else 0.0 for begins, ends, work_s in rows)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of each stage's passes by depth and of a p2p transfer, and the size of one stage's activations: of a
    micro-batch, or of one of its slices."""

    forward_s: Sequence[float]
    input_backward_s: Sequence[float]
    weight_backward_s: Sequence[float]
    p2p_s: float = 0.0
    stage_activation: float = 1.0
    pair_share: float = 1.0
    """Time of a forward and a backward that run as one, as a share of that of both one after another."""
    link_s: Sequence[Sequence[float]] = ()
    """Seconds of a p2p transfer from each pipeline rank to each, where they differ; empty: `p2p_s`."""
    link_busy_s: Sequence[Sequence[float]] = ()
    """Seconds for which such a transfer occupies the sender's outgoing link, for searches of paths; empty: none."""


WHY_AFTER = (
    ", whose keys and values it reads",
    ", which adds to the gradients of its keys and values",
)
"""Reasons why a forward, and a backward, of a slice comes after that of another slice of its sequence."""


def time_schedule(schedule: Schedule, spec: ScheduleSpec) -> Timing:
    """Return `time_passes` with the times of a spec. Raises ProgramError also if the two differ in size."""
    size = (schedule.num_stages, schedule.replicas, schedule.num_units)
    if size != (spec.depth * spec.replicas, spec.replicas, spec.num_micro_batches * spec.num_steps * spec.num_slices):
        raise ProgramError(
            f"schedule {schedule.name} has {size[0]} stages, {size[1]} replicas and {size[2]} micro-batches,"
            f" its setting {spec.depth * spec.replicas}, {spec.replicas} and {spec.num_micro_batches * spec.num_slices}"
        )
    share = 1 / spec.num_slices
    times_s = (spec.forward_s, spec.input_backward_s, spec.weight_backward_s)
    forward_s, input_s, weight_s = (tuple(time_s * share for time_s in times) for times in times_s)
    pair_share = 1.0 if spec.pair_share is None else spec.pair_share
    own = PassTimes(
        forward_s, input_s, weight_s, spec.p2p_s * share, spec.stage_activation * share, pair_share, spec.link_s
    )
    return time_passes(schedule, own)


def time_passes(schedule: Schedule, times: PassTimes) -> Timing:
    """Return when each pass begins and ends.

    A pass begins when the one before it on its rank is over and its input is there: at once from a stage on the same
    rank, `p2p_s` after the end of the pass that makes it on another rank. `B` takes the time of I and W. A forward and
    a backward that are a pair begin together, and their results are there when both are over; each is given its share
    of their time. An activation is saved from F until B or W. Raises ProgramError naming the action that is missing,
    duplicated, on the wrong rank or in an order that no rank could follow.
    """
    _check_shape(schedule)
    walk = _TimingWalk(schedule, times)
    walk.run()
    return Timing(tuple(walk.begin_s), tuple(walk.end_s), tuple(walk.work_s), tuple(walk.peak_activation))


def _check_shape(schedule: Schedule) -> None:
    """Check what can be seen rank by rank, with C-level loops only: searches come here very often."""
    if schedule.num_micro_batches < 1 or schedule.depth < 1:
        raise ProgramError(
            f"a schedule needs at least one stage and one micro-batch, {schedule.name} has {schedule.num_stages}"
            f" and {schedule.num_micro_batches}"
        )
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < len(schedule.ranks):
            raise ProgramError(f"stage {stage} lies on rank {rank}, but the ranks are 0 to {len(schedule.ranks) - 1}")
    for rank, order in enumerate(schedule.ranks):
        if not order:
            continue
        kinds, stages, micro_batches, slices, versions = zip(*order, strict=True)
        held = {stage for stage, holder in enumerate(schedule.placement) if holder == rank}
        good = held.issuperset(stages) and min(micro_batches) >= 0 and max(micro_batches) < schedule.num_micro_batches
        good = (
            good
            and {Kind.F, Kind.B, Kind.I, Kind.W}.issuperset(kinds)
            and (not any(versions) or schedule.num_steps > 1)
        )
        good = good and min(slices) >= 0 and max(slices) < schedule.num_slices
        if not good or len(set(order)) < len(order):
            raise ProgramError(_wrong_shape(schedule, rank))
    if (fault := wrong_path(schedule.paths, schedule.num_stages, schedule.num_micro_batches)) is not None:
        raise ProgramError(fault)
    for rank, order in enumerate(schedule.ranks if schedule.paths else ()):
        for action in order:
            if action.stage not in schedule.paths[action.micro_batch]:
                raise ProgramError(f"{action} is on rank {rank}, but micro-batch {action.micro_batch} skips its stage")
    if schedule.pairs and (fault := wrong_pair(schedule.ranks, schedule.pairs)) is not None:
        raise ProgramError(fault)


def _wrong_shape(schedule: Schedule, rank: int) -> str:
    seen: set[Action] = set()
    for action in schedule.ranks[rank]:
        if action.kind not in (Kind.F, Kind.B, Kind.I, Kind.W):
            return f"{action} on rank {rank} is no pass; a schedule has F, B, I and W"
        if not 0 <= action.stage < schedule.num_stages or not 0 <= action.micro_batch < schedule.num_micro_batches:
            return (
                f"{action} on rank {rank} is outside of {schedule.num_stages} stages"
                f" and {schedule.num_micro_batches} micro-batches"
            )
        if schedule.placement[action.stage] != rank:
            return (
                f"{action} is on rank {rank}, but stage {action.stage} lies on rank {schedule.placement[action.stage]}"
            )
        if not 0 <= action.slice < schedule.num_slices:
            return f"{action} on rank {rank} is outside of {pluralize(schedule.num_slices, 'slice')} per sequence"
        if action.version and schedule.num_steps == 1:
            return f"{action} on rank {rank} is of a version, which a schedule of one step has not"
        if action in seen:
            return f"{action} is on rank {rank} twice"
        seen.add(action)
    raise AssertionError("there is something wrong with the order")


def wrong_pair(ranks: Sequence[Sequence[Action]], pairs: Collection[Action]) -> str | None:
    """Return what is wrong with the pairs in the orders of passes of all ranks, in one sentence; None if nothing is."""
    found = 0
    for rank, order in enumerate(ranks):
        for index, action in enumerate(order):
            if action not in pairs:
                continue
            found += 1
            after = order[index + 1] if index + 1 < len(order) else None
            if action.kind != Kind.F or after is None or after.kind != Kind.B or after.stage == action.stage:
                what = "nothing" if after is None else str(after)
                return (
                    f"{action} on rank {rank} runs as one with the pass after it, which is {what}: expected a forward"
                    " and, after it, a backward B of another stage"
                )
    if found < len(pairs):
        missing = min(set(pairs) - {action for order in ranks for action in order})
        return f"{missing} runs as one with a backward, but is on no rank"
    return None


class _TimingWalk:
    """Walk of all ranks that follows the data: each rank runs until it needs a time that is not known yet."""

    def __init__(self, schedule: Schedule, times: PassTimes) -> None:
        self.schedule = schedule
        self.times = times
        count = len(schedule.ranks)
        self.begin_s: list[list[float]] = [[] for _ in range(count)]
        self.end_s: list[list[float]] = [[] for _ in range(count)]
        self.work_s, self.peak_activation = [0.0] * count, [0.0] * count
        self.backwards = schedule.num_stages * schedule.num_units
        self.finished_s = [-1.0] * (2 * self.backwards)
        """Seconds when the forward of stage × unit is over, a unit being a micro-batch or a slice of one; from
        `backwards` on, the same for B or I. −1: not yet."""
        placement = schedule.placement
        self.p2p_s = [self._transfer_s(one, other) for one, other in pairwise(placement)]
        """P2p seconds from each stage to the next one, or back."""
        self.waiting: dict[int, int] = {}
        """Index into `finished_s` → rank that waits for it."""
        self.ready = list(range(count))

    def _transfer_s(self, one: int, other: int) -> float:
        """Return the p2p seconds from one rank to another."""
        if one == other:
            return 0.0
        return self.times.link_s[one][other] if self.times.link_s else self.times.p2p_s

    def run(self) -> None:
        """Run all ranks to their ends. Raises ProgramError if one gets stuck or work is left over."""
        walks = [self._walk(rank) for rank in self.ready]
        while self.ready:
            rank = self.ready.pop()
            place = next(walks[rank], -1)
            if place >= 0:
                self.waiting[place] = rank
        if self.waiting:
            raise ProgramError(self._describe_deadlock())
        self._check_complete()

    def _walk(self, rank: int) -> Iterator[int]:
        """Yield each index into `finished_s` that the rank waits for."""
        over_s, waiting, times, p2p_s = self.finished_s, self.waiting, self.times, self.p2p_s
        depth, count, backwards = self.schedule.depth, self.schedule.num_units, self.backwards
        slices = self.schedule.num_slices
        begin, end = self.begin_s[rank].append, self.end_s[rank].append
        time_s = work_s = 0.0
        alive = peak = 0
        split: set[int] = set()
        """Stage × unit pairs whose I is over and whose W is not."""
        pairs, held = self.schedule.pairs, -1
        """`held`: the forward of the pair that the rank is in."""
        order, paths = self.schedule.ranks[rank], self.schedule.paths
        for index, (kind, stage, micro_batch, part, _) in enumerate(order):
            level = stage % depth
            place = stage * count + micro_batch * slices + part
            source = -1
            transfer_s = 0.0
            if kind == Kind.F:
                duration_s = times.forward_s[level]
                if part and over_s[place - 1] < 0:
                    raise ProgramError(self._wrong_slice(Action(kind, stage, micro_batch, part), rank))
                if level:
                    source = place - count
                    transfer_s = p2p_s[stage - 1]
                alive += 1
                peak = max(peak, alive)
            elif kind == Kind.W:
                duration_s = times.weight_backward_s[level]
                if place not in split:
                    action = Action(kind, stage, micro_batch, part)
                    raise ProgramError(f"{action} on rank {rank} has no {action._replace(kind=Kind.I)} before it")
                split.remove(place)
                alive -= 1
            else:
                duration_s = times.input_backward_s[level]
                if over_s[place] < 0 or over_s[place + backwards] >= 0:
                    raise ProgramError(self._wrong_backward(Action(kind, stage, micro_batch, part), rank))
                if part < slices - 1 and over_s[place + backwards + 1] < 0:
                    raise ProgramError(self._wrong_slice(Action(kind, stage, micro_batch, part), rank))
                if kind == Kind.B:
                    duration_s += times.weight_backward_s[level]
                    alive -= 1
                else:
                    split.add(place)
                place += backwards
                if level < depth - 1:
                    source = place + count
                    transfer_s = p2p_s[stage]
            if paths:
                source, transfer_s = self._source_on_path(order[index])
            if source >= 0:
                while over_s[source] < 0:
                    yield source
                time_s = max(time_s, over_s[source] + transfer_s)
            paired = bool(pairs) and order[index] in pairs
            if paired:
                source, transfer_s = self._source_of_backward(order[index + 1])
                if source >= 0:
                    while over_s[source] < 0:
                        yield source
                    time_s = max(time_s, over_s[source] + transfer_s)
            if paired or held >= 0:
                duration_s *= times.pair_share
            begin(time_s)
            time_s += duration_s
            work_s += duration_s
            end(time_s)
            made = () if kind == Kind.W or paired else (place,) if held < 0 else (held, place)
            for one in made:
                over_s[one] = time_s
                if one in waiting:
                    self.ready.append(waiting.pop(one))
            held = place if paired else -1
        if split:
            raise ProgramError(f"{self._action(Kind.W, min(split))} is missing on rank {rank}")
        self.work_s[rank], self.peak_activation[rank] = work_s, peak * times.stage_activation

    def _source_of_backward(self, action: Action) -> tuple[int, float]:
        """Return the index into `finished_s` of the backward that a backward waits for, −1 for none, and the p2p
        seconds from there."""
        _, stage, micro_batch, part, _ = action
        if stage % self.schedule.depth == self.schedule.depth - 1:
            return -1, 0.0
        place = (stage + 1) * self.schedule.num_units + micro_batch * self.schedule.num_slices + part
        return place + self.backwards, self.p2p_s[stage]

    def _source_on_path(self, action: Action) -> tuple[int, float]:
        """Return the index into `finished_s` of what a pass of a micro-batch with a path waits for, −1 for nothing, and
        the p2p seconds from there."""
        kind, stage, micro_batch, *_ = action
        if kind == Kind.W:
            return -1, 0.0
        other = stage_along(self.schedule.paths, stage, micro_batch, -1 if kind == Kind.F else 1)
        if other < 0:
            return -1, 0.0
        ranks = self.schedule.placement[other], self.schedule.placement[stage]
        place = other * self.schedule.num_units + micro_batch
        return place + self.backwards * (kind != Kind.F), self._transfer_s(*ranks)

    def _action(self, kind: Kind, place: int) -> Action:
        """Return the pass at a stage × unit pair."""
        stage, unit = divmod(place, self.schedule.num_units)
        return Action(kind, stage, *divmod(unit, self.schedule.num_slices))

    def _wrong_backward(self, action: Action, rank: int) -> str:
        _, stage, micro_batch, part, _ = action
        unit = micro_batch * self.schedule.num_slices + part
        if self.finished_s[stage * self.schedule.num_units + unit] < 0:
            return f"{action} on rank {rank} has no {action._replace(kind=Kind.F)} before it"
        return f"rank {rank} has both {action._replace(kind=Kind.B)} and {action._replace(kind=Kind.I)}"

    def _wrong_slice(self, action: Action, rank: int) -> str:
        needed = action._replace(slice=action.slice + (-1 if action.kind == Kind.F else 1))
        return f"{action} on rank {rank} comes before {needed}{WHY_AFTER[action.kind != Kind.F]}"

    def _describe_deadlock(self) -> str:
        """Return a sentence about the missing pass or, if none is missing, about who waits for whom."""
        words = []
        for place, rank in self.waiting.items():
            backward, rest = divmod(place, self.backwards)
            wanted = [self._action(kind, rest) for kind in (BACKWARDS if backward else (Kind.F,))]
            action = self.schedule.ranks[rank][len(self.end_s[rank])]
            holder = self.schedule.placement[wanted[0].stage]
            found = [one for one in wanted if one in self.schedule.ranks[holder]]
            if not found:
                return f"{wanted[0]} is missing on rank {holder}; {action} on rank {rank} waits for it"
            words.append(f"{action} on rank {rank} waits for {found[0]} on rank {holder}")
        return f"the ranks wait for each other: {', '.join(sorted(words))}"

    def _check_complete(self) -> None:
        """Check that every micro-batch runs through one replica: forward and, if there is any backward, backward."""
        schedule, count, slices = self.schedule, self.schedule.num_units, self.schedule.num_slices
        trains = max(self.finished_s[self.backwards :]) >= 0
        for unit in range(count):
            micro_batch = unit // slices
            first = range(0, schedule.num_stages, schedule.depth)
            begun = [stage for stage in first if self.finished_s[stage * count + unit] >= 0]
            if len(begun) > 1:
                one, other, *_ = (f"{stage}F{micro_batch} on rank {schedule.placement[stage]}" for stage in begun)
                raise ProgramError(f"micro-batch {micro_batch} runs through two replicas: {one}, {other}")
            start = begun[0] if begun else 0
            path = schedule.paths[micro_batch] if schedule.paths else range(start, start + schedule.depth)
            for stage in path:
                for kind, offset in ((Kind.F, 0), (Kind.B, self.backwards)) if trains else ((Kind.F, 0),):
                    if self.finished_s[offset + stage * count + unit] < 0:
                        missing = self._action(kind, stage * count + unit)
                        raise ProgramError(f"{missing} is missing on rank {schedule.placement[stage]}")
