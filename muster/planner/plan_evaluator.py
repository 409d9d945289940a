"""Evaluation of plans: cheap lower bounds and memory limits, or a full simulation."""

from collections import OrderedDict
from copy import copy
from dataclasses import dataclass, replace
from itertools import count

from muster.cost.time.cost_cache import CostCache
from muster.planner.balance import balance_layers
from muster.planner.bounds.lower_bounds import LowerBounds
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.memory.budget import MemoryBudget
from muster.planner.plan_costs import PlanCosts, whole_model_s
from muster.planner.request import PlanRequest
from muster.planner.search_budget import KNOWN_SHAPE_WORK, SHAPE_WORK
from muster.planner.space import ScheduleChoice
from muster.planner.uneven_batch import BatchSplitter
from muster.simulate.predict import predict
from muster.spec.errors import InfeasibleError
from muster.spec.plan import Plan, StageSpec

_NUMBERS = count()

MAX_RESTORED = 8
"""Evaluators with their caches that a process keeps for the searches of others."""


class PlanEvaluator:
    """Evaluates the plans of one request, and keeps the costs that many of them share."""

    def __init__(self, request: PlanRequest) -> None:
        """Raise InfeasibleError where the cluster's price or power is unknown and the objective needs it."""
        self.request = request
        self.number = next(_NUMBERS)
        """Number that evaluators with shared caches have in common."""
        self.costs = PlanCosts(request)
        self.memory_budget = MemoryBudget(request, self.costs)
        self.batch_splitter = BatchSplitter(request, whole_model_s)
        self._value_per_second = _value_per_second(request)
        self.bounds = LowerBounds(request, self.costs, self.memory_budget, self.batch_splitter, self._value_per_second)
        self.shape_work = SHAPE_WORK
        """Work of looking at a mesh shape."""
        self._balanced_stages: dict[Plan, tuple[StageSpec, ...] | None] = {}

    def without_head_room(self) -> "PlanEvaluator":
        """Return an evaluator whose plans may fill all memory that may be used; it shares this one's caches."""
        relaxed = copy(self)
        relaxed.memory_budget = self.memory_budget.without_head_room()
        relaxed.bounds = copy(self.bounds)
        relaxed.bounds.memory_budget = relaxed.memory_budget
        return relaxed

    def narrowed(self, request: PlanRequest) -> "PlanEvaluator":
        """Return an evaluator for a request that differs only in what it wants: axes, simplicity, degrees, sizes, ZeRO
        level or schedule. It shares this one's caches, which hold for any of these, unlike for recompute."""
        narrow = copy(self)
        narrow.shape_work = KNOWN_SHAPE_WORK
        narrow.request = request
        narrow.memory_budget = copy(self.memory_budget)
        narrow.memory_budget.request = request
        narrow.bounds = copy(self.bounds)
        narrow.bounds.request = request
        narrow.bounds.memory_budget = narrow.memory_budget
        return narrow

    @property
    def recipe(self) -> "EvaluatorRecipe":
        """Recipe from which another process makes the same evaluator."""
        base, request = (replace(one, cost_cache=CostCache()) for one in (self.costs.request, self.request))
        return EvaluatorRecipe(self.number, base, request, self.shape_work, self.memory_budget.head_room > 0)

    def evaluate(self, plan: Plan) -> EvaluatedPlan:
        """Simulate a step of a plan."""
        request = self.request
        program = self.costs.program(plan)
        times = None if plan.uneven_micro_batches else self.costs.op_times(plan)
        own = request.model, plan, request.workload, request.cluster, program, times, request.framework
        prediction = predict(*own, cache=request.cost_cache, optim=request.optim, outer=request.outer)
        if request.objective == "memory":
            value = float(max(rank.total for rank in prediction.memory))
        else:
            value = prediction.mean_step_s * self._value_per_second
        return EvaluatedPlan(plan, prediction, value)

    def complete_draft(self, draft: Plan, choice: ScheduleChoice) -> Plan | None:
        """Return a draft with layers balanced and the batch split as the choice asks.

        None where they are so already: the plan belongs to the choice without that, and is looked at there.
        """
        plan = self.with_balanced_layers(draft) if choice.balances_layers else draft
        return self.batch_splitter.with_best_split(plan) if choice.uneven_batch and plan is not None else plan

    def with_balanced_layers(self, plan: Plan) -> Plan | None:
        """Return the plan with layers moved until no rank has more to do than it must; None where none had to move."""
        num_layers = self.request.model.num_layers
        if plan.default_strategy.zero != "z1":
            return balance_layers(plan, num_layers, self.costs.pass_times)
        # Under z1 gradients are reduced after the passes, so that passes take the same time for every data sharding.
        key = plan.model_copy(update={"dp_replicate": 1, "dp_shard": plan.dp_replicate * plan.dp_shard})
        if key not in self._balanced_stages:
            balanced = balance_layers(key, num_layers, self.costs.pass_times)
            self._balanced_stages[key] = balanced and balanced.stages
        stages = self._balanced_stages[key]
        return plan.model_copy(update={"stages": stages}) if stages else None


@dataclass(frozen=True, slots=True)
class EvaluatorRecipe:
    """An evaluator without its caches, for another process."""

    number: int
    base: PlanRequest
    """Request that the caches are for."""
    request: PlanRequest
    shape_work: float
    leaves_head_room: bool

    def restore(self) -> PlanEvaluator:
        """Return the evaluator, with the caches of those with its number that this process has restored before."""
        if self.number not in _RESTORED:
            _RESTORED[self.number] = PlanEvaluator(self.base)
        _RESTORED.move_to_end(self.number)
        while len(_RESTORED) > MAX_RESTORED:
            _RESTORED.popitem(last=False)
        base = _RESTORED[self.number]
        found = base.narrowed(replace(self.request, cost_cache=base.request.cost_cache))
        found.shape_work = self.shape_work
        return found if self.leaves_head_room else found.without_head_room()


_RESTORED: OrderedDict[int, PlanEvaluator] = OrderedDict()


def _value_per_second(request: PlanRequest) -> float:
    """Return the value of a second of the whole cluster in the objective's unit; InfeasibleError if it is unknown."""
    cluster, objective = request.cluster, request.objective
    if objective in ("time", "memory"):
        return 1.0
    rate = cluster.usd_per_hour if objective == "cost" else cluster.watts
    if rate is None:
        missing = "price" if objective == "cost" else "power"
        raise InfeasibleError(
            f"--objective {objective} needs the {missing} of {cluster.name or 'the cluster'}, which is unknown:"
            " give it in a cluster file, or choose --objective time"
        )
    return rate / 3600 if objective == "cost" else rate
