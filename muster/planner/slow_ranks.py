"""Plans around slow ranks: fewer layers on a slow stage, and fewer micro-batches through a slow pipeline.

The degrees stay, since only speeds have changed. Layers go one by one to the stage that is done first with one more
(`balance.py`), micro-batches to the data-parallel rank that is (`uneven_batch.py`, as in Metis, USENIX ATC 2024). Of
these plans the one whose step has the least lower bound is taken.

Example: `dp2` with 12 micro-batches a step, of which rank 1 computes half as fast as rank 0. Six each take as long as
twelve on rank 0; with shares of 2 to 1, eight and four, a step takes two thirds of that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from muster.config.run_config import RunConfig, TrainConfig
from muster.cost.flops import forward_flops_per_token
from muster.cost.time.op_times import OpTimes
from muster.layout.mesh import coordinates_of, dp_index_of
from muster.planner.balance import balance_layers
from muster.planner.bounds.pass_times import PassTimes, pass_times_of_op_times
from muster.planner.bounds.step_bound import step_bound_s
from muster.planner.uneven_batch import fastest_split
from muster.schedule.action import Action, Kind
from muster.spec.errors import InfeasibleError
from muster.spec.legality import plan_violations
from muster.spec.plan import Plan, split_evenly
from muster.spec.plan_name import format_plan_name
from muster.spec.shares import normalize_shares

LEAST_GAIN = 0.05
"""Least share of a step that another plan must save: ranks that change their plan read all state and are timed anew."""

CHANGE_STEPS = 8.0
"""Cost of a change of the plan, about, in steps: those that are left must save more."""

_LAYER_PASSES = (Kind.F, Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True)
class MeasuredPasses:
    """Passes of a run's ranks under its plan, as timed before the first step and measured since."""

    times: OpTimes
    """Times of the instructions, means over the ranks of each stage."""
    expected_s: Sequence[float]
    """Passes of a step on each rank, by `times`."""
    measured_s: Sequence[float]
    """The same, measured."""
    slowness: Sequence[float]
    """Time of each rank over that of the others; 1 for ranks that aren't slow."""


@dataclass(frozen=True)
class FasterPlan:
    """Plan that is faster than a run's own, with the seconds of a step that both take at least."""

    plan: Plan
    step_s: float
    own_step_s: float


_ACTIONS = {
    "replace": "gives the place of a slow rank to a spare",
    "replan": "lets all ranks go on under another plan, from copies of their state",
}


def require_straggler_action_runs(train: TrainConfig, plan: Plan) -> None:
    """Raise InfeasibleError where ranks' times can't be compared, or nothing could be done about slow ones."""
    if train.straggler_check_every and plan.islands > 1:
        raise InfeasibleError(
            "train.straggler_check_every compares all ranks, for which islands would wait between their outer steps:"
            " leave islN or train.straggler_check_every out"
        )
    needs = {
        "replace": {
            "train.straggler_check_every or train.gradient_check_every above 0": bool(
                train.straggler_check_every or train.gradient_check_every
            ),
            "train.elastic true": train.elastic,
            "train.spares above 0": train.spares > 0,
            "train.recovery copy, or replicas": train.recovery == "copy" or plan.dp_replicate > 1,
        },
        "replan": {
            "train.straggler_check_every above 0": train.straggler_check_every > 0,
            "train.elastic true": train.elastic,
            "train.recovery copy": train.recovery == "copy",
        },
    }
    missing = [need for need, is_met in needs.get(train.straggler_action, {}).items() if not is_met]
    if missing:
        raise InfeasibleError(
            f"train.straggler_action {train.straggler_action} {_ACTIONS[train.straggler_action]}: it also needs"
            f" {' and '.join(missing)}"
        )


def fixed_plan_note(train: TrainConfig, plan: Plan) -> str | None:
    """Return a sentence where nothing will be compared, or `train.straggler_action` replan will change nothing; None
    else."""
    if train.straggler_check_every and plan.world_size == 1:
        return "train.straggler_check_every compares nothing here: a single rank has no other to be compared with"
    if train.straggler_action != "replan" or can_split_otherwise(plan):
        return None
    return (
        f"train.straggler_action replan will change nothing under {format_plan_name(plan)}: it moves layers between"
        " stages and changes shares of the batch, which need a pipeline, or z1 over data-parallel ranks"
    )


