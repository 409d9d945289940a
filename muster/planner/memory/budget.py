"""Whether plans have room: what their ranks hold against what they may, and the recompute and offload that make them
fit."""

from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import inf

from muster.cost.activations import offloaded_activation_bytes
from muster.cost.memory.device_overhead import FRAGMENTATION_SHARE, device_overhead
from muster.cost.memory.forecast import MEMORY_HEADROOM, StageMemoryCache, host_shares_bytes, peak_bytes_by_pp_rank
from muster.cost.memory.liveness import AllocationOrder, allocation_orders, schedule_allocation_order
from muster.cost.memory.native_storage import MemoryLowerBound, memory_lower_bound
from muster.cost.time.plan_times import host_copy_s
from muster.planner.bounds.pass_times import PassTimes
from muster.planner.memory.deferred_weight_grads import deferred_micro_batches, min_fullest_rank_bytes
from muster.planner.memory.fitter import RECOMPUTE_MODES, HostLink, LayerPolicy, MemoryFitter, stage_layers, with_policy
from muster.planner.plan_costs import PlanCosts
from muster.planner.request import PlanRequest
from muster.planner.space import DataSharding, MeshShape, ScheduleChoice, make_plan, recompute_modes
from muster.schedule.build import nothing_to_offload_error, schedule_for_plan
from muster.schedule.offload import CopyOverlaps, count_copy_overlaps
from muster.schedule.schedule import Schedule
from muster.spec.errors import InfeasibleError
from muster.spec.plan import Plan
from muster.spec.supported import unsupported_features

_FIT_ATTEMPTS = 4
"""Recompute and offload free what they are said to free but for what other moments of a pass hold; then they must free
that too."""


@dataclass(frozen=True, slots=True)
class PendingFit:
    """A plan that doesn't fit, on the way to those that do."""

    fitter: MemoryFitter
    may_offload: bool
    """Whether it may offload as well as recompute."""
    excess_bytes: list[float]
    """By pipeline rank."""
    alike: StageMemoryCache
    added_s: list[float]
    """By pipeline rank: what it will take more for each micro-batch at least."""


