"""Cost of a sequence on a group of context-parallel ranks, in seconds and in positions.

A group of d of the N ranks of a `cpdyn` plan computes as the ordinary plan with cp d does: the same kernels, the same
exchange of keys and values among neighbours, states sharded over the same N ranks. So a sequence costs its share of
that plan's passes, as `predict` times them, in a micro-batch of sequences of its length that fills the ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from muster.cost.flops import train_flops_per_token
from muster.cost.time.cost_cache import CostCache
from muster.cost.time.plan_times import place_plan, plan_times
from muster.cost.time.stage_times import StageTimes
from muster.schedule.action import Kind
from muster.spec.cluster import ClusterSpec
from muster.spec.context_rules import context_violations
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload

SHORTEST = 256
"""Length below which a position's time is taken for that at this length."""


@dataclass(frozen=True)
class SequenceCosts:
    """Costs by degree, which are the sizes of groups, and by length."""

    degrees: tuple[int, ...]
    """Sizes of groups, powers of two in rising order."""
    capacity: int
    """Positions that a rank can hold in one micro-batch."""
    fixed_s: tuple[float, ...]
    """Seconds of a micro-batch that don't depend on its sequences, by degree."""
    position_s: Callable[[int, NDArray[np.int64]], NDArray[np.floating]]
    """Seconds of a position of one rank, by degree and length of the sequence."""

    def positions(self, lengths_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions (degrees, B) of sequences on each rank of a group, with padding: of 2 · degree chunks
        each rank has two."""
        return np.array([lengths_B if d == 1 else 2 * -(-lengths_B // (2 * d)) for d in self.degrees])

    def share_s(self, lengths_B: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds (degrees, B) that sequences add to a group; infinite where a rank can't hold its part."""
        positions = self.positions(lengths_B)
        seconds = np.array([self.position_s(d, lengths_B) for d in self.degrees]) * positions
        return np.where(positions > self.capacity, np.inf, seconds)


def rank_capacity(plan: Plan, seq_len: int) -> int:
    """Return the positions that a rank holds in a micro-batch: a `cpdyn` plan's memory is that of the plan in which
    all ranks share micro_batch_size sequences of the whole length."""
    return plan.micro_batch_size * seq_len // plan.cp


def group_degrees(plan: Plan, model: ModelSpec) -> tuple[int, ...]:
    """Return the sizes of groups that the plan's kind of context parallelism can have for a model."""
    found = [1]
    while 2 * found[-1] <= plan.cp:
        found.append(2 * found[-1])
    return tuple(d for d in found if d == 1 or not list(context_violations(plan, Mesh(cp=d, tp=plan.tp), model)))


def quadratic_costs(
    degrees: tuple[int, ...],
    capacity: int,
    position_s: float,
    score_s: float,
    sent_s: float = 0.0,
    fixed_s: float = 0.0,
) -> SequenceCosts:
    """Return costs of the form of FlexSP (arXiv:2412.01523 §4.1): a position takes `position_s`, `score_s` for each
    position of its sequence, and `sent_s` · (d − 1) / d for what d ranks exchange."""
    return SequenceCosts(
        degrees,
        capacity,
        (fixed_s,) * len(degrees),
        lambda d, lengths_B: position_s + score_s * lengths_B + sent_s * (d - 1) / d,
    )


def flops_costs(model: ModelSpec, plan: Plan, seq_len: int) -> SequenceCosts:
    """Return the FLOPs of training for seconds, where no machine is described: they say how work is balanced
    (arXiv:2502.21231 §5.2), and a larger group counts as slower by 5 % for each doubling."""
    short, long = (train_flops_per_token(model, length, causal=True) for length in (SHORTEST, 2 * SHORTEST))
    slope = (long - short) / SHORTEST
    base = short - slope * SHORTEST
    return SequenceCosts(
        degrees := group_degrees(plan, model),
        rank_capacity(plan, seq_len),
        (0.0,) * len(degrees),
        lambda d, lengths_B: (base + slope * lengths_B) * (1 + 0.05 * np.log2(d)),
    )


def predicted_costs(
    model: ModelSpec, plan: Plan, seq_len: int, cluster: ClusterSpec, framework: FrameworkTraits | None = None
) -> SequenceCosts:
    """Return the costs of a `cpdyn` plan's groups on a cluster, from the passes of the plans with each degree."""
    capacity, cache = rank_capacity(plan, seq_len), CostCache()
    degrees = group_degrees(plan, model)

    def passes_s(degree: int, length: int, count: int) -> float:
        fields = {"cp": degree, "dp_shard": plan.dp_shard * plan.cp // degree, "micro_batch_size": count}
        alone = {"cp_comm_type": "p2p", "cp_ulysses_degree": 1, "cp_window_size": 1} if degree == 1 else {}
        own = plan.model_copy(update=fields | alone)
        workload = Workload(seq_len=length, global_batch_size=count * own.mesh(0).dp_size)
        if cluster.device.rates is not None:
            times = plan_times(model, own, workload, cluster, framework, cache=cache)
            return times.seconds[Kind.F, 0] + times.seconds[Kind.B, 0]
        found = StageTimes(place_plan(model, own, workload, cluster, framework, cache=cache), 0).passes_s
        return found[Kind.F] + found[Kind.B]

    fixed: list[float] = []
    grids: dict[int, NDArray[np.float64]] = {}
    rates: dict[int, NDArray[np.float64]] = {}
    for degree in degrees:
        longest = min(seq_len, capacity * degree)
        lengths = _grid(min(SHORTEST * degree, longest), longest, 2 * degree)
        count = max(2, capacity * degree // lengths[0])
        fixed.append(max(0.0, 2 * passes_s(degree, lengths[0], count // 2) - passes_s(degree, lengths[0], count)))
        counts = [max(1, capacity * degree // length) for length in lengths]
        grids[degree] = np.array(lengths, float)
        rates[degree] = np.array(
            [
                (passes_s(degree, length, count) - fixed[-1]) / (count * length / degree)
                for length, count in zip(lengths, counts, strict=True)
            ]
        )
    return SequenceCosts(degrees, capacity, tuple(fixed), lambda d, lengths_B: np.interp(lengths_B, grids[d], rates[d]))


def _grid(shortest: int, longest: int, multiple: int) -> list[int]:
    """Return lengths by half doublings, all multiples of a number."""
    lengths, length = {longest // multiple * multiple}, float(shortest)
    while length < longest:
        lengths.add(max(multiple, round(length / multiple) * multiple))
        length *= 2**0.5
    return sorted(lengths)
