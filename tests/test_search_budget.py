"""Budgets of searches: work counts, not time; more of it is never worse; processes change nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from test_planner import roomy_instance

from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.planner import lockstep
from muster.planner.heterogeneous import FIRST_WORK, _doubling_parts
from muster.planner.lockstep import kept_processes, run_in_lockstep
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search import NUM_PARTS, search
from muster.planner.search_budget import DEFAULT_WORK, LIMIT_SHARE, SearchBudget
from muster.planner.search_result import SearchResult
from muster.spec.workload import Workload
from tests.sampling import quick_sample


def request_of(model: str, cluster: str, seq_len: int, batch: int, **fixed: object) -> PlanRequest:
    workload = Workload(seq_len=seq_len, global_batch_size=batch)
    return PlanRequest(load_model(model), load_cluster(cluster), workload, fixed=fixed)


HARD = request_of("qwen2.5-7b", "16xl40s", 4096, 256, cp=1)
"""A question that takes more work than tests have."""


def answer_of(result: SearchResult) -> tuple:
    """All of an answer but its seconds."""
    plans = [(one.name, one.value) for one in result.best]
    return plans, result.open_bound, result.proven, dict(result.counts), result.nearest_miss


def clock_of(step_s: float) -> Callable[[], float]:
    """A clock that moves by `step_s` each time it is read."""
    now_s = 0.0

    def perf_counter() -> float:
        nonlocal now_s
        now_s += step_s
        return now_s

    return perf_counter


def test_parts_of_a_budget_count_for_the_whole() -> None:
    whole = SearchBudget(100.0)
    half = whole.share(0.5)
    half.spend(30)
    assert (half.left, whole.left) == (20, 70)
    assert not half.is_spent
    half.share(1.0).spend(25)
    assert half.is_spent
    assert whole.left == 45
    again = whole.renew(2.0)
    again.spend(1)
    assert (again.work, whole.left) == (200, 45)
    assert SearchBudget.start(2.0).work == 2 * DEFAULT_WORK


def test_parts_of_a_limit_end_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 5.0
    monkeypatch.setattr("muster.planner.search_budget.perf_counter", lambda: now_s)
    whole = SearchBudget.start(limit_s=10.0)
    assert whole.end_s == 5.0 + LIMIT_SHARE * 10.0
    ends = (whole.share(0.3).end_s - 5.0, whole.renew(time_part=0.5).end_s - 5.0)
    assert ends == pytest.approx((3.0 * LIMIT_SHARE, 5.0 * LIMIT_SHARE))
    assert not whole.is_spent
    now_s = 15.0
    assert whole.is_spent
    assert whole.share(0.5).is_spent


@pytest.mark.parametrize("work", quick_sample([150.0, 600.0, inf], 0, 2))
def test_the_clock_changes_no_answer(monkeypatch: pytest.MonkeyPatch, work: float) -> None:
    request_ = HARD if work < inf else roomy_instance(1)
    answers = []
    for step_s in (1e-3, 1e3):
        for module in ("search", "search_budget"):
            monkeypatch.setattr(f"muster.planner.{module}.perf_counter", clock_of(step_s))
        answers.append(answer_of(search(request_, 3, SearchBudget(work))))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("least", quick_sample([75.0, 300.0], 0))
def test_a_larger_budget_finds_all_that_a_smaller_one_does(least: float) -> None:
    found = [search(HARD, 3, SearchBudget(work), exact=1) for work in (least, 2 * least, 4 * least)]
    assert not found[0].proven, "a question that any budget answers shows nothing"
    for less, more in pairwise(found):
        assert more.counts["simulated"] >= less.counts["simulated"]
        assert [one.value for one in more.best] <= [one.value for one in less.best]
        assert more.gap <= less.gap


def test_on_unequal_clusters_a_larger_budget_searches_as_the_smaller_ones_before() -> None:
    def parts(work: float) -> list[float]:
        return [part.work for part in _doubling_parts(SearchBudget(work))]

    for times in (1, 2, 4):
        less, more = (parts(count * 1.07 * FIRST_WORK) for count in (times, 2 * times))
        assert sum(more) <= 2 * times * 1.07 * FIRST_WORK
        assert less == more[: len(less)]
    assert parts(8 * FIRST_WORK) == [FIRST_WORK, FIRST_WORK, 2 * FIRST_WORK, 4 * FIRST_WORK]
    assert parts(inf) == [inf]


@pytest.mark.parametrize("work", quick_sample([100.0, 600.0], 0))
def test_several_processes_answer_as_one_does(monkeypatch: pytest.MonkeyPatch, work: float) -> None:
    monkeypatch.setattr(lockstep, "can_fork", lambda: True)
    answers = [answer_of(search(HARD, 3, SearchBudget(work, processes=count))) for count in (1, 2, NUM_PARTS)]
    assert answers[0] == answers[1] == answers[2]


def test_processes_that_are_kept_answer_as_new_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in narrower searches that share the evaluator's caches, and after one that was broken off."""
    monkeypatch.setattr(lockstep, "can_fork", lambda: True)
    narrow = replace(HARD, fixed={"cp": 1, "pp": 1})

    def answers() -> list[tuple]:
        evaluator = PlanEvaluator(HARD)
        own = [(HARD, evaluator), (narrow, evaluator.narrowed(narrow)), (HARD, evaluator.without_head_room())]
        return [answer_of(search(request, 2, SearchBudget(60.0, processes=2), one)) for request, one in own]

    with kept_processes():
        group = run_in_lockstep([_counting(0), _counting(1)], 2, _Counting())
        with pytest.raises(ValueError, match="-1 is negative"):
            group.step([-1, 0])
        group.close()
        group = run_in_lockstep([_counting(0), _counting(1)], 2, _Counting())
        with pytest.raises(ValueError, match="-1 is negative"):
            group.step([0, -1])
        group.close()
        kept = answers()
    assert kept == answers()


