"""Host memory and disk that plans take, against the share that each device has of them."""

from collections.abc import Mapping, Sequence
from math import inf

from muster.cost.memory.forecast import StageMemoryCache, disk_shares_bytes, offloaded_state_bytes
from muster.cost.memory.liveness import AllocationOrder
from muster.planner.request import PlanRequest
from muster.spec.plan import Plan


def offloaded_states(request: PlanRequest, plan: Plan, cache: StageMemoryCache) -> list[tuple[int, int]]:
    """Return the bytes of optimizer state that each pipeline rank keeps in host memory and on disk; empty where none
    does."""
    if all(strategy.offload_optimizer == "none" for strategy in plan.strategies):
        return []
    own = request.model, plan, request.workload, request.cluster
    return offloaded_state_bytes(*own, cache, request.framework, request.optim)


def tier_excess_bytes(
    request: PlanRequest,
    plan: Plan,
    states: Sequence[tuple[int, int]],
    orders: Sequence[AllocationOrder],
    activations: Mapping[int, Sequence[int]],
    shares: Sequence[float],
) -> float:
    """Return the most bytes of any pipeline rank beyond its share of host memory or of the disk; 0 at least where host
    memory is unknown.

    `states`: those of `offloaded_states`; `orders`: allocation orders, empty where no activations are offloaded;
    `activations`: stage → offloaded bytes of each slice of a micro-batch; `shares`: host memory of each rank.
    """
    beyond_disk = -inf
    if states:
        disks = zip(states, disk_shares_bytes(plan, request.cluster), strict=True)
        beyond_disk = max(on_disk - share for (_, on_disk), share in disks)
    if min(shares, default=inf) == inf:
        return max(0.0, beyond_disk)
    whole = {stage: sum(sizes) for stage, sizes in activations.items()}
    held = [
        order.max_away_bytes(whole) if plan.offloads_by_layer else order.max_host_bytes(activations) for order in orders
    ] or [0] * plan.pp
    on_host = [size + state for size, (state, _) in zip(held, states or [(0, 0)] * plan.pp, strict=True)]
    return max(beyond_disk, *(size - share for size, share in zip(on_host, shares, strict=True)))
