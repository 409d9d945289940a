"""Requirements of schedules with two model replicas: an even number of ranks, half of the micro-batches each."""

from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.errors import InfeasibleError


def split_micro_batches(num_micro_batches: int) -> tuple[range, range]:
    """Return the micro-batches of each replica: the first half, larger by one if odd, and the second."""
    first = -(-num_micro_batches // 2)
    return range(first), range(first, num_micro_batches)


def require_even_ranks(name: str, spec: ScheduleSpec) -> int:
    """Return the number of ranks. Raises InfeasibleError if it is odd: bidirectional schedules need pairs of ranks."""
    if spec.num_ranks % 2:
        raise InfeasibleError(
            f"{name} needs an even number of pipeline ranks, got {spec.num_ranks};"
            f" the nearest that runs is {spec.num_ranks + 1}"
        )
    return spec.num_ranks