def test_a_limit_ends_a_search_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes half a second: after the limit it is looked at a few times by each part."""
    clock = clock_of(0.5)
    for module in ("search", "search_budget"):
        monkeypatch.setattr(f"muster.planner.{module}.perf_counter", clock)
    found = search(HARD, 1, SearchBudget.start(limit_s=100.0))
    assert not found.proven
    assert found.seconds < 100 + 0.5 * 5 * NUM_PARTS


# ----------------------------------------------------------------------------------------------------------------------
# Lockstep


def _counting(begin: int) -> Generator[tuple[int, int], int, None]:
    """Report the sum of all messages and the process."""
    total = begin
    while True:
        message = yield total, os.getpid()
        if message < 0:
            raise ValueError(f"{message} is negative")
        total += message


class _Counting:
    """The same coroutines as a job."""

    def coroutines(self, numbers: Sequence[int]) -> list[Generator[tuple[int, int], int, None]]:
        return [_counting(number) for number in numbers]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_coroutines_keep_their_state_on_any_process(monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    monkeypatch.setattr(lockstep, "can_fork", lambda: True)
    group = run_in_lockstep([_counting(10 * number) for number in range(5)], processes)
    try:
        group.step([1, 2, 3, 4, 5])
        reports = group.step([1] * 5)
        assert [total for total, _ in reports] == [2, 13, 24, 35, 46]
        assert len({process for _, process in reports}) == processes
        with pytest.raises(ValueError, match="-1 is negative"):
            group.step([0, -1, 0, 0, 0])
    finally:
        group.close()


def test_no_process_outlives_the_one_that_it_works_for() -> None:
    """Killed, it closes its pipes, and its child ends."""
    script = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # shells' background jobs begin ignoring it
        "from muster.planner.lockstep import run_in_lockstep\n"
        "def part():\n"
        "    while True: yield os.getpid()\n"
        "group = run_in_lockstep([part(), part()], 2)\n"
        "print(*group.step([0, 0]), flush=True)\n"
        "while True: time.sleep(0.1)\n"  # a signal just before a long sleep would wait for its end
    )
    for sent in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        mine, child = map(int, process.stdout.readline().split())
        assert mine == process.pid
        process.send_signal(sent)
        process.wait()
        deadline_s = time.monotonic() + 30
        while _is_alive(child) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not _is_alive(child), sent


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
