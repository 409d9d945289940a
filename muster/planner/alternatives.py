"""Alternatives to the first plan: the best plan that meets one more requirement, and how it compares.

Each is searched for like the answer itself, simple plans first, so that its figures are those of `muster plan
--require`, but for an order of passes found for its own times, which only the first plan gets. A search that its budget
ended is no comparison of plans, but bounds one: it is told as an interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from muster.cost.memory.forecast import MEMORY_HEADROOM
from muster.planner.bucket_choice import choose_buckets
from muster.planner.evaluated_plan import EvaluatedPlan, FoundPlan
from muster.planner.late_schedules import try_late_schedules
from muster.planner.memory.trim_offload import trim_offload
from muster.planner.notable_plans import fitting_notable
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.search import search
from muster.planner.search_budget import SearchBudget
from muster.planner.search_result import SearchResult
from muster.planner.simple_first import find_simplest
from muster.planner.simplicity import mechanisms
from muster.planner.space import is_admitted
from muster.planner.word_changes import changed_plans
from muster.simulate.predict import Prediction
from muster.spec.formatting import format_change, format_seconds
from muster.spec.plan import Plan

SAME_SPEED_TOLERANCE = 0.005
"""Relative difference of step times below which plans count as equally fast."""

NOT_FINISHED = "not finished (more --effort or --time-limit)"

NOT_SEARCHED = "not searched (more --effort or --time-limit)"

LESS_AND_MORE = {
    "time": ("faster", "slower"),
    "cost": ("cheaper", "more expensive"),
    "energy": ("less energy", "more energy"),
    "memory": ("less memory", "more memory"),
}
"""Words for a smaller and a larger value of each objective."""

FAIR_SHARES = 2.0
"""Equal parts of the budget that one of several alternatives may take."""

SEARCH_SHARE = 0.7
"""Share of an alternative's budget for its best plan."""

LATE_SHARE = 0.5
"""Share of what is left then for schedules that are tried late; the rest is for a simpler plan about as good."""


@dataclass(frozen=True, slots=True)
class FirstPlan:
    """The first plan of an answer, and what is known of all others."""

    evaluated: EvaluatedPlan
    evaluator: PlanEvaluator
    """Evaluator with the memory budget that it keeps."""
    least_value: float
    """Value that no plan is better than."""

    @property
    def leaves_head_room(self) -> bool:
        return self.evaluator.memory_budget.head_room > 0


@dataclass(frozen=True, slots=True)
class Alternative:
    """The plans that meet a requirement, and the best of them."""

    name: str
    result: SearchResult
    best: EvaluatedPlan | None
    """Simplest plan about as good as the best that was found."""
    proven: bool
    """True if more work would find no other."""

    @property
    def least_value(self) -> float:
        """Value that no plan is better than."""
        found = [*self.result.best, *([self.best] if self.best else ())]
        return min([self.result.open_bound, *(one.value for one in found)])

    @property
    def most_value(self) -> float | None:
        """Value of the answer after more work, at most; None where no plan was found."""
        if self.best is None or self.proven:
            return self.best and self.best.value
        found = min(self.best.value, self.result.best[0].value)
        return found * (1 + self.result.evaluator.request.tolerance)


def find_alternatives(
    names: Sequence[str],
    evaluators: Sequence[PlanEvaluator],
    known: Sequence[EvaluatedPlan],
    budget: SearchBudget,
    notable: Sequence[FoundPlan] = (),
    centres: Sequence[Plan] = (),
) -> list[Alternative]:
    """Search for the best plan of each evaluator's request. `known` and `notable`: plans to begin with, which fit in
    the memory of the first evaluator; `centres`: plans whose nearest ones that meet the request are tried first.

    Each may take `FAIR_SHARES` times its equal part of what is left, since most need less.
    """
    found: list[Alternative] = []
    for name, evaluator in zip(names, evaluators, strict=True):
        weighs = evaluator.memory_budget.head_room > evaluators[0].memory_budget.head_room
        met = [one for one in known if _meets(evaluator, one.plan, weighs)]
        part = budget.share(min(1.0, FAIR_SHARES / (len(names) - len(found))))
        seen = fitting_notable(evaluator, notable, weighs)
        found.append(find_alternative(name, evaluator, part, met, seen, centres))
    return found


def _meets(evaluator: PlanEvaluator, plan: Plan, weighs: bool) -> bool:
    """Return True if a plan is one that the evaluator's request asks for and, where it `weighs` memory, fits."""
    return is_admitted(evaluator.request, plan) and (not weighs or evaluator.memory_budget.fits(plan))


def find_alternative(
    name: str,
    evaluator: PlanEvaluator,
    budget: SearchBudget,
    known: Sequence[EvaluatedPlan] = (),
    notable: Sequence[FoundPlan] = (),
    centres: Sequence[Plan] = (),
) -> Alternative:
    """Search for the best plan of an evaluator's request. `known` and `notable`: simulated plans that it asks for;
    `centres`: plans whose nearest ones that it asks for are tried first."""
    own = budget.share(SEARCH_SHARE)
    begin = {one.plan: one for one in (*notable, *known)}.values()
    known_plans = {one.plan for one in begin}
    nearest = [plan for plan in changed_plans(centres, evaluator, own) if plan not in known_plans]
    found = search(evaluator.request, 1, own, evaluator, seeds=nearest, known=list(begin), climbs=True)
    late = try_late_schedules(found, 1, budget.share(LATE_SHARE), leaves_open=True)
    result = choose_buckets(trim_offload(late, budget), budget)
    if not result.best:
        return Alternative(name, result, None, result.proven)
    seen = [*result.best, *result.notable]
    simple = find_simplest(result.best[0], seen, result.evaluator, budget.share(1.0))
    return Alternative(name, result, simple.evaluated, result.proven and simple.proven)


