"""Times of a plan's passes and step ends, in columns by stage: the input of all lower bounds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from muster.cost.time.op_times import OpTimes
from muster.cost.time.plan_times import example_p2p_times, p2p_times_are_alike, per_step_s, stage_p2p_times
from muster.cost.time.rank_placement import PlacedPlan
from muster.cost.time.stage_times import example_stage_times
from muster.schedule.action import Action, Kind
from muster.spec.plan import Plan

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of passes and transfers by stage, of all replicas, and of what a step does once."""

    forward_s: Column
    backward_s: Column
    """Backward, whole or for the inputs alone where the schedule splits it."""
    weight_backward_s: Column
    """Backward for the weights; 0 where backwards are whole."""
    forward_transfer_s: Column
    """P2p transfer to each stage from the one before; 0 within a rank."""
    backward_transfer_s: Column
    """P2p transfer of the gradient, from each stage to the one before."""
    unshard_s: Sequence[float]
    """Gather of the first stage's parameters, by replica; 0 where the step doesn't wait for it."""
    reduce_grad_s: Sequence[float]
    """Reduction of the first stage's gradients, by replica; 0 where the step doesn't wait for it."""
    per_step_s: float
    """Optimizer step, and the gradient norm where the step waits for it."""
    core_load: Column
    """Part of the cores that all ranks share which a stage's ranks use, 2 for twice as many as there are; 0 where every
    rank has a device of its own."""
    is_additive: NDArray[np.bool_]
    """True if backwards of a stage take as much longer for each layer that is recomputed."""

    def without_sharding(self) -> "PassTimes":
        """Return the times as if parameters were gathered and gradients reduced in no time."""
        return replace(self, unshard_s=[0.0] * len(self.unshard_s), reduce_grad_s=[0.0] * len(self.reduce_grad_s))

    def by_kind(self) -> dict[str, Column]:
        """Return the times of passes by instruction kind."""
        return {
            Kind.F: self.forward_s,
            Kind.B: self.backward_s,
            Kind.I: self.backward_s,
            Kind.W: self.weight_backward_s,
        }

    def busy_s(self) -> Column:
        """Return the seconds of a micro-batch on each stage."""
        return self.forward_s + self.backward_s + self.weight_backward_s


def pass_times_of_placed(placed: PlacedPlan) -> PassTimes:
    """Return the times of a plan on devices with data sheets."""
    plan, zero = placed.plan, placed.plan.pass_strategy(0).zero
    examples = example_stage_times(placed)
    kind_of = placed.stage_kinds.kind_by_stage
    kinds = (Kind.F, Kind.I, Kind.W) if plan.split_backward else (Kind.F, Kind.B)
    is_late = plan.schedule_entry.is_asynchronous  # beside passes of the next step
    passes = np.array([[at.passes_s[kind] for kind in kinds] for at in examples])
    if placed.overlaps_pairs:  # bounds hold for passes that hide all that they can
        passes[:, :2] -= [at.hidden_s for at in examples]
    columns = passes[kind_of].T
    forward_transfer_s, backward_transfer_s = _transfer_columns(placed)
    firsts = range(0, len(kind_of), placed.stages_per_replica)
    shared = [examples[kind_of[first]] if plan.mesh(first).dp_size > 1 else None for first in firsts]
    norm_s, step_s = per_step_s(placed, examples)
    crowd = np.zeros(len(kind_of))
    if placed.cluster.device.shared_cores:
        ranks = [placed.mesh(stage).num_ranks for stage in range(len(kind_of))]
        crowd = _core_load(ranks, placed.cluster.device.shared_cores * placed.cluster.num_nodes)
    return PassTimes(
        columns[0],
        columns[1],
        columns[2] if plan.split_backward else np.zeros(len(kind_of)),
        forward_transfer_s,
        backward_transfer_s,
        [
            at.seconds[Kind.UNSHARD] if at and plan.gathers_before_passes(plan.mesh(first)) else 0.0
            for first, at in zip(firsts, shared, strict=True)
        ],
        [at.seconds[Kind.REDUCE_GRAD] if at and zero == "z1" and not is_late else 0.0 for at in shared],
        step_s + (0.0 if plan.post_validation else norm_s),
        crowd,
        np.array([at.recompute_is_additive for at in examples])[kind_of],
    )


def _transfer_columns(placed: PlacedPlan) -> Column:
    """Return the transfers to each stage and back from it, in two rows."""
    alike = p2p_times_are_alike(placed)
    hops = example_p2p_times(placed) if alike else stage_p2p_times(placed)
    columns = np.array([(0.0, 0.0) if pair is None else (pair[0].total_s, pair[1].total_s) for pair in hops])
    return (columns[placed.p2p_kinds.kind_by_stage] if alike else columns).T


def pass_times_of_op_times(plan: Plan, op_times: OpTimes) -> PassTimes:
    """Return the times of a plan whose instructions were timed."""
    placement, depth, zero = plan.placement, plan.stages_per_replica, plan.pass_strategy(0).zero
    is_late = plan.schedule_entry.is_asynchronous
    stages = range(len(placement))

    def column(kind: Kind) -> Column:
        return np.array([op_times.duration_s(Action(kind, stage)) for stage in stages])

    hops = [
        (op_times.p2p_time(stage - 1, stage).total_s, op_times.p2p_time(stage, stage - 1).total_s)
        if stage % depth and placement[stage] != placement[stage - 1]
        else (0.0, 0.0)
        for stage in stages
    ]
    firsts = range(0, len(placement), depth)
    shared = [plan.mesh(first).dp_size > 1 for first in firsts]
    ends = list(zip(firsts, shared, strict=True))
    return PassTimes(
        column(Kind.F),
        column(Kind.I if plan.split_backward else Kind.B),
        column(Kind.W) if plan.split_backward else np.zeros(len(placement)),
        np.array([pair[0] for pair in hops]),
        np.array([pair[1] for pair in hops]),
        [
            op_times.duration_s(Action(Kind.UNSHARD, first))
            if is_sharded and plan.gathers_before_passes(plan.mesh(first))
            else 0.0
            for first, is_sharded in ends
        ],
        [
            op_times.duration_s(Action(Kind.REDUCE_GRAD, first)) if is_sharded and zero == "z1" and not is_late else 0.0
            for first, is_sharded in ends
        ],
        (0.0 if plan.post_validation else op_times.duration_s(Action(Kind.GRAD_NORM, -1)))
        + op_times.duration_s(Action(Kind.STEP, -1)),
        _core_load(
            [op_times.processes_per_rank[rank] if op_times.processes_per_rank else 1 for rank in placement],
            op_times.cores,
        ),
        np.zeros(len(placement), bool),
    )


def _core_load(processes: Sequence[int], cores: int | None) -> Column:
    return np.array(processes) / cores if cores else np.zeros(len(processes))


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one micro-batch on alike devices, for a layer and for the whole model, forward and backward.

    The whole model has embedding, head and loss too; what a stage takes beside its layers counts once.
    """

    layer_forward_s: float
    layer_backward_s: float
    whole_forward_s: float
    whole_backward_s: float
