"""Plans with an order of passes that is found for their own times."""

from collections.abc import Iterator

from muster.cost.time.plan_times import plan_times
from muster.planner.request import PlanRequest
from muster.schedule.action import Kind
from muster.schedule.custom_search import search_custom_orders
from muster.schedule.resolve import pin_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.errors import InfeasibleError
from muster.spec.plan import PinnedSchedule, Plan, StageSpec

MAX_PASSES = 60_000
"""Passes of the longest order that is searched: more take seconds."""


def draft_of(
    plan: Plan, request: PlanRequest, placement: tuple[int, ...], stages: tuple[StageSpec, ...], in_flight: float
) -> Plan:
    """Return a plan of schedule `auto` whose order is yet to be found, with stages on these ranks and at most so many
    micro-batches in flight; no layer recomputes or offloads but as the request asks for."""
    default, fixed = request.base.default_strategy, request.fixed
    policy = {name: fixed.get(name, getattr(default, name)) for name in ("recompute", "offload")}
    count = request.island_sequences // plan.mesh(0).dp_size // plan.micro_batch_size
    return plan.model_copy(
        update={
            "schedule": "auto",
            "vpp": len(placement) // plan.pp,
            "stages": stages,
            "overrides": (),
            "max_in_flight_micro_batches": in_flight,
            "default_strategy": plan.default_strategy.model_copy(update=policy),
            "pinned_schedule": PinnedSchedule(
                times="predicted", micro_batches=count, placement=placement, ranks=("",) * plan.pp
            ),
        }
    )


def with_orders(plan: Plan, request: PlanRequest) -> Iterator[Plan]:
    """Yield a plan of schedule `auto` with each order that is found for its times, stages and micro-batches in flight;
    none where these are too few."""
    own = request.model, plan, request.workload, request.cluster, request.framework
    times = plan_times(*own, cache=request.cost_cache, optim=request.optim)
    stages = range(plan.num_stages)
    forward_s, inputs_s, weights_s = (
        tuple(times.seconds[kind, stage] for stage in stages) for kind in (Kind.F, Kind.I, Kind.W)
    )
    hops_s = [
        0.0 if plan.placement[stage] == plan.placement[stage + 1] else times.p2p_time(stage, stage + 1).total_s
        for stage in stages[:-1]
    ]
    setting = ScheduleSpec(
        plan.pp,
        plan.num_micro_batches(request.workload),
        plan.vpp,
        forward_s,
        inputs_s,
        weights_s,
        placement=plan.placement,
        memory_limit=plan.max_in_flight_micro_batches or plan.pp,
    )
    try:
        for schedule in search_custom_orders(setting, hops_s):
            yield plan.model_copy(update={"pinned_schedule": pin_schedule(schedule, "predicted")})
    except InfeasibleError:
        return
