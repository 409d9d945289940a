"""When a run finds the order of a searched schedule: for nominal times before it starts, for measured ones after."""

from pathlib import Path
from typing import TYPE_CHECKING

from muster.schedule.resolve import found_anew, resolved
from muster.spec.load import load_plan
from muster.spec.plan import Order, Plan
from muster.spec.run import RunConfig

if TYPE_CHECKING:
    from muster.parallel.op_profile import Profile
    from muster.parallel.world import World


def with_order(plan: Plan, config: RunConfig, before: Path | None) -> Plan:
    """The plan with its schedule found, where that is searched for. `before`: the directory of the run that goes on,
    with what it has found."""
    if before is not None and (before / "plan.yaml").exists():
        old = load_plan(before / "plan.yaml")
        if old.model_copy(update={"order": None}) == plan:
            return old
    if plan.schedule_entry.slow and plan.order is None:
        print(f"schedule {plan.schedule} is searched for, for up to a minute", flush=True)
    return resolved(plan, config.model, config.workload)


def measured_order(config: RunConfig, plan: Plan, world: "World", profile: "Profile") -> Order | None:
    """The order of `auto` for the times that all ranks have measured, found by rank 0; all ranks call it.

    None where the order was given, was found so before, or must be the same in every run (train.deterministic).
    """
    order = plan.order
    if order is None or order.times == "measured" or config.parallel.order is not None:
        return None
    if plan.schedule_entry.slow or config.train.deterministic:
        return None
    found = found_anew(plan, profile.times.passes(plan.depth)).model_dump() if world.rank == 0 else {}
    return Order.model_validate(world.share(found))
