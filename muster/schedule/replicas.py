"""What schedules with two replicas of the model need: ranks of an even number, and half of the micro-batches each."""

from muster.schedule.setting import Setting
from muster.spec.errors import InfeasibleError


def halves(num_micro_batches: int) -> tuple[range, range]:
    """The micro-batches of each of two replicas: the first half, larger by one if they are odd, and the second."""
    first = -(-num_micro_batches // 2)
    return range(first), range(first, num_micro_batches)


def even_ranks(name: str, setting: Setting) -> int:
    """The number of ranks. Raises InfeasibleError unless it is even, as schedules that run both ways need it."""
    if setting.num_ranks % 2:
        raise InfeasibleError(
            f"{name} needs an even number of pipeline ranks, got {setting.num_ranks};"
            f" the nearest that runs is {setting.num_ranks + 1}"
        )
    return setting.num_ranks
