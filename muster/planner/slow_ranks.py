"""Plans around slow ranks: fewer layers on a slow stage, and fewer micro-batches through a slow pipeline.

The degrees stay, since only speeds have changed. Layers go one by one to the stage that is done first with one more
(`balance.py`), micro-batches to the data-parallel rank that is (`uneven_batch.py`, as in Metis, USENIX ATC 2024); what
would be faster, by how long steps take at least, is taken.

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
from muster.schedule.action import Kind
from muster.spec.errors import InfeasibleError
from muster.spec.legality import plan_violations
from muster.spec.plan import Plan, split_evenly
from muster.spec.shares import normalize_shares

LEAST_GAIN = 0.05
"""Share of a step that another plan must save: ranks that change their plan read all state and are timed anew."""

CHANGE_STEPS = 8.0
"""Steps in whose time ranks change their plan, about: those that are left must save more."""


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


def require_straggler_action_runs(train: TrainConfig, plan: Plan) -> None:
    """Raise InfeasibleError where ranks' times can't be compared, or nothing could be done about slow ones."""
    if train.straggler_check_every and plan.islands > 1:
        raise InfeasibleError(
            "train.straggler_check_every compares all ranks, for which islands would wait between their outer steps:"
            " leave islN or train.straggler_check_every out"
        )
    checks = train.straggler_check_every or train.gradient_check_every
    if train.straggler_action == "replace" and not (checks and train.elastic and train.spares):
        raise InfeasibleError(
            "train.straggler_action replace gives the place of a slow rank to a spare: it needs"
            " train.straggler_check_every or train.gradient_check_every above 0, train.elastic true and train.spares"
            " above 0"
        )
    if train.straggler_action == "replan" and not (
        train.straggler_check_every and train.elastic and train.recovery == "copy"
    ):
        raise InfeasibleError(
            "train.straggler_action replan lets all ranks go on under another plan, from copies of their state: it"
            " needs train.straggler_check_every above 0, train.elastic true and train.recovery copy"
        )


def faster_plan(
    config: RunConfig, plan: Plan, measured: MeasuredPasses, fits: Callable[[Plan], bool]
) -> FasterPlan | None:
    """Return the fastest plan with other layers on its stages, other shares of the batch, or both; None where none
    saves `LEAST_GAIN`, or where stages have ranks of their own or a pinned order.

    `fits`: returns whether a plan's memory is there.
    """
    if not plan.is_uniform or plan.pinned_schedule is not None:
        return None
    speeds = _MeasuredSpeeds(config, plan, measured)
    own_s = speeds.step_s(plan)
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


def times_with_layers(config: RunConfig, times: OpTimes, plan: Plan, other: Plan) -> OpTimes:
    """Return the times of passes under a plan, given those under one that differs in its layers and shares alone."""
    ratios = _work_ratios(config, plan, other)
    passes = (Kind.F, Kind.B, Kind.I, Kind.W)
    seconds = {
        (kind, stage): one_s * (ratios[stage] if kind in passes and stage >= 0 else 1.0)
        for (kind, stage), one_s in times.seconds.items()
    }
    return replace(times, seconds=seconds)


def _work_ratios(config: RunConfig, plan: Plan, other: Plan) -> np.ndarray:
    """Return the FLOPs of each stage under another plan over those under a plan; layers count as alike."""
    model, seq_len = config.model, config.workload.seq_len
    head, layer = 0, forward_flops_per_token(model, seq_len)
    if model.num_layers > 1:
        whole = layer
        layer -= forward_flops_per_token(model.model_copy(update={"num_layers": model.num_layers - 1}), seq_len)
        head = max(0, whole - model.num_layers * layer)
    has_head = np.arange(plan.stages_per_replica) == plan.stages_per_replica - 1
    before, after = (head * has_head + layer * np.array(one.layer_counts(model.num_layers)) for one in (plan, other))
    return np.tile(after / np.maximum(before, 1), plan.pipeline_replicas)


def _time_factors(plan: Plan, measured: MeasuredPasses) -> np.ndarray:
    """Return the time of each pipeline rank (columns) for each data-parallel rank (rows) over that by `times`.

    Where passes wait for one another, as under z3, those of all ranks of a stage take as long as the slowest's, and
    before the first step it may have been slow already: a stage's own factor is the least that a rank shows once its
    slowness is taken out.
    """
    shape = plan.mesh(0).dp_size, plan.pp
    shown, slowness = np.full(shape, np.inf), np.ones(shape)
    for rank in range(plan.world_size):
        at = coordinates_of(plan, rank)
        cell = dp_index_of(plan, at), at.pp
        if measured.expected_s[rank]:
            shown[cell] = min(shown[cell], measured.measured_s[rank] / measured.expected_s[rank])
        slowness[cell] = max(slowness[cell], measured.slowness[rank])
    usual = (shown / slowness).min(axis=0)
    return np.where(np.isfinite(usual), usual, 1.0) * slowness
