"""Lower bounds of a plan's step time, from the times of its instructions alone.

They hold for whatever order a schedule chooses, so a plan whose bound is above a simulated time can't be the best.
Three things are certain of a pipeline rank: it can't begin before the first micro-batch has come through the stages
before its first one; it then has all its passes to do, one after another; and after its last backward the gradient
still has to go back to the first stage, whose weights are reduced and updated last.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from muster.cost.op_times import OpTimes
from muster.planner.balance import seconds_of
from muster.planner.space import Order
from muster.spec.plan import Plan
from muster.spec.schedules import SCHEDULES


def step_bound_s(plan: Plan, times: OpTimes, micro_batches: Mapping[int, int]) -> float:
    """Seconds that one step takes at least; `micro_batches`: those that run through each stage."""
    best, depth, splits, zero = 0.0, plan.depth, plan.splits, plan.default_strategy.zero
    placement = [plan.pp_rank(stage) for stage in range(plan.num_stages)]
    for first in range(0, len(placement), depth):
        shared = plan.mesh(first).data_ranks > 1
        begin_s = seconds_of(times, "UNSHARD", first) if shared and zero != "z3" else 0.0
        end_s = seconds_of(times, "REDUCE", first) if shared and zero == "z1" else 0.0
        head_s, back_s, first_weight_s = begin_s, end_s, 0.0
        ranks: dict[int, _Rank] = {}
        for stage in range(first, first + depth):
            rank = placement[stage]
            if stage > first and placement[stage - 1] != rank:
                hop_s = times.hop(stage - 1, stage).total_s
                head_s, back_s = head_s + hop_s, back_s + hop_s
            forward_s = seconds_of(times, "F", stage)
            input_s = seconds_of(times, "I" if splits else "B", stage)
            weight_s = seconds_of(times, "W", stage) if splits else 0.0
            if stage == first:
                first_weight_s = weight_s
            own = ranks.get(rank) or ranks.setdefault(rank, _Rank(head_s, back_s))
            own.inputs_s += micro_batches[stage] * (forward_s + input_s)
            own.weights_s += micro_batches[stage] * weight_s
            head_s, back_s = head_s + forward_s, back_s + input_s
        best = max(best, *(rank.bound_s(first_weight_s) for rank in ranks.values()))
    return best + seconds_of(times, "NORM", -1) + seconds_of(times, "STEP", -1)


def cores_bound_s(plan: Plan, times: OpTimes, micro_batches: Mapping[int, int]) -> float:
    """Seconds that one step takes at least where processes share cores: all their passes, dealt to all cores."""
    if times.cores is None:
        return 0.0
    kinds = ("F", "I", "W") if plan.splits else ("F", "B")
    work_s = sum(
        times.processes[plan.pp_rank(stage)] * micro_batches[stage] * seconds_of(times, kind, stage)
        for stage in range(plan.num_stages)
        for kind in kinds
    )
    return work_s / times.cores


@dataclass(slots=True)
class _Rank:
    """What a rank does, in seconds: until its first pass can begin, in its passes, and after its last backward."""

    head_s: float
    back_s: float
    inputs_s: float = 0.0
    weights_s: float = 0.0

    def bound_s(self, first_weight_s: float) -> float:
        """Its last pass is a weight backward, or a backward whose gradient goes back to the first stage and is used
        there."""
        return self.head_s + self.inputs_s + max(self.weights_s, self.back_s + first_weight_s)


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one micro-batch on devices that are alike: of a layer, and of the whole model, forward and backward.

    The whole has embedding, head and loss too, and whatever a stage takes beside its layers counts once.
    """

    layer_forward_s: float
    layer_backward_s: float
    whole_forward_s: float
    whole_backward_s: float


def order_bound_s(times: LayerTimes, order: Order, num_layers: int, micro_batches: int) -> float:
    """Seconds that the passes of any plan of an order take at least, whatever travels.

    With x_r the time of rank r for one micro-batch, its last pass ends after the forwards before it, its own passes,
    and (where backwards are whole) the backwards of the same stages: Σ_{s<r} ρ·x_s + m·x_r, with ρ the part of x that
    stands before and after. Whatever the layers of each rank, the largest of these is least where all are equal:
    x_{r+1} = x_r·(1 − ρ/m), so that Σ x_r = X gives X·ρ / (1 − (1 − ρ/m)^p). With several stages on a rank, evenly
    filled, the fewest layers of a stage bound what stands before.
    """
    pp, m = order.shape.pp, micro_batches
    total_s = times.whole_forward_s + times.whole_backward_s
    if pp == 1:
        return m * total_s
    splits = SCHEDULES[order.schedule].splits
    if order.vpp == 1 and order.balanced:
        share = times.layer_forward_s / (times.layer_forward_s + times.layer_backward_s) if splits else 1.0
        # Embedding and head are less evenly forward and backward than layers are, so the smaller share counts.
        whole = times.whole_forward_s / total_s if splits else 1.0
        ratio = min(share, whole)
        return total_s * ratio / (1 - (1 - ratio / m) ** pp)
    fewest = num_layers // (pp * order.vpp)
    before_s = times.layer_forward_s + (0.0 if splits else times.layer_backward_s)
    layer_s = times.layer_forward_s + times.layer_backward_s
    last_s = fewest * ((pp - 1) * before_s + m * order.vpp * layer_s)
    return max(m * total_s / pp, last_s)
