"""When a run finds the order of a searched schedule: for nominal times before it starts, for measured ones after."""

from pathlib import Path
from typing import TYPE_CHECKING

from muster.config.load_config import load_plan
from muster.config.run_config import RunConfig
from muster.schedule.resolve import refine_schedule, resolve_schedule
from muster.spec.plan import PinnedSchedule, Plan

if TYPE_CHECKING:
    from muster.parallel.op_profile import StageProfile
    from muster.parallel.world import World


def with_resolved_schedule(plan: Plan, config: RunConfig, previous_run: Path | None) -> Plan:
    """The plan with its schedule found, where that is searched for. `before`: the directory of the run that goes on,
    with what it has found."""
    if previous_run is not None and (previous_run / "plan.yaml").exists():
        old = load_plan(previous_run / "plan.yaml")
        if old.model_copy(update={"pinned_schedule": None}) == plan:
            return old
    if plan.schedule_entry.slow and plan.pinned_schedule is None:
        print(f"schedule {plan.schedule} is searched for, for up to a minute", flush=True)
    return resolve_schedule(plan, config.model, config.workload)


def refine_schedule_from_profile(
    config: RunConfig, plan: Plan, world: "World", profile: "StageProfile"
) -> PinnedSchedule | None:
    """The order of `auto` for the times that all ranks have measured, found by rank 0; all ranks call it.

    None where the order was given, was found so before, or must be the same in every run (train.deterministic).
    """
    order = plan.pinned_schedule
    if order is None or order.times == "measured" or config.parallel.pinned_schedule is not None:
        return None
    if plan.schedule_entry.slow or config.train.deterministic:
        return None
    found = (
        refine_schedule(plan, profile.times.pass_times(plan.stages_per_replica)).model_dump() if world.rank == 0 else {}
    )
    return PinnedSchedule.model_validate(world.broadcast_object(found))
