"""The four phases of a search on its frontier: seed, probe, best-first and local search.

`seed` and `probe` find good plans early, so that bounds have values to be pruned against; `best_first` is branch and
bound, which ends with a proof; `local_search` improves the best plan where there is no time for the proof.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count, groupby
from math import inf
from operator import itemgetter

from muster.planner.frontier import Entry, ExpandedChoice, Frontier
from muster.planner.neighbours import neighbour_plans
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.search_budget import fit_work
from muster.planner.space import (
    DataSharding,
    MeshShape,
    ScheduleChoice,
    draft_plans,
    schedule_choices,
)
from muster.spec.plan import Plan
from muster.spec.schedules import SCHEDULES

# ----------------------------------------------------------------------------------------------------------------------
# Seed


MIN_SEEDS = 4
"""Plans that are simulated however little time there is."""

SEEDS_PER_GROUP = 5
"""Seeds of each schedule of low bubble, tensor-parallel and pipeline degree."""

MAX_SEEDS = 64
"""Seeds in all, before layers are balanced and the batch is split for each."""


def seed(frontier: Frontier, seeds: Sequence[Plan], add_likely: bool, end: float) -> None:
    """Simulate `seeds` and, until `end` units of work are spent, plans that are likely to be good on unlike nodes or
    links."""
    for plan in seeds:
        if frontier.budget.is_late and frontier.best:
            break
        _simulate_seed(frontier, frontier.evaluator.bounds.of_plan(plan), plan)
    for bound, plan in likely_plans(frontier) if add_likely else ():
        if frontier.counts["simulated"] >= MIN_SEEDS and frontier.is_past(end):
            break
        _simulate_seed(frontier, bound, plan)


def _simulate_seed(frontier: Frontier, bound: float, plan: Plan) -> None:
    frontier.counts["plans"] += 1
    frontier.note_predrafted([plan])
    for fitting in [] if frontier.is_pruned(bound) else frontier.fit(plan):
        if frontier.has_time_for(fitting):
            frontier.simulate(fitting)


def likely_plans(frontier: Frontier) -> Iterator[tuple[float, Plan]]:
    """Yield bounds and plans, the lowest bound first.

    They are the plans with the lowest bounds of each schedule of low bubble, tensor-parallel and pipeline degree, with
    any micro-batch size and one data sharding.
    """
    evaluator = frontier.evaluator
    request = evaluator.request
    groups: defaultdict[tuple[int, int, str], list[tuple[float, int, Plan, list[ScheduleChoice]]]] = defaultdict(list)
    numbers = count()
    for shape in frontier.shapes():
        if groups and frontier.budget.is_late:
            break
        if shape.cp > 1 or shape.ep > 1:
            continue
        choices = schedule_choices(request, shape)
        for (schedule, _), alike in groupby(choices, lambda choice: (choice.schedule, choice.vpp)):
            if shape.pp > 1 and not SCHEDULES[schedule].planner.low_bubble and "schedule" not in request.fixed:
                continue
            first, *others = alike
            for draft in draft_plans(request, first, partial(_is_seed_sharding, evaluator, first)):
                plan = evaluator.complete_draft(draft, first)
                if plan is not None:
                    row = evaluator.bounds.of_plan(plan), next(numbers), plan, others
                    groups[shape.tp, shape.pp, schedule].append(row)
    lowest = sorted(row for rows in groups.values() for row in sorted(rows)[:SEEDS_PER_GROUP])[
        : MAX_SEEDS // frontier.part[1]
    ]
    found = [(bound, plan) for bound, _, plan, _ in lowest]
    for _, _, draft, others in lowest:
        completed = (evaluator.complete_draft(draft, choice) for choice in others)
        found += [(evaluator.bounds.of_plan(plan), plan) for plan in completed if plan is not None]
    return iter(sorted(found, key=itemgetter(0)))


def _is_seed_sharding(evaluator: PlanEvaluator, choice: ScheduleChoice, sharding: DataSharding) -> bool:
    dp_replicate, _, zero, *_ = sharding
    return dp_replicate == 1 and zero == "z1" and evaluator.memory_budget.may_fit(choice.shape, sharding, choice)


# ----------------------------------------------------------------------------------------------------------------------
# Probe


NARROWEST_TP_DEGREES = 2
"""Tensor-parallel degrees that are probed for models with experts."""

MAX_PROBED_DEPTHS = 6
"""Pipeline depths that are probed for dense models."""

FIT_ATTEMPTS = 3
"""Plans that are tried for each depth, until one fits."""


def probe(frontier: Frontier, end: float) -> None:
    """Simulate some plans that people would try first, so that bounds have a value to be pruned against.

    They have the smallest micro-batches and no context parallelism; dense models the widest tensor parallelism for each
    depth of the pipeline, models with experts the narrowest. It searches until `end` units of work are spent.
    """
    if frontier.request.model.moe is not None:
        _probe_narrow(frontier, end)
    if not frontier.best:
        _probe_wide(frontier)


def _probe_narrow(frontier: Frontier, end: float) -> None:
    """Search best-first among a few choices: for each depth and schedule the one with the lowest bound whose tensor
    parallelism is narrow and whose ranks hold all their parameters."""
    first: dict[tuple, Entry] = {}
    entries: list[Entry] = []
    is_probed = _narrow_shapes(frontier)
    for bound, number, node in frontier.heap:
        entry: Entry = bound, number, node
        if isinstance(node, ScheduleChoice) and is_probed(node.shape):
            shape = node.shape
            if frontier.memory_budget.may_fit(shape, (1, shape.data, "z1"), node):
                frontier.counts["opened"] += 1
                entry = max(bound, frontier.evaluator.bounds.unsharded(node)), number, ExpandedChoice(node)
                key = shape.tp, shape.pp, node.schedule, node.balances_layers
                first[key] = min(first.get(key, entry), entry)
        entries.append(entry)
    frontier.heap = sorted(first.values())
    probed = {number for _, number, _ in frontier.heap}
    while frontier.heap and not frontier.best and not frontier.is_past(end):
        frontier.step()
    frontier.heap += [entry for entry in entries if entry[1] not in probed]
    heapq.heapify(frontier.heap)


def _narrow_shapes(frontier: Frontier) -> Callable[[MeshShape], bool]:
    """Return a test for shapes with narrow tensor parallelism, and the least context parallelism and micro-batch."""
    shapes = [node.shape for _, _, node in frontier.heap if isinstance(node, ScheduleChoice)]
    narrow = sorted({shape.tp for shape in shapes})[:NARROWEST_TP_DEGREES]
    least = min(((shape.cp, shape.micro_batch_size) for shape in shapes), default=())
    return lambda shape: shape.tp in narrow and (shape.cp, shape.micro_batch_size) == least


def _probe_wide(frontier: Frontier) -> None:
    """Simulate the best plan with the widest tensor parallelism."""

    def rank(shape: MeshShape) -> tuple[int, int, int]:
        return -shape.tp, shape.cp, shape.micro_batch_size

    rows = _plain_choices(frontier)
    least = min((rank(choice.shape) for _, choice in rows), default=())
    widest = [(bound, choice) for bound, choice in rows if rank(choice.shape) == least]
    _simulate_likeliest(frontier, widest, lambda shape: shape.pp, MAX_PROBED_DEPTHS, 1, inf)


def _plain_choices(frontier: Frontier) -> list[tuple[float, ScheduleChoice]]:
    """Return bound and choice of the open choices with even layers, an even batch and whole backwards."""
    return [
        (bound, node)
        for bound, _, node in frontier.heap
        if isinstance(node, ScheduleChoice)
        and not node.balances_layers
        and not node.uneven_batch
        and not SCHEDULES[node.schedule].split_backward
    ]


def _simulate_likeliest(
    frontier: Frontier,
    rows: Iterable[tuple[float, ScheduleChoice]],
    group_by: Callable[[MeshShape], Hashable],
    max_groups: int,
    num_simulated: int,
    end: float,
) -> None:
    """Simulate the `num_simulated` best plans of the likeliest choice of each group, of `max_groups` groups at most."""
    evaluator = frontier.evaluator
    likeliest: dict[Hashable, tuple[float, ScheduleChoice]] = {}
    for bound, choice in rows:
        if likeliest and frontier.budget.is_late:
            break
        group = group_by(choice.shape)
        bound = max(bound, evaluator.bounds.unsharded(choice))
        likeliest[group] = min(likeliest.get(group, (inf, choice)), (bound, choice), key=itemgetter(0))
    drafts: list[list[tuple[float, int, Plan]]] = []
    for _, choice in likeliest.values():
        may_fit = partial(frontier.memory_budget.may_fit, choice.shape, choice=choice)
        plans = list(draft_plans(frontier.request, choice, may_fit))
        frontier.note_predrafted(plans)
        bounded = sorted((evaluator.bounds.of_plan(plan), next(frontier.numbers), plan) for plan in plans)
        drafts.append(bounded[:FIT_ATTEMPTS])
    ready: list[tuple[float, int, Plan]] = []
    for group_drafts in sorted(filter(None, drafts))[:max_groups]:
        enough = len(ready) >= num_simulated and group_drafts[0][0] > max(sorted(ready)[:num_simulated])[0]
        if enough or frontier.is_past(end):
            break
        for fitting in next(filter(None, (frontier.fit(plan) for _, _, plan in group_drafts)), ()):
            ready.append((evaluator.bounds.of_plan(fitting), next(frontier.numbers), fitting))
    for bound, _, plan in sorted(ready)[:num_simulated]:
        if not frontier.is_pruned(bound) and frontier.has_time_for(plan):
            frontier.simulate(plan)


# ----------------------------------------------------------------------------------------------------------------------
# Best-first


def best_first(frontier: Frontier, end: float) -> None:
    """Step through the heap until all wanted plans are known and the first are proven, or `end` units of work are
    spent."""
    while frontier.heap and not frontier.is_pruned(frontier.heap[0][0]) and not frontier.is_past(end):
        frontier.step()


# ----------------------------------------------------------------------------------------------------------------------
# Local search


MAX_LOCAL_SEARCH_SHAPES = 40
"""Groups of shapes that local search looks at: to make a plan of each fit takes a few hundredths of a second."""

LOCAL_SEARCH_SIMULATED = 5
"""Plans of these groups that local search simulates."""


def local_search(frontier: Frontier, looks_around: bool = True) -> Iterator[bool]:
    """Simulate, where it `looks_around`, the likeliest plans of all shapes, then the neighbours of the best plans, the
    best of them first.

    In a search without work for its proof this finds good plans sooner than their bounds do. It yields True after each
    piece of work, and False as long as the best plans have no neighbours that weren't tried. All parts start from the
    same best plans, and share their neighbours.
    """
    if looks_around:
        _simulate_likeliest(
            frontier,
            _plain_choices(frontier),
            lambda shape: (shape.tp, shape.pp, shape.cp, shape.micro_batch_size),
            MAX_LOCAL_SEARCH_SHAPES // frontier.part[1],
            LOCAL_SEARCH_SIMULATED,
            inf,
        )
        yield True
    workload = frontier.request.workload
    tried: set[Plan] = set()
    while True:
        centre = next((found.plan for found in frontier.best if found.plan not in tried), None)
        if centre is None:
            yield False
            continue
        tried.add(centre)
        first = frontier.best[0].plan
        for plan in neighbour_plans(centre, frontier.evaluator, frontier.part):
            frontier.budget.spend(fit_work(plan, workload, by_layer=True))
            if frontier.evaluator.bounds.of_plan(plan) < frontier.best[0].value and frontier.has_time_for(plan):
                frontier.simulate(plan)
            yield True
            if frontier.best[0].plan != first:
                break
