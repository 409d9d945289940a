"""Neighbours of a plan, each one change away: the steps of local search."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from muster.planner.dispatch_choice import copy_counts, dispatch_fields, expert_slices
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.space import domain_devices, is_admitted
from muster.spec.errors import InfeasibleError
from muster.spec.layer_strategy import LayerOverride
from muster.spec.legality import plan_violations
from muster.spec.plan import Plan
from muster.spec.schedules import DEFAULT_SCHEDULE, SCHEDULES
from muster.spec.skip_rules import NO_SKIPS

BREADTH_FIRST = "breadth-first"
_ALL_RANKS = {"param_shard_size": None, "grad_shard_size": None}

COMPENSATING_AXES = ("dp_shard", "dp_replicate", "pp", "tp", "cp")
"""Axes that compensate for a changed degree, so that all devices stay in use: the first that gives a legal plan."""


@dataclass(frozen=True, slots=True)
class Change:
    """A changed plan, and the change in words."""

    description: str
    plan: Plan
    may_refit: bool = True
    """True if recompute may change with it; False where recompute itself is what changes."""


# ----------------------------------------------------------------------------------------------------------------------
# Changes


def single_changes(plan: Plan, request: PlanRequest) -> Iterator[Change]:
    """Yield legal plans one change away; another axis compensates for a changed degree."""
    seen: set[Plan] = set()
    seen.add(plan)
    for change in _all_changes(plan, request):
        if change.plan not in seen and _is_legal(change.plan, request):
            seen.add(change.plan)
            yield change


def _all_changes(plan: Plan, request: PlanRequest) -> Iterator[Change]:
    if plan.tp > 1 and request.model.other_stream is None:
        sp = not plan.default_strategy.sp
        changed = _with_fastest_dispatcher(_with_strategy(plan, sp=sp), request)
        yield Change("tensor parallelism with sp" if sp else "tensor parallelism without sp", changed)
    for axis in ("tp", "pp", "cp"):
        for grows in (True, False):
            yield from _degree_change(plan, request, axis, grows)
    for degree in (plan.ep * 2, plan.ep // 2):
        moe = request.model.moe
        if moe is not None and degree and moe.num_experts % degree == 0 and plan.ep % min(degree, plan.ep) == 0:
            yield Change(f"ep {degree}", _with_fastest_dispatcher(plan.model_copy(update={"ep": degree}), request))
    for copies in copy_counts(request, plan.ep) if request.model.moe is not None else ():
        own = plan.tp, plan.cp, plan.ep, plan.default_strategy.sp, copies, plan.schedule
        yield Change(f"{copies or 'no'} copies of experts", plan.model_copy(update=dispatch_fields(request, *own)))
    for size in (plan.micro_batch_size * 2, plan.micro_batch_size / 2):
        if size >= 1 and size == int(size):
            yield Change(f"micro-batches of {int(size)}", plan.model_copy(update={"micro_batch_size": int(size)}))
    for level in ("z1", "z2", "z3"):
        if plan.dp_shard > 1 and level != plan.default_strategy.zero:
            plain = plan.model_copy(update={**_ALL_RANKS, "max_active_stages": None})
            yield Change(f"sharding level {level}", _with_strategy(plain, zero=level))
    if plan.has_shard_levels:
        yield Change("parameters and gradients over all ranks", plan.model_copy(update=_ALL_RANKS))
    for params, grads in shard_groups(plan, request):
        sizes = {"param_shard_size": params, "grad_shard_size": grads}
        changed = {"dp_shard": plan.dp_replicate * plan.dp_shard, "dp_replicate": 1, **sizes}
        words = f"parameters over {params} ranks, gradients over {grads}"
        yield Change(words, _with_strategy(plan.model_copy(update=changed), zero="z3"))
    if plan.max_active_stages is not None:
        yield Change("gathers in every pass", plan.model_copy(update={"max_active_stages": None}))
    for fields in active_stages(plan, request):
        words = "parameters gathered for units of passes, of {max_active_stages} of {vpp} stages a rank, {schedule}"
        yield Change(words.format(**fields), _with_strategy(plan.model_copy(update=fields), zero="z3"))
    for mode in ("none", "full"):
        if plan.overrides or mode != plan.default_strategy.recompute:
            yield Change(f"recompute {mode}", with_all_layers(plan, recompute=mode), may_refit=False)
    if plan.sequence_tiles > 1:
        yield Change("no tiles", plan.model_copy(update={"sequence_tiles": 1}))
    if plan.sequence_slices > 1:
        yield Change("no slices", plan.model_copy(update={"sequence_slices": 1}))
    if any(strategy.offload != "none" for strategy in plan.strategies):
        yield Change("no offload", with_all_layers(plan, offload="none"), may_refit=False)
    if any(strategy.offload != "activations" for strategy in plan.strategies):
        yield Change("offload of all layers", with_all_layers(plan, offload="activations"), may_refit=False)
    for schedule, entry in SCHEDULES.items():
        chunks = entry.planner.compared_with_chunks
        if plan.pp > 1 and chunks is not None and (schedule, chunks) != (plan.schedule, plan.vpp):
            stages = plan.stages if chunks == plan.vpp else ()
            yield Change(
                f"schedule {schedule}",
                plan.model_copy(
                    update={
                        "schedule": schedule,
                        "vpp": chunks,
                        "stages": stages,
                        "pinned_schedule": None,
                        "max_in_flight_micro_batches": None,
                        **NO_SKIPS,
                        "max_active_stages": None,
                    }
                ),
            )


def shard_groups(plan: Plan, request: PlanRequest) -> list[tuple[int, int]]:
    """Return the numbers of ranks over which parameters and gradients may be sharded so that passes communicate within
    nodes: all ranks of a node for both, or pairs for parameters. Empty where the ranks that share a plan's state lie on
    one node, gradients are reduced once a step (z1), or it isn't Muster's runtime that the request is about."""
    ranks = plan.dp_replicate * plan.dp_shard * plan.cp
    near, rest = divmod(domain_devices(request), plan.tp)
    sharded = plan.default_strategy.zero != "z1" and request.framework.storage == "muster"
    if not sharded or rest or near < 2 or near >= ranks or ranks % near or plan.ep > 1:
        return []
    return [(near, near), *([(2, near)] if near > 2 and near % 2 == 0 else [])]


def active_stages(plan: Plan, request: PlanRequest) -> list[dict[str, Any]]:
    """Return the fields of plans that gather parameters for units of passes under z3: of 1, 2 or 4 of a rank's stages
    under the plan's own schedule, where that runs stages round by round, and of one under breadth-first, whose units
    are longest. Empty without a pipeline or ranks that share state, and for another runtime than Muster's."""
    if plan.pp == 1 or plan.dp_shard * plan.cp == 1 or request.framework.storage != "muster":
        return []
    sizes = [count for count in (2, 4) if plan.pp * count <= request.model.num_layers]
    found: list[dict[str, Any]] = [{"schedule": BREADTH_FIRST, "vpp": size, "max_active_stages": 1} for size in sizes]
    rounds = not (plan.schedule_entry.v_shaped or plan.schedule_entry.searched)
    if plan.vpp > 1 and rounds and plan.pipeline_replicas == 1:
        own = {"schedule": plan.schedule, "vpp": plan.vpp}
        found = [*({**own, "max_active_stages": count} for count in (1, 2, 4) if count < plan.vpp), *found]
    others = {"stages": (), "pinned_schedule": None, "max_in_flight_micro_batches": None, **_ALL_RANKS}
    return [fields if fields["vpp"] == plan.vpp and not plan.pinned_schedule else others | fields for fields in found]


