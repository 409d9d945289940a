"""Explanations in words of the limit that binds where there is no plan."""

from dataclasses import replace
from itertools import islice
from math import prod

from muster.cost.memory.kernel_workspace import DEFAULT_KERNEL_WORKSPACE
from muster.cost.memory.native_memory import native_stage_memory
from muster.planner.request import PlanRequest, refix_request
from muster.planner.search import search
from muster.planner.search_budget import SearchBudget
from muster.planner.search_result import SearchResult
from muster.planner.smallest_plan import describe_need, format_size, limits_memory
from muster.planner.space import (
    draft_plans,
    mesh_shapes,
    schedule_choices,
)
from muster.spec.cluster import NodeGroup
from muster.spec.frameworks import FRAMEWORK_SCHEDULES, runs_schedule
from muster.spec.legality import plan_violations
from muster.spec.nearest_plans import MOST_DEVICES_WITH_NEAREST, nearest_plans
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.schedules import DEFAULT_SCHEDULE, SCHEDULES
from muster.spec.supported import unsupported_features
from muster.spec.units import pluralize

ASSUMED_HOST_BYTES_PER_S = 31.5e9
"""Rate assumed for an unknown link to the host: PCI Express 4 with 16 lanes."""


def explain_offload(request: PlanRequest, budget: SearchBudget) -> str:
    """Return the plan of a family that would fit with offload, and what stands against that; empty if there is none."""
    groups: list[NodeGroup] = []
    conditions: list[str] = []
    for group in request.cluster.groups:
        device = group.device
        changed: dict[str, object] = {}
        if device.kind == "gpu" and device.rates is None and device.host_bandwidth_bytes_per_s is None:
            speed = {"host_bandwidth_bytes_per_s": ASSUMED_HOST_BYTES_PER_S}
            changed["device"] = device.model_copy(update=speed)
            conditions.append(
                f"if {device.name} reached its host with {ASSUMED_HOST_BYTES_PER_S / 1e9:g} GB/s, which is unknown"
            )
        if group.host_memory_bytes is not None:
            changed["host_memory_bytes"] = None
            conditions.append(f"if nodes had more memory than {format_size(group.host_memory_bytes)}")
        groups.append(group.model_copy(update=changed))
    fixed = dict(request.fixed)
    if fixed.get("offload") == "none":
        del fixed["offload"]
        conditions = ["if that was allowed"]
    if not conditions:
        return ""
    cluster = request.cluster.model_copy(update={"groups": tuple(groups)})
    found = search(replace(request, fixed=fixed, cluster=cluster), 1, budget).best
    return f"; offload would make it fit {conditions[0]}: {found[0].name}" if found else ""


def describe_nearest_miss(result: SearchResult) -> str:
    """Return what the plan with the least excess takes, with its largest terms."""
    assert result.nearest_miss is not None
    evaluated = result.evaluator.evaluate(result.nearest_miss)
    budget = result.evaluator.memory_budget
    fullest = max(evaluated.prediction.memory, key=lambda rank: rank.total / (budget.limit_bytes(rank.rank) or 1))
    terms = sorted(((size, name) for name, size in fullest.terms.items() if size), reverse=True)[:2]
    shown = " and ".join(f"{format_size(size)} of {name.replace('_', ' ')}" for size, name in terms)
    limit = budget.limit_bytes(fullest.rank)
    of = f" of {format_size(limit)}" if limit else ""
    return f"the smallest, {evaluated.name}, takes {format_size(fullest.total)}{of} ({shown})"


def explain_illegal(request: PlanRequest, axes: tuple[str, ...]) -> str:
    """Return the first reason against the smallest use of these axes."""
    world = request.cluster.num_devices
    if ones := [axis for axis in axes if request.fixed.get(axis) == 1]:
        return f"{ones[0]} 1 is required"
    if world < 2 ** len(axes):
        return f"it needs {2 ** len(axes)} devices, there are {world}"
    if request.fixed:
        return _explain_fixed_illegal(request)
    degrees = {axis: 2 for axis in axes if axis != "ep"}
    rest = world // max(1, 2 ** len(degrees))
    plan = request.base.model_copy(update={**degrees, "dp_shard": rest, "ep": 2 if "ep" in axes else 1})
    reasons = plan_violations(plan, request.model, request.workload, world)
    reasons += unsupported_features(plan, request.model) if request.runnable else []
    if reasons:
        return f"{format_plan_name(plan)}: {reasons[0].replace('process', 'device')}"
    return "no degrees divide devices, heads, layers, sequence and batch into a step of a size that can be simulated"


