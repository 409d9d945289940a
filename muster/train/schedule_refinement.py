"""Searched schedules of a run: ordered for nominal times before the start, and again for measured times."""

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
    """Return the plan with its searched schedule resolved. `previous_run`: directory of a resumed run, whose order is
    reused."""
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
    """Return the order of schedule `auto` for the times measured on all ranks, as found by rank 0; all ranks call it.

    None where the order was given, was refined before, or must be the same in every run (train.deterministic;
    paths of micro-batches, which change what is trained).
    """
    order = plan.pinned_schedule
    if order is None or order.times == "measured" or config.parallel.pinned_schedule is not None:
        return None
    if plan.schedule_entry.slow or plan.schedule_entry.has_paths or config.train.deterministic:
        return None
    found = (
        refine_schedule(plan, profile.times.pass_times(plan.stages_per_replica)).model_dump() if world.rank == 0 else {}
    )
    return PinnedSchedule.model_validate(world.broadcast_object(found))