class MemoryBudget:
    """Weighs the plans of one request. It remembers orders of passes, which many plans share."""

    def __init__(self, request: PlanRequest, costs: PlanCosts) -> None:
        self.request = request
        self.costs = costs
        self.head_room = MEMORY_HEADROOM if request.memory_limit_bytes is None else 0.0
        """The part of a device's memory that plans must leave free; a search gives it up where none does."""
        self._schedules: dict[tuple, Schedule] = {}
        self._orders: dict[tuple, tuple[AllocationOrder, ...]] = {}
        self._rank_orders: dict[tuple, AllocationOrder] = {}
        self._overlapped_passes: dict[tuple, tuple[CopyOverlaps, ...]] = {}
        self._min_stages: dict[tuple, tuple[MemoryLowerBound, int]] = {}

    def without_head_room(self) -> "MemoryBudget":
        """Return a budget whose plans may fill all memory that may be used; it shares this one's caches."""
        budget = copy(self)
        budget.head_room = 0.0
        return budget

    @cached_property
    def _group_ranks(self) -> list[int]:
        """A rank of each group of nodes."""
        sizes = [group.num_devices for group in self.request.cluster.groups]
        return [sum(sizes[:index]) for index in range(len(sizes))]

    def limit_bytes(self, rank: int) -> int | None:
        """What a rank may hold; None where that is unknown."""
        own, wanted = self.request.cluster.group_of(rank).device.memory_bytes, self.request.memory_limit_bytes
        limit = min(own, wanted) if own and wanted else own or wanted
        return None if limit is None else int(limit * (1 - self.head_room))

    @property
    def usable_bytes(self) -> int:
        """What all devices may hold together."""
        groups = zip(self.request.cluster.groups, self._group_ranks, strict=True)
        return sum((self.limit_bytes(rank) or 0) * group.num_devices for group, rank in groups)

    @property
    def group_limits_bytes(self) -> list[int]:
        """What a device of each group of nodes may hold, where that is known."""
        limits = map(self.limit_bytes, self._group_ranks)
        return [limit for limit in limits if limit is not None]

    def may_fit(self, shape: MeshShape, sharding: DataSharding, choice: ScheduleChoice | None = None) -> bool:
        """Whether any plan of a shape that shares parameters and gradients so may; `order`: any if not given."""
        limits = self.group_limits_bytes
        return len(limits) < len(self._group_ranks) or self.min_bytes(shape, sharding, choice) <= max(limits)

    def min_bytes(self, shape: MeshShape, sharding: DataSharding, choice: ScheduleChoice | None = None) -> int:
        """What the fullest rank of such plans holds at least, wherever the layers lie.

        A rank holds its state and one micro-batch's activations of a stage whose layers are all recomputed, of which
        the fullest has the mean at least; or its layers' state, and what weight backwards that are put off will need.
        """
        least, beside = self._min_stage(shape, sharding)
        count, pp = self._micro_batches(shape), shape.pp
        moved = FRAGMENTATION_SHARE * self._all_fragment
        state = least.state if count > 1 else least.single_micro_batch_state
        held, late = state + moved * (state - least.resident), 0.0
        if choice is not None and count > 1:
            depth, layers, size = pp * choice.vpp, self.request.model.num_layers, shape.micro_batch_size
            each = layers if choice.vpp == 1 else layers // depth * pp
            held += (1 + moved) * each * size * least.layer_activations
            deferred, bytes_each = (
                deferred_micro_batches(choice.schedule, pp, count),
                (1 + moved) * size * least.min_layer_deferred,
            )
            late = min_fullest_rank_bytes(layers, least.min_layer_state, bytes_each, deferred) if deferred[-1] else 0.0
            if not choice.balances_layers and not self._has_fixed_stages:
                late = max(late, choice.vpp * (layers // depth) * (least.min_layer_state + deferred[-1] * bytes_each))
        return int(max(held / pp, late)) + beside - 1  # parts of a byte are rounded down, rank by rank

    def _micro_batches(self, shape: MeshShape) -> int:
        return self.request.workload.global_batch_size // shape.data // shape.micro_batch_size

    @cached_property
    def _has_fixed_stages(self) -> bool:
        """Whether the request says where layers lie."""
        return bool(self.request.fixed.get("stages", self.request.base.stages))

    @cached_property
    def _all_fragment(self) -> bool:
        """Whether what comes and goes leaves gaps on all devices."""
        return all(group.device.kind != "cpu" for group in self.request.cluster.groups)

    def _min_stage(self, shape: MeshShape, sharding: DataSharding) -> tuple[MemoryLowerBound, int]:
        """Of all the model's layers on one stage, and what is beside tensors."""
        key = shape.tp, shape.cp, shape.ep, *sharding
        if key not in self._min_stages:
            request = self.request
            alone = make_plan(request, replace(shape, pp=1, micro_batch_size=1), sharding, recompute="full")
            beside = min(device_overhead(group.device, alone, 0, 0).total for group in request.cluster.groups)
            self._min_stages[key] = memory_lower_bound(request.model, alone, request.workload), beside
        return self._min_stages[key]

    def excess_bytes(self, plan: Plan, alike: StageMemoryCache | None = None) -> list[float]:
        """What each pipeline rank holds beyond its limit at its peak; below 0 where there is room left. `alike` as in
        `peak_bytes`."""
        request = self.request
        found = peak_bytes_by_pp_rank(
            request.model, plan, request.workload, request.cluster, self._orders_of(plan), alike
        )
        limits = [self.limit_bytes(rank) for rank, _ in found]
        return [
            -inf if limit is None else float(total - limit) for (_, total), limit in zip(found, limits, strict=True)
        ]

    def host_excess_bytes(self, plan: Plan) -> float:
        """What a rank has in its host's memory beyond its share of that, at most; 0 where nothing is there."""
        offloads = self._offloading_stages(plan)
        shares = self._host_shares_bytes(plan) if offloads else []
        if min(shares, default=inf) == inf:
            return 0.0
        sizes = {
            stage: offloaded_activation_bytes(self.request.model, plan, self.request.workload, stage)
            for stage in offloads
        }
        return max(
            order.max_host_bytes(sizes) - share for order, share in zip(self._orders_of(plan), shares, strict=True)
        )

    def fits(self, plan: Plan) -> bool:
        """Whether a plan has room on its devices, and what it offloads beside them."""
        return max(self.excess_bytes(plan)) <= 0 and self.host_excess_bytes(plan) <= 0

    def fit(self, plan: Plan) -> tuple[list[Plan], float]:
        """The plan where it fits, else with the cheapest recompute by layer that makes it, and the cheapest recompute
        and offload where that is another; none where none does. And by how many bytes it is over, infinite where it has
        no Program."""
        begun, over = self.start_fit(plan)
        return self.finish_fit(begun) if isinstance(begun, PendingFit) else begun, over

    def start_fit(self, plan: Plan) -> tuple["list[Plan] | PendingFit", float]:
        """What `made_to_fit` gives, but where that takes longer, what it begins with."""
        alike: StageMemoryCache = {}
        try:
            over = self.excess_bytes(plan, alike)
        except InfeasibleError:  # what it offloads has no time to lie in the host's memory
            return [], inf
        host_over = self.host_excess_bytes(plan)
        if max(over) <= 0 and host_over <= 0:
            return [plan], max(over)
        fitter, both = self._fitter(plan)
        added_s = fitter.added_s(over) if len(fitter.policies) > 1 else None
        begun = self._all_recomputed(fitter) if added_s is None else PendingFit(fitter, both, over, alike, added_s)
        return begun, max(*over, host_over)

    def _fitter(self, plan: Plan) -> tuple[MemoryFitter, bool]:
        """What makes a plan fit, and whether it may offload as well as recompute."""
        own = LayerPolicy(plan.default_strategy.recompute, plan.default_strategy.offload)
        request = self.request
        chosen = request.fixed.get("recompute") is not None or own.recompute != "none"
        modes = (own.recompute,) if chosen else RECOMPUTE_MODES
        host = self._host_link(plan)
        both = own.offload == "none" and "offload" not in request.fixed and host is not None
        ways = [LayerPolicy(*pair) for pair in product(modes, ("none", "activations") if both else (own.offload,))]
        orders = self._orders_of(plan)
        stages = stage_layers(plan, request.model, request.workload, orders, self.costs.pass_times, ways, host)
        return MemoryFitter(plan, request.model.num_layers, ways, stages), both

    def finish_fit(self, pending: "PendingFit") -> list[Plan]:
        """The plan with the cheapest recompute by layer that makes it fit, and with the cheapest of recompute and
        offload."""
        fitter, found = pending.fitter, list[Plan]()
        ways = list(fitter.policies)
        for wanted in [ways, [way for way in ways if way.offload == "none"]] if pending.may_offload else [ways]:
            fitted = self._fit_within(fitter, pending.excess_bytes, wanted, pending.alike) if len(wanted) > 1 else None
            changed = fitted and fitted[0]
            if changed is not None and changed not in found:
                found.append(changed)
            if changed is not None and not fitter.waits:
                break  # copies that nothing waits for cost nothing, so that fewer ways lead to no faster plan
        return found or self._all_recomputed(fitter)

    def _all_recomputed(self, fitter: MemoryFitter) -> list[Plan]:
        """The plan with all layers recomputed as fully as they may be, where that fits: it may although no choice was
        said to, since what one frees is known without what lives in a pass only."""
        changed = with_policy(fitter.plan, fitter.policies[fitter.full_recompute])
        fits = (
            fitter.full_recompute > 0
            and not (self.request.runnable and unsupported_features(changed))
            and self.fits(changed)
        )
        return [changed] if fits else []

    def _fit_within(
        self, fitter: MemoryFitter, excess_bytes: list[float], policies: list[LayerPolicy], alike: StageMemoryCache
    ) -> tuple[Plan, list[float]] | None:
        """The plan with the cheapest of some ways for each layer, and what its ranks had to be told to free."""
        over = list(excess_bytes)
        for _ in range(_FIT_ATTEMPTS):
            changed = fitter.fit(over, policies)
            if changed is None or (self.request.runnable and unsupported_features(changed)):
                return None
            left = self.excess_bytes(changed, alike)
            if max(left) <= 0:
                return (changed, over) if self.host_excess_bytes(changed) <= 0 else None
            over = _corrected_excess(over, left, fitter.freed_bytes)
        return None

    def with_less_offload(self, plan: Plan) -> Plan:
        """Of a plan that was made to fit, the one that copies as little as takes no longer, by what is known of its
        passes; the plan itself where that is so already, or where as much as can be is to be freed."""
        request = self.request
        if request.objective == "memory" or not self._offloading_stages(plan):
            return plan
        begun, _ = self.start_fit(with_policy(plan, LayerPolicy(recompute_modes(request)[0])))
        if not isinstance(begun, PendingFit) or not begun.may_offload:
            return plan
        fitter, ways = begun.fitter, list(begun.fitter.policies)
        fitted = self._fit_within(fitter, begun.excess_bytes, ways, begun.alike)
        if fitted is None or fitted[0] != plan:
            return plan
        _, over = fitted
        for _ in range(_FIT_ATTEMPTS):
            changed = fitter.fit_with_less_offload(over, ways)
            if changed is None or changed == plan:
                break
            left = self.excess_bytes(changed, begun.alike)
            if max(left) <= 0 and self.host_excess_bytes(changed) <= 0:
                return changed
            over = _corrected_excess(over, left, fitter.freed_bytes)
        return plan

    def _host_shares_bytes(self, plan: Plan) -> list[float]:
        """Of each pipeline rank, what its ranks may have in their hosts' memory."""
        return [share * (1 - self.head_room) for share in host_shares_bytes(plan, self.request.cluster)]

    def offload_bound_s(self, plan: Plan, pass_times: PassTimes) -> float:
        """What a step of the plan takes at least for what it offloads; 0 where nothing is known of that."""
        offloads = self._offloading_stages(plan)
        host = self._host_link(plan) if offloads else None
        if host is None:
            return 0.0
        request = self.request
        sizes = {stage: offloaded_activation_bytes(request.model, plan, request.workload, stage) for stage in offloads}
        return host.bound_s(plan, pass_times, plan.num_micro_batches(request.workload), sizes)

    def _host_link(self, plan: Plan) -> HostLink | None:
        """What offload may use; None where it can't be, or what it takes is unknown."""
        request = self.request
        devices = [group.device for group in request.cluster.groups]
        if plan.pp == 1 or self._needs_program(plan) or any(device.rates is not None for device in devices):
            return None
        if any(device.kind == "cpu" or device.host_bandwidth_bytes_per_s is None for device in devices):
            return None
        beside = self._overlapped_passes_of(plan)
        if not any(beside):
            return None
        placed = self.costs.placed(plan)
        return HostLink(
            self._orders_by_rank(plan, frozenset(range(plan.stages_per_replica))),
            beside,
            [partial(host_copy_s, placed.device(stage)) for stage in range(plan.stages_per_replica)],
            self._host_shares_bytes(plan),
        )

    def _needs_program(self, plan: Plan) -> bool:
        """Whether only lowering knows what of its order makes or frees memory."""
        return (
            plan.pipeline_replicas > 1 or plan.vocab_parallel or plan.pinned_schedule is not None or not plan.is_uniform
        )

    def _orders_of(self, plan: Plan) -> tuple[AllocationOrder, ...]:
        """Of the plan's Program, which need not be made for it."""
        if self._needs_program(plan):
            return allocation_orders(self.costs.program(plan))
        offloads = self._offloading_stages(plan)
        copied = (stages for beside in (self._overlapped_passes_of(plan) if offloads else ()) for _, stages in beside)
        if offloads and not any(map(offloads.intersection, copied)):
            raise nothing_to_offload_error(plan, plan.num_micro_batches(self.request.workload))
        return self._orders_by_rank(plan, offloads)

    def _offloading_stages(self, plan: Plan) -> frozenset[int]:
        """The stages of which something may lie in the host's memory."""
        if plan.default_strategy.offload == "none" and not plan.overrides:
            return frozenset()
        layers = self.request.model.num_layers
        return frozenset(stage for stage in range(plan.num_stages) if plan.offloaded_layers(stage, layers))

    def _orders_by_rank(self, plan: Plan, offloads: frozenset[int]) -> tuple[AllocationOrder, ...]:
        """If these stages offload."""
        key, zero = self._schedule_key(plan), plan.default_strategy.zero
        shares = plan.mesh(0).grad_sum_size > 1
        ends = shares and zero != "z3", shares and zero == "z1"
        if (*key, *ends, offloads) not in self._orders:
            schedule = self._schedule(plan)
            found = []
            for rank in range(plan.pp):
                own = offloads.intersection(stage for stage, one in enumerate(schedule.placement) if one == rank)
                if (*key, *ends, rank, own) not in self._rank_orders:
                    order = schedule_allocation_order(schedule, rank, *ends, own)
                    self._rank_orders[*key, *ends, rank, own] = order
                found.append(self._rank_orders[*key, *ends, rank, own])
            self._orders[*key, *ends, offloads] = tuple(found)
        return self._orders[*key, *ends, offloads]

    def _schedule_key(self, plan: Plan) -> tuple:
        return plan.schedule, plan.pinned_schedule, plan.pp, plan.vpp, plan.num_micro_batches(self.request.workload)

    def _schedule(self, plan: Plan) -> Schedule:
        key = self._schedule_key(plan)
        if key not in self._schedules:
            self._schedules[key] = schedule_for_plan(plan, key[-1])
        return self._schedules[key]

    def _overlapped_passes_of(self, plan: Plan) -> tuple[CopyOverlaps, ...]:
        """Of each rank of a plan, what copies of all its stages run beside."""
        key = self._schedule_key(plan)
        if key not in self._overlapped_passes:
            schedule = self._schedule(plan)
            own = [[stage for stage, one in enumerate(schedule.placement) if one == rank] for rank in range(plan.pp)]
            self._overlapped_passes[key] = tuple(map(count_copy_overlaps, schedule.ranks, own))
        return self._overlapped_passes[key]


def _corrected_excess(excess: list[float], left: list[float], freed: list[float]) -> list[float]:
    """What ranks must free, where some still lack what is `left` although they were said to free so much."""
    return [max(one + more, own + 1) if more > 0 else one for one, more, own in zip(excess, left, freed, strict=True)]
