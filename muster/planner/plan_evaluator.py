"""What is thought of a plan: bounds, cheap, for what is not simulated, and a prediction for what is."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from muster.cost.time.op_times import OpTimes
from muster.cost.time.plan_times import place_plan, plan_times
from muster.cost.time.rank_placement import PlacedPlan
from muster.cost.time.stage_times import StageTimes, example_stage_times
from muster.planner.balance import balance_layers, min_busiest_rank_s, rank_loads
from muster.planner.bounds.latency_bound import latency_bound_s
from muster.planner.bounds.step_bound import (
    LayerTimes,
    PassTimes,
    choice_bound_s,
    pass_times_of_op_times,
    pass_times_of_placed,
    step_bound_s,
)
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.memory.budget import MemoryBudget
from muster.planner.request import PlanRequest
from muster.planner.space import (
    DataSharding,
    MeshShape,
    ScheduleChoice,
    axis_orders,
    make_plan,
    plan_of_choice,
    recompute_modes,
)
from muster.planner.uneven_batch import BatchSplitter
from muster.schedule.build import build_program
from muster.schedule.program import Program
from muster.simulate.predict import predict
from muster.spec.errors import InfeasibleError
from muster.spec.plan import Plan, StageSpec, split_evenly


class PlanEvaluator:
    """Judges the plans of one request. It remembers times and Programs, which many plans share."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.memory_budget = MemoryBudget(request, self.pass_times, self._program)
        self.batch_splitter = BatchSplitter(request, _whole_model_s)
        self._op_times: dict[Plan, OpTimes] = {}
        self._programs: dict[tuple, Program] = {}
        self._last_custom_program: tuple[tuple, Program] | None = None
        """The last Program of a plan with an order of its own."""
        self._layer_times_by_shape: dict[tuple[int, ...], LayerTimes] = {}
        self._min_rank_s_by_shape: dict[tuple[int, ...], float] = {}
        self._comm_s_by_shape: dict[tuple, float] = {}
        self._balanced_stages: dict[Plan, tuple[StageSpec, ...] | None] = {}
        self._value_of_second = self._value_per_second()

    def _value_per_second(self) -> float:
        """What a second of all devices is worth in the objective's unit; raises InfeasibleError where it is unknown."""
        cluster, objective = self.request.cluster, self.request.objective
        if objective in ("time", "memory"):
            return 1.0
        known = cluster.usd_per_hour if objective == "cost" else cluster.watts
        if known is None:
            what = "price" if objective == "cost" else "power"
            raise InfeasibleError(
                f"--objective {objective} needs the {what} of {cluster.name or 'the cluster'}, which is unknown:"
                " give it in a cluster file, or choose --objective time"
            )
        return known / 3600 if objective == "cost" else known

    def op_times(self, plan: Plan) -> OpTimes:
        """Of a plan's instructions."""
        if plan not in self._op_times:
            self._op_times[plan] = plan_times(self.request.model, plan, self.request.workload, self.request.cluster)
        return self._op_times[plan]

    def pass_times(self, plan: Plan) -> PassTimes:
        """Of a plan's passes, far faster than all its `times`."""
        if self.request.cluster.device.rates is not None:
            return pass_times_of_op_times(plan, self.op_times(plan))
        return pass_times_of_placed(self._placed(plan))

    def _placed(self, plan: Plan) -> PlacedPlan:
        return place_plan(self.request.model, plan, self.request.workload, self.request.cluster)

    def choice_bound(self, choice: ScheduleChoice) -> float:
        """The least value of any plan of an order, from the times of a layer."""
        share = self.request.workload.global_batch_size // choice.shape.data // choice.shape.micro_batch_size
        if self.request.cluster.device.rates is not None:
            return 0.0  # what passes take there depends on how the stages of the very plan are held
        if choice.uneven_batch:
            return self._bound(self.batch_splitter.order_bound_s(choice.shape))
        if not self._has_uniform_ranks:
            return self._bound(share * self._min_busiest_rank_s(choice.shape))
        times = self._layer_times(choice.shape)
        mean_s = share * (times.whole_forward_s + times.whole_backward_s) / choice.shape.pp
        if self._fixed_stages:
            return self._bound(mean_s * max(1.0, self._processes_per_core))
        passes_s = choice_bound_s(times, choice, self._num_uniform_layers, share)
        return self._bound(max(passes_s, mean_s * self._processes_per_core))

    @property
    def _has_uniform_ranks(self) -> bool:
        """Whether it makes no difference to passes on which nodes a stage lies."""
        cluster = self.request.cluster
        return cluster.is_uniform and cluster.node_bandwidth_bytes_per_s is None

    @cached_property
    def _has_uniform_layers(self) -> bool:
        """Whether every layer takes what the last one takes."""
        plan = make_plan(self.request, MeshShape(1, 1, 1, 1, 1, 1), (1, 1, "z1"))
        return self._placed(plan).cache.layers_are_alike and not self.request.base.overrides

    @property
    def _num_uniform_layers(self) -> int | None:
        """The model's layers, where they are alike."""
        return self.request.model.num_layers if self._has_uniform_layers else None

    @property
    def _fixed_stages(self) -> tuple[StageSpec, ...]:
        """Those that every plan must have."""
        return self.request.fixed.get("stages", self.request.base.stages)

    @cached_property
    def _processes_per_core(self) -> float:
        """Processes for each core, where they share cores: what they do in all takes no less than on so many cores."""
        cluster = self.request.cluster
        cores = cluster.device.shared_cores
        return cluster.num_devices / (cores * cluster.num_nodes) if cores else 0.0

    def _layer_times(self, shape: MeshShape) -> LayerTimes:
        """What a micro-batch takes depends on neither data nor pipeline parallelism: a plan of one stage tells it for
        many shapes, and one of a model with fewer layers how much of it is layers."""
        key = shape.tp, shape.cp, shape.ep, shape.micro_batch_size
        if key not in self._layer_times_by_shape:
            request = self.request
            data = max(1, shape.ep // (shape.tp * shape.cp))
            plan = make_plan(
                request, replace(shape, data=data, pp=1), (1, data, "z1"), recompute=recompute_modes(request)[0]
            )
            depth = request.model.num_layers
            forward_s, backward_s = self._passes_s(plan)
            less = self._one_layer_fewer._passes_s(plan) if depth > 1 else (0.0, 0.0)
            self._layer_times_by_shape[key] = LayerTimes(
                forward_s - less[0], backward_s - less[1], forward_s, backward_s
            )
        return self._layer_times_by_shape[key]

    @cached_property
    def _one_layer_fewer(self) -> "PlanEvaluator":
        """Of the model with a layer less."""
        model = self.request.model
        fewer = model.model_copy(update={"num_layers": max(1, model.num_layers - 1)})
        return PlanEvaluator(replace(self.request, model=fewer))

    def _passes_s(self, plan: Plan) -> tuple[float, float]:
        seconds = self.pass_times(plan)
        return float(seconds.forward_s[0]), float(seconds.backward_s[0])

    def _min_busiest_rank_s(self, shape: MeshShape) -> float:
        """What the busiest rank takes for a micro-batch at least, on devices that differ: layers go where they are
        done first. Known where layers are alike."""
        if not self._has_uniform_layers:
            return 0.0
        key = shape.tp, shape.pp, shape.cp, shape.ep, shape.micro_batch_size, shape.data
        if key not in self._min_rank_s_by_shape:
            depth = self.request.model.num_layers
            laid = self._plans_by_axis_order(ScheduleChoice(shape, "1f1b", 1, False), (1, shape.data, "z1"))
            self._min_rank_s_by_shape[key] = min(
                min_busiest_rank_s(rank_loads(plan, depth, self.pass_times), depth) for plan in laid
            )
        return self._min_rank_s_by_shape[key]

    def unsharded_bound(self, choice: ScheduleChoice) -> float:
        """The least value of the plans of an order, from the times of their stages as they would be if nothing was
        gathered or reduced in a step, and the optimizer's work was shared by as many as there are."""
        request = self.request
        if (
            request.objective == "memory"
            or self._fixed_stages
            or request.cluster.device.rates is not None
            or choice.uneven_batch
        ):
            return 0.0
        split: DataSharding = (1, choice.shape.data, "z1")
        bare = self._plans_by_axis_order(choice, split)
        if not choice.balances_layers:
            return min(self._bound_of(plan, self.pass_times(plan).without_sharding()) for plan in bare)
        if not self._has_uniform_ranks:
            return 0.0
        hop_s = min(float(np.min(self.pass_times(plan).forward_transfer_s[1:])) for plan in bare)
        share = request.workload.global_batch_size // choice.shape.data // choice.shape.micro_batch_size
        times = self._layer_times(choice.shape)
        return self._bound(choice_bound_s(times, choice, self._num_uniform_layers, share, hop_s))

    def _plans_by_axis_order(self, choice: ScheduleChoice, sharding: DataSharding) -> list[Plan]:
        """A plan of the order for each way to lay axes on the devices."""
        recompute = recompute_modes(self.request)[0]
        axes = axis_orders(self.request, choice.shape)
        return [plan_of_choice(self.request, choice, sharding, axis_order, recompute) for axis_order in axes]

    def comm_bound(self, shape: MeshShape, sharding: DataSharding) -> float:
        """The least value of the plans of a shape with one way to share parameters and gradients, from what travels
        for each layer and micro-batch: whether it is hidden or not, no pass is shorter."""
        request = self.request
        measured = request.cluster.device.rates is not None
        if (
            request.objective == "memory"
            or sharding[2] == "z1"
            or shape.data == 1
            or request.base.overrides
            or measured
        ):
            return 0.0
        if self._fixed_stages:  # which may not be as many as the shape has
            return 0.0
        key = shape.tp, shape.pp, shape.cp, shape.ep, *sharding
        if key not in self._comm_s_by_shape:
            plans = self._plans_by_axis_order(ScheduleChoice(shape, "1f1b", 1, False), sharding)
            examples = [at for plan in plans for at in example_stage_times(self._placed(plan))]
            self._comm_s_by_shape[key] = min(map(self._layer_comm_s, examples))
        share = request.workload.global_batch_size // shape.data // shape.micro_batch_size
        return self._bound(share * self._comm_s_by_shape[key] / shape.pp)

    def _layer_comm_s(self, at: StageTimes) -> float:
        """What travels for all layers, wherever they lie; parameters are gathered for the forward and the backward."""
        gather_s, reduce_s = at.param_communication.per_micro_batch_s(range(self.request.model.num_layers))
        return 2 * gather_s + reduce_s

    def bound(self, plan: Plan) -> float:
        """The least value of a plan."""
        if self.request.objective == "memory":
            return 0.0
        if plan.uneven_micro_batches and self.request.cluster.device.rates is None:
            return self._bound(self.batch_splitter.bound_s(plan))
        return self._bound_of(plan, self.pass_times(plan))

    def bound_with_added(self, plan: Plan, added_s: Sequence[float]) -> float:
        """The least value of a plan whose pipeline ranks take so much more for each micro-batch."""
        if plan.uneven_micro_batches:  # whose ranks don't all run as many
            return self.bound(plan)
        counts = split_evenly(plan.num_micro_batches(self.request.workload), plan.pipeline_replicas)
        return self._bound(step_bound_s(plan, self.pass_times(plan), counts, np.array(added_s)))

    def _bound_of(self, plan: Plan, seconds: PassTimes) -> float:
        counts = split_evenly(plan.num_micro_batches(self.request.workload), plan.pipeline_replicas)
        passes_s = max(step_bound_s(plan, seconds, counts), latency_bound_s(plan, seconds, counts[0]))
        return self._bound(max(passes_s, self.memory_budget.offload_bound_s(plan, seconds)))

    def _bound(self, step_s: float) -> float:
        # How much memory a plan needs is not bounded: every plan may be the one that needs least.
        return 0.0 if self.request.objective == "memory" else step_s * self._value_of_second

    def with_balanced_layers(self, plan: Plan) -> Plan | None:
        """The plan with its layers so that no rank has more to do than it must; None where they lie so already."""
        if plan.default_strategy.zero != "z1":
            return balance_layers(plan, self.request.model.num_layers, self.pass_times)
        # Passes of plans that only reduce after them are the same however they share their gradients.
        key = plan.model_copy(update={"dp_replicate": 1, "dp_shard": plan.dp_replicate * plan.dp_shard})
        if key not in self._balanced_stages:
            moved = balance_layers(key, self.request.model.num_layers, self.pass_times)
            self._balanced_stages[key] = moved and moved.stages
        stages = self._balanced_stages[key]
        return plan.model_copy(update={"stages": stages}) if stages else None

    def evaluate(self, plan: Plan) -> EvaluatedPlan:
        """The plan simulated."""
        request = self.request
        program, times = self._program(plan), None if plan.uneven_micro_batches else self.op_times(plan)
        prediction = predict(request.model, plan, request.workload, request.cluster, program, times)
        if request.objective == "memory":
            value = float(max(rank.total for rank in prediction.memory))
        else:
            value = prediction.step_time_s * self._value_of_second
        return EvaluatedPlan(plan, prediction, value)

    def _program(self, plan: Plan) -> Program:
        strategy, layers = plan.default_strategy, self.request.model.num_layers
        key = (
            plan.schedule,
            plan.pp,
            plan.vpp,
            plan.num_micro_batches(self.request.workload),
            strategy.zero,
            plan.mesh(0).dp_size > 1,
            plan.tp,
            strategy.sp,
            tuple(bool(plan.offloaded_layers(stage, layers)) for stage in range(plan.num_stages)),
        )
        if plan.pinned_schedule is not None:  # which no two plans share
            if self._last_custom_program is None or self._last_custom_program[0] != (key, plan.pinned_schedule):
                self._last_custom_program = (
                    (key, plan.pinned_schedule),
                    build_program(plan, self.request.model, self.request.workload),
                )
            return self._last_custom_program[1]
        if key not in self._programs:
            self._programs[key] = build_program(plan, self.request.model, self.request.workload)
        return self._programs[key]


def _whole_model_s(request: PlanRequest, shape: MeshShape) -> float:
    """What the whole model takes for a micro-batch of a shape."""
    times = PlanEvaluator(request)._layer_times(shape)
    return times.whole_forward_s + times.whole_backward_s
