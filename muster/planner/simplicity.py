"""The order of simplicity of plans, and the rule by which a simple plan goes before a faster, more complicated one.

A prediction errs by some percent. Of plans whose predicted values differ by less, nobody knows which is faster, but
everybody knows which is easier to configure, to debug and to move to another cluster. So among the plans within
`PREDICTION_ERROR` of the best value, the simplest is the answer: first those that treat all layers alike, then those
that use the fewest mechanisms, then by value. The order is that of `Simplicity`, and depends on the plan alone.
"""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from muster.planner.evaluated_plan import EvaluatedPlan, FoundPlan
from muster.spec.mesh_axes import MESH_AXES
from muster.spec.plan import Plan
from muster.spec.schedules import DEFAULT_SCHEDULE, SCHEDULES

PREDICTION_ERROR = 0.03
"""Relative difference of predicted values below which neither plan is known to be better."""

_AXES = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
}


Ranked = TypeVar("Ranked", bound=EvaluatedPlan | FoundPlan)


class Simplicity(NamedTuple):
    """Place of a plan in the order of simplicity: the less, the simpler."""

    differs_by_layer: bool
    """True if some layers are recomputed, offloaded or sharded otherwise than others."""
    num_mechanisms: int
    """Number of `mechanisms` that the plan uses."""


def mechanisms(plan: Plan) -> list[str]:
    """Return what a plan uses beyond data parallelism over even micro-batches, a few words each."""
    strategies = plan.strategies
    used = {
        **{words: getattr(plan, axis) > 1 for axis, words in _AXES.items()},
        "replicas of sharded groups": plan.dp_replicate > 1 and plan.dp_shard > 1,
        "groups of ranks for parameters and gradients": plan.has_shard_levels,
        "gathers for units of passes": plan.max_active_stages is not None,
        "buckets of several layers": plan.bucket_layers > 1,
        "another order of axes": plan.axis_order != MESH_AXES,
        "unequal stages": bool(plan.stages),
        "stages with degrees of their own": not plan.is_uniform,
        "unequal shares of the batch": bool(plan.uneven_micro_batches),
        "recompute": any(strategy.recompute != "none" for strategy in strategies),
        "tiles": plan.sequence_tiles > 1,
        "slices": plan.sequence_slices > 1,
        "copies of experts": plan.ep_redundant_experts > 0,
        "overlap of tensor-parallel collectives": any(strategy.tp_overlap != "none" for strategy in strategies),
        "offload": any(strategy.offload != "none" for strategy in strategies),
        "a schedule searched for its times": plan.pinned_schedule is not None,
    }
    return [*(words for words, is_used in used.items() if is_used), *_schedule_mechanisms(plan.schedule)]


def _schedule_mechanisms(schedule: str) -> list[str]:
    """Return what a schedule adds to 1F1B."""
    if schedule == DEFAULT_SCHEDULE:
        return []
    entry = SCHEDULES[schedule]
    splits = entry.split_backward or entry.searched
    return [
        f"schedule {schedule}",
        *(["split backwards"] if splits else []),
        *(["two copies of the model"] if entry.default_replicas > 1 else []),
    ]


def simplicity(plan: Plan) -> Simplicity:
    """Return a plan's place in the order of simplicity."""
    return Simplicity(bool(plan.overrides), len(mechanisms(plan)))


def least_simplicity(num_axes: int, schedule: str, num_others: int) -> Simplicity:
    """Return the place of the simplest plans with so many axes beyond data parallelism, a schedule, and so many
    other mechanisms."""
    return Simplicity(False, num_axes + len(_schedule_mechanisms(schedule)) + num_others)


def simplest(plans: Iterable[Ranked], best_value: float, tolerance: float = PREDICTION_ERROR) -> Ranked | None:
    """Return the simplest of the plans within `tolerance` of `best_value`; of equally simple ones the best.

    None where no plan is within it.
    """
    close = (one for one in plans if one.value <= best_value * (1 + tolerance))
    return min(close, key=lambda one: (simplicity(one.plan), one.sort_key), default=None)