# ----------------------------------------------------------------------------------------------------------------------
# Comparison


@dataclass(frozen=True, slots=True)
class Comparison:
    """An alternative against the first plan."""

    name: str
    best: EvaluatedPlan | None
    slower: float | None
    """Relative increase of the step time; None where nothing fits, or the search wasn't finished."""
    interval: tuple[float, float] | None
    """Least and greatest relative increase of the objective's value, where the search wasn't finished."""
    sentence: str


def compare_alternative(against: FirstPlan, alternative: Alternative) -> Comparison:
    """Return how the best plan of an alternative compares with the first plan, in words too."""
    first = against.evaluated
    name, best, most = alternative.name, alternative.best, alternative.most_value
    fuller = against.leaves_head_room and not alternative.result.leaves_head_room
    note = f", but leaves less than {MEMORY_HEADROOM:.0%} of the memory free" if fuller else ""
    if best is None or most is None:
        words = "no such plan fits" if alternative.proven else _unfound_words(alternative.result)
        return Comparison(name, None, None, None, words)
    if first.prediction.compiled and not best.prediction.compiled:
        note += ", not compiled"
    if alternative.proven:
        words = describe_difference(first, best, alternative.result.evaluator.request.objective)
        slower = best.prediction.step_time_s / first.prediction.step_time_s - 1
        return Comparison(name, best, slower, None, words + note)
    least = alternative.least_value if fuller else max(alternative.least_value, min(against.least_value, most))
    interval = least / first.value - 1, most / first.value - 1
    less_and_more = LESS_AND_MORE[alternative.result.evaluator.request.objective]
    so_far = describe_relation(best.value / first.value - 1, *less_and_more)
    words = f"{_interval(*interval, *less_and_more)}, {NOT_FINISHED}; the one found is {so_far}"
    return Comparison(name, best, None, interval, words + note)


def _unfound_words(result: SearchResult) -> str:
    return f"none that fits was found, {NOT_FINISHED}" if result.has_weighed_plans else NOT_SEARCHED


def _interval(low: float, high: float, less: str, more: str) -> str:
    """Return an interval of relative differences: `3.1 % to 4.0 % slower`, `2.0 % faster to 1.0 % slower`."""
    if low <= -1:
        return f"up to {format_change(high)} {more}, or {less}"
    if (low < 0) == (high < 0):
        near, far = sorted((low, high), key=abs)
        return f"{format_change(near)} to {format_change(far)} {less if low < 0 else more}"
    return f"{format_change(low)} {less} to {format_change(high)} {more}"


def describe_relation(more: float, less_word: str, more_word: str) -> str:
    """Return a relative difference of values in words: `3.1% slower`, or `as good`."""
    return "as good" if abs(more) < 0.0005 else f"{format_change(more)} {more_word if more > 0 else less_word}"


def describe_difference(first: EvaluatedPlan, other: EvaluatedPlan, objective: str) -> str:
    """Return in words how another plan differs from the first: time, what takes it, and what makes a faster one less
    simple."""
    mine, its = first.prediction, other.prediction
    slower = its.step_time_s / mine.step_time_s - 1
    more = other.value / first.value - 1
    if objective == "memory" and abs(more) >= SAME_SPEED_TOLERANCE:
        words = f"{format_change(more)} {'more' if more > 0 else 'less'} memory, {_speed(slower)}"
    elif abs(slower) < SAME_SPEED_TOLERANCE:
        words = "as fast"
    else:
        name, more_s = largest_difference(mine, its, slower > 0)
        words = f"{_speed(slower)}, {format_seconds(abs(more_s))} {'more' if slower > 0 else 'less'} {name}"
    return words + (_what_it_takes(first, other) if more < 0 else "")


def _what_it_takes(first: EvaluatedPlan, other: EvaluatedPlan) -> str:
    """Return what a plan within the prediction's error of the first uses beyond it."""
    mine = set(mechanisms(first.plan))
    needed = [words for words in mechanisms(other.plan) if words not in mine]
    needed = ["settings layer by layer"] * bool(other.plan.overrides) + needed
    return f", within the prediction's error, but less simple ({', '.join(needed)})" if needed else ""


def _speed(part: float) -> str:
    return (
        f"{format_change(part)} {'slower' if part > 0 else 'faster'}"
        if abs(part) >= SAME_SPEED_TOLERANCE
        else "as fast"
    )


def largest_difference(mine: Prediction, its: Prediction, grows: bool) -> tuple[str, float]:
    """Return the part of a step that grows or shrinks most, and by how many seconds."""
    mine_s = _parts(mine)
    its_s = _parts(its)
    differences = {name: its_s.get(name, 0.0) - mine_s.get(name, 0.0) for name in {**mine_s, **its_s}}
    name = (max if grows else min)(differences, key=lambda part: differences[part])
    return name, differences[name]


def _parts(prediction: Prediction) -> dict[str, float]:
    parts = prediction.parts
    waiting = {f"waiting for {axis}": time_s for axis, time_s in parts.communication_s.items()}
    return {"of computing": parts.compute_s, "bubble": parts.bubble_s, "optimizer": parts.optimizer_s, **waiting}
