"""Whether plans have room: what their ranks hold against what they may, and the recompute that makes them fit."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from math import inf

from muster.cost.forecast import HEAD_ROOM, peak_bytes
from muster.cost.own_memory import Least, least_held
from muster.cost.walk import RankOrder, orders_of, orders_of_schedule
from muster.planner.bound import PassSeconds
from muster.planner.fit import fitted
from muster.planner.request import Request
from muster.planner.space import Shape, Split, make_plan
from muster.schedule.build import schedule_of
from muster.schedule.program import Program
from muster.schedule.schedule import Schedule
from muster.spec.errors import InfeasibleError
from muster.spec.legal import not_yet, strategies_of
from muster.spec.plan import Plan

_TRIES = 3
"""Recompute frees what it is said to free but for what other moments of a pass hold; then it must free that too."""


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
        self._least: dict[tuple, Least] = {}

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

    def may_fit(self, shape: Shape, split: Split, chunks: int | None = None) -> bool:
        """Whether any plan of a shape that shares parameters and gradients so may; `chunks`: stages of a rank, any if
        not given."""
        limits = [self.limit_bytes(rank) for rank in self._group_ranks]
        return None in limits or self.least_bytes(shape, split, chunks) <= max(filter(None, limits))

    def least_bytes(self, shape: Shape, split: Split, chunks: int | None = None) -> float:
        """What the fullest rank of such plans holds at least: the mean of all pipeline ranks, wherever the layers lie.
        A rank holds its state, and one micro-batch's activations of a stage whose layers are all recomputed."""
        least, layers = self._least_of(shape, split), self.request.model.num_layers
        count = self.request.workload.global_batch_size // shape.data // shape.micro_batch_size
        held = (least.state if count > 1 else least.first_state) / shape.pp
        if count > 1 and chunks is not None:
            each = layers / shape.pp if chunks == 1 else layers // (shape.pp * chunks)
            held += each * shape.micro_batch_size * least.layer
        return held

    def _least_of(self, shape: Shape, split: Split) -> Least:
        """Of all the model's layers on one stage."""
        key = shape.tp, shape.cp, shape.ep, *split
        if key not in self._least:
            alone = make_plan(self.request, replace(shape, pp=1, micro_batch_size=1), split, recompute="full")
            self._least[key] = least_held(self.request.model, alone, self.request.workload)
        return self._least[key]

    def over_bytes(self, plan: Plan) -> list[float]:
        """What each pipeline rank holds beyond its limit at its peak; below 0 where there is room left."""
        request = self.request
        found = peak_bytes(request.model, plan, request.workload, request.cluster, self._orders_of(plan))
        limits = [self.limit_bytes(rank) for rank, _ in found]
        return [
            -inf if limit is None else float(total - limit) for (_, total), limit in zip(found, limits, strict=True)
        ]

    def made_to_fit(self, plan: Plan) -> tuple[Plan | None, float]:
        """The plan where it fits, else with the cheapest recompute by layer that makes it, None where none does; and
        by how many bytes it is over, infinite where it has no Program."""
        try:
            over = self.over_bytes(plan)
        except InfeasibleError:  # what it offloads has no time to lie in the host's memory
            return None, inf
        return (plan if max(over) <= 0 else self._fitting(plan, over)), max(over)

    def _fitting(self, plan: Plan, over_bytes: list[float]) -> Plan | None:
        """A plan that doesn't fit, with the cheapest recompute by layer that makes it fit; None where none does."""
        if self.request.fixed.get("recompute") is not None or plan.default_strategy.recompute != "none":
            return None
        request, margin = self.request, 0.0
        for _ in range(_TRIES):
            over = [over + margin for over in over_bytes]
            changed = fitted(plan, request.model, request.workload, self._orders_of(plan), self.seconds, over)
            if changed is None or (request.runnable and not_yet(changed)):
                return None
            left = max(self.over_bytes(changed))
            if left <= 0:
                return changed
            margin += left
        return None

    def _orders_of(self, plan: Plan) -> tuple[RankOrder, ...]:
        """Of the plan's Program, which need not be made for it but for what only lowering knows."""
        request, zero = self.request, plan.default_strategy.zero
        kept = plan.replicas > 1 or plan.spread_vocab or plan.order is not None or not plan.is_uniform
        if kept or any(strategy.offload != "none" for strategy in strategies_of(plan)):
            return orders_of(self.program(plan))
        count = plan.num_micro_batches(request.workload)
        key = plan.schedule, plan.pp, plan.vpp, count
        if key not in self._schedules:
            self._schedules[key] = schedule_of(plan, count)
        shares = plan.mesh(0).data_ranks * plan.cp > 1
        ends = shares and zero != "z3", shares and zero == "z1"
        if (*key, *ends) not in self._orders:
            self._orders[*key, *ends] = orders_of_schedule(self._schedules[key], *ends)
        return self._orders[*key, *ends]
