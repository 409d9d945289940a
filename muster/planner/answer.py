"""The answer of `muster plan`: the simplest of the best plans, plans of other families, and reasons for the first.

Whatever a search on the way comes upon that is better becomes the answer: the best of another family, an alternative
that a reason compares with, a part of the cluster that is faster alone.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import Any

from muster.planner.alternatives import Alternative, FirstPlan
from muster.planner.balance import with_layers
from muster.planner.cluster_parts import cluster_parts, least_step_s
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.explain import explain_no_plan
from muster.planner.families import PlanFamily, search_families
from muster.planner.heterogeneous import PlanSearch, find_best_plans
from muster.planner.islands import (
    IslandComparison,
    compare_islands,
    in_listed_nodes,
    island_counts,
    search_islands,
    weighs_islands,
    with_island_order,
    with_outer_steps,
)
from muster.planner.overlap_choice import choose_tp_overlap
from muster.planner.reasons import Reason, find_reasons
from muster.planner.request import PlanRequest, refix_request
from muster.planner.search_budget import SearchBudget
from muster.planner.search_result import ROUNDING_TOLERANCE, SearchResult
from muster.planner.simple_first import find_simplest
from muster.planner.simplicity import PREDICTION_ERROR, simplest
from muster.planner.skip_paths import layers_by_visits, resolve_on_cluster
from muster.planner.space import is_admitted, used_axes
from muster.planner.tiers import choose_tier, explain_no_tier, tier_words
from muster.planner.training_cost import TrainingCost, training_cost
from muster.simulate.predict import require_legal
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import InfeasibleError
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name

SEARCH_TIME_SHARE = 0.6
"""Share of the time, where it is limited, for the search for the best plan, which has all of the work."""

UNREQUIRED_TIME_SHARE = 0.3
"""Share of the time that is left then, where it is limited, for the answer without what is required."""

PART_EFFORT = 0.5
"""Work for each part of the cluster that may be faster alone, as a part of that of the search."""

TIER_EFFORT = 1.0
"""Work for the choice of the optimizer state's tier, or of the overlap of tensor-parallel collectives, where that is
searched for, as a part of that of the search."""

TIER_TIME_SHARE = 0.4
"""Share of the time for it, where that is limited."""

ISLAND_EFFORT = 0.3
"""Work for the simplest plan without islands, which those with islands are compared with, as a part of that of the
search."""

ISLAND_TIME_SHARE = 0.3
"""Share of the time for islands, where it is limited."""

EXPLANATION_EFFORT = 1.0
"""Work for simpler plans, other families and reasons, as a part of that of the search."""

SIMPLE_SHARE = 0.4
"""Share of it for simpler plans about as good."""

FAMILY_SHARE = 0.6
"""Share of what is left then for the best plan of every family; reasons have the rest."""

REASONS_SHARE = 0.7
"""Share of what is left then for reasons; the rest is for those for a better plan that they come upon."""

MAX_ADOPTIONS = 3
"""Times that a better plan among the alternatives becomes the first one."""


@dataclass(frozen=True)
class WholeCluster:
    """The best plan for all devices, where a part of them is faster alone."""

    cluster: ClusterSpec
    best: EvaluatedPlan
    gap: float
    """Largest relative improvement of it that is still possible."""


@dataclass(frozen=True)
class PlanAnswer:
    """The best plans for a request."""

    search: PlanSearch
    """Plans of different families, best first, on the cluster or the part of it that they are for."""
    against: FirstPlan
    """The answer, as other plans are compared with it."""
    fastest: EvaluatedPlan
    """Plan of the best value; the first one unless that is simpler and about as good."""
    simplicity_proven: bool
    """True if no simpler plan is about as good as the best."""
    families: list[PlanFamily]
    known_reasons: list[Reason] | None
    """Reasons that were looked for on the way; None where nothing found with them can change the answer."""
    whole: WholeCluster | None
    """The cluster that was asked about, where the plans are for a part of it."""
    budget: SearchBudget
    """Budget of the answer, less what was spent on it."""
    unrequired: EvaluatedPlan | None
    """Answer without the required parts of a plan; None where nothing is required, or nothing fits without them."""
    islands: IslandComparison | None = None
    """Best plan with islands against the best without; None where no links are slow and none were required."""
    training_costs: list[TrainingCost] | None = field(init=False)
    """Cost of the whole training under each plan; None where the request has no number of tokens."""

    def __post_init__(self) -> None:
        request = self.request
        if (tokens := request.tokens) is None:
            costs = None
        else:
            costs = [training_cost(one.prediction, tokens, request.conditions) for one in self.result.best]
        object.__setattr__(self, "training_costs", costs)

    @cached_property
    def reasons(self) -> list[Reason]:
        """The best plan for each requirement that the first doesn't meet, against it."""
        if self.known_reasons is not None:
            return self.known_reasons
        known = [*self.result.best, self.fastest]
        return find_reasons(self.against, known, self.budget.share(1.0), self.result.notable, self.fastest)

    @property
    def request(self) -> PlanRequest:
        """Request that was answered, with the cluster's nodes in the order that was found."""
        return self.search.request

    @property
    def result(self) -> SearchResult:
        """Plans, best first, and counters of the search."""
        return self.search.result

    @property
    def first(self) -> EvaluatedPlan:
        """The answer."""
        return self.result.best[0]