def can_split_otherwise(plan: Plan) -> bool:
    """Return whether a plan's kind allows other layers on its stages, or other shares of the batch."""
    has_shares = plan.mesh(0).dp_size > 1 and plan.default_strategy.zero not in ("z2", "z3")
    return plan.is_uniform and plan.pinned_schedule is None and (plan.stages_per_replica > 1 or has_shares)


def faster_plan(
    config: RunConfig, plan: Plan, usual_plan: Plan, measured: MeasuredPasses, fits: Callable[[Plan], bool]
) -> FasterPlan | None:
    """Return the fastest plan with other layers on its stages, other shares of the batch, or both; where no rank is
    slow, `usual_plan`. None where that saves less than `LEAST_GAIN`, or where stages have ranks of their own or a
    pinned order.

    `fits`: returns whether there is memory for a plan.
    """
    if not plan.is_uniform or plan.pinned_schedule is not None:
        return None
    speeds = _MeasuredSpeeds(config, plan, measured)
    own_s = speeds.step_s(plan)
    if max(measured.slowness) == 1:
        usual_s = speeds.step_s(usual_plan)
        return FasterPlan(usual_plan, usual_s, own_s) if usual_s < (1 - LEAST_GAIN) * own_s else None
    balanced = balance_layers(plan, config.model.num_layers, speeds.slowest_pipeline)
    found = (own_s, plan)
    for layers in filter(None, (plan, balanced)):
        even = layers.model_copy(update={"uneven_micro_batches": ()})
        for other in (even, speeds.with_best_shares(even)):  # the first of equals is the simplest
            is_legal = not plan_violations(other, config.model, config.workload, other.world_size)
            if is_legal and (step_s := speeds.step_s(other)) < found[0] and fits(other):
                found = step_s, other
    step_s, best = found
    return FasterPlan(best, step_s, own_s) if step_s < (1 - LEAST_GAIN) * own_s else None


class _MeasuredSpeeds:
    """Times of a plan and of those with other layers and shares, from what its ranks have shown."""

    def __init__(self, config: RunConfig, plan: Plan, measured: MeasuredPasses) -> None:
        self._config, self._plan = config, plan
        # Each rank's speed is the measured one, with what it loses to others on the same cores.
        times = pass_times_of_op_times(plan, measured.times)
        self._timed = replace(times, core_load=np.zeros(plan.num_stages))
        self._factors = _time_factors(plan, measured)

    def _pipeline(self, plan: Plan, factors: np.ndarray) -> PassTimes:
        """Return the times of a plan's passes, on pipeline ranks that take so many times as long as `times` say."""
        longer = _work_ratios(self._config, self._plan, plan) * factors[list(plan.placement)]
        timed = self._timed
        return replace(
            timed,
            forward_s=timed.forward_s * longer,
            backward_s=timed.backward_s * longer,
            weight_backward_s=timed.weight_backward_s * longer,
        )

    def slowest_pipeline(self, plan: Plan) -> PassTimes:
        """Return the times of passes where each stage is as slow as its slowest data-parallel rank."""
        return self._pipeline(plan, self._factors.max(axis=0))

    def step_s(self, plan: Plan) -> float:
        """Return the seconds that a step takes at least."""
        workload = self._config.workload
        return max(
            step_bound_s(
                plan,
                self._pipeline(plan, factors),
                split_evenly(plan.num_micro_batches(workload, data_rank), plan.pipeline_replicas),
            )
            for data_rank, factors in enumerate(self._factors)
        )

    def with_best_shares(self, plan: Plan) -> Plan:
        """Return the plan with the micro-batches for which the last data-parallel rank is done soonest."""

        def time_of(factors: np.ndarray) -> Callable[[int], float]:
            times = self._pipeline(plan, factors)
            return lambda count: step_bound_s(plan, times, split_evenly(count, plan.pipeline_replicas))

        total = self._config.workload.global_batch_size // (plan.micro_batch_size * plan.islands)
        if total < len(self._factors):
            return plan
        shares = normalize_shares(fastest_split([time_of(factors) for factors in self._factors], total))
        return plan.model_copy(update={"uneven_micro_batches": shares})


