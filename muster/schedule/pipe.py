"""What the schedule searches work on: a Setting on one placement, as plain tuples and integers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from muster.schedule.action import Action, all_passes
from muster.schedule.schedule import Schedule
from muster.schedule.setting import Setting
from muster.spec.errors import InfeasibleError

KINDS = "FIW"


@dataclass(frozen=True, slots=True)
class Pipe:
    """One replica of the model on its ranks.

    A pass is an integer: `(kind · stages + stage) · micro_batches + micro_batch` with kind 0 F, 1 I, 2 W.
    """

    placement: tuple[int, ...]
    num_ranks: int
    num_micro_batches: int
    times_s: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    """Of F, I and W by stage."""
    hops_s: tuple[float, ...]
    """From each stage to the one after it, or back."""
    capacity: int
    """Activations of one micro-batch on one stage that a rank may keep."""
    stages: tuple[tuple[int, ...], ...]
    """Of each rank, ascending."""
    period_s: float
    """Work of the busiest rank for one micro-batch."""

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def size(self) -> int:
        """Passes of all ranks."""
        return 3 * len(self.placement) * self.num_micro_batches

    def trip_s(self, stage: int) -> float:
        """From the begin of a micro-batch's F on a stage until its I can begin there."""
        forward_s, input_s, _ = self.times_s
        return sum(forward_s[stage:]) + sum(input_s[stage + 1 :]) + 2 * sum(self.hops_s[stage:])


@dataclass(frozen=True, slots=True)
class Run:
    """A schedule with its times."""

    makespan_s: float
    passes: list[int]
    """In an order in which each comes after all that it needs, and after what its rank does before it."""


def pipe_of(setting: Setting, placement: Sequence[int]) -> Pipe:
    """Raises InfeasibleError where a rank may not keep even one micro-batch."""
    ranks = range(setting.num_ranks)
    stages = tuple(tuple(stage for stage, holder in enumerate(placement) if holder == rank) for rank in ranks)
    times_s = (setting.forward_s, setting.input_backward_s, setting.weight_backward_s)
    most = setting.chunks * setting.num_micro_batches
    capacity = int(min(most, setting.memory_limit / setting.activation + 1e-9))
    if capacity < setting.chunks:
        raise InfeasibleError(
            f"memory_limit {setting.memory_limit:g} doesn't hold one micro-batch's activations; the least is 1"
        )
    return Pipe(
        placement=tuple(placement),
        num_ranks=setting.num_ranks,
        num_micro_batches=setting.num_micro_batches,
        times_s=times_s,
        hops_s=tuple(setting.hop_s * (one != other) for one, other in pairwise(placement)),
        capacity=capacity,
        stages=stages,
        period_s=max(sum(kind[stage] for kind in times_s for stage in held) for held in stages),
    )


def schedule_of(pipe: Pipe, passes: Iterable[int], name: str) -> Schedule:
    count, stages = pipe.num_micro_batches, pipe.num_stages
    ranks: list[list[Action]] = [[] for _ in range(pipe.num_ranks)]
    actions = [action for kind in KINDS for stage in range(stages) for action in all_passes(kind, stage, count)]
    holders = [ranks[rank] for rank in pipe.placement] * len(KINDS)
    for code in passes:
        holders[code // count].append(actions[code])
    return Schedule(name, pipe.placement, count, tuple(map(tuple, ranks)))


def codes_of(pipe: Pipe, schedule: Schedule) -> list[int]:
    """The F and I of a schedule, rank by rank; a B counts as I."""
    count, place = pipe.num_micro_batches, {"F": 0, "B": pipe.num_stages, "I": pipe.num_stages}
    return [
        (place[kind] + stage) * count + micro_batch
        for order in schedule.ranks
        for kind, stage, micro_batch, *_ in order
        if kind != "W"
    ]


def orders_of(pipe: Pipe, passes: Iterable[int]) -> list[list[int]]:
    """The F and I of each rank among `passes`, in their order."""
    orders: list[list[int]] = [[] for _ in range(pipe.num_ranks)]
    count, stages = pipe.num_micro_batches, pipe.num_stages
    for code in passes:
        if code < 2 * count * stages:
            orders[pipe.placement[code // count % stages]].append(code)
    return orders


def turns(pipe: Pipe, stage: int, per_turn_s: float) -> int:
    """How many micro-batches begin on a stage, one each `per_turn_s`, before the first one's I can begin there."""
    return max(1, ceil(pipe.trip_s(stage) / per_turn_s - 1e-9)) if per_turn_s > 0 else pipe.num_micro_batches
