"""What schedules with two replicas of the model need: ranks of an even number, and half of the micro-batches each."""

from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.errors import InfeasibleError


def split_micro_batches(num_micro_batches: int) -> tuple[range, range]:
    """The micro-batches of each of two replicas: the first half, larger by one if they are odd, and the second."""
    first = -(-num_micro_batches // 2)
    return range(first), range(first, num_micro_batches)


def require_even_ranks(name: str, spec: ScheduleSpec) -> int:
    """The number of ranks. Raises InfeasibleError unless it is even, as schedules that run both ways need it."""
    if spec.num_ranks % 2:
        raise InfeasibleError(
            f"{name} needs an even number of pipeline ranks, got {spec.num_ranks};"
            f" the nearest that runs is {spec.num_ranks + 1}"
        )
    return spec.num_ranks
