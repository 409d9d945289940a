"""Branch and bound over plans: nodes with the lowest bounds first, and only simulated values are trusted.

The space is dealt out to parts, each with a frontier of its own, which work in rounds: after each round the parts are
told the best plans of all. Parts, rounds and their work don't depend on the budget, which only says where the search
stops. So it finds the same on one process as on several, and a larger budget finds all that a smaller one does.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from time import perf_counter

from muster.planner.evaluated_plan import EvaluatedPlan, FoundPlan
from muster.planner.frontier import Frontier
from muster.planner.lockstep import run_in_lockstep
from muster.planner.node_order import is_heterogeneous
from muster.planner.notable_plans import Trait
from muster.planner.plan_evaluator import EvaluatorRecipe, PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search_budget import SearchBudget, simulation_work
from muster.planner.search_phases import best_first, local_search, probe, seed
from muster.planner.search_result import ROUNDING_TOLERANCE, SearchResult, total_counts
from muster.planner.space import draft_plans, mesh_shapes, schedule_choices
from muster.spec.gc_pause import gc_paused
from muster.spec.plan import Plan

NUM_PARTS = 4
"""Parts of the space: as many as processes may work on one search."""

SEED_WORK = 250.0
"""Work that a part may spend on seeds."""

PROBE_WORK = 500.0
"""Work after which a part's probes end without a plan that fits."""

FIRST_ROUND_WORK = 100.0
"""Work of each part in the first round."""

ROUND_GROWTH = 1.5
"""Work of a round over that of the one before."""

FIRST_LOCAL_ROUND = 1
"""First round with local search: small questions are settled before it."""

LOCAL_SEARCH_SHARE = 0.4
"""Share of local search in the work of a round after one in which it found something better; half of the last share
where it didn't."""

CLIMBING_SHARE = 0.5
"""The same where the best plan's neighbours are looked at from the first round on."""

HEAD_ROOM_SHARE = 0.6
"""Share of the budget in which some plan must be found that leaves head-room: the rest goes to a search without it."""


def search(
    request: PlanRequest,
    top: int = 5,
    budget: SearchBudget | None = None,
    evaluator: PlanEvaluator | None = None,
    ceiling: float = inf,
    seeds: Sequence[Plan] = (),
    exact: int | None = None,
    known: Sequence[EvaluatedPlan | FoundPlan] = (),
    climbs: bool = False,
) -> SearchResult:
    """Return the `top` best plans of a request. `seeds` are simulated first; values above `ceiling` may be left out.

    `known` plans of the request are among them without being simulated again: they fit the evaluator's memory budget.
    With `climbs` the neighbours of the best plan are looked at from the first round on: for small budgets. With it or a
    ceiling nothing need be found, so that nothing is simulated which ends after the time limit.

    A plan is only left out when its bound is above simulated values, or when it doesn't fit in memory. So the first
    `exact` plans (default: all) are those that simulating every plan would give; the others are the best of those that
    were simulated. When the budget (default: endless) is spent, the search stops, and the result's `gap` says by how
    much its best may be improved. Where no plan leaves the head-room of the memory budget free, a second search does
    without it.
    """
    budget = budget or SearchBudget()
    evaluator = evaluator or PlanEvaluator(request)
    wishes = _Wishes(top, exact or top, ceiling, tuple(seeds), tuple(known), climbs)
    has_second = bool(evaluator.memory_budget.head_room) and ceiling == inf
    first = _search(evaluator, wishes, budget, HEAD_ROOM_SHARE if has_second else 1.0)
    if first.best or not has_second or budget.is_late:
        return first
    second = _search(evaluator.without_head_room(), wishes, budget, 1.0)
    return replace(
        second,
        gave_up_head_room_early=not first.proven,
        seconds=first.seconds + second.seconds,
        counts=total_counts(second, [first, second]),
    )


@dataclass(frozen=True, slots=True)
class _Wishes:
    """Plans that a search is to find."""

    top: int
    exact: int
    ceiling: float
    seeds: tuple[Plan, ...]
    known: tuple[EvaluatedPlan | FoundPlan, ...] = ()
    climbs: bool = False

    def is_pruned(self, bound: float, best: Sequence[FoundPlan]) -> bool:
        """Return True if no plan with this bound is wanted beside the best so far."""
        last = best[self.exact - 1].value if len(best) >= self.top else inf
        return bound == inf or bound > min(last, self.ceiling) * (1 + ROUNDING_TOLERANCE)


