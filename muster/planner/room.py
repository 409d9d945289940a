"""Whether plans have room: what their ranks hold against what they may, and the recompute and offload that make them
fit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import inf

from muster.cost.activations import offloaded_bytes
from muster.cost.device_memory import FRAGMENTED_SHARE, device_terms
from muster.cost.forecast import HEAD_ROOM, Alike, host_shares_bytes, peak_bytes
from muster.cost.own_storage import Least, least_held
from muster.cost.plan_times import host_copy_s, plan_setting
from muster.cost.walk import RankOrder, order_of_schedule, orders_of
from muster.planner.bound import PassSeconds
from muster.planner.deferred import least_fullest, put_off
from muster.planner.fit import MODES, Fitter, HostLink, Way, layers_of, with_way
from muster.planner.request import Request
from muster.planner.space import Order, Shape, Split, make_plan, recomputes
from muster.schedule.build import nothing_to_offload, schedule_of
from muster.schedule.offload import Beside, passes_beside
from muster.schedule.program import Program
from muster.schedule.schedule import Schedule
from muster.spec.errors import InfeasibleError
from muster.spec.plan import Plan
from muster.spec.runnable import not_yet

_TRIES = 4
"""Recompute and offload free what they are said to free but for what other moments of a pass hold; then they must free
that too."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A plan that doesn't fit, on the way to those that do."""

    fitter: Fitter
    both: bool
    """Whether it may offload as well as recompute."""
    over_bytes: list[float]
    """By pipeline rank."""
    alike: Alike
    added_s: list[float]
    """By pipeline rank: what it will take more for each micro-batch at least."""


