"""Decision whether a run changes its plan because of slow ranks, and the sentences that say so."""

from typing import NamedTuple

from muster.config.run_config import RunConfig
from muster.planner.slow_ranks import CHANGE_STEPS, FasterPlan, can_split_otherwise, faster_plan
from muster.simulate.stragglers import StragglerKey
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.units import pluralize
from muster.train.memory_preflight import has_memory
from muster.train.straggler_monitor import StragglerCheck, StragglerMonitor


class Replan(NamedTuple):
    """Result of a search for a faster plan."""

    sentences: list[str]
    plan: Plan | None = None
    """Plan that ranks change to; None where theirs stays."""


class Replanner:
    """Search, on rank 0 after each comparison, for a plan around slow ranks, or for the usual one again."""

    def __init__(
        self, config: RunConfig, plan: Plan, usual_plan: Plan, monitor: StragglerMonitor, num_changes: int
    ) -> None:
        """`usual_plan`: the plan for as many ranks where none is slow; `num_changes`: how often this rank has asked for
        another plan."""
        self._config, self._plan, self._usual_plan = config, plan, usual_plan
        self._monitor, self._num_changes = monitor, num_changes
        self._has_asked = False
        self._answered: frozenset[StragglerKey] | None = None
        """Slow ranks of which it was last said that the plan stays all the same; None before."""

    def after_check(self, check: StragglerCheck, step: int) -> Replan:
        """Return the plan that ranks should change to after a step, or that theirs stays and why."""
        about = f"step {step}:"
        told = [f"{about} replan does nothing about the {one.fault}" for one in check.new if one.kind != "compute"]
        steps_left = self._config.train.num_steps - step
        if self._has_asked:
            return Replan(told)  # ranks leave at the end of one of the next steps
        if check.measured is None or not steps_left or not self._monitor.may_replan(self._num_changes):
            return Replan(told)
        slow = {key: one for key, one in self._monitor.detector.confirmed.items() if one.kind == "compute"}
        found = faster_plan(
            self._config, self._plan, self._usual_plan, check.measured, lambda plan: has_memory(self._config, plan)
        )
        if found is not None and _pays(found, steps_left):
            self._has_asked = True
            because = "; ".join(map(str, slow.values())) or "all ranks are about as fast"
            return Replan([*told, f"{about} {because}: {_name_gain(found, 'is')}"], found.plan)
        if (slow or self._plan != self._usual_plan) and slow.keys() != self._answered:
            who = "the plan stays" if slow else "all ranks are about as fast, but the plan stays"
            told.append(f"{about} {who}: {self._reason(found, steps_left, bool(slow))}")
        self._answered = frozenset(slow)
        return Replan(told)

    def _reason(self, found: FasterPlan | None, steps_left: int, is_slow: bool) -> str:
        if found is not None:
            left = f"{pluralize(steps_left, 'step')} that {'is' if steps_left == 1 else 'are'} left"
            return f"{_name_gain(found, 'would be')}, but the {left} would save less than the change costs"
        if not is_slow:
            return f"plan {format_plan_name(self._usual_plan)} would save too little"
        name = format_plan_name(self._plan)
        if not can_split_otherwise(self._plan):
            return f"{name} has neither stages nor unequal shares of the batch that could be changed"
        return f"no other layers or shares of the batch that {name} allows would save enough"


def _pays(found: FasterPlan, steps_left: int) -> bool:
    return steps_left * (found.own_step_s - found.step_s) > CHANGE_STEPS * found.own_step_s


def _name_gain(found: FasterPlan, verb: str) -> str:
    return f"plan {format_plan_name(found.plan)} {verb} {found.own_step_s / found.step_s:.2f} times as fast"