def answer_request(request: PlanRequest, top: int, budget: SearchBudget, explained: bool = True) -> PlanAnswer:
    """Find the best plans of `top` families within a budget; `explained`: with the best plan of every
    family and reasons for the first, else the first alone.

    Raises InfeasibleError, with the limit that binds, if there is no plan.
    """
    if request.skip_fields:
        ordinary = answer_request(replace(request, skip_fields={}), 1, budget, explained=False)
        return _with_skipped_stages(ordinary, request.skip_fields, budget)
    if request.searches_tiers:
        choice = choose_tier(request, budget.renew(TIER_EFFORT, TIER_TIME_SHARE))
        if not choice.fits:
            raise explain_no_tier(request)
        request = choice.request
    if request.allowed_overlap_words and not request.overlap_word:
        request = choose_tp_overlap(request, budget.renew(TIER_EFFORT, TIER_TIME_SHARE))
    arranged, order = with_island_order(request)
    if request.base.islands > 1:
        arranged, _ = with_outer_steps(arranged, budget)
    search = in_listed_nodes(find_best_plans(arranged, 2, budget.share(1.0, SEARCH_TIME_SHARE)), order)
    if not search.result.best:
        tiers = tier_words(request)[1:] if search.result.proven and not request.tier_word else ()
        if tiers and (choice := choose_tier(request, budget.renew(TIER_EFFORT, TIER_TIME_SHARE), tiers)).fits:
            return answer_request(choice.request, top, budget, explained)
        raise InfeasibleError(explain_no_plan(search.result, budget))
    if request.base.islands == 1:
        search, whole = _search_parts(request, search, budget)
    else:
        whole = None
    islands = _weigh_islands(request, search, budget) if explained else None
    if islands is not None and islands.pays and request.allows_islands:
        search, whole = islands.search, None
    unrequired = _without_requirement(request, budget) if explained and request.fixed_text else None
    return _Answer(search, whole, top, budget.renew(EXPLANATION_EFFORT)).build(explained, unrequired, islands)


