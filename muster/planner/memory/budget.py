"""The memory budget of plans: the memory of their ranks against its limits, and the recompute and offload that make
them fit."""

from collections.abc import Hashable
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice, product
from math import inf

from muster.cost.activations import offloaded_activation_bytes, pass_sizes
from muster.cost.memory.device_overhead import FRAGMENTATION_SHARE, device_overhead
from muster.cost.memory.forecast import (
    MEMORY_HEADROOM,
    StageMemoryCache,
    host_shares_bytes,
    peak_bytes_by_pp_rank,
    stage_memory_family,
)
from muster.cost.memory.liveness import AllocationOrder, allocation_orders, schedule_allocation_order
from muster.cost.memory.native_storage import MemoryLowerBound, memory_lower_bound
from muster.cost.precision_bytes import compute_bytes
from muster.cost.sequence_slices import offloaded_bytes_of_slices
from muster.cost.time.plan_times import host_copy_s
from muster.planner.bounds.pass_times import PassTimes
from muster.planner.memory.deferred_weight_grads import deferred_micro_batches, min_fullest_rank_bytes
from muster.planner.memory.fitter import (
    RECOMPUTE_MODES,
    HostLink,
    LayerPolicy,
    MemoryFitter,
    PendingFit,
    corrected_excess,
    stage_layers,
    with_policy,
)
from muster.planner.memory.hopeless import hopeless_bytes
from muster.planner.memory.host_tiers import offloaded_states, tier_excess_bytes
from muster.planner.plan_costs import PlanCosts
from muster.planner.request import PlanRequest
from muster.planner.space import DataSharding, MeshShape, ScheduleChoice, make_plan, recompute_modes
from muster.planner.tiles import tiled_plan
from muster.schedule.build import nothing_to_offload_error, schedule_for_plan
from muster.schedule.message_liveness import Column, schedule_message_counts
from muster.schedule.offload import CopyOverlaps, count_copy_overlaps, count_passes_with_layers
from muster.schedule.schedule import Schedule
from muster.spec.compilation import compiles
from muster.spec.device_update_rules import updates_fetched_state
from muster.spec.errors import InfeasibleError
from muster.spec.frameworks import MUSTER, treats_layers_alike
from muster.spec.layer_strategy import Offload
from muster.spec.pass_pairs import pairs_passes
from muster.spec.plan import Plan
from muster.spec.plugin_model import plugin_model
from muster.spec.schedules import SCHEDULES
from muster.spec.supported import unsupported_features

_FIT_ATTEMPTS = 4
"""Attempts to fit a plan. What a policy frees is known but for the other moments of a pass; where a rank still exceeds
its limit, it has to free that much more."""


_LAYERS_ON_DEVICE = 2
"""Layers of a pass whose activations are on the device where they leave layer by layer."""


