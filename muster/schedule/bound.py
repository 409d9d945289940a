"""What no schedule of a setting can beat."""

from math import ceil

from muster.schedule.pipe import Pipe


def lower_bound_s(pipe: Pipe) -> float:
    """The largest of what each rank needs, in seconds.

    A rank begins when the first micro-batch has come to it, and does all its work. Until its first I can begin it has
    nothing but as many F as the memory holds. After its last I, the way back to the first stage is still to go, beside
    which it can do at most the W that the memory still holds. And every micro-batch holds its memory from F to W.
    """
    return max(_rank_bound_s(pipe, rank) for rank in range(pipe.num_ranks))


def _rank_bound_s(pipe: Pipe, rank: int) -> float:
    held, count, hops_s = pipe.stages[rank], pipe.num_micro_batches, pipe.hops_s
    if not held:
        return 0.0
    forward_s, input_s, weight_s = pipe.times_s
    first, deepest = held[0], held[-1]
    head_s = sum(forward_s[:first]) + sum(hops_s[:first])
    work_s = count * sum(kind[stage] for kind in pipe.times_s for stage in held)
    # The first I on the rank is its deepest stage's.
    turn_s = pipe.trip_s(deepest) + sum(forward_s[first:deepest]) + sum(hops_s[first:deepest])
    filling_s = sum(sorted((forward_s[stage] for stage in held for _ in range(count)), reverse=True)[: pipe.capacity])
    idle_s = max(0.0, turn_s - filling_s)
    back_s = sum(input_s[:first]) + sum(hops_s[:first]) + weight_s[0]
    draining_s = sum(sorted((weight_s[stage] for stage in held for _ in range(count)), reverse=True)[: pipe.capacity])
    tail_s = max(0.0, back_s - draining_s) if first else 0.0
    held_s = [pipe.trip_s(stage) + input_s[stage] + weight_s[stage] for stage in held]
    slots_s = count * sum(held_s) / pipe.capacity
    if len(held) == 1:
        slots_s = ceil(count / pipe.capacity) * held_s[0]
    return head_s + max(work_s + idle_s + tail_s, slots_s)