@dataclass(frozen=True, slots=True)
class _Round:
    """The order for a part's next round."""

    work: float
    """Work of the whole round."""
    allowed: float
    """Work that the budget still allows, no more than that."""
    has_local_search: bool
    best: tuple[FoundPlan, ...]
    """Best plans of all parts."""


@dataclass(frozen=True, slots=True)
class _PartReport:
    """State of a part after a round."""

    spent: float
    best: tuple[FoundPlan, ...]
    open_bound: float
    nearest_miss: tuple[float, Plan | None]
    counts: Counter[str]
    notable: dict[Trait, FoundPlan]
    is_late: bool
    """True if the time is over, or no longer enough for this part's next simulation."""


def _search(evaluator: PlanEvaluator, wishes: _Wishes, budget: SearchBudget, patience: float) -> SearchResult:
    """Search within one memory budget; without any plan only as long as a `patience` of the budget lasts."""
    begin_s = perf_counter()
    workload = evaluator.request.workload
    unready = (simulation_work(one.plan, workload) for one in wishes.known if not isinstance(one, EvaluatedPlan))
    if not budget.has_time_for(max(unready, default=0.0)):
        ready = sorted((one for one in wishes.known if isinstance(one, EvaluatedPlan)), key=attrgetter("sort_key"))
        return SearchResult(evaluator, ready[: wishes.top], 0.0, None)
    until_first = budget.share(patience)
    found = tuple(FoundPlan(one.sort_key, one.plan) for one in wishes.known)
    frontiers = [_frontier(evaluator, replace(wishes, known=found), budget.end_s, part) for part in range(NUM_PARTS)]
    job = _SearchJob(evaluator.recipe, replace(wishes, known=found), budget.end_s, SearchBudget.seconds_per_unit)
    with gc_paused():
        group = run_in_lockstep([_search_part(frontier, wishes) for frontier in frontiers], budget.processes, job)
        try:
            order = _Round(SEED_WORK, min(SEED_WORK, budget.left / NUM_PARTS), False, ())
            reports = group.step([order] * NUM_PARTS)
            best = _spend_and_merge(until_first, wishes, reports)
            number, work = 0, FIRST_ROUND_WORK
            while True:
                open_bounds = [report.open_bound for report in reports]
                active = [bound < inf and not wishes.is_pruned(bound, best) for bound in open_bounds]
                if number:
                    active = [wanted and not report.is_late for wanted, report in zip(active, reports, strict=True)]
                if not any(active) or (number and (budget if best else until_first).is_spent):
                    break
                allowed = min(work, budget.left / sum(active))
                order = _Round(work, allowed, wishes.climbs or number >= FIRST_LOCAL_ROUND, best)
                idle = replace(order, allowed=-1.0)
                reports = group.step([order if is_active else idle for is_active in active])
                best = _spend_and_merge(until_first, wishes, reports)
                number, work = number + 1, work * ROUND_GROWTH
        finally:
            group.close()
        known = {one.plan: one for one in wishes.known if isinstance(one, EvaluatedPlan)}
        known |= {plan: one for frontier in frontiers for plan, one in frontier.evaluated.items()}
        if budget.is_late:
            best = tuple(one for number, one in enumerate(best) if not number or one.plan in known)
        given = [one.plan for one in wishes.known]
        budget.spend(
            sum(simulation_work(one.plan, evaluator.request.workload) for one in best if one.plan not in given)
        )
        evaluated = [known.get(one.plan) or evaluator.evaluate(one.plan) for one in best]
    return SearchResult(
        evaluator,
        evaluated,
        min(report.open_bound for report in reports),
        min((report.nearest_miss for report in reports), key=lambda miss: miss[0])[1],
        sum((report.counts for report in reports), Counter[str]()),
        perf_counter() - begin_s,
        _merged_notable(reports),
    )


def _frontier(evaluator: PlanEvaluator, wishes: _Wishes, end_s: float, part: int) -> Frontier:
    """Return the frontier of one part, which knows the plans of the wishes."""
    frontier = Frontier(
        evaluator,
        wishes.top,
        wishes.exact,
        wishes.ceiling,
        SearchBudget(end_s=end_s),
        (part, NUM_PARTS),
        must_answer=wishes.ceiling == inf and not wishes.climbs,
    )
    frontier.keep([one for one in wishes.known if isinstance(one, FoundPlan)])
    return frontier