class MemoryBudget:
    """Memory limits for the plans of one request, and the policies that keep them.

    It caches the order of allocations of each schedule, which many plans share.
    """

    def __init__(self, request: PlanRequest, costs: PlanCosts) -> None:
        self.request = request
        self.costs = costs
        self.head_room = MEMORY_HEADROOM if request.memory_limit_bytes is None else 0.0
        """Part of a device's memory that plans must leave free; a search does without where no plan leaves it."""
        self._schedules: dict[tuple, Schedule] = {}
        self._orders: dict[tuple, tuple[AllocationOrder, ...]] = {}
        self._rank_orders: dict[tuple, AllocationOrder] = {}
        self._messages: dict[tuple, list[dict[int, Column]]] = {}
        self._overlapped_passes: dict[tuple, tuple[CopyOverlaps, ...]] = {}
        self._min_stages: dict[tuple, tuple[MemoryLowerBound, int]] = {}
        self._min_logits: dict[tuple, int] = {}
        self._stage_memory: dict[Hashable, StageMemoryCache] = {}
        self._fitters: dict[Hashable, MemoryFitter] = {}
        self._peaks: dict[Plan, list[tuple[int, int]]] = {}
        self._misses: dict[tuple, float] = {}
        """Excess of plans that can't be made to fit."""
        self._hopeless: dict[tuple, float | None] = {}

    def without_head_room(self) -> "MemoryBudget":
        """Return a budget whose plans may fill all memory that may be used; it shares this one's caches."""
        budget = copy(self)
        budget.head_room = 0.0
        return budget

    @cached_property
    def _group_ranks(self) -> list[int]:
        """One rank of each group of nodes."""
        sizes = [group.num_devices for group in self.request.cluster.groups]
        return [sum(sizes[:index]) for index in range(len(sizes))]

    def limit_bytes(self, rank: int) -> int | None:
        """Return the bytes that a rank may hold; None where that is unknown."""
        device_bytes = self.request.cluster.group_of(rank).device.memory_bytes
        wanted_bytes = self.request.memory_limit_bytes
        limit = min(device_bytes, wanted_bytes) if device_bytes and wanted_bytes else device_bytes or wanted_bytes
        return None if limit is None else int(limit * (1 - self.head_room))

    @property
    def usable_bytes(self) -> int:
        """Bytes that all devices may hold together."""
        groups = zip(self.request.cluster.groups, self._group_ranks, strict=True)
        return sum((self.limit_bytes(rank) or 0) * group.num_devices for group, rank in groups)

    @property
    def group_limits_bytes(self) -> list[int]:
        """Bytes that a device of each group of nodes may hold, where that is known."""
        limits = map(self.limit_bytes, self._group_ranks)
        return [limit for limit in limits if limit is not None]

    def may_fit(self, shape: MeshShape, sharding: DataSharding, choice: ScheduleChoice | None = None) -> bool:
        """Return True if any plan of a shape with this data sharding may fit; `choice`: any if not given."""
        limits = self.group_limits_bytes
        return len(limits) < len(self._group_ranks) or self.min_bytes(shape, sharding, choice) <= max(limits)

    def min_bytes(self, shape: MeshShape, sharding: DataSharding, choice: ScheduleChoice | None = None) -> int:
        """Return the least bytes of the fullest rank of such plans, wherever the layers lie.

        A rank holds its state, and the activations of one micro-batch for a stage whose layers are all recomputed: the
        fullest has at least the mean. Or it holds its layers' state, and the deferred weight gradients; or logits.
        """
        least, overhead = self._min_stage(shape, sharding)
        logits_bytes = 0.0
        pp = shape.pp
        count = self._micro_batches(shape)
        fragmentation = FRAGMENTATION_SHARE * self._all_fragment
        state = least.state if count > 1 else least.single_micro_batch_state
        mean_bytes = state + fragmentation * (state - least.resident)
        deferring_bytes = 0.0
        if choice is not None and count > 1:
            num_layers = self.request.model.num_layers
            layers_per_stage = num_layers // (pp * choice.vpp)
            size = (1 + fragmentation) * shape.micro_batch_size
            logits_bytes = (1 + fragmentation) * self._min_logits_bytes(shape, sharding, choice)
            alive = num_layers if choice.vpp == 1 else layers_per_stage * pp
            if pp == 1 and self._offloads_by_layer:
                alive = min(alive, _LAYERS_ON_DEVICE)
            mean_bytes += size * alive * least.layer_activations
            deferred = deferred_micro_batches(choice.schedule, pp, count)
            deferred_bytes = size * least.min_layer_deferred
            if deferred[-1]:
                deferring_bytes = min_fullest_rank_bytes(num_layers, least.min_layer_state, deferred_bytes, deferred)
            if not choice.balances_layers and not self._has_fixed_stages:
                last_rank_layers = choice.vpp * layers_per_stage
                last_rank_bytes = last_rank_layers * (least.min_layer_state + deferred[-1] * deferred_bytes)
                deferring_bytes = max(deferring_bytes, last_rank_bytes)
        # Fractions are rounded down, rank by rank.
        return int(max(mean_bytes / pp, deferring_bytes, logits_bytes)) + overhead - 1

    def _min_logits_bytes(self, shape: MeshShape, sharding: DataSharding, choice: ScheduleChoice) -> int:
        """Return the least bytes of logits and their gradient at the loss, with as many tiles as plans may have."""
        key = shape.tp, shape.cp, shape.micro_batch_size, SCHEDULES[choice.schedule].split_backward
        if key not in self._min_logits:
            fields = {"schedule": choice.schedule, "vpp": choice.vpp}
            plan = make_plan(self.request, shape, sharding, fields=fields)
            self._min_logits[key] = self._logits_bytes(tiled_plan(self.request, plan) or plan)
        return self._min_logits[key]

    def logits_fit(self, plan: Plan) -> bool:
        """Return True if the logits of a plan leave open that it can be made to fit."""
        limits = self.group_limits_bytes
        return len(limits) < len(self._group_ranks) or self._logits_bytes(plan) <= max(limits)

    def _logits_bytes(self, plan: Plan) -> int:
        """Return the bytes of logits and their gradient at the loss, which no recompute and no offload changes; 0 where
        that isn't known."""
        request = self.request
        if request.framework.storage == "megatron" or plugin_model(request.model) is not None:
            return 0
        if plan.vocab_parallel or plan.sequence_slices > 1 or plan.stages:
            return 0
        sizes = pass_sizes(request.model, plan, request.workload, plan.num_stages - 1)
        return 2 * sizes.tile_tokens * sizes.local_model.vocab_size * compute_bytes(plan.precision)

    def _micro_batches(self, shape: MeshShape) -> int:
        return self.request.island_sequences // shape.data // shape.micro_batch_size

    @cached_property
    def _has_fixed_stages(self) -> bool:
        """True if the request fixes the layers of each stage."""
        return bool(self.request.fixed.get("stages", self.request.base.stages))

    @property
    def _offloads_by_layer(self) -> bool:
        """True if plans without a pipeline may keep activations off the device, layer by layer."""
        request = self.request
        if request.framework.storage == "megatron":
            return False
        wanted = request.fixed.get("offload", request.base.default_strategy.offload)
        return wanted != "none" or ("offload" not in request.fixed and self._copies_are_known)

    @cached_property
    def _copies_are_known(self) -> bool:
        """True if the time of copies to the hosts' memory is known."""
        devices = [group.device for group in self.request.cluster.groups]
        return not any(
            device.rates is not None or device.kind == "cpu" or device.host_bandwidth_bytes_per_s is None
            for device in devices
        )

    @cached_property
    def _all_fragment(self) -> bool:
        """True if allocations fragment memory on all devices."""
        return all(group.device.kind != "cpu" for group in self.request.cluster.groups)

    def _min_stage(self, shape: MeshShape, sharding: DataSharding) -> tuple[MemoryLowerBound, int]:
        """Return the least memory of all layers on one stage, and the overhead beside tensors."""
        key = shape.tp, shape.cp, shape.ep, shape.copies, *sharding
        if key not in self._min_stages:
            request = self.request
            alone = make_plan(request, replace(shape, pp=1, micro_batch_size=1), sharding, recompute="full")
            overhead = min(device_overhead(group.device, alone, 0, 0).total for group in request.cluster.groups)
            self._min_stages[key] = (
                memory_lower_bound(request.model, alone, request.workload, request.optim),
                overhead,
            )
        return self._min_stages[key]

    def excess_bytes(self, plan: Plan) -> list[float]:
        """Return each pipeline rank's bytes beyond its limit at its peak; below 0 where memory is left."""
        if plan not in self._peaks:
            request = self.request
            own = request.model, plan, request.workload, request.cluster
            cache = self._stage_memory.setdefault(stage_memory_family(plan), {})
            self._peaks[plan] = peak_bytes_by_pp_rank(
                *own, self._orders_of(plan), cache, request.framework, request.optim
            )
        peaks = self._peaks[plan]
        limits = [self.limit_bytes(rank) for rank, _ in peaks]
        return [
            -inf if limit is None else float(total - limit) for (_, total), limit in zip(peaks, limits, strict=True)
        ]

    def host_excess_bytes(self, plan: Plan) -> float:
        """Return the most bytes of any rank beyond its share of the host's memory or disk; 0 where nothing is
        offloaded."""
        request, offloads = self.request, self._offloading_stages(plan)
        cache = self._stage_memory.setdefault(stage_memory_family(plan), {})
        states = offloaded_states(request, plan, cache)
        shares = self._host_shares_bytes(plan) if offloads or states else []
        is_limited = bool(offloads) and min(shares) < inf
        sizes = {
            stage: offloaded_bytes_of_slices(request.model, plan, request.workload, stage)
            for stage in (offloads if is_limited else ())
        }
        orders = self._orders_of(plan) if is_limited else ()
        return tier_excess_bytes(request, plan, states, orders, sizes, shares)

    def fits(self, plan: Plan) -> bool:
        """Return True if a plan fits on its devices, and what it offloads in their hosts' memory."""
        return max(self.excess_bytes(plan)) <= 0 and self.host_excess_bytes(plan) <= 0

    def fit(self, plan: Plan, nearest_bytes: float = -inf) -> tuple[list[Plan], float]:
        """Return the plan where it fits, else the plans that do: with the cheapest recompute by layer, and the cheapest
        recompute and offload where that is another. Empty where none does.

        Also return by how many bytes the plan exceeds its limits, infinite where it has no Program. Where nothing makes
        it fit and that is more than `nearest_bytes`, at least by how many.
        """
        fit, excess = self.start_fit(plan, nearest_bytes)
        return self.finish_fit(fit) if isinstance(fit, PendingFit) else fit, excess

    def start_fit(self, plan: Plan, nearest_bytes: float = -inf) -> tuple[list[Plan] | PendingFit, float]:
        """Return what `fit` does, or where that takes longer, a `PendingFit` for `finish_fit`."""
        key = plan, self.head_room, self.request.simpler_than
        if key in self._misses:
            return [], self._misses[key]
        least = self._hopeless_bytes(plan)
        if least is not None and least >= nearest_bytes:
            return [], least
        fit, excess = self._start_fit(plan)
        if fit == []:
            self._misses[key] = excess
        return fit, excess

    def _hopeless_bytes(self, plan: Plan) -> float | None:
        """Return by how many bytes at least a plan that nothing makes fit exceeds its limits (`hopeless_bytes`)."""
        if self._needs_program(plan) or plan.overrides or plan.default_strategy.offload != "none":
            return None
        key = plan, self.head_room
        if key not in self._hopeless:
            live = self._orders_of(plan)[0].live_micro_batches
            own = self.request, plan, self.limit_bytes(0), live
            self._hopeless[key] = hopeless_bytes(*own, self._first_rank_bytes)
        return self._hopeless[key]

    def _first_rank_bytes(self, plan: Plan) -> float:
        """Return the peak of a plan's first pipeline rank; infinite where it has nothing to offload."""
        request = self.request
        own = request.model, plan, request.workload, request.cluster
        cache = self._stage_memory.setdefault(stage_memory_family(plan), {})
        try:
            orders = self._orders_of(plan)[:1]
        except InfeasibleError:
            return inf
        return peak_bytes_by_pp_rank(*own, orders, cache, request.framework, request.optim)[0][1]

    def _start_fit(self, plan: Plan) -> tuple[list[Plan] | PendingFit, float]:
        try:
            excess = self.excess_bytes(plan)
        except InfeasibleError:  # nothing that it offloads is saved for long enough
            return [], inf
        host_excess = self.host_excess_bytes(plan)
        if max(excess) <= 0 and host_excess <= 0:
            return [plan] if self.request.is_simple_enough(plan) else [], max(excess)
        fitters, may_offload = self._fitters_of(plan)
        fitters = [fitter for fitter in fitters if len(fitter.policies) > 1]
        added_s = [found for fitter in fitters if (found := fitter.added_s(excess)) is not None]
        if not added_s:
            return self._with_uniform_fits(fitters, self._smallest(fitters)), max(*excess, host_excess)
        least_s = [min(of_rank) for of_rank in zip(*added_s, strict=True)]
        return PendingFit(fitters, may_offload, excess, least_s), max(*excess, host_excess)

    def _fitters_of(self, plan: Plan) -> tuple[list[MemoryFitter], bool]:
        """Return the fitters of a plan, and True if they may offload as well as recompute.

        Blocks with elementwise recompute can't be compiled. So where blocks are compiled by default, there are two: one
        without it, and one with it and the times of eager blocks.
        """
        policy = LayerPolicy(plan.default_strategy.recompute, plan.default_strategy.offload)
        request = self.request
        is_fixed = request.fixed.get("recompute") is not None or policy.recompute != "none"
        modes = (policy.recompute,) if is_fixed else RECOMPUTE_MODES
        host = self._host_link(plan)
        may_offload = policy.offload == "none" and "offload" not in request.fixed and host is not None
        may_offload = may_offload and plan.sequence_slices == 1
        offloads: tuple[Offload, ...] = ("none", "activations") if may_offload else (policy.offload,)
        policies = [LayerPolicy(*pair) for pair in product(modes, offloads)]
        compiled = compiles(plan, request.model, request.cluster.device.kind, request.framework or MUSTER)
        if is_fixed or not compiled or (plan.compile and not request.runnable):
            return [self._fitter(plan, policies, host)], may_offload
        of_compiled = [policy for policy in policies if policy.recompute != "elementwise"]
        found = [self._fitter(plan, of_compiled, host)]
        if plan.compile is None:
            found.append(self._fitter(plan, policies, host, eager=True))
        return found, may_offload

    def _fitter(
        self, plan: Plan, policies: list[LayerPolicy], host: HostLink | None, eager: bool = False
    ) -> MemoryFitter:
        key = plan, *policies, eager, self.head_room
        if key not in self._fitters:
            request, times_of = self.request, self.costs.pass_times
            own = request.model, request.workload, self._orders_of(plan)
            stages = stage_layers(plan, *own, self._eager_times if eager else times_of, policies, host, request.optim)
            extra_s = None
            if eager:
                extra_s = partial(self._eager_extra_s, plan)
            self._fitters[key] = MemoryFitter(plan, request.model.num_layers, policies, stages, extra_s)
        return self._fitters[key]

    def _eager_extra_s(self, plan: Plan) -> list[float]:
        """Return the seconds by which an eager backward of each stage is longer than a compiled one."""
        return (self._eager_times(plan).backward_s - self.costs.pass_times(plan).backward_s).tolist()

    def _eager_times(self, plan: Plan) -> PassTimes:
        """Return the times of a plan's passes if its blocks aren't compiled."""
        return self.costs.pass_times(plan.model_copy(update={"compile": False}))

    def finish_fit(self, pending: PendingFit) -> list[Plan]:
        """Return the plan with the cheapest recompute by layer that makes it fit, and with the cheapest recompute and
        offload. Where simple plans are wanted, those with one policy for all layers are tried too."""
        simpler_than = self.request.simpler_than
        if self._layers_are_alike or (simpler_than is not None and not simpler_than.differs_by_layer):
            return self._with_uniform_fits(pending.fitters, [])
        found = [plan for fitter in pending.fitters for plan in self._fits_by_layer(fitter, pending)]
        return self._with_uniform_fits(pending.fitters, found or self._smallest(pending.fitters))

    def _fits_by_layer(self, fitter: MemoryFitter, pending: PendingFit) -> list[Plan]:
        """Return a fitter's plan with the cheapest recompute, and the one with the cheapest recompute and offload."""
        found: list[Plan] = []
        policies = list(fitter.policies)
        without_offload = [policy for policy in policies if policy.offload == "none"]
        for allowed in [policies, without_offload] if pending.may_offload else [policies]:
            fitted = None
            if len(allowed) > 1:
                fitted = self._fit_within(fitter, pending.excess_bytes, allowed)
            changed = fitted and fitted[0]
            if changed is not None and changed not in found and fitter.is_for(changed):
                found.append(changed)
            if changed is not None and not fitter.waits:
                break  # copies that no pass waits for cost nothing: fewer policies give no faster plan
        return found

    def _with_uniform_fits(self, fitters: list[MemoryFitter], found: list[Plan]) -> list[Plan]:
        """Return what was found; where simple plans are wanted, those of it and of `uniform_fits` that are; for a
        framework that treats all layers alike, these alone."""
        if self.request.simpler_than is None and not self._layers_are_alike:
            return found
        mixed = [] if self._layers_are_alike else found
        return [
            plan
            for plan in dict.fromkeys([*mixed, *self._uniform_fits(fitters)])
            if self.request.is_simple_enough(plan)
        ]

    @property
    def _layers_are_alike(self) -> bool:
        return treats_layers_alike(self.request.framework)

    def uniform_fits(self, plan: Plan) -> list[Plan]:
        """Return a plan that doesn't fit with the least recompute of all layers alike that makes it fit: alone, and
        with all layers offloading; where blocks are compiled by default, each compiled and eager."""
        return self._uniform_fits(self._fitters_of(plan)[0])

    def _uniform_fits(self, fitters: list[MemoryFitter]) -> list[Plan]:
        found: list[Plan] = []
        for fitter in fitters:
            for offload in dict.fromkeys(policy.offload for policy in fitter.policies):
                plans = (with_policy(fitter.plan, policy) for policy in fitter.policies if policy.offload == offload)
                fitting = (plan for plan in plans if plan != fitter.plan and self._fits_and_runs(plan))
                found += islice(fitting, 1)
        return list(dict.fromkeys(found))

    def _fits_and_runs(self, plan: Plan) -> bool:
        if self.request.runnable and unsupported_features(plan, self.request.model):
            return False
        try:
            return self.fits(plan)
        except InfeasibleError:  # nothing that it offloads is saved for long enough
            return False

    def _smallest(self, fitters: list[MemoryFitter]) -> list[Plan]:
        """Return the plans with all layers recomputed as far as allowed, and those with the policies that free most,
        where they fit.

        They may fit although no choice of a fitter does, which knows the memory of layers but for what lives within a
        pass only.
        """
        plans = [
            plan
            for fitter in fitters
            if len(fitter.policies) > 1
            for plan in (with_policy(fitter.plan, fitter.policies[fitter.full_recompute]), fitter.fit_most())
            if plan != fitter.plan
        ]
        return [plan for plan in dict.fromkeys(plans) if self._fits_and_runs(plan)]

    def _fit_within(
        self, fitter: MemoryFitter, excess_bytes: list[float], policies: list[LayerPolicy]
    ) -> tuple[Plan, list[float]] | None:
        """Return the plan with the cheapest policy for each layer, and the bytes that its ranks were to free."""
        excess = list(excess_bytes)
        for _ in range(_FIT_ATTEMPTS):
            changed = fitter.fit(excess, policies)
            if changed is None or (self.request.runnable and unsupported_features(changed, self.request.model)):
                return None
            left = self.excess_bytes(changed)
            if max(left) <= 0:
                return (changed, excess) if self.host_excess_bytes(changed) <= 0 else None
            excess = corrected_excess(excess, left, fitter.freed_bytes)
        return None

    def with_less_offload(self, plan: Plan) -> Plan:
        """Return the plan with the least offload that takes no longer, by what is known of its passes.

        That is the plan itself where it has no offload to spare, or the memory that is left is the objective.
        """
        request = self.request
        if request.objective == "memory" or not self._offloading_stages(plan):
            return plan
        pending, _ = self.start_fit(with_policy(plan, LayerPolicy(recompute_modes(request)[0])))
        if not isinstance(pending, PendingFit) or not pending.may_offload:
            return plan
        for fitter in pending.fitters:
            policies = list(fitter.policies)
            fitted = self._fit_within(fitter, pending.excess_bytes, policies)
            if fitted is not None and fitted[0] == plan:
                break
        else:
            return plan
        _, excess = fitted
        for _ in range(_FIT_ATTEMPTS):
            changed = fitter.fit_with_less_offload(excess, policies)
            if changed is None or changed == plan:
                break
            left = self.excess_bytes(changed)
            if max(left) <= 0 and self.host_excess_bytes(changed) <= 0:
                return changed
            excess = corrected_excess(excess, left, fitter.freed_bytes)
        return plan

    def _host_shares_bytes(self, plan: Plan) -> list[float]:
        """Return the bytes that each pipeline rank may hold in its host's memory."""
        return [share * (1 - self.head_room) for share in host_shares_bytes(plan, self.request.cluster)]

    def offload_bound_s(self, plan: Plan, pass_times: PassTimes) -> float:
        """Return the seconds that a step of the plan takes at least for its offload; 0 where nothing is known of
        that."""
        offloads = self._offloading_stages(plan)
        host = self._host_link(plan) if offloads else None
        if host is None:
            return 0.0
        request = self.request
        sizes = {stage: offloaded_activation_bytes(request.model, plan, request.workload, stage) for stage in offloads}
        return host.bound_s(plan, pass_times, plan.num_micro_batches(request.workload), sizes)

    def _host_link(self, plan: Plan) -> HostLink | None:
        """Return the link that offload may use; None where it can't, or its time is unknown."""
        if self._needs_program(plan) or not self._copies_are_known:
            return None
        if plan.offloads_by_layer and not self._offloads_by_layer:
            return None
        overlaps = self._overlapped_passes_of(plan)
        if not any(overlaps):
            return None
        placed = self.costs.placed(plan)
        offloads = frozenset() if plan.offloads_by_layer else frozenset(range(plan.stages_per_replica))
        return HostLink(
            self._orders_by_rank(plan, offloads),
            overlaps,
            [partial(host_copy_s, placed.device(stage)) for stage in range(plan.stages_per_replica)],
            self._host_shares_bytes(plan),
        )

    def _needs_program(self, plan: Plan) -> bool:
        """Return True if only lowering tells what allocates and frees memory."""
        return (
            plan.pipeline_replicas > 1
            or plan.vocab_parallel
            or plan.pinned_schedule is not None
            or not plan.is_uniform
            or plan.sequence_slices > 1
            or updates_fetched_state(plan)
            or plan.max_active_stages is not None
            or plan.schedule_entry.is_asynchronous  # whose weight versions only several steps show
        )

    def _orders_of(self, plan: Plan) -> tuple[AllocationOrder, ...]:
        """Return the order of a plan's allocations, without making its Program where that is possible."""
        if self._needs_program(plan):
            return allocation_orders(self.costs.program(plan))
        offloads = frozenset() if plan.offloads_by_layer else self._offloading_stages(plan)
        overlaps = self._overlapped_passes_of(plan) if offloads else ()
        copied = (stages for of_rank in overlaps for _, stages in of_rank)
        if offloads and not any(map(offloads.intersection, copied)):
            raise nothing_to_offload_error(plan, plan.num_micro_batches(self.request.workload))
        return self._orders_by_rank(plan, offloads)

    def _offloading_stages(self, plan: Plan) -> frozenset[int]:
        """Return the stages that may offload activations."""
        if plan.default_strategy.offload == "none" and not plan.overrides:
            return frozenset()
        layers = self.request.model.num_layers
        return frozenset(stage for stage in range(plan.num_stages) if plan.offloaded_layers(stage, layers))

    def _orders_by_rank(self, plan: Plan, offloads: frozenset[int]) -> tuple[AllocationOrder, ...]:
        """Return the order of allocations by rank if these stages offload."""
        key = self._schedule_key(plan)
        is_reduced, is_z1 = plan.mesh(0).grad_sum_size > 1, plan.default_strategy.zero == "z1"
        is_reduced &= not plan.schedule_entry.is_asynchronous
        ends = is_reduced and plan.gathers_before_passes(plan.mesh(0)), is_reduced and is_z1
        if (*key, *ends, offloads) not in self._orders:
            schedule = self._schedule(plan)
            orders: list[AllocationOrder] = []
            if key not in self._messages:
                self._messages[key] = schedule_message_counts(schedule)
            for rank in range(plan.pp):
                offloading = offloads.intersection(schedule.stages_on(rank))
                rank_key = (*key, *ends, rank, offloading)
                if rank_key not in self._rank_orders:
                    self._rank_orders[rank_key] = schedule_allocation_order(
                        schedule, rank, *ends, offloading, self._messages[key]
                    )
                orders.append(self._rank_orders[rank_key])
            self._orders[*key, *ends, offloads] = tuple(orders)
        return self._orders[*key, *ends, offloads]

    def _schedule_key(self, plan: Plan) -> tuple:
        count = plan.num_micro_batches(self.request.workload)
        pairs = pairs_passes(plan, self.request.model)
        return plan.schedule, plan.pinned_schedule, plan.pp, plan.vpp, plan.sequence_slices, pairs, count

    def _schedule(self, plan: Plan) -> Schedule:
        key = self._schedule_key(plan)
        if key not in self._schedules:
            self._schedules[key] = schedule_for_plan(plan, key[-1], key[-2])
        return self._schedules[key]

    def _overlapped_passes_of(self, plan: Plan) -> tuple[CopyOverlaps, ...]:
        """Return the passes that copies of all stages are overlapped with, by rank."""
        key = self._schedule_key(plan)
        if key not in self._overlapped_passes:
            schedule = self._schedule(plan)
            stages = [schedule.stages_on(rank) for rank in range(plan.pp)]
            count = count_passes_with_layers if plan.offloads_by_layer else count_copy_overlaps
            self._overlapped_passes[key] = tuple(map(count, schedule.ranks, stages))
        return self._overlapped_passes[key]
