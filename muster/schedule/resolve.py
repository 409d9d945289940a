"""Searched schedules, found once for a plan and pinned in it."""

from typing import Literal

from muster.schedule.action import parse_action
from muster.schedule.paths import format_path
from muster.schedule.program import ProgramError
from muster.schedule.registry import make_schedule
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import PathLimits, ScheduleSpec
from muster.schedule.timing import PassTimes
from muster.schedule.unit_costs import nominal_pass_times
from muster.spec.model import ModelSpec
from muster.spec.plan import PinnedSchedule, Plan
from muster.spec.schedules import find_schedule
from muster.spec.workload import Workload

TimesSource = Literal["nominal", "predicted", "measured"]
"""Source of the times that a search used (`PinnedSchedule.times`)."""


def resolve_schedule(plan: Plan, model: ModelSpec, workload: Workload) -> Plan:
    """Return the plan with its searched schedule found for nominal times, if it is not pinned yet.

    The same call finds the same `auto` again; `exact` may differ: find it once and pass the plan on. Raises
    InfeasibleError if no schedule fits, MusterError if the solver of `exact` is not installed.
    """
    if not plan.schedule_entry.searched or plan.pinned_schedule is not None:
        return plan
    spec = schedule_spec_of(plan, plan.num_micro_batches(workload), nominal_pass_times(plan, model, workload))
    return plan.model_copy(update={"pinned_schedule": pin_schedule(make_schedule(plan.schedule, spec), "nominal")})


def refine_schedule(plan: Plan, times: PassTimes) -> PinnedSchedule:
    """Return the plan's searched schedule for measured times, with stages where the pinned schedule has them.

    Raises InfeasibleError, MusterError as `resolve_schedule`.
    """
    assert plan.pinned_schedule is not None, "there is nothing to find anew"
    spec = schedule_spec_of(plan, plan.pinned_schedule.micro_batches, times, plan.pinned_schedule.placement)
    return pin_schedule(make_schedule(plan.schedule, spec), "measured")


def schedule_spec_of(
    plan: Plan,
    num_micro_batches: int,
    times: PassTimes,
    placement: tuple[int, ...] = (),
) -> ScheduleSpec:
    """Return the inputs of a search for a plan's schedule; `placement`: rank of each stage, empty: free."""
    passes = times.forward_s, times.input_backward_s, times.weight_backward_s
    return ScheduleSpec(
        plan.pp,
        num_micro_batches,
        plan.vpp,
        *map(tuple, passes),
        p2p_s=times.p2p_s,
        placement=placement,
        memory_limit=plan.max_in_flight_micro_batches or plan.pp,
        replicas=plan.pipeline_replicas,
        link_s=tuple(map(tuple, times.link_s)),
        link_busy_s=tuple(map(tuple, times.link_busy_s)),
        paths=PathLimits(plan.skip_ratio, plan.min_visits, plan.swaps_stages),
    )


def pin_schedule(schedule: Schedule, times: TimesSource) -> PinnedSchedule:
    """Return a schedule as a plan keeps it; `times`: those that it was found for."""
    ranks = tuple(" ".join(map(str, passes)) for passes in schedule.ranks)
    return PinnedSchedule(
        times=times,
        micro_batches=schedule.num_micro_batches,
        placement=schedule.placement,
        ranks=ranks,
        paths=tuple(map(format_path, schedule.paths)),
    )


def pinned_schedule(name: str, pinned: PinnedSchedule) -> Schedule:
    """Return a pinned schedule as a Schedule. Raises ProgramError for a text that is no action."""
    try:
        ranks = tuple(tuple(parse_action(word) for word in text.split()) for text in pinned.ranks)
    except ValueError as error:
        raise ProgramError(f"the plan's order of schedule {name}: {error}") from None
    replicas, paths = find_schedule(name).default_replicas, pinned.stage_paths
    return Schedule(name, pinned.placement, pinned.micro_batches, ranks, replicas, paths=paths)
