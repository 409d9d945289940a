"""What is thought of a plan: bounds, cheap, for what is not simulated, and a prediction for what is."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from muster.cost.op_times import OpTimes
from muster.cost.places import PlanSetting
from muster.cost.plan_times import plan_setting, plan_times
from muster.cost.stage_times import StageTimes, example_times
from muster.planner.balance import balanced, least_busy_s, loads
from muster.planner.bound import (
    LayerTimes,
    PassSeconds,
    order_bound_s,
    seconds_of_setting,
    seconds_of_times,
    step_bound_s,
)
from muster.planner.request import Request
from muster.planner.room import Room
from muster.planner.shares import Shares
from muster.planner.space import Order, Shape, Split, axis_orders, make_plan, ordered_plan, recomputes
from muster.planner.trips import trips_bound_s
from muster.planner.verdict import Verdict
from muster.schedule.build import program_of
from muster.schedule.program import Program
from muster.simulate.predict import predict
from muster.spec.errors import InfeasibleError
from muster.spec.plan import Plan, StageSpec, split_evenly


class Judge:
    """Judges the plans of one request. It remembers times and Programs, which many plans share."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.room = Room(request, self.seconds, self._program)
        self.shares = Shares(request, _whole_s)
        self._times: dict[Plan, OpTimes] = {}
        self._programs: dict[tuple, Program] = {}
        self._ordered: tuple[tuple, Program] | None = None
        """The last Program of a plan with an order of its own."""
        self._layers: dict[tuple[int, ...], LayerTimes] = {}
        self._least: dict[tuple[int, ...], float] = {}
        self._travel: dict[tuple, float] = {}
        self._moved: dict[Plan, tuple[StageSpec, ...] | None] = {}
        self._value_of_second = self._objective_factor()

    def _objective_factor(self) -> float:
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

    def times(self, plan: Plan) -> OpTimes:
        """Of a plan's instructions."""
        if plan not in self._times:
            self._times[plan] = plan_times(self.request.model, plan, self.request.workload, self.request.cluster)
        return self._times[plan]

    def seconds(self, plan: Plan) -> PassSeconds:
        """Of a plan's passes, far faster than all its `times`."""
        if self.request.cluster.device.rates is not None:
            return seconds_of_times(plan, self.times(plan))
        return seconds_of_setting(self._setting(plan))

    def _setting(self, plan: Plan) -> PlanSetting:
        return plan_setting(self.request.model, plan, self.request.workload, self.request.cluster)

    def order_bound(self, order: Order) -> float:
        """The least value of any plan of an order, from the times of a layer."""
        share = self.request.workload.global_batch_size // order.shape.data // order.shape.micro_batch_size
        if self.request.cluster.device.rates is not None:
            return 0.0  # what passes take there depends on how the stages of the very plan are held
        if order.shares:
            return self._bound(self.shares.order_bound_s(order.shape))
        if not self._ranks_alike:
            return self._bound(share * self._least_s(order.shape))
        times = self._layer_times(order.shape)
        mean_s = share * (times.whole_forward_s + times.whole_backward_s) / order.shape.pp
        if self._stages:
            return self._bound(mean_s * max(1.0, self._crowd))
        passes_s = order_bound_s(times, order, self._alike_layers, share)
        return self._bound(max(passes_s, mean_s * self._crowd))

    @property
    def _ranks_alike(self) -> bool:
        """Whether it makes no difference to passes on which nodes a stage lies."""
        cluster = self.request.cluster
        return cluster.is_uniform and cluster.node_bandwidth_bytes_per_s is None

    @cached_property
    def _layers_alike(self) -> bool:
        """Whether every layer takes what the last one takes."""
        plan = make_plan(self.request, Shape(1, 1, 1, 1, 1, 1), (1, 1, "z1"))
        return self._setting(plan).known.layers_alike and not self.request.base.overrides

    @property
    def _alike_layers(self) -> int | None:
        """The model's layers, where they are alike."""
        return self.request.model.num_layers if self._layers_alike else None

    @property
    def _stages(self) -> tuple[StageSpec, ...]:
        """Those that every plan must have."""
        return self.request.fixed.get("stages", self.request.base.stages)

    @cached_property
    def _crowd(self) -> float:
        """Processes for each core, where they share cores: what they do in all takes no less than on so many cores."""
        cluster = self.request.cluster
        cores = cluster.device.shared_cores
        return cluster.num_devices / (cores * cluster.num_nodes) if cores else 0.0

    def _layer_times(self, shape: Shape) -> LayerTimes:
        """What a micro-batch takes depends on neither data nor pipeline parallelism: a plan of one stage tells it for
        many shapes, and one of a model with fewer layers how much of it is layers."""
        key = shape.tp, shape.cp, shape.ep, shape.micro_batch_size
        if key not in self._layers:
            request = self.request
            data = max(1, shape.ep // (shape.tp * shape.cp))
            plan = make_plan(
                request, replace(shape, data=data, pp=1), (1, data, "z1"), recompute=recomputes(request)[0]
            )
            depth = request.model.num_layers
            forward_s, backward_s = self._passes_s(plan)
            less = self._fewer._passes_s(plan) if depth > 1 else (0.0, 0.0)
            self._layers[key] = LayerTimes(forward_s - less[0], backward_s - less[1], forward_s, backward_s)
        return self._layers[key]

    @cached_property
    def _fewer(self) -> "Judge":
        """Of the model with a layer less."""
        model = self.request.model
        fewer = model.model_copy(update={"num_layers": max(1, model.num_layers - 1)})
        return Judge(replace(self.request, model=fewer))

    def _passes_s(self, plan: Plan) -> tuple[float, float]:
        seconds = self.seconds(plan)
        return float(seconds.forward[0]), float(seconds.inputs[0])

    def _least_s(self, shape: Shape) -> float:
        """What the busiest rank takes for a micro-batch at least, on devices that differ: layers go where they are
        done first. Known where layers are alike."""
        if not self._layers_alike:
            return 0.0
        key = shape.tp, shape.pp, shape.cp, shape.ep, shape.micro_batch_size, shape.data
        if key not in self._least:
            depth = self.request.model.num_layers
            laid = self._laid(Order(shape, "1f1b", 1, False), (1, shape.data, "z1"))
            self._least[key] = min(least_busy_s(loads(plan, depth, self.seconds), depth) for plan in laid)
        return self._least[key]

    def unsharded_bound(self, order: Order) -> float:
        """The least value of the plans of an order, from the times of their stages as they would be if nothing was
        gathered or reduced in a step, and the optimizer's work was shared by as many as there are."""
        request = self.request
        if request.objective == "memory" or self._stages or request.cluster.device.rates is not None or order.shares:
            return 0.0
        split: Split = (1, order.shape.data, "z1")
        bare = self._laid(order, split)
        if not order.balanced:
            return min(self._bound_of(plan, self.seconds(plan).without_shards()) for plan in bare)
        if not self._ranks_alike:
            return 0.0
        hop_s = min(float(np.min(self.seconds(plan).come[1:])) for plan in bare)
        share = request.workload.global_batch_size // order.shape.data // order.shape.micro_batch_size
        times = self._layer_times(order.shape)
        return self._bound(order_bound_s(times, order, self._alike_layers, share, hop_s))

    def _laid(self, order: Order, split: Split) -> list[Plan]:
        """A plan of the order for each way to lay axes on the devices."""
        recompute = recomputes(self.request)[0]
        axes = axis_orders(self.request, order.shape)
        return [ordered_plan(self.request, order, split, axis_order, recompute) for axis_order in axes]

    def travel_bound(self, shape: Shape, split: Split) -> float:
        """The least value of the plans of a shape with one way to share parameters and gradients, from what travels
        for each layer and micro-batch: whether it is hidden or not, no pass is shorter."""
        request = self.request
        measured = request.cluster.device.rates is not None
        if request.objective == "memory" or split[2] == "z1" or shape.data == 1 or request.base.overrides or measured:
            return 0.0
        if self._stages:  # which may not be as many as the shape has
            return 0.0
        key = shape.tp, shape.pp, shape.cp, shape.ep, *split
        if key not in self._travel:
            plans = self._laid(Order(shape, "1f1b", 1, False), split)
            examples = [at for plan in plans for at in example_times(self._setting(plan))]
            self._travel[key] = min(map(self._travels_s, examples))
        share = request.workload.global_batch_size // shape.data // shape.micro_batch_size
        return self._bound(share * self._travel[key] / shape.pp)

    def _travels_s(self, at: StageTimes) -> float:
        """What travels for all layers, wherever they lie; parameters are gathered for the forward and the backward."""
        gather_s, reduce_s = at.parameters.travel_s(range(self.request.model.num_layers))
        return 2 * gather_s + reduce_s

    def bound(self, plan: Plan) -> float:
        """The least value of a plan."""
        if self.request.objective == "memory":
            return 0.0
        if plan.data_shares and self.request.cluster.device.rates is None:
            return self._bound(self.shares.bound_s(plan))
        return self._bound_of(plan, self.seconds(plan))

    def bound_with(self, plan: Plan, added_s: Sequence[float]) -> float:
        """The least value of a plan whose pipeline ranks take so much more for each micro-batch."""
        if plan.data_shares:  # whose ranks don't all run as many
            return self.bound(plan)
        counts = split_evenly(plan.num_micro_batches(self.request.workload), plan.replicas)
        return self._bound(step_bound_s(plan, self.seconds(plan), counts, np.array(added_s)))

    def _bound_of(self, plan: Plan, seconds: PassSeconds) -> float:
        counts = split_evenly(plan.num_micro_batches(self.request.workload), plan.replicas)
        passes_s = max(step_bound_s(plan, seconds, counts), trips_bound_s(plan, seconds, counts[0]))
        return self._bound(max(passes_s, self.room.copies_bound_s(plan, seconds)))

    def _bound(self, step_s: float) -> float:
        # How much memory a plan needs is not bounded: every plan may be the one that needs least.
        return 0.0 if self.request.objective == "memory" else step_s * self._value_of_second

    def moved(self, plan: Plan) -> Plan | None:
        """The plan with its layers so that no rank has more to do than it must; None where they lie so already."""
        if plan.default_strategy.zero != "z1":
            return balanced(plan, self.request.model.num_layers, self.seconds)
        # Passes of plans that only reduce after them are the same however they share their gradients.
        key = plan.model_copy(update={"dp_replicate": 1, "dp_shard": plan.dp_replicate * plan.dp_shard})
        if key not in self._moved:
            moved = balanced(key, self.request.model.num_layers, self.seconds)
            self._moved[key] = moved and moved.stages
        stages = self._moved[key]
        return plan.model_copy(update={"stages": stages}) if stages else None

    def verdict(self, plan: Plan) -> Verdict:
        """The plan simulated."""
        request = self.request
        program, times = self._program(plan), None if plan.data_shares else self.times(plan)
        prediction = predict(request.model, plan, request.workload, request.cluster, program, times)
        if request.objective == "memory":
            value = float(max(rank.total for rank in prediction.memory))
        else:
            value = prediction.step_time_s * self._value_of_second
        return Verdict(plan, prediction, value)

    def _program(self, plan: Plan) -> Program:
        strategy, layers = plan.default_strategy, self.request.model.num_layers
        key = (
            plan.schedule,
            plan.pp,
            plan.vpp,
            plan.num_micro_batches(self.request.workload),
            strategy.zero,
            plan.mesh(0).data_ranks > 1,
            plan.tp,
            strategy.sp,
            tuple(bool(plan.offloaded_layers(stage, layers)) for stage in range(plan.num_stages)),
        )
        if plan.order is not None:  # which no two plans share
            if self._ordered is None or self._ordered[0] != (key, plan.order):
                self._ordered = (key, plan.order), program_of(plan, self.request.model, self.request.workload)
            return self._ordered[1]
        if key not in self._programs:
            self._programs[key] = program_of(plan, self.request.model, self.request.workload)
        return self._programs[key]


def _whole_s(request: Request, shape: Shape) -> float:
    """What the whole model takes for a micro-batch of a shape."""
    times = Judge(request)._layer_times(shape)
    return times.whole_forward_s + times.whole_backward_s
