"""Durations of a forward and a backward that run as one."""

from collections.abc import Iterator

from muster.cost.time.op_times import OpTimes
from muster.schedule.action import Action
from muster.schedule.program import Program


def pairs_of_rank(program: Program, rank: int) -> Iterator[tuple[int, Action, Action]]:
    """Yield for each pair of a rank the place of its forward in the compute lane, the forward and the backward."""
    compute = program.ranks[rank].get("compute", ()) if program.pairs else ()
    for index, (action, _, _) in enumerate(compute):
        if action in program.pairs:
            yield index, action, compute[index + 1].action


def paired_durations_s(program: Program, times: OpTimes, rank: int) -> dict[int, float]:
    """Return place in a rank's compute lane → seconds, for the passes of pairs.

    The passes of a pair take turns; each is given its share of their time, in the order of the lane.
    """
    durations_s: dict[int, float] = {}
    for index, forward, backward in pairs_of_rank(program, rank):
        share = times.pair_share(forward, backward)
        durations_s[index] = share * times.duration_s(forward)
        durations_s[index + 1] = share * times.duration_s(backward)
    return durations_s
