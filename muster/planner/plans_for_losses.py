"""Plans under which a training goes on with the ranks that are left when others are lost."""

from dataclasses import replace

from muster.config.load_config import ResolvedConfig
from muster.planner.auto import best_plan_for
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.simplicity import PREDICTION_ERROR
from muster.spec.errors import InfeasibleError
from muster.spec.fewer_ranks import plans_with_fewer_ranks
from muster.spec.plan import Plan

MOST_LOST = 4
"""Ranks that may be lost at once for which the planner is asked; beyond, places are filled before ranks go on."""
_KEPT = (
    "precision",
    "fp8_recipe",
    "grad_reduce_dtype",
    "compile",
    "micro_batch_size",
    "schedule",
    "axis_order",
    "default_strategy",
)
"""Fields of a plan that the planner keeps: none of them depends on the degrees."""


def plans_for_losses(resolved: ResolvedConfig, plan: Plan) -> dict[int, Plan]:
    """Return plans with the global batch of `plan` and fewer ranks, by their number of ranks.

    Those of `plans_with_fewer_ranks`, and for larger numbers of ranks, where dp alone can't use all that are left, the
    best of the planner, where that is predicted to be faster than with fewer ranks, by more than predictions err. Ranks
    that rebuild lost stages from those beside them (`train.recovery` checkfree) keep their stages.
    """
    config = resolved.config
    found = plans_with_fewer_ranks(plan, config.model, config.workload)
    if config.train.recovery == "checkfree" or plan.islands > 1:
        return found
    least = max(found, default=0)
    fastest_s = float("inf") if not least else _step_s(_best(resolved, plan, least))
    for num_ranks in range(max(least + 1, plan.world_size - MOST_LOST), plan.world_size):
        best = _best(resolved, plan, num_ranks)
        if best is not None and _step_s(best) < (1 - PREDICTION_ERROR) * fastest_s:
            found[num_ranks], fastest_s = best.plan, _step_s(best)
    return dict(sorted(found.items()))


def _step_s(found: EvaluatedPlan | None) -> float:
    return float("inf") if found is None else found.prediction.step_time_s


def _best(resolved: ResolvedConfig, plan: Plan, num_ranks: int) -> EvaluatedPlan | None:
    """Return the planner's best plan for so many ranks, with what `plan` says beside degrees; None without any."""
    kept = Plan().model_copy(update={name: getattr(plan, name) for name in _KEPT})
    config = resolved.config.model_copy(update={"parallel": kept})
    try:
        return best_plan_for(replace(resolved, config=config, plan_is_auto=True), num_ranks)
    except InfeasibleError:
        return None