def _degree_change(plan: Plan, request: PlanRequest, axis: str, grows: bool) -> Iterator[Change]:
    """Yield the plan with a doubled or halved degree, with the first axis that compensates for it."""
    for partner in COMPENSATING_AXES:
        degree = getattr(plan, axis)
        other = getattr(plan, partner)
        if partner == axis or (other if grows else degree) % 2:
            continue
        degrees = {axis: degree * 2, partner: other // 2} if grows else {axis: degree // 2, partner: other * 2}
        changed = with_degrees(plan, degrees, request)
        if _is_legal(changed, request):
            also = "" if partner.startswith("dp") else f" and {partner} {degrees[partner]}"
            yield Change(f"{axis} {degrees[axis]}{also}", changed)
            return


def with_degrees(plan: Plan, degrees: dict[str, int], request: PlanRequest) -> Plan:
    """Return the plan with other degrees, and the fields that these decide."""
    update: dict[str, Any] = dict(degrees)
    pp = degrees.get("pp", plan.pp)
    if pp != plan.pp:
        update["stages"] = ()
    if pp == 1:
        update |= {"schedule": DEFAULT_SCHEDULE, "vpp": 1, "max_active_stages": None, **NO_SKIPS}
    changed = plan.model_copy(update=update)
    strategy: dict[str, object] = {}
    if changed.tp == 1 or request.workload.seq_len % (changed.tp * changed.cp):
        strategy["sp"] = False
    elif plan.tp == 1:
        strategy["sp"] = request.shards_positions(changed.tp, changed.cp)
    if plan.mesh(0).dp_size == 1 < changed.mesh(0).dp_size:
        strategy["zero"] = request.fixed.get("zero", "z1")
    return _with_fastest_dispatcher(_with_strategy(changed, **strategy) if strategy else changed, request)


def _with_fastest_dispatcher(plan: Plan, request: PlanRequest) -> Plan:
    """Return the plan with the slices of experts and the dispatcher of tokens that suit its degrees."""
    if request.model.moe is None:
        return plan
    counts, copies = copy_counts(request, plan.ep), plan.ep_redundant_experts
    copies = copies if copies in counts else counts[0]
    own = plan.tp, plan.cp, plan.ep, plan.default_strategy.sp, copies, plan.schedule
    update = {"etp": expert_slices(request, plan.tp, plan.ep), **dispatch_fields(request, *own)}
    return plan.model_copy(update=update)


def _is_legal(plan: Plan, request: PlanRequest) -> bool:
    return not plan_violations(plan, request.model, request.workload, request.cluster.num_devices)


def with_all_layers(plan: Plan, **changed: object) -> Plan:
    """Return the plan with a change for all layers; overrides that no longer differ from the default are dropped."""
    default = plan.default_strategy.model_copy(update=changed)
    runs = (run.model_copy(update={"strategy": run.strategy.model_copy(update=changed)}) for run in plan.overrides)
    overrides = tuple(run for run in runs if run.strategy != default)
    return plan.model_copy(update={"default_strategy": default, "overrides": overrides})


def _with_strategy(plan: Plan, **changed: object) -> Plan:
    """Return the plan with a change for all layers that keeps recompute by layer as it is."""
    overrides = tuple(
        LayerOverride(
            start=run.start,
            count=run.count,
            strategy=run.strategy.model_copy(update={**changed, "recompute": run.strategy.recompute}),
        )
        for run in plan.overrides
    )
    default = plan.default_strategy.model_copy(update=changed)
    return plan.model_copy(update={"default_strategy": default, "overrides": overrides})


# ----------------------------------------------------------------------------------------------------------------------
# Plans that fit


def neighbour_plans(plan: Plan, evaluator: PlanEvaluator, part: tuple[int, int] = (0, 1)) -> Iterator[Plan]:
    """Yield the plans one change away that fit, with recompute and offload where these are needed, within the space of
    the search. `part`: number of a part of the changes, which are dealt out in turn, and number of parts."""
    request = evaluator.request
    number, parts = part
    for change in islice(single_changes(plan, request), number, None, parts):
        if change.may_refit and _may_refit(request):
            try:
                found = evaluator.memory_budget.fit(
                    _without_fitting(_rebalanced(plan, change.plan, evaluator), request)
                )[0]
            except InfeasibleError:
                continue
            yield from (fitting for fitting in found if is_admitted(request, fitting))


def _may_refit(request: PlanRequest) -> bool:
    """Return True if the search chooses recompute by layer."""
    return "recompute" not in request.fixed and request.objective != "memory" and not request.base.overrides


def _without_fitting(plan: Plan, request: PlanRequest) -> Plan:
    """Return the plan with only the recompute and offload that are required."""
    offload = request.fixed.get("offload", request.base.default_strategy.offload)
    return with_all_layers(plan, recompute="none", offload=offload)


def _rebalanced(winner: Plan, plan: Plan, evaluator: PlanEvaluator) -> Plan:
    """Return the changed plan with layers balanced and the batch split for it, where the winner has them so."""
    request = evaluator.request
    fixed = request.fixed.get("stages") or request.base.stages
    if winner.stages and not fixed and winner.is_uniform and plan.pp > 1 and plan.vpp == 1:
        # The evaluator has cached times of plans without recompute, which hardly changes the best balance.
        even = _without_fitting(plan, request).model_copy(update={"stages": ()})
        moved = evaluator.with_balanced_layers(even)
        if moved is not None and evaluator.bounds.of_plan(moved) < evaluator.bounds.of_plan(even):
            plan = plan.model_copy(update={"stages": moved.stages})
        else:
            plan = plan.model_copy(update={"stages": ()})
    if winner.uneven_micro_batches and "uneven_micro_batches" not in request.fixed:
        even = plan.model_copy(update={"uneven_micro_batches": ()})
        plan = evaluator.batch_splitter.with_best_split(even) or even
    return plan
