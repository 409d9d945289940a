"""What `muster plan` was asked, and what it found."""

from dataclasses import dataclass
from functools import cached_property

from muster.planner.explain import no_plan
from muster.planner.footprint import Footprint, footprint
from muster.planner.found import Found
from muster.planner.neighbours import Neighbour, neighbours
from muster.planner.request import Asked, Request
from muster.planner.space import admitted
from muster.planner.unequal import Arranged, arrange
from muster.spec.errors import InfeasibleError

LEAST_WHY_S = 2.0
"""For saying why the first is the best, however long the search took."""

MOST_STEPS = 3
"""From the plan that a stopped search has found to better ones beside it."""


@dataclass(frozen=True)
class Answer:
    """The best plans for a request."""

    arranged: Arranged
    footprints: list[Footprint] | None
    """Of the training under each plan; None where nobody said how many tokens it takes."""
    derived: list[str]
    """A line for each value that was left out and derived."""
    limit_s: float
    """Of the search."""

    @property
    def request(self) -> Request:
        return self.arranged.request

    @cached_property
    def why(self) -> list[Neighbour]:
        """What one change to the first would do, in what is left of the time."""
        left_s = max(LEAST_WHY_S, self.limit_s - self.found.seconds)
        return neighbours(self.found.best[0], self.arranged.judge, left_s)

    @property
    def found(self) -> Found:
        return self.arranged.found


def answer_to(asked: Asked, top: int, limit_s: float) -> Answer:
    """The `top` best plans, found within `limit_s`. Raises InfeasibleError, with what binds, where there is none."""
    arranged = arrange(asked.request, top, limit_s)
    if not arranged.found.best:
        raise InfeasibleError(no_plan(arranged.request, arranged.found, arranged.judge))
    _step_ahead(arranged, top)
    tokens = asked.tokens
    footprints = None if tokens is None else [footprint(one.prediction, tokens) for one in arranged.found.best]
    return Answer(arranged, footprints, asked.derived, limit_s)


def _step_ahead(arranged: Arranged, top: int) -> None:
    """Where the search was stopped, takes what one change makes better, so that no line about the first plan says that
    another is faster; for `LEAST_WHY_S` at each step."""
    found, request = arranged.found, arranged.request
    for _ in range(MOST_STEPS):
        if found.proven:
            return
        first = found.best[0]
        changed = (one.verdict for one in neighbours(first, arranged.judge, LEAST_WHY_S))
        better = {one.plan: one for one in changed if one and one.value < first.value and admitted(request, one.plan)}
        if not better:
            return
        found.best = sorted([*better.values(), *found.best], key=lambda one: one.order)[:top]
