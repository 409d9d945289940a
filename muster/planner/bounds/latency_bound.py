"""Lower bound of a step for pipelines over slow links: a rank waits for what it has sent to come back."""

import numpy as np

from muster.planner.bounds.pass_times import PassTimes
from muster.spec.plan import Plan


def latency_bound_s(plan: Plan, times: PassTimes, micro_batches: int) -> float:
    """Return the seconds that a step takes at least; 0 for schedules without `PlannerTraits.max_in_flight`.

    A micro-batch that a stage has begun goes through all stages after it and comes back before its backward ends. With
    at most k of them in flight, m of them take at least m/k such trips (Little's law), after the first one has come to
    the stage, and before the last gradient has gone back from there to the first stage. A weight backward that stands
    between two trips makes the first one longer, but no gradient waits for the last of them.

    Example: with 4 in flight, 16 micro-batches and trips of 1 s, a stage needs 4 s, however fast its device is.
    """
    traits = plan.schedule_entry.planner
    if traits.max_in_flight is None or plan.pp == 1:
        return 0.0
    per_stage, extra = traits.max_in_flight
    max_in_flight = per_stage * np.arange(plan.stages_per_replica, 0, -1) + extra
    in_flight = np.minimum(max_in_flight, micro_batches)
    forward, inputs, weights = times.forward_s, times.backward_s, times.weight_backward_s
    through = times.forward_transfer_s + forward + inputs + times.backward_transfer_s
    after = np.cumsum(through[::-1])[::-1] - through
    before = np.cumsum(times.forward_transfer_s + forward) - forward
    back = np.cumsum(times.backward_transfer_s + inputs) - inputs
    trip = forward + after + inputs
    ends = before + micro_batches / in_flight * trip + back + times.reduce_grad_s[0]
    if plan.vpp == 1:
        delayed = traits.weight_grad_delay * np.arange(plan.pp)
        follow = np.maximum(0, micro_batches - delayed)
        ends = np.maximum(ends, before + (micro_batches * trip + follow * weights) / in_flight)
        # Between two stages: a forward of the first may only follow the backward of the second that frees its place.
        ahead = max_in_flight[:-1] - max_in_flight[1:] + 1
        rounds = np.maximum(0, micro_batches - max_in_flight[1:]) // ahead
        lacking = np.minimum(rounds, -(-delayed[:-1] // ahead))
        pair = (forward + inputs)[:-1] + through[1:] + weights[:-1]
        first = before[:-1] + (np.minimum(max_in_flight[1:], micro_batches) - 1) * forward[:-1]
        pairs = first + rounds * pair - lacking * weights[:-1] + (trip + back)[:-1] + times.reduce_grad_s[0]
        ends = np.maximum(ends, np.append(pairs, 0.0))
    return float(np.max(ends)) + times.unshard_s[0] + times.per_step_s
