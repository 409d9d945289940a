"""CheckFree+: a pipeline in which a lost end stage can be a copy of the one beside it (Blagoev, Ersoy and Chen 2025,
arXiv:2506.15461).

**It changes what is trained.** The embedding and the head are stages of their own. Every second micro-batch passes
through the first two of the stages between them in the other order, and through the last two, so that each of such a
pair learns to act in the other's place. Backwards take the same way back.
"""

from muster.schedule.paths import Paths
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.skippipe import order_passes, warm_ups
from muster.schedule.timing import time_schedule
from muster.spec.errors import InfeasibleError
from muster.spec.schedules import SCHEDULES, stage_placement

_NAME = "checkfree-plus"


def checkfree_plus(spec: ScheduleSpec) -> Schedule:
    """Every second micro-batch has the end stages swapped; passes are in the order of 1F1B, as far as paths let them.

    The shorter of two depths of the warm-up is kept. Raises InfeasibleError where there is nothing to swap.
    """
    if spec.depth < 4 or spec.depth == 5:
        raise InfeasibleError(
            f"schedule {_NAME} swaps stages of 4 pipeline ranks, or of 6 or more, not of {spec.depth}"
        )
    if spec.num_micro_batches == 1:
        raise InfeasibleError(
            f"schedule {_NAME} swaps stages for every second micro-batch, but a step has only one: take a larger"
            " global_batch_size, or a smaller micro_batch_size"
        )
    placement = spec.placement or stage_placement(SCHEDULES[_NAME], spec.num_ranks, spec.chunks)
    paths = swapped_paths(spec.depth, spec.num_micro_batches)
    orders = (order_passes(spec, placement, paths, most_in_flight) for most_in_flight in warm_ups(spec))
    schedules = [Schedule(_NAME, placement, spec.num_micro_batches, ranks, paths=paths) for ranks in orders]

    def rating(schedule: Schedule) -> tuple[float, float]:
        timing = time_schedule(schedule, spec)
        return round(timing.makespan_s, 12), max(timing.peak_activation)

    return min(schedules, key=rating)


def swapped_paths(num_stages: int, num_micro_batches: int) -> Paths:
    """Return the path of each micro-batch: all stages in turn, and for every second one the end stages swapped."""
    in_turn = tuple(range(num_stages))
    other = list(in_turn)
    for one, next_ in swapped_stages(num_stages):
        other[one], other[next_] = next_, one
    return tuple(tuple(other) if number % 2 else in_turn for number in range(num_micro_batches))


def swapped_stages(num_stages: int) -> list[tuple[int, int]]:
    """Return the first and the last pair of the stages between the embedding and the head: with 4 stages the same."""
    return list(dict.fromkeys(((1, 2), (num_stages - 3, num_stages - 2))))
