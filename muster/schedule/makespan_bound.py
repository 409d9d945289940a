"""Lower bound of the makespan of any schedule, and the gap to it."""

from dataclasses import dataclass
from math import ceil

from muster.schedule.search_problem import SearchProblem


@dataclass(frozen=True, slots=True)
class OptimalityGap:
    """Gap between a makespan and a lower bound of it."""

    makespan_s: float
    bound_s: float
    scope: str
    """Schedules that the bound holds for, in words: `on its placement`, `with 2 stages per rank`."""

    @property
    def proven(self) -> bool:
        """True if no schedule takes less, up to the rounding of a solver."""
        return self.makespan_s <= self.bound_s * (1 + 1e-6)

    @property
    def share(self) -> float:
        """Largest distance of the makespan from the optimum, as a fraction of the bound."""
        return 0.0 if self.proven else self.makespan_s / self.bound_s - 1

    def __str__(self) -> str:
        if self.proven:
            return f"proven optimal: no schedule {self.scope} takes less than {self.bound_s:.6g}"
        return (
            f"at most {self.share:.2%} above the optimum: no schedule {self.scope} takes less than {self.bound_s:.6g}"
        )


def lower_bound_s(problem: SearchProblem) -> float:
    """Return a lower bound of the makespan in seconds: the largest need of any rank.

    A rank begins when the first micro-batch has reached it, and does all its work. Until its first I can begin, it has
    only as many F as its memory holds; what is left of that time is idle. After its last I, a gradient still has to
    travel back to the first stage, during which the rank has at most the W that memory still holds. And each
    micro-batch occupies memory from F to W, so that `capacity` of them at a time take at least count / capacity turns.

    Example: 4 ranks, 8 micro-batches, F = I = W = 1, no transfers, memory for 4. The last rank begins after 3 and works
    24, then the gradient travels 3 I back beside up to 4 W, and W follows on the first stage: 3 + 24 + 0 = 27, a bubble
    of 3 as in ZB-H1.
    """
    bound_s = _rank_bound_s if problem.replicas == 1 else _replicas_bound_s
    return max(bound_s(problem, rank) for rank in range(problem.num_ranks))


def _replicas_bound_s(problem: SearchProblem, rank: int) -> float:
    """Return the bound where replicas begin at both ends: a rank begins with whichever reaches it first, and a
    micro-batch makes its whole way."""
    held = problem.stages[rank]
    if not held:
        return 0.0
    forward_s, input_s, weight_s = problem.times_s
    firsts = [stage - stage % problem.depth for stage in held]
    heads_s = (
        sum(forward_s[first:stage]) + sum(problem.p2p_s[first:stage]) for first, stage in zip(firsts, held, strict=True)
    )
    work_s = problem.num_micro_batches * sum(kind[stage] for kind in problem.times_s for stage in held)
    return max(min(heads_s) + work_s, problem.round_trip_s(0) + input_s[0] + weight_s[0])


def _rank_bound_s(problem: SearchProblem, rank: int) -> float:
    held = problem.stages[rank]
    count = problem.num_micro_batches
    p2p_s = problem.p2p_s
    if not held:
        return 0.0
    forward_s, input_s, weight_s = problem.times_s
    first = held[0]
    deepest = held[-1]
    head_s = sum(forward_s[:first]) + sum(p2p_s[:first])
    work_s = count * sum(kind[stage] for kind in problem.times_s for stage in held)
    # The first I on the rank is its deepest stage's.
    turn_s = problem.round_trip_s(deepest) + sum(forward_s[first:deepest]) + sum(p2p_s[first:deepest])
    filling_s = sum(
        sorted((forward_s[stage] for stage in held for _ in range(count)), reverse=True)[: problem.capacity]
    )
    idle_s = max(0.0, turn_s - filling_s)
    back_s = sum(input_s[:first]) + sum(p2p_s[:first]) + weight_s[0]
    draining_s = sum(
        sorted((weight_s[stage] for stage in held for _ in range(count)), reverse=True)[: problem.capacity]
    )
    tail_s = max(0.0, back_s - draining_s) if first else 0.0
    held_s = [problem.round_trip_s(stage) + input_s[stage] + weight_s[stage] for stage in held]
    slots_s = count * sum(held_s) / problem.capacity
    if len(held) == 1:
        slots_s = ceil(count / problem.capacity) * held_s[0]
    return head_s + max(work_s + idle_s + tail_s, slots_s)
