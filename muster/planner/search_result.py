"""The result of a search for plans."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from muster.planner.evaluated_plan import EvaluatedPlan, FoundPlan
from muster.planner.plan_evaluator import PlanEvaluator
from muster.spec.plan import Plan

ROUNDING_TOLERANCE = 1e-9
"""Relative difference below which two values may be the same sum, added in another order."""


COUNTERS = ("shapes", "orders", "opened", "drafts", "too_large", "plans", "fit", "simulated")
"""Counters of a search, as `muster plan --json` prints them: shapes of the mesh; their schedule choices, and those that
were expanded; drafts of plans, and shardings that are too large for memory; plans with a bound; fitting plans, and
simulated ones."""

_WEIGHED = ("lacking", "fit", "simulated")
"""Counters of plans whose memory was weighed."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plans that a search found, and what it can say of all others."""

    evaluator: PlanEvaluator
    """Evaluator of the plans, with the memory budget that they keep."""
    best: list[EvaluatedPlan]
    """Plans that fit, best first; equal ones by short name."""
    open_bound: float
    """Least value that a plan may have that was not simulated; infinite where none is left."""
    nearest_miss: Plan | None
    """Plan with the least excess, of all that can't be made to fit."""
    counts: Counter[str] = field(default_factory=Counter)
    """Nodes that the search looked at, for each of `COUNTERS`."""
    seconds: float = 0.0
    notable: tuple[FoundPlan, ...] = ()
    """Best plans of each trait (`notable_plans`) that were simulated."""
    gave_up_head_room_early: bool = False
    """True if head-room was given up before all plans that might leave it were looked at."""

    @property
    def leaves_head_room(self) -> bool:
        """True if the plans leave the head-room of each device's memory free."""
        return bool(self.evaluator.memory_budget.head_room)

    @property
    def proven(self) -> bool:
        """True if no plan can be better than the best."""
        return not self.gave_up_head_room_early and self._is_settled and not self.has_custom_schedule

    @property
    def has_weighed_plans(self) -> bool:
        """True if the memory of any plan was weighed: without one, nothing can be said of plans that fit."""
        return bool(self.best) or self.nearest_miss is not None or any(self.counts[name] for name in _WEIGHED)

    @property
    def has_custom_schedule(self) -> bool:
        """True if the best plan's schedule was found for its own times: such plans have no bound."""
        return bool(self.best) and self.best[0].plan.pinned_schedule is not None

    @property
    def _is_settled(self) -> bool:
        return self.open_bound == inf or (
            bool(self.best) and self.open_bound > self.best[0].value * (1 - ROUNDING_TOLERANCE)
        )

    @property
    def gap(self) -> float:
        """Largest relative improvement of the best value that is still possible."""
        return 0.0 if self._is_settled or not self.best else 1 - self.open_bound / self.best[0].value


def total_counts(last: SearchResult, results: Sequence[SearchResult]) -> Counter[str]:
    """Return the summed counts of several searches; shapes, which are the same in each, as the `last` one has them."""
    counts = sum((result.counts for result in results), Counter[str]())
    counts["shapes"] = last.counts["shapes"]
    return counts
