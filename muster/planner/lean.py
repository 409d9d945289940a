"""What the best plan copies to its hosts for nothing stays on the device.

A search makes a plan fit by what takes least time, and of that by what leaves most room: so that layers are copied that
need not be, as long as nothing waits for them. Of plans that take as long, people want the one that copies least.
"""

from dataclasses import replace

from muster.planner.fit import ROUNDING
from muster.planner.found import Found
from muster.planner.judge import Judge


def leanest(found: Found, judge: Judge) -> Found:
    """What was found, its first plan with as little offload as is no slower."""
    if not found.best:
        return found
    first, *others = found.best
    plan = judge.room.leaner(first.plan)
    lean = next((one for one in found.best if one.plan == plan), None) or judge.verdict(plan)
    if lean.value > first.value * (1 + ROUNDING):
        return found
    kept = [one for one in others if one.plan != plan]
    return replace(found, best=sorted([lean, *kept], key=lambda one: one.order))