class Room:
    """Weighs the plans of one request. It remembers orders of passes, which many plans share."""

    def __init__(
        self, request: Request, seconds: Callable[[Plan], PassSeconds], program: Callable[[Plan], Program]
    ) -> None:
        self.request, self.seconds, self.program = request, seconds, program
        self.head_room = HEAD_ROOM if request.memory_limit_bytes is None else 0.0
        """The part of a device's memory that plans must leave free; a search gives it up where none does."""
        self._schedules: dict[tuple, Schedule] = {}
        self._orders: dict[tuple, tuple[RankOrder, ...]] = {}
        self._rank_orders: dict[tuple, RankOrder] = {}
        self._beside: dict[tuple, tuple[Beside, ...]] = {}
        self._least: dict[tuple, tuple[Least, int]] = {}

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
    def limits_bytes(self) -> list[int]:
        """What a device of each group of nodes may hold, where that is known."""
        limits = map(self.limit_bytes, self._group_ranks)
        return [limit for limit in limits if limit is not None]

    def may_fit(self, shape: Shape, split: Split, order: Order | None = None) -> bool:
        """Whether any plan of a shape that shares parameters and gradients so may; `order`: any if not given."""
        limits = self.limits_bytes
        return len(limits) < len(self._group_ranks) or self.least_bytes(shape, split, order) <= max(limits)

    def least_bytes(self, shape: Shape, split: Split, order: Order | None = None) -> int:
        """What the fullest rank of such plans holds at least, wherever the layers lie.

        A rank holds its state and one micro-batch's activations of a stage whose layers are all recomputed, of which
        the fullest has the mean at least; or its layers' state, and what weight backwards that are put off will need.
        """
        least, beside = self._least_of(shape, split)
        count, pp = self._micro_batches(shape), shape.pp
        moved = FRAGMENTED_SHARE * self._fragments
        state = least.state if count > 1 else least.first_state
        held, late = state + moved * (state - least.resident), 0.0
        if order is not None and count > 1:
            depth, layers, size = pp * order.vpp, self.request.model.num_layers, shape.micro_batch_size
            each = layers if order.vpp == 1 else layers // depth * pp
            held += (1 + moved) * each * size * least.layer
            deferred, bytes_each = put_off(order.schedule, pp, count), (1 + moved) * size * least.deferred
            late = least_fullest(layers, least.layer_state, bytes_each, deferred) if deferred[-1] else 0.0
            if not order.balanced and not self._stages:
                late = max(late, order.vpp * (layers // depth) * (least.layer_state + deferred[-1] * bytes_each))
        return int(max(held / pp, late)) + beside - 1  # parts of a byte are rounded down, rank by rank

    def _micro_batches(self, shape: Shape) -> int:
        return self.request.workload.global_batch_size // shape.data // shape.micro_batch_size

    @cached_property
    def _stages(self) -> bool:
        """Whether the request says where layers lie."""
        return bool(self.request.fixed.get("stages", self.request.base.stages))

    @cached_property
    def _fragments(self) -> bool:
        """Whether what comes and goes leaves gaps on all devices."""
        return all(group.device.kind != "cpu" for group in self.request.cluster.groups)

    def _least_of(self, shape: Shape, split: Split) -> tuple[Least, int]:
        """Of all the model's layers on one stage, and what is beside tensors."""
        key = shape.tp, shape.cp, shape.ep, *split
        if key not in self._least:
            request = self.request
            alone = make_plan(request, replace(shape, pp=1, micro_batch_size=1), split, recompute="full")
            beside = min(device_terms(group.device, alone, 0, 0).total for group in request.cluster.groups)
            self._least[key] = least_held(request.model, alone, request.workload), beside
        return self._least[key]

    def over_bytes(self, plan: Plan, alike: Alike | None = None) -> list[float]:
        """What each pipeline rank holds beyond its limit at its peak; below 0 where there is room left. `alike` as in
        `peak_bytes`."""
        request = self.request
        found = peak_bytes(request.model, plan, request.workload, request.cluster, self._orders_of(plan), alike)
        limits = [self.limit_bytes(rank) for rank, _ in found]
        return [
            -inf if limit is None else float(total - limit) for (_, total), limit in zip(found, limits, strict=True)
        ]

    def host_over_bytes(self, plan: Plan) -> float:
        """What a rank has in its host's memory beyond its share of that, at most; 0 where nothing is there."""
        offloads = self._offloads(plan)
        shares = self._host_shares_bytes(plan) if offloads else []
        if min(shares, default=inf) == inf:
            return 0.0
        sizes = {stage: offloaded_bytes(self.request.model, plan, self.request.workload, stage) for stage in offloads}
        return max(order.away_bytes(sizes) - share for order, share in zip(self._orders_of(plan), shares, strict=True))

    def fits(self, plan: Plan) -> bool:
        """Whether a plan has room on its devices, and what it offloads beside them."""
        return max(self.over_bytes(plan)) <= 0 and self.host_over_bytes(plan) <= 0

    def made_to_fit(self, plan: Plan) -> tuple[list[Plan], float]:
        """The plan where it fits, else with the cheapest recompute by layer that makes it, and the cheapest recompute
        and offload where that is another; none where none does. And by how many bytes it is over, infinite where it has
        no Program."""
        begun, over = self.begun(plan)
        return self.finished(begun) if isinstance(begun, Begun) else begun, over

    def begun(self, plan: Plan) -> tuple["list[Plan] | Begun", float]:
        """What `made_to_fit` gives, but where that takes longer, what it begins with."""
        alike: Alike = {}
        try:
            over = self.over_bytes(plan, alike)
        except InfeasibleError:  # what it offloads has no time to lie in the host's memory
            return [], inf
        host_over = self.host_over_bytes(plan)
        if max(over) <= 0 and host_over <= 0:
            return [plan], max(over)
        fitter, both = self._fitter(plan)
        added_s = fitter.added_s(over) if len(fitter.ways) > 1 else None
        begun = self._all_again(fitter) if added_s is None else Begun(fitter, both, over, alike, added_s)
        return begun, max(*over, host_over)

    def _fitter(self, plan: Plan) -> tuple[Fitter, bool]:
        """What makes a plan fit, and whether it may offload as well as recompute."""
        own = Way(plan.default_strategy.recompute, plan.default_strategy.offload)
        request = self.request
        chosen = request.fixed.get("recompute") is not None or own.recompute != "none"
        modes = (own.recompute,) if chosen else MODES
        host = self._host_link(plan)
        both = own.offload == "none" and "offload" not in request.fixed and host is not None
        ways = [Way(*pair) for pair in product(modes, ("none", "activations") if both else (own.offload,))]
        orders = self._orders_of(plan)
        stages = layers_of(plan, request.model, request.workload, orders, self.seconds, ways, host)
        return Fitter(plan, request.model.num_layers, ways, stages), both

    def finished(self, begun: "Begun") -> list[Plan]:
        """The plan with the cheapest recompute by layer that makes it fit, and with the cheapest of recompute and
        offload."""
        fitter, found = begun.fitter, list[Plan]()
        ways = list(fitter.ways)
        for wanted in [ways, [way for way in ways if way.offload == "none"]] if begun.both else [ways]:
            fitted = self._fitted(fitter, begun.over_bytes, wanted, begun.alike) if len(wanted) > 1 else None
            changed = fitted and fitted[0]
            if changed is not None and changed not in found:
                found.append(changed)
            if changed is not None and not fitter.waits:
                break  # copies that nothing waits for cost nothing, so that fewer ways lead to no faster plan
        return found or self._all_again(fitter)

    def _all_again(self, fitter: Fitter) -> list[Plan]:
        """The plan with all layers recomputed as fully as they may be, where that fits: it may although no choice was
        said to, since what one frees is known without what lives in a pass only."""
        changed = with_way(fitter.plan, fitter.ways[fitter.all_again])
        fits = fitter.all_again > 0 and not (self.request.runnable and not_yet(changed)) and self.fits(changed)
        return [changed] if fits else []

    def _fitted(
        self, fitter: Fitter, over_bytes: list[float], ways: list[Way], alike: Alike
    ) -> tuple[Plan, list[float]] | None:
        """The plan with the cheapest of some ways for each layer, and what its ranks had to be told to free."""
        over = list(over_bytes)
        for _ in range(_TRIES):
            changed = fitter.fitted(over, ways)
            if changed is None or (self.request.runnable and not_yet(changed)):
                return None
            left = self.over_bytes(changed, alike)
            if max(left) <= 0:
                return (changed, over) if self.host_over_bytes(changed) <= 0 else None
            over = _corrected(over, left, fitter.freed_bytes)
        return None

    def leaner(self, plan: Plan) -> Plan:
        """Of a plan that was made to fit, the one that copies as little as takes no longer, by what is known of its
        passes; the plan itself where that is so already, or where as much as can be is to be freed."""
        request = self.request
        if request.objective == "memory" or not self._offloads(plan):
            return plan
        begun, _ = self.begun(with_way(plan, Way(recomputes(request)[0])))
        if not isinstance(begun, Begun) or not begun.both:
            return plan
        fitter, ways = begun.fitter, list(begun.fitter.ways)
        fitted = self._fitted(fitter, begun.over_bytes, ways, begun.alike)
        if fitted is None or fitted[0] != plan:
            return plan
        _, over = fitted
        for _ in range(_TRIES):
            changed = fitter.leaner(over, ways)
            if changed is None or changed == plan:
                break
            left = self.over_bytes(changed, begun.alike)
            if max(left) <= 0 and self.host_over_bytes(changed) <= 0:
                return changed
            over = _corrected(over, left, fitter.freed_bytes)
        return plan

    def _host_shares_bytes(self, plan: Plan) -> list[float]:
        """Of each pipeline rank, what its ranks may have in their hosts' memory."""
        return [share * (1 - self.head_room) for share in host_shares_bytes(plan, self.request.cluster)]

    def copies_bound_s(self, plan: Plan, seconds: PassSeconds) -> float:
        """What a step of the plan takes at least for what it offloads; 0 where nothing is known of that."""
        offloads = self._offloads(plan)
        host = self._host_link(plan) if offloads else None
        if host is None:
            return 0.0
        request = self.request
        sizes = {stage: offloaded_bytes(request.model, plan, request.workload, stage) for stage in offloads}
        return host.bound_s(plan, seconds, plan.num_micro_batches(request.workload), sizes)

    def _host_link(self, plan: Plan) -> HostLink | None:
        """What offload may use; None where it can't be, or what it takes is unknown."""
        request = self.request
        devices = [group.device for group in request.cluster.groups]
        if plan.pp == 1 or self._needs_program(plan) or any(device.rates is not None for device in devices):
            return None
        if any(device.kind == "cpu" or device.host_bandwidth_bytes_per_s is None for device in devices):
            return None
        beside = self._beside_of(plan)
        if not any(beside):
            return None
        setting = plan_setting(request.model, plan, request.workload, request.cluster)
        return HostLink(
            self._orders_by_rank(plan, frozenset(range(plan.depth))),
            beside,
            [partial(host_copy_s, setting.device(stage)) for stage in range(plan.depth)],
            self._host_shares_bytes(plan),
        )

    def _needs_program(self, plan: Plan) -> bool:
        """Whether only lowering knows what of its order makes or frees memory."""
        return plan.replicas > 1 or plan.spread_vocab or plan.order is not None or not plan.is_uniform

    def _orders_of(self, plan: Plan) -> tuple[RankOrder, ...]:
        """Of the plan's Program, which need not be made for it."""
        if self._needs_program(plan):
            return orders_of(self.program(plan))
        offloads = self._offloads(plan)
        copied = (stages for beside in (self._beside_of(plan) if offloads else ()) for _, stages in beside)
        if offloads and not any(map(offloads.intersection, copied)):
            raise nothing_to_offload(plan, plan.num_micro_batches(self.request.workload))
        return self._orders_by_rank(plan, offloads)

    def _offloads(self, plan: Plan) -> frozenset[int]:
        """The stages of which something may lie in the host's memory."""
        if plan.default_strategy.offload == "none" and not plan.overrides:
            return frozenset()
        layers = self.request.model.num_layers
        return frozenset(stage for stage in range(plan.num_stages) if plan.offloaded_layers(stage, layers))

    def _orders_by_rank(self, plan: Plan, offloads: frozenset[int]) -> tuple[RankOrder, ...]:
        """If these stages offload."""
        key, zero = self._schedule_key(plan), plan.default_strategy.zero
        shares = plan.mesh(0).data_ranks * plan.cp > 1
        ends = shares and zero != "z3", shares and zero == "z1"
        if (*key, *ends, offloads) not in self._orders:
            schedule = self._schedule(plan)
            found = []
            for rank in range(plan.pp):
                own = offloads.intersection(stage for stage, one in enumerate(schedule.placement) if one == rank)
                if (*key, *ends, rank, own) not in self._rank_orders:
                    order = order_of_schedule(schedule, rank, *ends, own)
                    self._rank_orders[*key, *ends, rank, own] = order
                found.append(self._rank_orders[*key, *ends, rank, own])
            self._orders[*key, *ends, offloads] = tuple(found)
        return self._orders[*key, *ends, offloads]

    def _schedule_key(self, plan: Plan) -> tuple:
        return plan.schedule, plan.order, plan.pp, plan.vpp, plan.num_micro_batches(self.request.workload)

    def _schedule(self, plan: Plan) -> Schedule:
        key = self._schedule_key(plan)
        if key not in self._schedules:
            self._schedules[key] = schedule_of(plan, key[-1])
        return self._schedules[key]

    def _beside_of(self, plan: Plan) -> tuple[Beside, ...]:
        """Of each rank of a plan, what copies of all its stages run beside."""
        key = self._schedule_key(plan)
        if key not in self._beside:
            schedule = self._schedule(plan)
            own = [[stage for stage, one in enumerate(schedule.placement) if one == rank] for rank in range(plan.pp)]
            self._beside[key] = tuple(map(passes_beside, schedule.ranks, own))
        return self._beside[key]


def _corrected(over: list[float], left: list[float], freed: list[float]) -> list[float]:
    """What ranks must free, where some still lack what is `left` although they were said to free so much."""
    return [max(one + more, own + 1) if more > 0 else one for one, more, own in zip(over, left, freed, strict=True)]
