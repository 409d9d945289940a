"""The nearest plans that can run."""

from collections.abc import Iterator
from math import gcd, log2

from muster.spec.context_rules import with_possible_kind
from muster.spec.errors import InfeasibleError
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.legality import LEGAL_RULES, layer_violations, plan_violations, schedules_for_vpp
from muster.spec.mesh_axes import DEGREE_FIELDS, MESH_AXES, SUPPORTED_AXES
from muster.spec.mesh_cuts import divisors
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name, settings_beyond_name
from muster.spec.rules import as_by_default, repaired
from muster.spec.schedules import DEFAULT_SCHEDULE
from muster.spec.supported import require_supported_model, runtime_rules, unsupported_features
from muster.spec.units import pluralize
from muster.spec.workload import Workload

MOST_DEVICES_WITH_NEAREST = 4096
"""Devices up to which predictions and searches look for the nearest plans, among all degrees."""


def require_runnable(plan: Plan, model: ModelSpec, workload: Workload, world_size: int) -> None:
    """Raise InfeasibleError unless the plan can run: with the reasons and the nearest plans that can, or with the parts
    of the model that can't run at all."""
    require_supported_model(model)
    found = plan_violations(plan, model, workload, world_size) or unsupported_features(plan, model)
    if not found:
        return
    sentence = f"plan {format_plan_name(plan)} can't run: {'; '.join(found)}"
    for size in range(min(world_size, model.num_layers * workload.global_batch_size), 0, -1):
        if near := nearest_plans(plan, model, workload, size):
            where = "" if size == world_size else f" with {pluralize(size, 'process')}"
            raise InfeasibleError(f"{sentence}; nearest{where}: {', '.join(_name_beside(plan, one) for one in near)}")
    raise InfeasibleError(sentence)


def _name_beside(plan: Plan, near: Plan) -> str:
    """Return the name of a plan near another one, with what it lacks where the names alone look the same."""
    name, own = format_plan_name(near), format_plan_name(plan)
    lacks = [setting for setting in settings_beyond_name(plan) if setting not in settings_beyond_name(near)]
    is_alike = name.partition("+")[0] == own.partition("+")[0]
    return f"{name} (without {', '.join(lacks)})" if is_alike and lacks else name


def nearest_plans(plan: Plan, model: ModelSpec, workload: Workload, world_size: int, limit: int = 3) -> list[Plan]:
    """Return the runnable plans for `world_size` processes that differ least from `plan`, nearest first, ties by name.

    The distance is the number of doublings between degrees, summed over all axes, plus half of that for the micro-batch
    size, and a tenth for optimizer state, and for parameters, in another tier. (dp8 is 1 from dp4, and 2 from dp4-tp2.)
    """
    ranked = sorted(
        (_distance(plan, candidate), format_plan_name(candidate), candidate)
        for candidate in _candidates(plan, model, workload, world_size)
        if _is_runnable(candidate, model, workload, world_size)
    )
    by_name: dict[str, Plan] = {}
    for _, name, candidate in ranked:
        by_name.setdefault(name, candidate)
    return list(by_name.values())[:limit]


def _is_runnable(plan: Plan, model: ModelSpec, workload: Workload, world_size: int) -> bool:
    return not plan_violations(plan, model, workload, world_size) and not unsupported_features(plan, model)


# ----------------------------------------------------------------------------------------------------------------------
# Candidates


