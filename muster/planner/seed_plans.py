"""Plans that are likely to be good where nodes or links differ, from bounds alone: they are simulated first."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import count, groupby

from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.space import DataSharding, ScheduleChoice, draft_plans, mesh_shapes, schedule_choices
from muster.spec.plan import Plan

SEED_SCHEDULES = ("zb-h2", "zb-v")
"""Schedules that keep ranks busiest."""

SEEDS_PER_GROUP = 5
"""Plans for each schedule and degree of tensor and pipeline parallelism."""

MAX_SEEDS = 64
"""Plans in all; layers and shares of each are laid out as suits the devices, too."""


def seed_plans(request: PlanRequest, evaluator: PlanEvaluator) -> Iterator[tuple[float, Plan]]:
    """Bounds and plans: for each schedule that keeps ranks busy and each degree of tensor and pipeline parallelism
    those with the lowest bounds, of any micro-batches, with one sharding; the lowest first."""
    found: defaultdict[tuple[int, int, str], list[tuple[float, int, Plan, list[ScheduleChoice]]]] = defaultdict(list)
    numbers = count()
    for shape in mesh_shapes(request):
        if shape.cp > 1 or shape.ep > 1:
            continue
        for (schedule, _), alike in groupby(
            schedule_choices(request, shape), lambda order: (order.schedule, order.vpp)
        ):
            if shape.pp > 1 and schedule not in SEED_SCHEDULES and "schedule" not in request.fixed:
                continue
            first, *others = alike
            for draft in draft_plans(request, first, partial(_is_seed_sharding, evaluator, first)):
                if (plan := complete_draft(evaluator, draft, first)) is not None:
                    row = evaluator.bound(plan), next(numbers), plan, others
                    found[shape.tp, shape.pp, schedule].append(row)
    least = sorted(one for own in found.values() for one in sorted(own)[:SEEDS_PER_GROUP])[:MAX_SEEDS]
    laid = [(bound, plan) for bound, _, plan, _ in least]
    for _, _, draft, others in least:
        for order in others:
            if (plan := complete_draft(evaluator, draft, order)) is not None:
                laid.append((evaluator.bound(plan), plan))
    return iter(sorted(laid, key=lambda pair: pair[0]))


def _is_seed_sharding(evaluator: PlanEvaluator, choice: ScheduleChoice, sharding: DataSharding) -> bool:
    return sharding[0] == 1 and sharding[2] == "z1" and evaluator.memory_budget.may_fit(choice.shape, sharding, choice)


def complete_draft(evaluator: PlanEvaluator, draft: Plan, choice: ScheduleChoice) -> Plan | None:
    """The plan with its layers and shares as the order wants them; None where they are so already."""
    placed = evaluator.with_balanced_layers(draft) if choice.balances_layers else draft
    return evaluator.batch_splitter.with_best_split(placed) if choice.uneven_batch and placed is not None else placed
