"""A lower bound of the step for pipelines over slow links: a rank waits for what it has sent to come back."""

import numpy as np

from muster.planner.bound import PassSeconds
from muster.spec.plan import Plan

_UNDER_WAY = {"1f1b": (1, 0), "zb-h1": (1, 0), "zb-h2": (2, -1)}
"""Schedule → (a, b): a rank that is the n-th from the end has at most a·n + b micro-batches between the beginning of
their forward and the end of their backward, as its passes are in this order whatever they take."""


def trips_bound_s(plan: Plan, seconds: PassSeconds, micro_batches: int) -> float:
    """Seconds that a step takes at least; 0 for schedules of which nothing is known.

    A micro-batch that a rank has begun goes through all stages after it and comes back before its backward ends. With
    at most k of them under way at once, m of them take the m-th part of k trips at least (Little's law), after the
    first one has come to the rank, and before the last gradient has gone back from there to the first stage.
    """
    if plan.schedule not in _UNDER_WAY or plan.pp == 1:
        return 0.0
    most, more = _UNDER_WAY[plan.schedule]
    under_way = most * np.arange(plan.pp, 0, -1) + more
    forward, inputs = seconds.forward, seconds.inputs
    through = seconds.come + forward + inputs + seconds.back
    after = np.cumsum(through[::-1])[::-1] - through
    before = np.cumsum(seconds.come + forward) - forward
    back = np.cumsum(seconds.back + inputs) - inputs
    trips = micro_batches / np.minimum(under_way, micro_batches) * (forward + after + inputs)
    return float(np.max(before + trips + back)) + seconds.begin[0] + seconds.end[0] + seconds.once