def with_usual_ratios(config: RunConfig, profiled: OpTimes, plan: Plan, usual: OpTimes, usual_plan: Plan) -> OpTimes:
    """Return profiled times of a plan's passes with the ratios between stages that those of another plan had.

    A rank may be slow while its stage is profiled, and then its slowness would be what is expected of it. So layers
    take as long beside one another as when the run began. What slowness has added is taken away: the stage that took
    least over its usual time keeps its profile.
    """
    usual_s, own_s = _usual_stage_times(config, usual, usual_plan, plan), _stage_times(profiled, plan)
    is_timed = (usual_s > 0) & (own_s > 0)
    if not is_timed.any():
        return profiled
    factors = np.ones(plan.num_stages)
    factors[is_timed] = usual_s[is_timed] / own_s[is_timed]
    factors[is_timed] /= factors[is_timed].max()
    seconds = {
        (kind, stage): one_s * (factors[stage] if kind in _LAYER_PASSES and stage >= 0 else 1.0)
        for (kind, stage), one_s in profiled.seconds.items()
    }
    return replace(profiled, seconds=seconds)


def _stage_times(times: OpTimes, plan: Plan) -> np.ndarray:
    """Return the seconds of the passes of one micro-batch through each stage."""
    stages = range(plan.num_stages)
    return np.array([sum(times.duration_s(Action(kind, stage)) for kind in _LAYER_PASSES) for stage in stages])


def _usual_stage_times(config: RunConfig, usual: OpTimes, usual_plan: Plan, plan: Plan) -> np.ndarray:
    """Return the times of a plan's stages, given those of another with the same layers on other stages: of the time of
    a stage each layer, and the head, has its share of the FLOPs."""
    layer, head = _layer_and_head_flops(config)
    num_layers = config.model.num_layers
    before = np.array(usual_plan.layer_counts(num_layers))
    flops = layer * before
    flops[-1] += head
    copies_s = _stage_times(usual, usual_plan).reshape(usual_plan.pipeline_replicas, -1)
    rates = copies_s.min(axis=0) / np.maximum(flops, 1)  # a rank of one replica may have been slow
    layers_s = layer * np.repeat(rates, before)
    ends = np.cumsum(plan.layer_counts(num_layers))
    stages_s = np.array([part.sum() for part in np.split(layers_s, ends[:-1])])
    stages_s[-1] += head * rates[-1]
    return np.tile(stages_s, plan.pipeline_replicas)


def _layer_and_head_flops(config: RunConfig) -> tuple[float, float]:
    """Return the FLOPs per token of a forward of one layer, and of the head; layers count as alike."""
    model, seq_len = config.model, config.workload.seq_len
    head, layer = 0.0, forward_flops_per_token(model, seq_len)
    if model.num_layers > 1:
        whole = layer
        layer -= forward_flops_per_token(model.model_copy(update={"num_layers": model.num_layers - 1}), seq_len)
        head = max(0.0, whole - model.num_layers * layer)
    return layer, head


def _work_ratios(config: RunConfig, plan: Plan, other: Plan) -> np.ndarray:
    """Return the FLOPs of each stage under another plan over those under a plan; layers count as alike."""
    layer, head = _layer_and_head_flops(config)
    has_head = np.arange(plan.stages_per_replica) == plan.stages_per_replica - 1
    counts = (np.array(one.layer_counts(config.model.num_layers)) for one in (plan, other))
    before, after = (head * has_head + layer * count for count in counts)
    return np.tile(after / np.maximum(before, 1), plan.pipeline_replicas)


def _time_factors(plan: Plan, measured: MeasuredPasses) -> np.ndarray:
    """Return the time of each pipeline rank (columns) for each data-parallel rank (rows) over that by `times`.

    Where passes wait for one another, as under z3, those of all ranks of a stage take as long as the slowest's, and
    before the first step it may have been slow already: a stage's own factor is the least that a rank shows once its
    slowness is taken out. Where no rank is slow, all are as fast as they usually are.
    """
    shape = plan.mesh(0).dp_size, plan.pp
    shown, slowness = np.full(shape, np.inf), np.ones(shape)
    for rank in range(plan.world_size):
        at = coordinates_of(plan, rank)
        cell = dp_index_of(plan, at), at.pp
        if measured.expected_s[rank]:
            shown[cell] = min(shown[cell], measured.measured_s[rank] / measured.expected_s[rank])
        slowness[cell] = max(slowness[cell], measured.slowness[rank])
    if (slowness == 1).all():
        return slowness
    usual = (shown / slowness).min(axis=0)
    return np.where(np.isfinite(usual), usual, 1.0) * slowness