def _explain_fixed_illegal(request: PlanRequest) -> str:
    """Return the reason against the required parts of a plan, with data parallelism for the rest of the devices."""
    world = request.cluster.num_devices
    required = request.fixed_text or "what is required"
    fields = {name: value for name, value in request.fixed.items() if name in Plan.model_fields}
    strategy = {name: value for name, value in request.fixed.items() if name not in fields}
    if fields.get("overlap_param_gather_with_optimizer_step"):
        strategy = {"zero": "z1", **strategy}  # a search tries it under z1 and z2 alone
    if stages := fields.get("stages"):
        fields = {"pp": max(1, len(stages) // fields.get("vpp", 1)), **fields}
    cut = prod(fields.get(axis, 1) for axis in ("tp", "pp", "cp", "dp_replicate"))
    if world % cut and cut < world:
        return f"with {required}, {world} devices are not a multiple of {cut}"
    schedule = fields.get("schedule", DEFAULT_SCHEDULE)
    if not runs_schedule(request.framework, schedule):
        known = ", ".join(sorted(FRAMEWORK_SCHEDULES[request.framework.name]))
        return f"with {required}, {request.framework.name} doesn't run schedule {schedule}: expected one of {known}"
    if fields.get("pp") == 1 and schedule != DEFAULT_SCHEDULE:
        return f"with {required}, schedule {schedule} needs a pipeline of 2 ranks or more, which pp 1 is not"
    plan = request.base.model_copy(
        update={
            "dp_shard": max(1, world // cut),
            **(
                {"pp": 2, "dp_shard": max(1, world // cut // 2)}
                if schedule != DEFAULT_SCHEDULE and "pp" not in fields
                else {}
            ),
            "vpp": SCHEDULES[schedule].default_chunks,
            **fields,
            "default_strategy": request.base.default_strategy.model_copy(update=strategy),
        }
    )
    reasons = plan_violations(plan, request.model, request.workload, world)
    reasons += unsupported_features(plan, request.model) if request.runnable else []
    if reasons:
        return f"with {required}, {reasons[0].replace('processes', 'devices').replace('process', 'device')}"
    return f"{required} is not among the plans that are searched ('muster predict' takes any plan)"


def explain_no_plan(result: SearchResult, budget: SearchBudget) -> str:
    """Return why a search with a budget found nothing: the limit that binds, what would relax it, and a plan that can't
    run yet but would fit."""
    return _explain_limit(result) + _suggest_anticipated(result.evaluator.request, budget)


ANTICIPATION_EFFORT = 0.1
"""Work of the search for a plan that can't run yet, where none that can fits, as a part of the question's."""


def _suggest_anticipated(request: PlanRequest, budget: SearchBudget) -> str:
    """Return a plan that is predicted to fit but can't be run yet, with the flag that shows it; empty without one."""
    if not request.runnable:
        return ""
    found = search(replace(request, runnable=False), 1, budget.renew(ANTICIPATION_EFFORT)).best
    if not found or not found[0].unsupported:
        return ""
    return f"; {found[0].name} is predicted to fit, but can't be run yet: --anticipate shows such plans"


def _explain_limit(result: SearchResult) -> str:
    request = result.evaluator.request
    if result.nearest_miss is not None and not result.proven:
        small = describe_nearest_miss(result)
        return (
            f"no plan that fits was found, and not all were looked at: of those that were, {small}; a search with"
            f" more --effort may find one; {describe_need(request)}"
        )
    if not result.proven:
        return "no plan was found, and not all were looked at: a search with more --effort or a longer --time-limit may"
    if result.nearest_miss is not None or (result.counts["too_large"] and _has_plans(request)):
        state, together = training_state_bytes(request), result.evaluator.memory_budget.usable_bytes
        more = ""
        if state > together:
            of = "all of it that may be used" if limits_memory(request) else "all memory together"
            more = f"parameters, gradients and optimizer state of {request.model.name} take {format_size(state)}, "
            more += f"{of} is {format_size(together)}; "
        return f"no plan fits: {more}{describe_need(request)}"
    devices = pluralize(request.cluster.num_devices, "device")
    return f"no plan is legal for {devices}: {explain_illegal(request, ())}{suggest_legal(request)}"


def suggest_legal(request: PlanRequest) -> str:
    """Return the least change that makes a plan legal: one required part less, or another batch; empty if neither
    does."""
    world = request.cluster.num_devices
    batch = request.workload.global_batch_size
    parts = request.fixed_text.split("-") if request.fixed_text else []
    for left_out in parts:
        rest = "-".join(part for part in parts if part != left_out)
        if _has_plans(refix_request(request, rest)):
            return f"; there are plans without {left_out}{_nearest_legal(request, left_out)}"
    for more in sorted(
        {max(1, batch // world) * world, -(-batch // world) * world}, key=lambda size: abs(size - batch)
    ):
        other = request.workload.model_copy(update={"global_batch_size": more})
        if more != batch and _has_plans(replace(request, workload=other)):
            return f"; there are plans for {pluralize(more, 'sequence')} a step (--global-batch {more})"
    return ""


def _nearest_legal(request: PlanRequest, left_out: str) -> str:
    """Return the plan that can run and is nearest to what is required, as an end of a sentence; empty if it has the
    part that searched plans are without."""
    asked = parse_plan_name(request.fixed_text, request.base)
    devices = request.cluster.num_devices
    own = request.model, request.workload, devices
    near = nearest_plans(asked, *own, limit=1) if devices <= MOST_DEVICES_WITH_NEAREST else []
    name = format_plan_name(near[0]) if near else ""
    return f", the nearest being {name}" if near and left_out not in name.split("-") else ""


def _has_plans(request: PlanRequest) -> bool:
    """Return True if any plan is legal, judged by the first few hundred choices."""
    each = (order for shape in mesh_shapes(request) for order in schedule_choices(request, shape))
    return any(next(draft_plans(request, order), None) is not None for order in islice(each, 300))


def training_state_bytes(request: PlanRequest) -> int:
    """Return the bytes of all parameters, gradients and optimizer state, once."""
    held = native_stage_memory(
        request.model, request.base, request.workload, 0, DEFAULT_KERNEL_WORKSPACE, request.optim
    )
    return held.resident.parameters + held.resident.optimizer + held.gradients