def _with_skipped_stages(answer: PlanAnswer, fields: Mapping[str, Any], budget: SearchBudget) -> PlanAnswer:
    """Return the answer whose plan lets its micro-batches skip stages, found in the time that is left, with one try at
    least. Raises InfeasibleError where it can't."""
    evaluator, request = answer.search.evaluator, answer.request
    own = request.model, request.workload, request.cluster, request.framework

    def resolve(plan: Plan) -> Plan:
        return resolve_on_cluster(plan, *own, request.cost_cache, request.optim, lambda: budget.is_late)

    asked, best = _with_paths(answer, fields, resolve, budget)
    plans = [best]
    ordinary = answer.first.plan.model_copy(update={"micro_batch_size": asked.micro_batch_size})
    num_layers, times_of = request.model.num_layers, evaluator.costs.pass_times
    if "stages" not in request.fixed and asked.vpp == 1 and not budget.is_late:
        layers = layers_by_visits(plans[0], ordinary, num_layers, times_of)
        with suppress(InfeasibleError):
            plans += [resolve(with_layers(asked, layers))] if layers else []
    is_late = budget.is_late
    fitting = [plan for plan in plans if evaluator.memory_budget.fits(plan)]
    if not fitting:
        raise InfeasibleError(
            f"{format_plan_name(answer.first.plan)} fits the memory, but not with skipped stages, whose ranks may hold"
            " more micro-batches: require more pipeline ranks, or a recompute such as rfull"
        )
    found = min(map(evaluator.evaluate, fitting), key=lambda one: one.value)
    plan = found.plan
    share = f"{asked.skip_ratio:.0%} of the stages"
    line = f"each micro-batch skips {share}, which changes what is trained"
    if plan.skip_ratio < asked.skip_ratio:
        line = f"with {share} skipped by each micro-batch the step would be longer: this plan skips none"
    elif not asked.skip_ratio:
        line = "no stage is skipped"
    kind = "1F1B" if plan.vpp == 1 else "interleaved 1F1B"
    what = "paths and places" if plan.stages == asked.stages else "paths, places and layers"
    line += f": the best plan of {kind}, with {what} found for its times"
    line += "; the time limit ended the search for them" * is_late
    evaluator = evaluator.narrowed(replace(request, derived_lines=(*request.derived_lines, line)))
    search = replace(answer.search, result=replace(answer.result, evaluator=evaluator, best=[found]))
    return replace(answer, search=search, against=FirstPlan(found, evaluator, found.value), fastest=found)


