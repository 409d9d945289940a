"""Plans under which a training goes on when ranks are lost: the same, with fewer data-parallel ranks."""

from muster.spec.legality import plan_violations
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.rules import repaired
from muster.spec.shard_level_rules import SHARD_LEVEL_LEGAL_RULES
from muster.spec.workload import Workload


def plans_with_fewer_ranks(plan: Plan, model: ModelSpec, workload: Workload) -> dict[int, Plan]:
    """Return the legal plans with fewer data-parallel ranks and the same global batch, by their number of ranks.

    Replicas (`dp_replicate`) are given up before shards. None has another order of passes than the plan's, so one with
    a pinned order, or with shares of the batch of its own, has no such plans; nor have stages of unequal ranks.
    """
    if not plan.is_uniform or plan.pinned_schedule is not None or plan.uneven_micro_batches:
        return {}
    axis = "dp_replicate" if plan.dp_replicate > 1 else "dp_shard"
    found: dict[int, Plan] = {}
    for degree in range(1, getattr(plan, axis)):
        other = repaired(SHARD_LEVEL_LEGAL_RULES, plan.model_copy(update={axis: degree}))
        if not plan_violations(other, model, workload, other.world_size):
            found[other.world_size] = other
    return found
