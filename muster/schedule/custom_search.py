"""Search of an order of passes for one plan with its own times, where p2p transfers are slow or unequal."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from muster.schedule.action import Action, Kind
from muster.schedule.makespan_bound import lower_bound_s
from muster.schedule.order_search import OrderSearch, explore, improve
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.search_problem import make_search_problem, schedule_from_passes
from muster.spec.gc_pause import gc_paused

EXPLORE_PASSES = 60_000
"""Passes to schedule while rules are explored."""

IMPROVE_RUNS = 12
"""Runs in which the best order is changed, and the most passes of these runs."""
MAX_IMPROVE_PASSES = 120_000


@gc_paused()
def search_custom_orders(spec: ScheduleSpec, p2p_s: Sequence[float]) -> Iterator[Schedule]:
    """Yield orders for a spec's times on its placement, with `p2p_s` seconds from each stage to the next.

    First the shortest order found, then the same with each rank's final W sorted by stage (`sort_final_weight_grads`).
    Raises InfeasibleError if memory holds no micro-batch.
    """
    problem = replace(make_search_problem(spec, spec.placement), p2p_s=tuple(p2p_s))
    search = OrderSearch(problem, lower_bound_s(problem))
    explore(search, [], EXPLORE_PASSES)
    search.budget = search.spent + min(IMPROVE_RUNS * problem.num_passes, MAX_IMPROVE_PASSES)
    if search.rules and not search.finished:
        improve(search)
    if search.best is not None:
        found = schedule_from_passes(problem, search.best.passes, "auto")
        yield found
        yield sort_final_weight_grads(found)


def sort_final_weight_grads(schedule: Schedule) -> Schedule:
    """Return the schedule with the W that end each rank's order sorted by stage, the last stage first.

    The gradients of one stage are then complete, and travel, while those of the others are computed.
    """
    return replace(schedule, ranks=tuple(map(_sort_end, schedule.ranks)))


def _sort_end(order: tuple[Action, ...]) -> tuple[Action, ...]:
    begin = len(order)
    while begin and order[begin - 1].kind == Kind.W:
        begin -= 1
    return order[:begin] + tuple(sorted(order[begin:], key=lambda action: (-action.stage, action.micro_batch)))
