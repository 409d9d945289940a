"""Times and Programs of the plans of one request, computed once and shared by bounds, memory and evaluation."""

from dataclasses import replace
from functools import cached_property
from math import lcm

from muster.cost.time.op_times import OpTimes
from muster.cost.time.plan_times import place_plan, plan_times
from muster.cost.time.rank_placement import PlacedPlan
from muster.cost.time.stage_times import example_stage_times
from muster.layout.host_updates import device_updates
from muster.planner.bounds.pass_times import LayerTimes, PassTimes, pass_times_of_op_times, pass_times_of_placed
from muster.planner.dispatch_choice import dispatch_fields, expert_slices
from muster.planner.request import PlanRequest
from muster.planner.space import MeshShape, make_plan, recompute_modes
from muster.schedule.build import build_program
from muster.schedule.program import Program
from muster.spec.pass_pairs import pairs_passes
from muster.spec.plan import Plan

MAX_PASS_TIMES = 4096
"""Plans whose pass times are kept: a plan is bounded, fitted and perhaps balanced in a row."""


class PlanCosts:
    """Cache of the times and Programs of one request's plans."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self._op_times: dict[Plan, OpTimes] = {}
        self._pass_times: dict[Plan, PassTimes] = {}
        self._programs: dict[tuple, Program] = {}
        self._last_pinned_program: tuple[tuple, Program] | None = None
        """Program of the latest plan with a pinned schedule, which no other plan shares."""
        self._layer_times: dict[tuple[int, ...], LayerTimes] = {}

    def op_times(self, plan: Plan) -> OpTimes:
        """Return the times of all instructions of a plan."""
        if plan not in self._op_times:
            request = self.request
            own = request.model, plan, request.workload, request.cluster, request.framework
            self._op_times[plan] = plan_times(*own, cache=request.cost_cache, optim=request.optim)
        return self._op_times[plan]

    def pass_times(self, plan: Plan) -> PassTimes:
        """Return the times of a plan's passes, far faster than all its `op_times` where devices have data sheets."""
        if plan not in self._pass_times:
            if self.request.cluster.device.rates is not None:
                found = pass_times_of_op_times(plan, self.op_times(plan))
            else:
                found = pass_times_of_placed(self.placed(plan))
            if len(self._pass_times) >= MAX_PASS_TIMES:
                self._pass_times.clear()
            self._pass_times[plan] = found
        return self._pass_times[plan]

    def placed(self, plan: Plan) -> PlacedPlan:
        """Return a plan with its ranks laid on the cluster."""
        request = self.request
        own = request.model, plan, request.workload, request.cluster, request.framework
        return place_plan(*own, cache=request.cost_cache, optim=request.optim)

    @cached_property
    def has_uniform_layers(self) -> bool:
        """True if all layers of the model take the same time."""
        if self.request.optim is not None and self.request.optim.freeze:
            return False
        plan = make_plan(self.request, MeshShape(1, 1, 1, 1, 1, 1), (1, 1, "z1"))
        return self.placed(plan).cache.layers_are_alike and not self.request.base.overrides

    def layer_times(self, shape: MeshShape, in_pairs: bool = False) -> LayerTimes:
        """Return the times of one layer and of the whole model for a micro-batch; with `in_pairs` without what a
        pair of passes hides at most.

        They depend on neither data nor pipeline parallelism: a plan of one stage serves many shapes, and the difference
        to a model with one layer fewer is one layer.
        """
        key = shape.tp, shape.cp, shape.ep, shape.micro_batch_size, shape.copies, in_pairs
        if key not in self._layer_times:
            request = self.request
            etp = expert_slices(request, shape.tp, shape.ep)
            data = lcm(shape.ep * etp, shape.tp * shape.cp) // (shape.tp * shape.cp)
            single_stage = replace(shape, data=data, pp=1)
            plan = make_plan(request, single_stage, (1, data, "z1"), recompute=recompute_modes(request)[0])
            if in_pairs:  # the dispatcher of plans whose schedule has pairs
                own = shape.tp, shape.cp, shape.ep, plan.default_strategy.sp, shape.copies
                plan = plan.model_copy(update=dispatch_fields(request, *own, schedule="dualpipe"))
            forward_s, backward_s = self._first_stage_s(plan, in_pairs)
            fewer = self._one_layer_fewer if request.model.num_layers > 1 else None
            shorter_s = (0.0, 0.0) if fewer is None else fewer._first_stage_s(plan, in_pairs)
            self._layer_times[key] = LayerTimes(
                forward_s - shorter_s[0], backward_s - shorter_s[1], forward_s, backward_s
            )
        return self._layer_times[key]

    @cached_property
    def _one_layer_fewer(self) -> "PlanCosts":
        """Costs of the same model with one layer fewer."""
        model = self.request.model
        shorter = model.model_copy(update={"num_layers": max(1, model.num_layers - 1)})
        return PlanCosts(replace(self.request, model=shorter))

    def _first_stage_s(self, plan: Plan, in_pairs: bool) -> tuple[float, float]:
        """Return the seconds of the first stage's forward and backward."""
        times = self.pass_times(plan)
        hidden_s = example_stage_times(self.placed(plan))[0].hidden_s if in_pairs else (0.0, 0.0)
        return float(times.forward_s[0]) - hidden_s[0], float(times.backward_s[0]) - hidden_s[1]

    def program(self, plan: Plan) -> Program:
        """Return the Program of a plan; plans that differ only in what a Program doesn't show share one."""
        strategy = plan.default_strategy
        num_layers = self.request.model.num_layers
        key = (
            plan.schedule,
            plan.pp,
            plan.vpp,
            plan.num_micro_batches(self.request.workload),
            plan.sequence_slices,
            strategy.zero,
            plan.copies_params(plan.mesh(0)),
            plan.max_active_stages,
            plan.overlap_param_gather_with_optimizer_step and plan.bucket_layers,
            plan.mesh(0).dp_size > 1,
            plan.tp,
            strategy.sp,
            tuple(bool(plan.offloaded_layers(stage, num_layers)) for stage in range(plan.num_stages)),
            tuple(plan.host_update_tiers(stage, num_layers) for stage in range(plan.num_stages)),
            tuple(device_updates(plan, num_layers, stage) for stage in range(plan.num_stages)),
            plan.param_tiers(num_layers),
            pairs_passes(plan, self.request.model),
        )
        if plan.pinned_schedule is not None:
            pinned_key = (key, plan.pinned_schedule)
            if self._last_pinned_program is None or self._last_pinned_program[0] != pinned_key:
                self._last_pinned_program = pinned_key, self._build(plan)
            return self._last_pinned_program[1]
        if key not in self._programs:
            self._programs[key] = self._build(plan)
        return self._programs[key]

    def _build(self, plan: Plan) -> Program:
        return build_program(plan, self.request.model, self.request.workload)


def whole_model_s(request: PlanRequest, shape: MeshShape) -> float:
    """Return the seconds that the whole model takes for one micro-batch of a shape."""
    times = PlanCosts(request).layer_times(shape)
    return times.whole_forward_s + times.whole_backward_s
