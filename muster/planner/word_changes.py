"""A known plan with the words changed that a request requires: where the search for an alternative begins.

Who reads "schedule zb-h1: 3 % slower" checks it by changing that one word of the first plan. So the plan with the word
changed is among the plans that the line is about, however little work its search has: the word alone where that is
legal, else with the degree that has to give way, and with every micro-batch size.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from muster.planner.neighbours import COMPENSATING_AXES, with_all_layers, with_degrees
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search_budget import PLAN_WORK, SearchBudget, fit_work, simulation_work
from muster.planner.space import QUANTIZED, SHARD_SIZES, is_admitted, micro_batch_sizes, schedule_options
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.legality import plan_violations
from muster.spec.plan import Plan
from muster.spec.schedules import DEFAULT_SCHEDULE
from muster.spec.skip_rules import NO_SKIPS

MAX_CHANGED = 8
"""Changed plans that a search begins with."""

CHANGED_SHARE = 0.5
"""Share of a search's work for them; the first is tried however little it is."""

TIME_MARGIN = 3.0
"""Work that there must be time for, as a multiple of that of one plan of each: fitting may make several of one."""

_DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")


def changed_plans(centres: Iterable[Plan], evaluator: PlanEvaluator, budget: SearchBudget) -> list[Plan]:
    """Return `centres` with the words that the evaluator's request requires, as many as a share of the budget is enough
    for: the words alone changed first, then by bound."""
    request = evaluator.request
    exact: dict[Plan, None] = {}
    others: dict[Plan, None] = {}
    for centre in centres:
        for plan in _with_required(centre, request):
            exact[plan] = None
            others |= dict.fromkeys(_with_sizes(plan, request))
    rest = [plan for plan in others if plan not in exact]
    budget.spend(PLAN_WORK * len(rest))
    rest.sort(key=evaluator.bounds.of_plan)
    return list(_affordable([*exact, *rest][:MAX_CHANGED], request, budget))


def _affordable(plans: Sequence[Plan], request: PlanRequest, budget: SearchBudget) -> Iterator[Plan]:
    work = 0.0
    for number, plan in enumerate(plans):
        work += fit_work(plan, request.workload, by_layer=True) + simulation_work(plan, request.workload)
        if (number and work > CHANGED_SHARE * budget.left) or not budget.has_time_for(TIME_MARGIN * work):
            return
        yield plan


def _with_required(plan: Plan, request: PlanRequest) -> Iterator[Plan]:
    """Yield the legal plans with the required words changed and as little else as possible, the nearest first."""
    if plan.pinned_schedule is not None:
        ordinary = {"pinned_schedule": None, "schedule": DEFAULT_SCHEDULE, "vpp": 1, "stages": (), **NO_SKIPS}
        plan = plan.model_copy(update=ordinary)
    for changed in _with_required_degrees(plan, request):
        if changed.pp == 1 < plan.pp and request.fixed.get("schedule", DEFAULT_SCHEDULE) != DEFAULT_SCHEDULE:
            continue
        found = [one for one in _with_required_schedule(changed, request) if _is_wanted(one, request)]
        yield from found
        if found:
            return


def _with_required_degrees(plan: Plan, request: PlanRequest) -> Iterator[Plan]:
    """Yield the plan with the required degrees: others give way so that all devices stay in use."""
    now = {axis: getattr(plan, axis) for axis in _DEGREES}
    wanted = {axis: request.fixed.get(axis, degree) for axis, degree in now.items()}
    names = ("ep", "micro_batch_size", *SHARD_SIZES, *QUANTIZED, "max_active_stages", "bucket_layers")
    others = {name: request.fixed[name] for name in names if name in request.fixed}
    strategy = {name: value for name, value in request.fixed.items() if name in LayerStrategy.model_fields}
    for degrees in _filling(wanted, request):
        other = {axis: degree for axis, degree in degrees.items() if degree != now[axis]}
        changed = with_degrees(plan, other, request) if other else plan
        if (degrees["dp_replicate"], degrees["dp_shard"]) != (plan.dp_replicate, plan.dp_shard):
            others["uneven_micro_batches"] = request.fixed.get("uneven_micro_batches", ())
        yield with_all_layers(changed.model_copy(update=others), **strategy)


def _filling(wanted: dict[str, int], request: PlanRequest) -> Iterator[dict[str, int]]:
    """Yield degrees that fill the devices: the wanted ones, each with one other changed for it, and for experts those
    with pipeline stages given up for more data-parallel ranks."""
    world = request.island_devices
    filled = prod(wanted.values())
    if filled == world:
        yield wanted
    for axis in COMPENSATING_AXES if filled != world else ():
        degree, rest = divmod(wanted[axis] * world, filled)
        if not rest and degree and axis not in request.fixed:
            yield {**wanted, axis: degree}
    if "ep" in request.fixed and "pp" not in request.fixed and filled == world:
        for factor in (2**power for power in range(1, wanted["pp"].bit_length())):
            if wanted["pp"] % factor == 0:
                yield {**wanted, "pp": wanted["pp"] // factor, "dp_shard": wanted["dp_shard"] * factor}


def _with_required_schedule(plan: Plan, request: PlanRequest) -> Iterator[Plan]:
    """Yield the plan with the required schedule, with as many stages of a rank as it may have."""
    schedule = request.fixed.get("schedule")
    if schedule is None or schedule == plan.schedule:
        yield plan
        return
    for name, vpp in schedule_options(request, plan.pp):
        if name == schedule and request.admits("vpp", vpp):
            stages: dict[str, Any] = {} if vpp == plan.vpp else {"stages": ()}
            yield plan.model_copy(update={"schedule": name, "vpp": vpp, "max_in_flight_micro_batches": None, **stages})


def _with_sizes(plan: Plan, request: PlanRequest) -> Iterator[Plan]:
    """Yield the plan with each micro-batch size, without recompute that isn't required: fitting adds what is needed."""
    if plan.uneven_micro_batches:
        return
    fixed = request.fixed
    if "recompute" not in fixed and request.objective != "memory" and not request.base.overrides:
        plan = with_all_layers(plan, recompute="none")
    sequences = request.island_sequences // plan.mesh(0).dp_size
    for size in micro_batch_sizes(request, sequences) if "micro_batch_size" not in fixed else (plan.micro_batch_size,):
        other = plan.model_copy(update={"micro_batch_size": size})
        if _is_wanted(other, request):
            yield other


def _is_wanted(plan: Plan, request: PlanRequest) -> bool:
    if not is_admitted(request, plan):
        return False
    return not plan_violations(plan, request.model, request.workload, request.cluster.num_devices)