def _candidates(plan: Plan, model: ModelSpec, workload: Workload, world_size: int) -> Iterator[Plan]:
    """Yield, for each way to factor the world over the supported axes, the plan closest to `plan` in all else.

    Broken rules are repaired by the rules' own repairs.
    """
    overrides = tuple(run for run in plan.overrides if run.start + run.count <= model.num_layers)
    for axes in _degrees(plan, world_size):
        share, rest = divmod(workload.global_batch_size, plan.islands * axes["dp_replicate"] * axes["dp_shard"])
        if rest or axes["pp"] > model.num_layers or (axes["tp"] > 1 and axes["tp"] != plan.tp):
            continue  # tensor parallelism only where the plan asks for it
        if axes["cp"] > 1 and plan.cp == 1:
            continue
        keeps_stages = (
            len(plan.stages) == axes["pp"] * axes["vpp"] and plan.is_uniform and not list(layer_violations(plan, model))
        )
        count = 1 if model.moe is None else model.moe.num_experts
        experts = gcd(plan.ep, count)
        candidate = _with_degrees(plan, **axes, ep=experts, etp=plan.etp if model.moe else 1).model_copy(
            update={
                "micro_batch_size": min(divisors(share), key=lambda n: (abs(log2(n / plan.micro_batch_size)), n)),
                "stages": plan.stages if keeps_stages else (),
                "ep_redundant_experts": min(plan.ep_redundant_experts, count - count // experts),
                "pinned_schedule": None,
                "schedule": _nearest_schedule(plan, axes["vpp"]),
                "default_strategy": _carried_over(plan.default_strategy),
                "overrides": tuple(
                    run.model_copy(update={"strategy": _carried_over(run.strategy)}) for run in overrides
                ),
            }
        )
        same_for_all_layers = as_by_default("zero", "sp", "tp_overlap")
        for one in dict.fromkeys((_with_tiers_of(plan, candidate), candidate)):
            yield with_possible_kind(repaired((*LEGAL_RULES, *runtime_rules(model)), same_for_all_layers(one)), model)


_TIERS = ("offload_optimizer", "offload_param")
_TIER_FIELDS = (*_TIERS, *(f"{name}_ratio" for name in _TIERS), "device_update_ratio")
_RANK_AXES = tuple(axis for axis in SUPPORTED_AXES if axis in MESH_AXES)
"""Supported axes that hold ranks of their own; experts' ranks are among these."""


def _nearest_schedule(plan: Plan, vpp: int) -> str:
    schedules = schedules_for_vpp(vpp)
    if plan.schedule in schedules or plan.schedule_entry.searched:
        return plan.schedule
    return DEFAULT_SCHEDULE if vpp == 1 else schedules[0]


def _carried_over(strategy: LayerStrategy) -> LayerStrategy:
    """Return the parts of a strategy that the nearest plans keep: not the attention kernel, nor offload."""
    return LayerStrategy(
        zero=strategy.zero, sp=strategy.sp, tp_overlap=strategy.tp_overlap, recompute=strategy.recompute
    )


def _degrees(plan: Plan, world_size: int) -> Iterator[dict[str, int]]:
    """Yield all factorizations of the world over the axes, with one stage on each pipeline rank or as many as the plan
    has."""
    if world_size % plan.islands:
        return
    for degrees in _factorizations(world_size // plan.islands, len(_RANK_AXES)):
        axes = dict(zip(_RANK_AXES, degrees, strict=True))
        yield axes | {"vpp": 1}
        wanted = {plan.vpp, plan.schedule_entry.min_chunks} - {1}
        for vpp in wanted if axes["pp"] > 1 else ():
            yield axes | {"vpp": vpp}


def _with_degrees(plan: Plan, **degrees: int) -> Plan:
    """Return the plan with these degrees and 1 for all others, without single stages."""
    ones = dict.fromkeys((*DEGREE_FIELDS, "vpp"), 1)
    return plan.model_copy(update={**ones, **degrees, "stages": (), "uneven_micro_batches": ()})


def _distance(asked: Plan, candidate: Plan) -> float:
    doublings = sum(abs(log2(getattr(asked, axis) / getattr(candidate, axis))) for axis in (*MESH_AXES, "vpp"))
    tiers = (getattr(asked.default_strategy, name) == getattr(candidate.default_strategy, name) for name in _TIERS)
    return doublings + abs(log2(asked.micro_batch_size / candidate.micro_batch_size)) / 2 + 0.1 * (2 - sum(tiers))


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered ways to write `number` as a product of `parts` factors."""
    if parts == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in _factorizations(number // first, parts - 1):
            yield (first, *rest)


def _with_tiers_of(plan: Plan, candidate: Plan) -> Plan:
    """Return a candidate whose layers have the optimizer state and parameters where those of the plan have them."""
    own = plan.default_strategy
    strategy = candidate.default_strategy.model_copy(update={name: getattr(own, name) for name in _TIER_FIELDS})
    return candidate.model_copy(update={"default_strategy": strategy})
