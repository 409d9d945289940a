"""The kind of context parallelism for a shape: the one whose passes are predicted to take the least time.

One for each pair of degrees (tp, cp), so that a search has as many plans as with one kind. A layer's time decides, in
which the bytes by link, what hides them, and the kernels for blocks and for whole sequences have their parts.
"""

from collections.abc import Iterator
from typing import Any

from muster.cost.activations import attention_activation_bytes, pass_sizes
from muster.cost.context_traffic import attention_workspace
from muster.cost.precision_bytes import compute_bytes, master_bytes
from muster.cost.time.plan_times import place_plan, plan_times
from muster.cost.time.stage_times import StageTimes
from muster.planner.request import PlanRequest
from muster.schedule.action import Kind
from muster.spec.context_kinds import CONTEXT_KINDS
from muster.spec.context_rules import context_violations, group_degrees
from muster.spec.frameworks import MUSTER
from muster.spec.mesh import Mesh
from muster.spec.plan import Plan

LEAST_GAIN = 0.005
"""Part of the time that another kind than the ring must save to be chosen."""
LARGE_SHARE = 0.5
"""Share of a device's memory that a layer's attention may take; beyond it, of the kinds about as fast the one that
takes least is chosen."""
CONTEXT_FIELDS = ("cp_comm_type", "cp_ulysses_degree", "cp_window_size")


def context_fields(request: PlanRequest, tp: int, cp: int) -> dict[str, Any]:
    """Return the fields of a plan that say how context-parallel ranks communicate: the required ones, or the fastest.

    Other frameworks have not all kinds, and keep the ring. Linear attention has kinds of its own.
    """
    base = {name: request.fixed.get(name, getattr(request.base, name)) for name in CONTEXT_FIELDS}
    if cp == 1 or base["cp_comm_type"] != "p2p" or request.framework.name != MUSTER.name:
        return base
    known = request.cost_cache.tables(
        request.model, request.workload, request.cluster, request.framework
    ).context_fields
    key = tp, cp, request.precision
    if key not in known:
        known[key] = _fastest(request, tp, cp)
    return known[key]


def _fastest(request: PlanRequest, tp: int, cp: int) -> dict[str, Any]:
    plans = list(_candidates(request, tp, cp))
    if not plans:  # of a fixed kind that the model can't have: a rule says so
        return {name: getattr(request.base, name) for name in CONTEXT_FIELDS}
    seconds = [_passes_s(request, plan) for plan in plans]
    best = min(range(len(plans)), key=seconds.__getitem__)
    chosen = plans[best if seconds[best] < (1 - LEAST_GAIN) * seconds[0] else 0]
    limit = request.cluster.device.memory_bytes
    if limit and _attention_bytes(request, chosen) > LARGE_SHARE * limit:
        longest_s = seconds[best] / (1 - LEAST_GAIN)
        as_fast = [plan for plan, time_s in zip(plans, seconds, strict=True) if time_s <= longest_s]
        chosen = min(as_fast, key=lambda plan: _attention_bytes(request, plan))
    return {name: getattr(chosen, name) for name in CONTEXT_FIELDS}


def _candidates(request: PlanRequest, tp: int, cp: int) -> Iterator[Plan]:
    """Yield a plan of each kind that the model's attention allows, the ring first, if there is one."""
    devices = min(group.domain_devices for group in request.cluster.groups)
    for kind, row in CONTEXT_KINDS.items():
        if row.saves_scores:  # never the least time or memory
            continue
        for degree in group_degrees(cp) if row.has_groups else [1]:
            one_ring = Plan(tp=tp, cp=cp, cp_comm_type=kind, cp_ulysses_degree=degree, precision=request.precision)
            if list(context_violations(one_ring, Mesh(tp=tp, cp=cp), request.model)):
                continue
            yield one_ring
            # Inner rings within the fastest links; without slower ones a double ring has nothing to hide.
            inner = [size for size in group_degrees(cp // degree) if size * degree * tp <= devices < tp * cp]
            if row.has_double_ring and inner:
                yield one_ring.model_copy(update={"cp_window_size": max(inner)})


def _attention_bytes(request: PlanRequest, plan: Plan) -> int:
    """Return the bytes that the backward of one layer's attention takes of a sequence: what it has saved, its buffers,
    and the gradient of its output."""
    sizes = pass_sizes(request.model, plan, request.workload, 0)
    elements = compute_bytes(plan.precision), master_bytes(plan.precision)
    buffers = attention_workspace(sizes.context, sizes.attention, *elements, backward=True)
    return attention_activation_bytes(sizes, 0) + buffers + sizes.attention.queries * elements[0]


def _passes_s(request: PlanRequest, plan: Plan) -> float:
    """Return the seconds of one micro-batch's forward and backward through all layers."""
    one_sequence = request.workload.model_copy(update={"global_batch_size": plan.islands})
    own = request.model, plan, one_sequence, request.cluster, request.framework
    if request.cluster.device.rates is not None:
        times = plan_times(*own, cache=request.cost_cache, optim=request.optim)
        return times.seconds[Kind.F, 0] + times.seconds[Kind.B, 0]
    passes_s = StageTimes(place_plan(*own, cache=request.cost_cache, optim=request.optim), 0).passes_s
    return passes_s[Kind.F] + passes_s[Kind.B]
