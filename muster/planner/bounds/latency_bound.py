"""A lower bound of the step for pipelines over slow links: a rank waits for what it has sent to come back."""

import numpy as np

from muster.planner.bounds.pass_times import PassTimes
from muster.spec.plan import Plan


def latency_bound_s(plan: Plan, times: PassTimes, micro_batches: int) -> float:
    """Seconds that a step takes at least; 0 for schedules of which nothing is known.

    A micro-batch that a stage has begun goes through all stages after it and comes back before its backward ends. With
    at most k of them under way at once, m of them take the m-th part of k trips at least (Little's law), after the
    first one has come to the stage, and before the last gradient has gone back from there to the first stage. A weight
    backward that stands between two trips makes the first one longer, but no gradient waits for the last of them.
    """
    traits = plan.schedule_entry.planner
    if traits.max_in_flight is None or plan.pp == 1:
        return 0.0
    most, more = traits.max_in_flight
    begun = most * np.arange(plan.stages_per_replica, 0, -1) + more
    under_way = np.minimum(begun, micro_batches)
    forward, inputs, weights = times.forward_s, times.backward_s, times.weight_backward_s
    through = times.forward_transfer_s + forward + inputs + times.backward_transfer_s
    after = np.cumsum(through[::-1])[::-1] - through
    before = np.cumsum(times.forward_transfer_s + forward) - forward
    back = np.cumsum(times.backward_transfer_s + inputs) - inputs
    trip = forward + after + inputs
    ends = before + micro_batches / under_way * trip + back + times.reduce_grad_s[0]
    if plan.vpp == 1:
        delayed = traits.weight_grad_delay * np.arange(plan.pp)
        follow = np.maximum(0, micro_batches - delayed)
        ends = np.maximum(ends, before + (micro_batches * trip + follow * weights) / under_way)
        # Between two stages: the first one's forward may follow the backward that the second one does after a forward.
        ahead = begun[:-1] - begun[1:] + 1
        rounds = np.maximum(0, micro_batches - begun[1:]) // ahead
        lacking = np.minimum(rounds, -(-delayed[:-1] // ahead))
        pair = (forward + inputs)[:-1] + through[1:] + weights[:-1]
        first = before[:-1] + (np.minimum(begun[1:], micro_batches) - 1) * forward[:-1]
        pairs = first + rounds * pair - lacking * weights[:-1] + (trip + back)[:-1] + times.reduce_grad_s[0]
        ends = np.maximum(ends, np.append(pairs, 0.0))
    return float(np.max(ends)) + times.unshard_s[0] + times.per_step_s
