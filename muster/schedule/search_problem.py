"""Input of the schedule searches: a spec on one placement, as plain tuples and integers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from muster.schedule.action import Action, Kind, actions_of_stage
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.errors import InfeasibleError

PASS_KINDS = (Kind.F, Kind.I, Kind.W)


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """The model, or two replicas of it, on its ranks.

    The code of a pass is an integer: `(kind · stages + stage) · micro_batches + micro_batch` with kind 0 F, 1 I, 2 W.
    Stages are numbered replica by replica, micro-batches within theirs: each replica has as many.
    """

    placement: tuple[int, ...]
    num_ranks: int
    num_micro_batches: int
    """Micro-batches of each replica."""
    times_s: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    """Seconds of F, I and W by stage."""
    p2p_s: tuple[float, ...]
    """P2p seconds from each stage to the next one, or back."""
    capacity: int
    """Most activations saved on a rank, in micro-batches on one stage."""
    stages: tuple[tuple[int, ...], ...]
    """Stages of each rank, ascending."""
    period_s: float
    """Seconds of work of the busiest rank for one micro-batch of each replica."""
    replicas: int = 1

    @property
    def num_stages(self) -> int:
        """Stages of all replicas."""
        return len(self.placement)

    @property
    def depth(self) -> int:
        """Stages of one replica."""
        return len(self.placement) // self.replicas

    @property
    def first_stages(self) -> range:
        """First stage of each replica."""
        return range(0, len(self.placement), self.depth)

    def is_first(self, stage: int) -> bool:
        """Return True for the first stage of a replica."""
        return stage % self.depth == 0

    def is_last(self, stage: int) -> bool:
        """Return True for the last stage of a replica."""
        return stage % self.depth == self.depth - 1

    @property
    def num_passes(self) -> int:
        """Number of passes of all ranks."""
        return 3 * len(self.placement) * self.num_micro_batches

    def round_trip_s(self, stage: int) -> float:
        """Return the seconds from the begin of a micro-batch's F on a stage until its I can begin there."""
        forward_s, input_s, _ = self.times_s
        end = stage - stage % self.depth + self.depth
        return sum(forward_s[stage:end]) + sum(input_s[stage + 1 : end]) + 2 * sum(self.p2p_s[stage : end - 1])


@dataclass(frozen=True, slots=True)
class TimedPasses:
    """Passes of a schedule with its makespan."""

    makespan_s: float
    passes: list[int]
    """Codes in an order in which each pass follows all that it needs and all earlier ones of its rank."""


def make_search_problem(spec: ScheduleSpec, placement: Sequence[int]) -> SearchProblem:
    """Return the search problem of a spec on the placement of all replicas.

    Raises InfeasibleError if memory holds no micro-batch of each replica, or these don't share micro-batches evenly.
    """
    ranks = range(spec.num_ranks)
    stages = tuple(tuple(stage for stage, holder in enumerate(placement) if holder == rank) for rank in ranks)
    forward_s, input_s, weight_s = (
        times * spec.replicas for times in (spec.forward_s, spec.input_backward_s, spec.weight_backward_s)
    )
    times_s = forward_s, input_s, weight_s
    count, rest = divmod(spec.num_micro_batches, spec.replicas)
    if rest:
        raise InfeasibleError(
            f"{spec.num_micro_batches} micro-batches can't be searched for on {spec.replicas} replicas: expected a"
            f" multiple of {spec.replicas}"
        )
    most = spec.chunks * count
    capacity = int(min(most, spec.memory_limit / spec.stage_activation + 1e-9))
    if capacity < spec.chunks:
        raise InfeasibleError(
            f"memory_limit {spec.memory_limit:g} doesn't hold one micro-batch's activations"
            f"{' of each replica' * (spec.replicas > 1)}; the least is {spec.replicas}"
        )
    return SearchProblem(
        placement=tuple(placement),
        num_ranks=spec.num_ranks,
        num_micro_batches=count,
        times_s=times_s,
        p2p_s=tuple(spec.p2p_s * (one != other) for one, other in pairwise(placement)),
        capacity=capacity,
        stages=stages,
        period_s=max(sum(kind[stage] for kind in times_s for stage in held) for held in stages),
        replicas=spec.replicas,
    )


def schedule_from_passes(problem: SearchProblem, passes: Iterable[int], name: str) -> Schedule:
    """Return the schedule of passes in an order in which their ranks run them."""
    count, stages = problem.num_micro_batches, problem.num_stages
    ranks: list[list[Action]] = [[] for _ in range(problem.num_ranks)]
    whole = count * problem.replicas
    actions = []
    for kind in PASS_KINDS:
        for stage in range(stages):
            first = stage // problem.depth * count  # as `split_micro_batches` has them
            actions += actions_of_stage(kind, stage, whole)[first : first + count]
    holders = [ranks[rank] for rank in problem.placement] * len(PASS_KINDS)
    for code in passes:
        holders[code // count].append(actions[code])
    return Schedule(name, problem.placement, whole, tuple(map(tuple, ranks)), problem.replicas)


def pass_codes(problem: SearchProblem, schedule: Schedule) -> list[int]:
    """Return the codes of F and I of a schedule, rank by rank; a B counts as I."""
    count = problem.num_micro_batches
    place = {Kind.F: 0, Kind.B: problem.num_stages, Kind.I: problem.num_stages}
    return [
        (place[kind] + stage) * count + micro_batch % count
        for order in schedule.ranks
        for kind, stage, micro_batch, *_ in order
        if kind != Kind.W
    ]


def rank_orders(problem: SearchProblem, passes: Iterable[int]) -> list[list[int]]:
    """Return the codes of F and I of each rank among `passes`, in their order."""
    orders: list[list[int]] = [[] for _ in range(problem.num_ranks)]
    count, stages = problem.num_micro_batches, problem.num_stages
    for code in passes:
        if code < 2 * count * stages:
            orders[problem.placement[code // count % stages]].append(code)
    return orders


def min_in_flight(problem: SearchProblem, stage: int, interval_s: float) -> int:
    """Return how many micro-batches, one each `interval_s`, begin on a stage before the I of the first one can."""
    return (
        max(1, ceil(problem.round_trip_s(stage) / interval_s - 1e-9)) if interval_s > 0 else problem.num_micro_batches
    )