@dataclass(frozen=True, slots=True)
class _SearchJob:
    """A search for another process: a part of the parts."""

    recipe: EvaluatorRecipe
    wishes: _Wishes
    end_s: float
    pace_s: float

    def coroutines(self, numbers: Sequence[int]) -> list[Generator[_PartReport, _Round, None]]:
        """Return the coroutines of some parts."""
        SearchBudget.seconds_per_unit = max(SearchBudget.seconds_per_unit, self.pace_s)
        evaluator = self.recipe.restore()
        frontiers = [_frontier(evaluator, self.wishes, self.end_s, part) for part in numbers]
        return [_search_part(frontier, self.wishes) for frontier in frontiers]


def _merged_notable(reports: Sequence[_PartReport]) -> tuple[FoundPlan, ...]:
    """Return the best plans of each trait over all parts."""
    traits: dict[Trait, FoundPlan] = {}
    for trait, one in (pair for report in reports for pair in report.notable.items()):
        traits[trait] = min(traits.get(trait, one), one, key=attrgetter("sort_key"))
    return tuple(sorted({one.plan: one for one in traits.values()}.values(), key=attrgetter("sort_key")))


def _spend_and_merge(budget: SearchBudget, wishes: _Wishes, reports: Sequence[_PartReport]) -> tuple[FoundPlan, ...]:
    """Count the work of a round, and return the best plans of all parts."""
    budget.spend(sum(report.spent for report in reports))
    found = {one.plan: one for report in reports for one in report.best}
    return tuple(sorted(found.values(), key=attrgetter("sort_key"))[: wishes.top])


def _search_part(frontier: Frontier, wishes: _Wishes) -> Generator[_PartReport, _Round, None]:
    """Work on one part of the space, round by round: seeds and bounds of all choices, probes, then best-first search
    and local search."""
    order = yield _report(frontier)
    seeds = wishes.seeds
    add_likely = (wishes.climbs or not seeds) and is_heterogeneous(frontier.request.island_cluster)
    seed(frontier, seeds if frontier.part[0] == 0 else (), add_likely, order.allowed)
    frontier.expand()
    local = local_search(frontier, looks_around=not wishes.climbs)
    is_first = True
    local_share = LOCAL_SEARCH_SHARE
    while True:
        order = yield _report(frontier)
        frontier.budget = SearchBudget(end_s=frontier.budget.end_s)
        frontier.keep(order.best)
        if order.allowed < 0:
            continue
        if is_first and not frontier.best:
            probe(frontier, min(PROBE_WORK, 2 * order.allowed) if wishes.climbs else PROBE_WORK)
        is_first = False
        local_work = order.work * local_share if order.has_local_search else 0.0
        if wishes.climbs:
            local_work = order.allowed * CLIMBING_SHARE
            best_first(frontier, order.allowed - local_work)
        else:
            best_first(frontier, min(order.allowed, order.work - local_work))
        if local_work and not frontier.is_settled and frontier.best:
            first = frontier.best[0]
            while not frontier.is_past(order.allowed) and next(local):
                pass
            local_share = LOCAL_SEARCH_SHARE if frontier.best[0] != first else local_share / 2
        best_first(frontier, order.allowed)


def _report(frontier: Frontier) -> _PartReport:
    return _PartReport(
        frontier.budget.spent,
        tuple(frontier.best),
        frontier.open_bound,
        frontier.nearest_miss,
        frontier.counts,
        frontier.notable,
        frontier.budget.is_late,
    )


def evaluate_seeds(
    evaluator: PlanEvaluator, top: int, budget: SearchBudget, seeds: Sequence[Plan], add_likely: bool
) -> SearchResult:
    """Return the best of `seeds` and, with `add_likely`, of plans that are likely to be good, without a search."""
    begin_s = perf_counter()
    with gc_paused():
        frontier = Frontier(evaluator, top, top, budget=budget)
        seed(frontier, seeds, add_likely, budget.work)
    best = [frontier.evaluated[found.plan] for found in frontier.best]
    return SearchResult(evaluator, best, 0.0, frontier.nearest_miss[1], frontier.counts, perf_counter() - begin_s)


def exhaustive_search(evaluator: PlanEvaluator) -> Iterator[EvaluatedPlan]:
    """Simulate every plan of the space that fits, without any bound: the reference that `search` must agree with."""
    request = evaluator.request
    for shape in mesh_shapes(request):
        for choice in schedule_choices(request, shape):
            for draft in draft_plans(request, choice):
                plan = evaluator.complete_draft(draft, choice)
                if plan is not None:
                    yield from map(evaluator.evaluate, evaluator.memory_budget.fit(plan)[0])
