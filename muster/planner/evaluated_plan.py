"""A plan with its prediction, and the order in which plans are ranked."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from muster.simulate.predict import Prediction
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.supported import not_run_yet


class SortKey(NamedTuple):
    """Rank of a plan: by the objective, then by step time, then by name."""

    value: float
    step_time_s: float
    name: str


@dataclass(frozen=True)
class EvaluatedPlan:
    """A plan that was simulated."""

    plan: Plan
    prediction: Prediction
    value: float
    """Value of the objective for one step: seconds, dollars, joules or bytes."""

    @cached_property
    def name(self) -> str:
        return format_plan_name(self.plan)

    @property
    def sort_key(self) -> SortKey:
        return SortKey(self.value, self.prediction.step_time_s, self.name)

    @cached_property
    def unsupported(self) -> list[str]:
        """Parts of the model and features of the plan that can't be run yet."""
        return not_run_yet(self.prediction.model, self.plan)

    @property
    def peak_bytes(self) -> int:
        """Memory of the fullest rank."""
        return max(rank.total for rank in self.prediction.memory)


class FoundPlan(NamedTuple):
    """A plan that was simulated, without its prediction."""

    sort_key: SortKey
    plan: Plan

    @property
    def value(self) -> float:
        return self.sort_key.value
