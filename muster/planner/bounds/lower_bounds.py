"""Lower bounds of the objective, from the coarsest (a shape with a schedule) to the finest (a plan).

Branch and bound needs bounds that are cheap where there are many candidates, and tight where few are left. In the order
in which a search asks for them: `of_choice` (all plans of a shape and schedule, from the times of one layer),
`communication` (all plans with one data sharding, from the bytes alone), `unsharded` (the same plans from the times of
their stages, as if nothing was gathered or reduced) and `of_plan` (one plan). Each is at most the simulated value of
every plan that it stands for; `tests/test_planner.py` simulates all plans of small problems to check that.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from muster.config.outer_config import OuterConfig
from muster.cost.time.island_round import IslandRound, least_round
from muster.cost.time.stage_times import StageTimes, example_stage_times
from muster.planner.balance import min_busiest_rank_s, rank_loads
from muster.planner.bounds.latency_bound import latency_bound_s
from muster.planner.bounds.pass_times import LayerTimes, PassTimes
from muster.planner.bounds.step_bound import choice_bound_s, step_bound_s
from muster.planner.memory.budget import MemoryBudget
from muster.planner.plan_costs import PlanCosts
from muster.planner.request import PlanRequest
from muster.planner.space import (
    DataSharding,
    MeshShape,
    ScheduleChoice,
    axis_orders,
    has_slices,
    is_asynchronous,
    plan_of_choice,
    recompute_modes,
)
from muster.planner.uneven_batch import BatchSplitter
from muster.spec.pass_pairs import has_tp_pairs
from muster.spec.plan import Plan, StageSpec, split_evenly
from muster.spec.schedules import DEFAULT_SCHEDULE, SCHEDULES


class LowerBounds:
    """Lower bounds for the plans of one request, in the unit of its objective.

    They are 0 for the objective `memory`: any plan may be the one that needs least.
    """

    def __init__(
        self,
        request: PlanRequest,
        costs: PlanCosts,
        memory_budget: MemoryBudget,
        batch_splitter: BatchSplitter,
        value_per_second: float,
    ) -> None:
        self.request = request
        self.costs = costs
        self.memory_budget = memory_budget
        self.batch_splitter = batch_splitter
        self.value_per_second = value_per_second
        self._busiest_rank_s: dict[tuple, float] = {}
        self._comm_s: dict[tuple, float] = {}

    def of_choice(self, choice: ScheduleChoice) -> float:
        """Return a bound of all plans of a choice, from the times of one layer."""
        count = self._micro_batches(choice.shape)
        if self._has_measured_rates:
            return 0.0  # passes take what the measured stages of the very plan take
        if choice.uneven_batch:
            return self._value(self.batch_splitter.shape_bound_s(choice.shape))
        if not self._has_uniform_ranks:
            return self._value(count * self._min_busiest_rank_s(choice.shape))
        times = self._layer_times(choice)
        mean_s = count * (times.whole_forward_s + times.whole_backward_s) / choice.shape.pp
        if self._fixed_stages:
            return self._value(mean_s * max(1.0, self._processes_per_core))
        passes_s = choice_bound_s(times, choice, self._num_uniform_layers, count)
        return self._value(max(passes_s, mean_s * self._processes_per_core))

    def unsharded(self, choice: ScheduleChoice) -> float:
        """Return a bound of all plans of a choice, from the times of their stages.

        Nothing is gathered or reduced in it, and all data-parallel ranks share the optimizer step.
        """
        if self.request.objective == "memory" or self._fixed_stages or self._has_measured_rates or choice.uneven_batch:
            return 0.0
        plans = self._plans_by_axis_order(choice, (1, choice.shape.data, "z1"))
        if not choice.balances_layers:
            return min(self._of_times(plan, self.costs.pass_times(plan).without_sharding()) for plan in plans)
        if not self._has_uniform_ranks:
            return 0.0
        transfer_s = min(float(np.min(self.costs.pass_times(plan).forward_transfer_s[1:])) for plan in plans)
        times = self._layer_times(choice)
        count = self._micro_batches(choice.shape)
        return self._value(choice_bound_s(times, choice, self._num_uniform_layers, count, transfer_s))

    def _layer_times(self, choice: ScheduleChoice) -> LayerTimes:
        """Return the times of a layer in any plan of a choice: without what pairs of passes may hide."""
        request = self.request
        has_pairs = SCHEDULES[choice.schedule].has_pairs and request.framework.overlap_pairs
        hides = has_pairs and (request.model.moe is not None or has_tp_pairs(request.base))
        return self.costs.layer_times(choice.shape, in_pairs=hides)

    def communication(self, shape: MeshShape, sharding: DataSharding) -> float:
        """Return a bound of all plans of a shape with one data sharding, from gathers and reductions alone.

        They are made for each layer and micro-batch, and no pass is shorter, whether they are overlapped or not.
        """
        if self.request.objective == "memory" or sharding[2] == "z1" or shape.data == 1:
            return 0.0
        if self.request.base.overrides or self._has_measured_rates or self._fixed_stages:
            return 0.0
        key = shape.tp, shape.pp, shape.cp, shape.ep, *sharding
        if key not in self._comm_s:
            plans = self._plans_by_axis_order(ScheduleChoice(shape, DEFAULT_SCHEDULE, 1, False), sharding)
            examples = [times for plan in plans for times in example_stage_times(self.costs.placed(plan))]
            self._comm_s[key] = min(map(self._all_layers_comm_s, examples))
        return self._value(self._micro_batches(shape) * self._comm_s[key] / shape.pp)

    def of_plan(self, plan: Plan) -> float:
        """Return a bound of one plan."""
        if self.request.objective == "memory":
            return 0.0
        if plan.uneven_micro_batches and not self._has_measured_rates:
            return self._value(self.batch_splitter.bound_s(plan))
        return self._of_times(plan, self.costs.pass_times(plan))

    def with_added(self, plan: Plan, added_s: Sequence[float]) -> float:
        """Return a bound of a plan whose pipeline ranks take `added_s` longer for each micro-batch."""
        if plan.uneven_micro_batches:  # its ranks run different numbers of micro-batches
            return self.of_plan(plan)
        counts = self._counts_by_replica(plan)
        return self._value(step_bound_s(plan, self.costs.pass_times(plan), counts, np.array(added_s)))

    def _of_times(self, plan: Plan, times: PassTimes) -> float:
        counts = self._counts_by_replica(plan)
        passes_s = max(step_bound_s(plan, times, counts), latency_bound_s(plan, times, counts[0]))
        return self._value(max(passes_s, self.memory_budget.offload_bound_s(plan, times)))

    def _value(self, step_s: float) -> float:
        """Return the value of a step in the unit of the objective; 0 with slices of sequences, whose pipeline fills and
        drains faster, and in an asynchronous schedule, whose pipeline does so once in several steps."""
        if self.request.objective == "memory" or has_slices(self.request) or is_asynchronous(self.request):
            return 0.0
        whole = self._least_round
        mean_s = step_s if whole is None else replace(whole, step_s=step_s).round_s / whole.outer.every
        return mean_s * self.value_per_second

    @cached_property
    def _least_round(self) -> IslandRound | None:
        """Round of islands with exchanges as short as those of any plan; None without islands."""
        if self.request.base.islands == 1:
            return None
        own = self.request
        return least_round(own.model, own.base, own.cluster, own.outer or OuterConfig(), own.island_devices, own.optim)

    def _micro_batches(self, shape: MeshShape) -> int:
        return self.request.island_sequences // shape.data // shape.micro_batch_size

    def _counts_by_replica(self, plan: Plan) -> list[int]:
        return split_evenly(plan.num_micro_batches(self.request.workload), plan.pipeline_replicas)

    @property
    def _has_measured_rates(self) -> bool:
        return self.request.cluster.device.rates is not None

    @property
    def _has_uniform_ranks(self) -> bool:
        """True if passes take the same time on whichever nodes a stage lies."""
        cluster = self.request.cluster
        return cluster.is_uniform and cluster.node_bandwidth_bytes_per_s is None

    @property
    def _num_uniform_layers(self) -> int | None:
        """Number of layers of the model; None where layers differ."""
        return self.request.model.num_layers if self.costs.has_uniform_layers else None

    @property
    def _fixed_stages(self) -> tuple[StageSpec, ...]:
        """Stages that every plan of the request must have."""
        return self.request.fixed.get("stages", self.request.base.stages)

    @cached_property
    def _processes_per_core(self) -> float:
        """Processes that share a core: all their work together takes no less than on that many cores; 0 if none do."""
        cluster = self.request.cluster
        cores = cluster.device.shared_cores
        return cluster.num_devices / (cores * cluster.num_nodes) if cores else 0.0

    def _min_busiest_rank_s(self, shape: MeshShape) -> float:
        """Return the least time of the busiest rank for a micro-batch on unlike devices; 0 where layers differ.

        Layers go where they are done first.
        """
        if not self.costs.has_uniform_layers:
            return 0.0
        key = shape.tp, shape.pp, shape.cp, shape.ep, shape.micro_batch_size, shape.data, shape.copies
        if key not in self._busiest_rank_s:
            num_layers = self.request.model.num_layers
            plans = self._plans_by_axis_order(ScheduleChoice(shape, DEFAULT_SCHEDULE, 1, False), (1, shape.data, "z1"))
            loads = (rank_loads(plan, num_layers, self.costs.pass_times) for plan in plans)
            self._busiest_rank_s[key] = min(min_busiest_rank_s(ranks, num_layers) for ranks in loads)
        return self._busiest_rank_s[key]

    def _plans_by_axis_order(self, choice: ScheduleChoice, sharding: DataSharding) -> list[Plan]:
        """Return a plan of the choice for each order of axes on the devices."""
        recompute = recompute_modes(self.request)[0]
        orders = axis_orders(self.request, choice.shape)
        return [plan_of_choice(self.request, choice, sharding, axis_order, recompute) for axis_order in orders]

    def _all_layers_comm_s(self, times: StageTimes) -> float:
        """Return the communication of all layers for a micro-batch; parameters are gathered in forward and backward."""
        gather_s, reduce_s = times.param_communication.per_micro_batch_s(range(self.request.model.num_layers))
        if times.trained is not None:
            return gather_s  # backwards of frozen layers gather and reduce nothing
        return 2 * gather_s + reduce_s
