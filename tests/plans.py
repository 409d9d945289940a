"""Plans that no name says."""

from itertools import pairwise
from typing import Any

from muster.schedule.custom_search import search_custom_orders
from muster.schedule.schedule_spec import ScheduleSpec


def unequal(*stages: tuple[int, dict[str, int]]) -> dict[str, Any]:
    """Stages of so many layers on such a mesh."""
    return {"stages": [{"layers": layers, "mesh": mesh} for layers, mesh in stages]}


def timed_order(num_ranks: int, chunks: int, micro_batches: int) -> dict[str, Any]:
    """An order for a slow hop, each rank's stages next to each other."""
    placement = tuple(rank for rank in range(num_ranks) for _ in range(chunks))
    setting = ScheduleSpec(num_ranks, micro_batches, chunks, placement=placement, memory_limit=3)
    *_, schedule = search_custom_orders(setting, [float(one != other) for one, other in pairwise(placement)])
    ranks = [" ".join(map(str, passes)) for passes in schedule.ranks]
    return {
        "pinned_schedule": {
            "times": "predicted",
            "micro_batches": micro_batches,
            "placement": placement,
            "ranks": tuple(ranks),
        }
    }
