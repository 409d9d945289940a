"""What `muster plan` was asked, and what it found."""

from dataclasses import dataclass

from muster.planner.explain import no_plan
from muster.planner.footprint import Footprint, footprint
from muster.planner.request import Asked, Request
from muster.planner.search import Found
from muster.planner.unequal import Arranged, arrange
from muster.spec.errors import InfeasibleError


@dataclass(frozen=True)
class Answer:
    """The best plans for a request."""

    arranged: Arranged
    footprints: list[Footprint] | None
    """Of the training under each plan; None where nobody said how many tokens it takes."""
    derived: list[str]
    """A line for each value that was left out and derived."""

    @property
    def request(self) -> Request:
        return self.arranged.request

    @property
    def found(self) -> Found:
        return self.arranged.found


def answer_to(asked: Asked, top: int, limit_s: float) -> Answer:
    """The `top` best plans, found within `limit_s`. Raises InfeasibleError, with what binds, where there is none."""
    arranged = arrange(asked.request, top, limit_s)
    if not arranged.found.best:
        raise InfeasibleError(no_plan(arranged.request, arranged.found, arranged.judge))
    tokens = asked.tokens
    footprints = None if tokens is None else [footprint(one.prediction, tokens) for one in arranged.found.best]
    return Answer(arranged, footprints, asked.derived)
