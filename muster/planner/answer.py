"""What `muster plan` was asked, and what it found."""

from dataclasses import dataclass
from functools import cached_property

from muster.planner.explain import explain_no_plan
from muster.planner.heterogeneous import PlanSearch, find_best_plans
from muster.planner.neighbours import Neighbour, neighbours
from muster.planner.request import ParsedRequest, PlanRequest
from muster.planner.search_result import SearchResult
from muster.planner.space import is_admitted
from muster.planner.training_cost import TrainingCost, training_cost
from muster.spec.errors import InfeasibleError

MIN_EXPLAIN_S = 2.0
"""For saying why the first is the best, however long the search took."""

MAX_IMPROVEMENTS = 3
"""From the plan that a stopped search has found to better ones beside it."""


@dataclass(frozen=True)
class PlanAnswer:
    """The best plans for a request."""

    arranged: PlanSearch
    training_costs: list[TrainingCost] | None
    """Of the training under each plan; None where nobody said how many tokens it takes."""
    derived_lines: list[str]
    """A line for each value that was left out and derived."""
    limit_s: float
    """Of the search."""

    @property
    def request(self) -> PlanRequest:
        return self.arranged.request

    @cached_property
    def neighbours(self) -> list[Neighbour]:
        """What one change to the first would do, in what is left of the time."""
        left_s = max(MIN_EXPLAIN_S, self.limit_s - self.found.seconds)
        return neighbours(self.found.best[0], self.arranged.judge, left_s)

    @property
    def found(self) -> SearchResult:
        return self.arranged.found


def answer_request(asked: ParsedRequest, top: int, limit_s: float) -> PlanAnswer:
    """The `top` best plans, found within `limit_s`. Raises InfeasibleError, with what binds, where there is none."""
    arranged = find_best_plans(asked.request, top, limit_s)
    if not arranged.found.best:
        raise InfeasibleError(explain_no_plan(arranged.request, arranged.found, arranged.judge))
    _adopt_better_neighbours(arranged, top)
    tokens = asked.tokens
    footprints = None if tokens is None else [training_cost(one.prediction, tokens) for one in arranged.found.best]
    return PlanAnswer(arranged, footprints, asked.derived_lines, limit_s)


def _adopt_better_neighbours(arranged: PlanSearch, top: int) -> None:
    """Where the search was stopped, takes what one change makes better, so that no line about the first plan says that
    another is faster; for `LEAST_WHY_S` at each step."""
    found, request = arranged.found, arranged.request
    for _ in range(MAX_IMPROVEMENTS):
        if found.proven:
            return
        first = found.best[0]
        changed = (one.evaluated for one in neighbours(first, arranged.judge, MIN_EXPLAIN_S))
        better = {
            one.plan: one for one in changed if one and one.value < first.value and is_admitted(request, one.plan)
        }
        if not better:
            return
        found.best = sorted([*better.values(), *found.best], key=lambda one: one.sort_key)[:top]
