"""Plans that are likely to be good where nodes or links differ, from bounds alone: they are simulated first."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import count, groupby

from muster.planner.judge import Judge
from muster.planner.request import Request
from muster.planner.space import Order, Split, orders, plans, shapes
from muster.spec.plan import Plan

BUSY = ("zb-h2", "zb-v")
"""Schedules that keep ranks busiest."""

EACH = 5
"""Plans for each schedule and degree of tensor and pipeline parallelism."""

LIKELIEST = 64
"""Plans in all; layers and shares of each are laid out as suits the devices, too."""


def likely_plans(request: Request, judge: Judge) -> Iterator[tuple[float, Plan]]:
    """Bounds and plans: for each schedule that keeps ranks busy and each degree of tensor and pipeline parallelism
    those with the lowest bounds, of any micro-batches, with one sharding; the lowest first."""
    found: defaultdict[tuple[int, int, str], list[tuple[float, int, Plan, list[Order]]]] = defaultdict(list)
    numbers = count()
    for shape in shapes(request):
        if shape.cp > 1 or shape.ep > 1:
            continue
        for (schedule, _), alike in groupby(orders(request, shape), lambda order: (order.schedule, order.vpp)):
            if shape.pp > 1 and schedule not in BUSY and "schedule" not in request.fixed:
                continue
            first, *others = alike
            for draft in plans(request, first, partial(_is_likely, judge, first)):
                if (plan := placed(judge, draft, first)) is not None:
                    row = judge.bound(plan), next(numbers), plan, others
                    found[shape.tp, shape.pp, schedule].append(row)
    least = sorted(one for own in found.values() for one in sorted(own)[:EACH])[:LIKELIEST]
    laid = [(bound, plan) for bound, _, plan, _ in least]
    for _, _, draft, others in least:
        for order in others:
            if (plan := placed(judge, draft, order)) is not None:
                laid.append((judge.bound(plan), plan))
    return iter(sorted(laid, key=lambda pair: pair[0]))


def _is_likely(judge: Judge, order: Order, split: Split) -> bool:
    return split[0] == 1 and split[2] == "z1" and judge.room.may_fit(order.shape, split, order)


def placed(judge: Judge, plan: Plan, order: Order) -> Plan | None:
    """The plan with its layers and shares as the order wants them; None where they are so already."""
    placed = judge.moved(plan) if order.balanced else plan
    return judge.shares.given(placed) if order.shares and placed is not None else placed
