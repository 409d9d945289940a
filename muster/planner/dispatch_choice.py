"""The dispatcher of tokens to experts for a shape: the one whose passes are predicted to take the least time.

One for each triple of degrees (tp, cp, ep), so that a search has as many plans as with one dispatcher. A layer's time
decides, in which the bytes by link, and the matmuls that hide them, have their parts. Where the load is known and
uneven, shapes with copies of experts are shapes of their own, since they differ in memory and in the schedules that run
them. Hidden states travel in 8 bits, or as centroids, only where the user allows it, since that changes losses.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import lcm
from typing import Any

from muster.cost.time.plan_times import place_plan
from muster.cost.time.stage_times import StageTimes, pair_of_stages_s
from muster.planner.request import PlanRequest
from muster.schedule.action import Kind
from muster.spec.expert_kinds import DISPATCHERS
from muster.spec.frameworks import MUSTER
from muster.spec.pass_pairs import pairs_passes
from muster.spec.plan import Plan
from muster.spec.schedules import DEFAULT_SCHEDULE, SCHEDULES
from muster.spec.supported import unsupported_features

LEAST_GAIN = 0.005
"""Part of the time that another dispatcher than the plain all-to-all must save to be chosen."""
LEAST_LOSSY_GAIN = 0.03
"""The same for hidden states in 8 bits and for centroids, where they are allowed."""
DISPATCH_FIELDS = ("ep_dispatcher", "ep_inner_size", "ep_chunks", "ep_redundant_experts")
DISPATCH_FIELDS += ("ep_dispatch_dtype", "ep_lsh_rate")
CHUNK_COUNTS = (2, 4, 8)
"""Numbers of chunks in flight that are tried."""
COPY_COUNTS = (1, 2, 4)
"""Numbers of copies of experts on each rank that are tried where the load is uneven."""
LEAST_RELIEF = 0.01
"""Part of the fullest rank's load that more copies must take from it to be tried."""


def copy_counts(request: PlanRequest, ep: int) -> list[int]:
    """Return the numbers of copies of experts to try with `ep` ranks: none, and those that each take more from the
    fullest rank than the last; the required one alone where the exchange isn't chosen."""
    if ep == 1 or _is_given(request):
        return [request.fixed.get("ep_redundant_experts", request.base.ep_redundant_experts)]
    load, found = request.workload.expert_load, [0]
    if load is None or request.framework.name != MUSTER.name:
        return found
    relieved = load.imbalance(ep)
    for count in COPY_COUNTS:
        if load.imbalance(ep, (), count) < (1 - LEAST_RELIEF) * relieved:
            relieved = load.imbalance(ep, (), count)
            found.append(count)
    return found


def _is_given(request: PlanRequest) -> bool:
    """Return True if the dispatcher isn't chosen: it is required, or the program or the device leaves no choice."""
    is_required = any(name in request.fixed for name in DISPATCH_FIELDS) or request.base.ep_dispatcher != "all_to_all"
    return is_required or request.framework.storage == "megatron" or request.cluster.device.rates is not None


def expert_slices(request: PlanRequest, tp: int, ep: int) -> int:
    """Return the tensor-parallel ranks that share each expert (etp): the required ones; else, where only plans are
    wanted that run, `tp` unless whole experts lie on different tensor-parallel ranks."""
    base: int = request.fixed.get("etp", request.base.etp)
    if "etp" in request.fixed or request.model.moe is None or not request.runnable or ep % tp == 0:
        return base
    return tp


def dispatch_fields(
    request: PlanRequest, tp: int, cp: int, ep: int, sp: bool, copies: int = 0, schedule: str = DEFAULT_SCHEDULE
) -> dict[str, Any]:
    """Return the fields of a plan that say how tokens get to experts: the required ones, or the fastest with so many
    copies of experts. Under a schedule with pairs of passes what these hide counts (`muster.spec.pass_pairs`).

    Programs other than Muster send rows by the plain all-to-all.
    """
    base = {name: request.fixed.get(name, getattr(request.base, name)) for name in DISPATCH_FIELDS}
    if ep == 1 or _is_given(request):
        return base
    known = request.cost_cache.tables(
        request.model, request.workload, request.cluster, request.framework
    ).dispatch_fields
    allowed = request.allowed_dispatch_dtypes, request.allowed_lsh_rate
    has_pairs = SCHEDULES[schedule].has_pairs and request.framework.overlap_pairs
    key = tp, cp, ep, expert_slices(request, tp, ep), sp, request.precision, copies, allowed, has_pairs
    if key not in known:
        known[key] = _fastest(request, tp, cp, ep, sp, copies, schedule if has_pairs else None)
    return known[key]


