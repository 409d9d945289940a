"""Schedules that are searched for, found once for a plan and kept with it."""

from typing import Literal

from muster.schedule.action import parse_action
from muster.schedule.nominal import nominal_times
from muster.schedule.program import ProgramError
from muster.schedule.registry import make_schedule
from muster.schedule.schedule import Schedule
from muster.schedule.setting import Setting
from muster.schedule.timing import PassTimes
from muster.spec.model import ModelSpec
from muster.spec.plan import Order, Plan
from muster.spec.workload import Workload


def resolved(plan: Plan, model: ModelSpec, workload: Workload) -> Plan:
    """The plan with its schedule found for nominal times, where it is one that is searched for and not found yet.

    `auto` is found again by the same call, `exact` need not be: find it once and hand the plan on. Raises
    InfeasibleError where no schedule serves, MusterError where the solver of `exact` is not installed.
    """
    if not plan.schedule_entry.searched or plan.order is not None:
        return plan
    setting = _setting(plan, plan.num_micro_batches(workload), nominal_times(plan, model, workload))
    return plan.model_copy(update={"order": _order(make_schedule(plan.schedule, setting), "nominal")})


def found_anew(plan: Plan, times: PassTimes) -> Order:
    """The order that a plan's schedule has for measured times, with the stages where the plan's order has them.

    Raises InfeasibleError, MusterError as `resolved`.
    """
    assert plan.order is not None, "there is nothing to find anew"
    setting = _setting(plan, plan.order.micro_batches, times, plan.order.placement)
    return _order(make_schedule(plan.schedule, setting), "measured")


def _setting(plan: Plan, num_micro_batches: int, times: PassTimes, placement: tuple[int, ...] = ()) -> Setting:
    passes = times.forward_s, times.input_backward_s, times.weight_backward_s
    return Setting(
        plan.pp,
        num_micro_batches,
        plan.vpp,
        *map(tuple, passes),
        hop_s=times.hop_s,
        placement=placement,
        memory_limit=plan.activation_limit or plan.pp,
    )


def _order(schedule: Schedule, times: Literal["nominal", "measured"]) -> Order:
    ranks = tuple(" ".join(map(str, passes)) for passes in schedule.ranks)
    return Order(times=times, micro_batches=schedule.num_micro_batches, placement=schedule.placement, ranks=ranks)


def kept_schedule(name: str, order: Order) -> Schedule:
    """The way back. Raises ProgramError where a text is no action."""
    try:
        ranks = tuple(tuple(parse_action(word) for word in text.split()) for text in order.ranks)
    except ValueError as error:
        raise ProgramError(f"the plan's order of schedule {name}: {error}") from None
    return Schedule(name, order.placement, order.micro_batches, ranks)
