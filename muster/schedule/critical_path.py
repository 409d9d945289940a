"""Critical path of a run: the passes that its makespan depends on."""

from muster.schedule.search_problem import SearchProblem, TimedPasses

_EPSILON_S = 1e-9


def critical_pairs(problem: SearchProblem, run: TimedPasses) -> list[tuple[int, int]]:
    """Return pairs of neighbouring F or I on a rank that are on the critical path and could be swapped.

    The second begins when the first ends, doesn't need it, and has no slack: swapping them may shorten the run.
    """
    forward = 2 * problem.num_stages * problem.num_micro_batches
    begins_s = begin_times_s(problem, run.passes)
    tail_s = [0.0] * problem.num_passes
    rank_tail_s = [0.0] * problem.num_ranks
    following = [-1] * problem.num_ranks
    pairs = []
    for code in reversed(run.passes):
        kind, stage, before, transfer_s = dependency(problem, code)
        rank = problem.placement[stage]
        time_s = problem.times_s[kind][stage]
        other = following[rank]
        if code < forward and 0 <= other < forward and begins_s[other] <= begins_s[code] + time_s + _EPSILON_S:
            critical = begins_s[other] + tail_s[other] >= run.makespan_s - _EPSILON_S
            if critical and dependency(problem, other)[2] != code:
                pairs.append((code, other))
        tail_s[code] = rank_tail_s[rank] = max(rank_tail_s[rank], tail_s[code]) + time_s
        if before >= 0:
            tail_s[before] = max(tail_s[before], tail_s[code] + transfer_s)
        following[rank] = code
    return pairs


def begin_times_s(problem: SearchProblem, passes: list[int]) -> list[float]:
    """Return the begin of each pass by its code, if ranks follow the order of `passes`."""
    begins_s, ends_s, free_s = [0.0] * problem.num_passes, [0.0] * problem.num_passes, [0.0] * problem.num_ranks
    for code in passes:
        kind, stage, before, transfer_s = dependency(problem, code)
        rank = problem.placement[stage]
        begins_s[code] = max(free_s[rank], ends_s[before] + transfer_s if before >= 0 else 0.0)
        free_s[rank] = ends_s[code] = begins_s[code] + problem.times_s[kind][stage]
    return begins_s


def dependency(problem: SearchProblem, code: int) -> tuple[int, int, int, float]:
    """Return a pass's kind and stage, the pass that it needs (−1: none), and the delay between the two."""
    count = problem.num_micro_batches
    num_passes = count * problem.num_stages
    kind, place = divmod(code, num_passes)
    stage = place // count
    if kind == 0:
        return (
            (kind, stage, -1, 0.0) if problem.is_first(stage) else (kind, stage, code - count, problem.p2p_s[stage - 1])
        )
    if kind == 1 and not problem.is_last(stage):
        return kind, stage, code + count, problem.p2p_s[stage]
    return kind, stage, code - num_passes, 0.0


def path_depth(problem: SearchProblem, code: int) -> int:
    """Return the number of passes of its micro-batch before it: a tie-break for passes that take no time."""
    kind, stage = divmod(code // problem.num_micro_batches, problem.num_stages)
    level = stage % problem.depth
    return level if kind == 0 else 2 * problem.depth - 1 - level if kind == 1 else 2 * problem.depth
