"""What the best plans copy to their hosts for nothing stays on the device.

A search makes a plan fit by what takes least time, and of that by what leaves most room: so that layers are copied that
need not be, as long as nothing waits for them. Of plans that take as long, people want the one that copies least.
"""

from dataclasses import replace

from muster.planner.fit import ROUNDING
from muster.planner.judge import Judge
from muster.planner.search import Found
from muster.planner.verdict import Verdict


def leanest(found: Found, judge: Judge) -> Found:
    """What was found, its best plans with as little offload as is no slower."""
    best: list[Verdict] = []
    for one in found.best:
        plan = judge.room.leaner(one.plan)
        known = plan == one.plan or any(plan == other.plan for other in [*best, *found.best])
        lean = one if known else judge.verdict(plan)
        best.append(lean if lean.value <= one.value * (1 + ROUNDING) else one)
    return replace(found, best=sorted(best, key=lambda one: one.order))