def _with_paths(
    answer: PlanAnswer, fields: Mapping[str, Any], resolve: Callable[[Plan], Plan], budget: SearchBudget
) -> tuple[Plan, Plan]:
    """Return the answer's plan with these fields, and the same with paths found for it.

    Where its micro-batches are too few for paths, they are halved until there are some, and further as long as the step
    gets shorter and there is time. Raises InfeasibleError where no size has paths.
    """
    request, plan, evaluator = answer.request, answer.first.plan, answer.search.evaluator
    sizes = [plan.micro_batch_size]
    while sizes[-1] % 2 == 0 and "micro_batch_size" not in request.fixed:
        sizes.append(sizes[-1] // 2)
    found: list[tuple[float, Plan, Plan]] = []
    problems = []
    for size in sizes:
        asked = plan.model_copy(update={**fields, "pinned_schedule": None, "micro_batch_size": size})
        try:
            require_legal(asked, request.model, request.workload, request.cluster)
            resolved = resolve(asked)
        except InfeasibleError as error:
            problems.append(error)
            continue
        if not problems:
            return asked, resolved
        found.append((evaluator.evaluate(resolved).value, asked, resolved))
        if budget.is_late or found[-1][0] > found[0][0]:
            break
    if not found:
        raise problems[0]
    _, asked, resolved = min(found, key=lambda one: one[0])
    return asked, resolved


def _weigh_islands(request: PlanRequest, search: PlanSearch, budget: SearchBudget) -> IslandComparison | None:
    """Return the best plan with islands against the simplest of the best without, where links are slow."""
    if not weighs_islands(request) or not island_counts(request.cluster):
        return None
    exact = _Answer(search, None, 1, budget.renew(ISLAND_EFFORT, ISLAND_TIME_SHARE)).build(False).first
    return search_islands(request, exact, budget.renew(time_part=ISLAND_TIME_SHARE))


def _without_requirement(request: PlanRequest, budget: SearchBudget) -> EvaluatedPlan | None:
    """Return the first plan of the same question with nothing required."""
    own = budget.renew(time_part=UNREQUIRED_TIME_SHARE)
    try:
        return answer_request(refix_request(request, ""), 1, own, explained=False).first
    except InfeasibleError:
        return None


def _search_parts(
    request: PlanRequest, search: PlanSearch, budget: SearchBudget
) -> tuple[PlanSearch, WholeCluster | None]:
    """Return the search for the part of the cluster that is faster alone, and what all devices take; else the search
    itself."""
    whole = search.result.best[0]
    best = search
    for cluster in cluster_parts(request.cluster) if request.objective != "memory" else ():
        part_request = replace(request, cluster=cluster)
        if least_step_s(part_request) >= best.result.best[0].prediction.step_time_s:
            continue
        found = find_best_plans(part_request, 2, budget.renew(PART_EFFORT, PART_EFFORT))
        keeps_room = found.result.leaves_head_room >= best.result.leaves_head_room
        if found.result.best and keeps_room and _is_clearly_better(found.result.best[0], best.result.best[0]):
            best = found
    return best, None if best is search else WholeCluster(request.cluster, whole, search.result.gap)


def _is_clearly_better(one: EvaluatedPlan, other: EvaluatedPlan) -> bool:
    """Return True if a plan is better and faster by more than the prediction's error."""
    pairs = (one.value, other.value), (one.prediction.step_time_s, other.prediction.step_time_s)
    return all(mine * (1 + PREDICTION_ERROR) < its for mine, its in pairs)


class _Answer:
    """An answer that takes whatever is better of what the searches for it find."""

    def __init__(self, search: PlanSearch, whole: WholeCluster | None, top: int, budget: SearchBudget) -> None:
        self.search = search
        self.whole = whole
        self.top = top
        self.budget = budget
        self.fastest = search.result.best[0]
        self.evaluator = search.evaluator
        self.families: list[PlanFamily] = []
        self.reasons: list[Reason] | None = None
        self.known = {one.plan: one for one in search.result.best}

    def build(
        self, explained: bool, unrequired: EvaluatedPlan | None = None, islands: IslandComparison | None = None
    ) -> PlanAnswer:
        """Return the answer, with other families and reasons where it is to be `explained`."""
        self._simplify()
        if explained:
            self._search_families()
            self._adopt()
            self._improve()
        result = replace(self.search.result, best=self._rows(), open_bound=self._open_bound())
        search = replace(self.search, result=result)
        return PlanAnswer(
            search,
            self._first_plan(),
            self.fastest,
            self.simplest.proven,
            self.families,
            self.reasons if explained else [],
            self.whole,
            self.budget,
            unrequired,
            self._compare_islands(search, unrequired, islands),
        )

    def _compare_islands(
        self, search: PlanSearch, unrequired: EvaluatedPlan | None, islands: IslandComparison | None
    ) -> IslandComparison | None:
        """Return the comparison of plans with islands and without, with the first plan as the one of its kind."""
        first = self.simplest.evaluated
        if first.plan.islands > 1:
            exact = unrequired if islands is None else islands.exact
            return None if exact is None or exact.plan.islands > 1 else compare_islands(first, exact, search)
        return islands and replace(islands, exact=first)

    def _improve(self) -> None:
        """Take better plans that the reasons for the first come upon, as long as there are any."""
        for number in range(MAX_ADOPTIONS):
            if not self._may_improve():
                return
            self._find_reasons(1.0 if number == MAX_ADOPTIONS - 1 else REASONS_SHARE)
            if not self._adopt():
                return
        self.reasons = [again for reason in self.reasons or () if (again := reason.against(self._first_plan()))]

    def _first_plan(self) -> FirstPlan:
        return FirstPlan(self.simplest.evaluated, self.evaluator, self._least_value())

    def _simplify(self) -> None:
        """Take the simplest plan that is about as good as the fastest."""
        known = [*self.known.values(), *self.search.result.notable]
        self.simplest = find_simplest(self.fastest, known, self.evaluator, self.budget.share(SIMPLE_SHARE))
        self._learn([self.simplest.evaluated])

    def _search_families(self) -> None:
        known = list(self.known.values())
        notable = self.search.result.notable
        self.families = search_families(self.evaluator, known, self.budget.share(FAMILY_SHARE), notable)
        self._learn_alternatives(family.alternative for family in self.families)

    def _find_reasons(self, share: float) -> None:
        known = list(self.known.values())
        notable = self.search.result.notable
        self.reasons = find_reasons(self._first_plan(), known, self.budget.share(share), notable, self.fastest)
        found = [one for one in self.reasons if one.comparison.best is not None]
        self._learn_fitting(one.comparison.best for one in found)
        self._learn_fitting(one.alternative and one.alternative.result.best[0] for one in found)

    def _learn_fitting(self, plans: Iterable[EvaluatedPlan | None]) -> None:
        self._learn(one for one in plans if one is not None and self.evaluator.memory_budget.fits(one.plan))

    def _learn_alternatives(self, alternatives: Iterable[Alternative]) -> None:
        """Note the plans that keep the answer's memory budget."""
        room = self.evaluator.memory_budget.head_room
        for found in alternatives:
            if found.result.evaluator.memory_budget.head_room >= room:
                self._learn([*found.result.best, *([found.best] if found.best else ())])

    def _learn(self, plans: Iterable[EvaluatedPlan]) -> None:
        request = self.search.request
        self.known |= {one.plan: one for one in plans if is_admitted(request, one.plan)}

    def _adopt(self) -> bool:
        """Take a plan that an alternative found as the fastest or the simplest where it is; return True if the first
        plan changed."""
        first = self.simplest.evaluated
        best = min(self.known.values(), key=attrgetter("sort_key"))
        if best.value < self.fastest.value * (1 - ROUNDING_TOLERANCE):
            self.fastest = best
            self._simplify()
        else:
            chosen = simplest(self.known.values(), self.fastest.value, self.search.request.tolerance)
            if chosen is not None and not self.simplest.proven:
                self.simplest = replace(self.simplest, evaluated=chosen)
        return self.simplest.evaluated.plan != first.plan

    def _may_improve(self) -> bool:
        """Return True if the search left better or simpler plans open."""
        return not self.simplest.proven or self._open_bound() < inf

    def _least_value(self) -> float:
        """Return the value that no plan is better than."""
        return min(self._open_bound(), self.fastest.value)

    def _open_bound(self) -> float:
        """Return the least value that a plan may have that is better than the fastest; infinite where there is none.

        Families have no plan in common and leave none out: none is better than what their searches left open.
        """
        bound = self.search.result.open_bound
        if self.families:
            bound = max(bound, min(self._bound_of(family.alternative.result) for family in self.families))
        return inf if bound > self.fastest.value * (1 - ROUNDING_TOLERANCE) else bound

    def _bound_of(self, result: SearchResult) -> float:
        """Return the least value of plans that the search for a family left open, and that keep the answer's memory
        budget."""
        if result.gave_up_head_room_early:
            return 0.0
        keeps_room = result.evaluator.memory_budget.head_room >= self.evaluator.memory_budget.head_room
        return result.open_bound if keeps_room else inf

    def _rows(self) -> list[EvaluatedPlan]:
        """Return the first plan and the best ones of other families; data parallelism alone is always among them."""
        first = self.simplest.evaluated
        own = used_axes(first.plan)
        room = self.evaluator.memory_budget.head_room
        others = {
            frozenset(family.axes): family.alternative.best
            for family in self.families
            if frozenset(family.axes) != own
            and family.alternative.best is not None
            and family.alternative.result.evaluator.memory_budget.head_room >= room
        }
        ranked = sorted(others.values(), key=attrgetter("sort_key"))[: self.top - 1]
        alone = others.get(frozenset())
        if alone is not None and alone not in ranked and ranked:
            ranked[-1] = alone
        return [first, *ranked]