def _fastest(
    request: PlanRequest, tp: int, cp: int, ep: int, sp: bool, copies: int, paired: str | None
) -> dict[str, Any]:
    """Return the fields of the fastest way; `paired`: schedule whose forwards and backwards may run as one."""
    plain = _plain_plan(request, tp, cp, ep, sp, copies)
    plans = [plain]
    if plain.world_size <= request.cluster.num_devices:
        plans += [plan for plan in _others(request, plain) if not unsupported_features(plan, request.model)]
    seconds = [_passes_s(request, plan, paired) for plan in plans] if len(plans) > 1 else [0.0]
    best = min(range(len(plans)), key=seconds.__getitem__)
    best = best if seconds[best] < (1 - LEAST_GAIN) * seconds[0] else 0
    chosen = plans[best]
    if len(plans) > 1 and (lossy := list(_lossy(request, plans))):
        lossy_s = [_passes_s(request, plan, paired) for plan in lossy]
        if min(lossy_s) < (1 - LEAST_LOSSY_GAIN) * seconds[best]:
            chosen = lossy[lossy_s.index(min(lossy_s))]
    return {name: getattr(chosen, name) for name in DISPATCH_FIELDS}


def _lossy(request: PlanRequest, plans: Sequence[Plan]) -> Iterator[Plan]:
    """Yield the plans with each way of sending less that is allowed: fewer bits, centroids, and both."""
    dtypes = ("none", *request.allowed_dispatch_dtypes[:1])  # all of 8 bits send as many bytes
    for dtype, rate in product(dtypes, dict.fromkeys((0.0, request.allowed_lsh_rate))):
        for plan in plans if (dtype, rate) != ("none", 0.0) else ():
            way = DISPATCHERS[plan.ep_dispatcher]
            sends_centroids = way.sends_centroids and plan.ep_chunks == 1 and not plan.ep_redundant_experts
            if (way.casts_rows or dtype == "none") and (sends_centroids or not rate):
                yield plan.model_copy(update={"ep_dispatch_dtype": dtype, "ep_lsh_rate": rate})


def _plain_plan(request: PlanRequest, tp: int, cp: int, ep: int, sp: bool, copies: int) -> Plan:
    etp = expert_slices(request, tp, ep)
    data = lcm(ep * etp, tp * cp) // (tp * cp)
    strategy = request.base.default_strategy.model_copy(update={"sp": sp and tp > 1})
    return Plan(
        tp=tp,
        cp=cp,
        ep=ep,
        dp_shard=data,
        etp=etp,
        ep_redundant_experts=copies,
        precision=request.precision,
        default_strategy=strategy,
    )


def _others(request: PlanRequest, plain: Plan) -> Iterator[Plan]:
    """Yield the plan with each other dispatcher that has a meaning for its degrees."""
    yield plain.model_copy(update={"ep_dispatcher": "all_gather"})
    if (plain.ep, plain.etp) == (plain.tp, 1):
        yield plain.model_copy(update={"ep_dispatcher": "slicing"})
    devices = min(group.domain_devices for group in request.cluster.groups)
    if 1 < devices < plain.ep and plain.ep % devices == 0:
        yield plain.model_copy(update={"ep_dispatcher": "hierarchical", "ep_inner_size": devices})
    for count in CHUNK_COUNTS:
        yield plain.model_copy(update={"ep_chunks": count})


def _passes_s(request: PlanRequest, plan: Plan, paired: str | None) -> float:
    """Return the seconds of one micro-batch's forward and backward through all layers, as one where they are under the
    schedule `paired`."""
    one_sequence = request.workload.model_copy(update={"global_batch_size": plan.islands * plan.mesh(0).dp_size})
    placed = place_plan(request.model, plan, one_sequence, request.cluster, request.framework, cache=request.cost_cache)
    stage = StageTimes(placed, 0)
    if paired is not None and pairs_passes(plan.model_copy(update={"schedule": paired}), request.model):
        return pair_of_stages_s(stage, stage)
    passes_s = stage.passes_s
    return passes_s[Kind.F] + passes_s[Kind.B]
