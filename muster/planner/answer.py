"""The answer of `muster plan`: the best plans of a request, and the reasons for the first."""

from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

from muster.planner.explain import explain_no_plan
from muster.planner.heterogeneous import PlanSearch, find_best_plans
from muster.planner.neighbours import Neighbour, neighbours
from muster.planner.request import PlanRequest
from muster.planner.search_budget import SearchBudget
from muster.planner.search_result import SearchResult
from muster.planner.space import is_admitted
from muster.planner.training_cost import TrainingCost, training_cost
from muster.spec.errors import InfeasibleError

SEARCH_SHARE = 0.8
"""Share of the budget for the search; the neighbours of its first plan have the rest, and what it leaves."""

MAX_IMPROVEMENTS = 3
"""Steps from the first plan of a stopped search to a better neighbour."""


@dataclass(frozen=True)
class PlanAnswer:
    """The best plans for a request."""

    search: PlanSearch
    training_costs: list[TrainingCost] | None
    """Cost of the whole training under each plan; None where the request has no number of tokens."""
    budget: SearchBudget
    """Budget of the answer, less what was spent on the search."""

    @property
    def request(self) -> PlanRequest:
        """Request that was answered, with the cluster's nodes in the order that was found."""
        return self.search.request

    @property
    def result(self) -> SearchResult:
        """Plans, best first, and counters of the search."""
        return self.search.result

    @cached_property
    def neighbours(self) -> list[Neighbour]:
        """Effect of each single change to the first plan, evaluated with what the search has left of the budget."""
        return neighbours(self.result.best[0], self.search.evaluator, self.budget)


def answer_request(request: PlanRequest, top: int, budget: SearchBudget) -> PlanAnswer:
    """Find the `top` best plans within a budget.

    Raises InfeasibleError, with the limit that binds, if there is no plan.
    """
    search = find_best_plans(request, top, budget.share(SEARCH_SHARE))
    if not search.result.best:
        raise InfeasibleError(explain_no_plan(search.result))
    search = replace(search, result=_adopt_better_neighbours(search.result, top, budget))
    costs = None
    if request.tokens is not None:
        costs = [
            training_cost(evaluated.prediction, request.tokens, request.conditions) for evaluated in search.result.best
        ]
    return PlanAnswer(search, costs, budget)


def _adopt_better_neighbours(result: SearchResult, top: int, budget: SearchBudget) -> SearchResult:
    """Return the result of a stopped search with better neighbours of its first plan.

    Else a line about the first plan would say that another is faster.
    """
    evaluator = result.evaluator
    for _ in range(MAX_IMPROVEMENTS):
        if result.proven:
            return result
        first = result.best[0]
        changed = (neighbour.evaluated for neighbour in neighbours(first, evaluator, budget.share(0.5)))
        better = {
            one.plan: one
            for one in changed
            if one and one.value < first.value and is_admitted(evaluator.request, one.plan)
        }
        if not better:
            return result
        result = replace(result, best=sorted([*better.values(), *result.best], key=attrgetter("sort_key"))[:top])
    return result
