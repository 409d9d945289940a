"""Changes of a run's plan because of slow ranks: when, and what is said."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from muster.launch.launcher_words import Membership
from muster.simulate.stragglers import Straggler
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.train import replan
from muster.train.carried import Carried
from muster.train.generations import _Rank
from muster.train.replan import Replanner
from muster.train.straggler_monitor import StragglerCheck, StragglerMonitor
from tests.test_slow_ranks import config_of, passes_of


class Comparisons:
    """Comparisons of a run that has this plan, each with the slowness of ranks."""

    def __init__(self, plan: str, steps: int, usual: str = "") -> None:
        config = config_of(plan)
        self._config = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
        self._plan = parse_plan_name(plan)
        self._confirmed: dict[Any, Straggler] = {}
        monitor = SimpleNamespace(
            may_replan=lambda num_changes: True, detector=SimpleNamespace(confirmed=self._confirmed)
        )
        own = self._config, self._plan, parse_plan_name(usual or plan), cast("StragglerMonitor", monitor)
        self._replanner = Replanner(*own, 0)

    def after(self, step: int, slowness: dict[int, float]) -> replan.Replan:
        found = [Straggler("compute", (rank,), ratio) for rank, ratio in slowness.items()]
        new = [one for one in found if one.key not in self._confirmed]
        self._confirmed.clear()
        self._confirmed.update({one.key: one for one in found})
        measured = passes_of(self._plan, self._config, slowness)
        return self._replanner.after_check(StragglerCheck({}, [], new, measured), step)


@pytest.fixture(autouse=True)
def memory_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replan, "has_memory", lambda config, plan: True)


def test_a_change_is_told_with_its_reason_and_its_gain() -> None:
    comparisons = Comparisons("dp2-mb1-z1-fp32", 100)
    change = comparisons.after(10, {1: 2.0})
    assert comparisons.after(11, {1: 2.0}) == ([], None), "once in a generation"
    assert change.plan is not None
    assert change.plan.uneven_micro_batches == (2, 1)
    slow = "rank 1 takes 2.00 times as long as the others to compute"
    assert change.sentences == [f"step 10: {slow}: plan dp2-mb1-uneven2.1-z1-fp32 is 1.50 times as fast"]
    back = Comparisons("dp2-mb1-uneven2.1-z1-fp32", 100, usual="dp2-mb1-z1-fp32").after(10, {})
    assert back.sentences == ["step 10: all ranks are about as fast: plan dp2-mb1-z1-fp32 is 1.33 times as fast"]
    late = Comparisons("dp2-mb1-uneven2.1-z1-fp32", 20, usual="dp2-mb1-z1-fp32")
    assert late.after(10, {}) == (
        [
            "step 10: all ranks are about as fast, but the plan stays: plan dp2-mb1-z1-fp32 would be 1.33 times as"
            " fast, but the 10 steps that are left would save less than the change costs"
        ],
        None,
    )
    assert late.after(12, {}) == ([], None)


def test_why_a_plan_stays_is_told_once_for_each_slowness() -> None:
    few = Comparisons("dp2-mb1-z1-fp32", 20)
    left = "but the 10 steps that are left would save less than the change costs"
    gain = "plan dp2-mb1-uneven2.1-z1-fp32 would be 1.50 times as fast"
    assert few.after(10, {1: 2.0}) == ([f"step 10: the plan stays: {gain}, {left}"], None)
    assert few.after(12, {1: 2.0}) == ([], None)
    assert few.after(14, {}) == ([], None)
    assert few.after(19, {1: 2.0})[0][0].endswith("but the 1 step that is left would save less than the change costs")
    assert few.after(20, {0: 2.0}) == ([], None), "after the last step nothing stays"
    sharded = Comparisons("dp2-mb1-fp32", 100).after(10, {1: 2.0}).sentences
    none = "dp2-mb1-fp32 has neither stages nor unequal shares of the batch that could be changed"
    assert sharded == [f"step 10: the plan stays: {none}"]
    small = Comparisons("pp4-mb1-fp32", 100).after(10, {1: 1.21}).sentences
    assert small == [
        "step 10: the plan stays: no other layers or shares of the batch that pp4-mb1-fp32 allows would save enough"
    ]


def agreed(ranks: list[tuple[str, bool, int, bool]]) -> list[tuple[str, bool, int]]:
    """Let ranks agree on a plan, each by its own (plan, whether that is around slow ranks, changes asked for, whether
    it was a rank in a generation before)."""
    store = dist.HashStore()
    ours = [
        SimpleNamespace(
            _plan=parse_plan_name(name),
            _is_around=is_around,
            _carried=Carried(num_plan_changes=changes),
            _has_trained=has_trained,
            _plans={},
        )
        for name, is_around, changes, has_trained in ranks
    ]

    def agree(number: int) -> None:
        _Rank._agree_on_plan(cast("_Rank", ours[number]), Membership(1, number, len(ranks)), store)

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(agree, range(len(ranks))))
    return [(format_plan_name(one._plan), one._is_around, one._carried.num_plan_changes) for one in ours]


def test_a_spare_that_becomes_rank_0_takes_the_plan_of_those_that_are_left() -> None:
    first, around = "dp2-mb1-z1-fp32", "dp2-mb1-uneven2.1-z1-fp32"
    left = (around, True, 3, True)
    assert agreed([(first, False, 0, False), left]) == [(around, True, 3)] * 2
    assert agreed([left, (first, False, 0, False)]) == [(around, True, 3)] * 2
    assert agreed([(first, False, 0, False)] * 2) == [(first, False, 0)] * 2, "nobody is left"
    assert agreed([(around, True, 1, True), (first, False, 0, True)]) == [(around, True, 1)] * 2, "rank 0 has asked"
