"""Checks of what an answer of `muster plan` says: each percentage, and that nothing in it is better than the first."""

from dataclasses import replace

import pytest

from muster.planner.alternatives import Comparison
from muster.planner.answer import PlanAnswer, answer_request
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.request import require_more
from muster.planner.search_budget import SearchBudget
from muster.planner.simplicity import simplicity
from muster.simulate.predict import predict
from muster.spec.errors import InfeasibleError

PERCENTAGE_TOLERANCE = 0.005
"""Difference of a printed percentage from what another command gives."""


def assert_claims_hold(answer: PlanAnswer, effort: float, *, recompute_all: bool = False) -> None:
    """Compare each reason and family with the answer to its requirement, and with the prediction of its plan.

    `recompute_all`: every requirement with a search of its own, else every third.
    """
    request = replace(answer.request, cost_cache=type(answer.request.cost_cache)())
    first = answer.first
    assert_nothing_is_better(answer)
    for number, reason in enumerate(answer.reasons):
        _assert_is_what_predict_says(reason.comparison, answer)
        if reason.part and (recompute_all or number % 3 == 0):
            try:
                required = answer_request(
                    require_more(request, reason.part), 1, SearchBudget.start(effort), explained=False
                )
            except InfeasibleError:
                assert reason.comparison.best is None, reason.sentence
                continue
            ratio = required.first.prediction.step_time_s / first.prediction.step_time_s - 1
            if reason.comparison.slower is not None:
                assert ratio == pytest.approx(reason.comparison.slower, abs=PERCENTAGE_TOLERANCE), reason.sentence
            elif reason.comparison.interval is not None:
                low, high = reason.comparison.interval
                value = required.first.value / first.value - 1
                assert low - PERCENTAGE_TOLERANCE <= value <= high + PERCENTAGE_TOLERANCE, reason.sentence


def assert_nothing_is_better(answer: PlanAnswer) -> None:
    """No plan in any part of the answer is better than the first: by more than the error, or as good and simpler."""
    first, tolerance = answer.first, answer.request.tolerance
    shown = [*answer.result.best[1:], answer.fastest]
    compared = (reason.comparison for reason in answer.reasons)
    shown += [one.best for one in compared if one.best is not None and _keeps_room(one, answer)]
    for other in shown:
        assert other.value * (1 + tolerance) >= first.value * (1 - 1e-9), (first.name, other.name)
        if other.value <= answer.fastest.value * (1 + tolerance):
            assert _order(other) >= _order(first), (first.name, other.name)
    values = [one.value for one in answer.result.best[1:]]
    assert values == sorted(values)


def _order(one: EvaluatedPlan) -> tuple:
    return simplicity(one.plan), one.value * (1 + 1e-9)


def _keeps_room(comparison: Comparison, answer: PlanAnswer) -> bool:
    return comparison.best is not None and answer.search.evaluator.memory_budget.fits(comparison.best.plan)


def _assert_is_what_predict_says(comparison: Comparison, answer: PlanAnswer) -> None:
    if comparison.best is not None and comparison.slower is not None:
        request = answer.request
        alone = predict(request.model, comparison.best.plan, request.workload, request.cluster)
        slower = alone.step_time_s / answer.first.prediction.step_time_s - 1
        assert slower == pytest.approx(comparison.slower, abs=PERCENTAGE_TOLERANCE), comparison.sentence
