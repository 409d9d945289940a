"""What a search for plans came to."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from muster.planner.evaluated_plan import EvaluatedPlan
from muster.spec.plan import Plan

ROUNDING_TOLERANCE = 1e-9
"""A bound that is above a time by no more may be one of the same length, added up in another order."""


COUNTERS = ("shapes", "orders", "opened", "drafts", "too_large", "plans", "fit", "simulated")
"""What a search counts."""


@dataclass(slots=True)
class SearchResult:
    """What a search came to."""

    best: list[EvaluatedPlan]
    """The best plans that fit, best first; equal ones by short name."""
    open_bound: float
    """The least value that a plan not yet looked at may have; infinite where none is left."""
    nearest_miss: Plan | None
    """Of the plans that can't be made to fit, the one that is over by the least."""
    seen: Counter[str] = field(default_factory=Counter)
    """How many of each of `SEEN` were looked at."""
    seconds: float = 0.0
    cut: bool = False
    """Whether head-room was given up before all plans that might leave it were looked at."""

    @property
    def proven(self) -> bool:
        """Whether nothing that was not simulated can be better than the best."""
        return not self.cut and self._is_settled and not self.has_custom_schedule

    @property
    def has_custom_schedule(self) -> bool:
        """Whether the best has an order of passes for its own times: those that may be are not bounded."""
        return bool(self.best) and self.best[0].plan.pinned_schedule is not None

    @property
    def _is_settled(self) -> bool:
        return self.open_bound == inf or (
            bool(self.best) and self.open_bound > self.best[0].value * (1 - ROUNDING_TOLERANCE)
        )

    @property
    def gap(self) -> float:
        """The part by which the best may at most be improved."""
        return 0.0 if self._is_settled or not self.best else 1 - self.open_bound / self.best[0].value


def total_counts(last: SearchResult, results: Sequence[SearchResult]) -> Counter[str]:
    """What several searches looked at in all, of shapes what the `last` one did: they are the same in each."""
    seen = sum((one.seen for one in results), Counter[str]())
    seen["shapes"] = last.seen["shapes"]
    return seen
