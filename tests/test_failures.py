"""Expected losses to failures, compared with simulations that follow every segment, copy, failure and repair."""

import random
from collections import deque
from heapq import heappop, heappush

import pytest

from muster.planner.failures import (
    ExpectedTimes,
    FailureModel,
    best_interval_s,
    expected_times,
    waiting_s,
    waiting_share,
)
from muster.spec.errors import ConfigError


def simulated(segments: int, interval_s: float, model: FailureModel, seed: int = 0) -> ExpectedTimes:
    """Follow a training until so many segments of work are copied."""
    draw = random.Random(seed)
    now = checkpoints = lost = restarts = 0.0
    position = complete = failures = 0
    copies: deque[tuple[float, int]] = deque()
    failure = draw.expovariate(1 / model.mtbf_s)
    while complete < segments:
        end = now + interval_s + model.stall_s
        while copies and copies[0][0] <= min(end, failure):
            complete = copies.popleft()[1]
        if failure >= end:
            now, position = end, position + 1
            copies.append((now + model.write_s, position))
            continue
        lost += failure - now + (position - complete) * (interval_s + model.stall_s)
        now, position, failures = failure, complete, failures + 1
        copies.clear()
        while (failure := now + draw.expovariate(1 / model.mtbf_s)) < now + model.restart_s:
            restarts, now, failures = restarts + failure - now, failure, failures + 1
        restarts, now = restarts + model.restart_s, now + model.restart_s
    checkpoints = complete * model.stall_s
    return ExpectedTimes(checkpoints, lost, restarts, failures)


@pytest.mark.parametrize(
    ("interval_s", "model"),
    [
        (90.0, FailureModel(11_000.0, 0.6, 9.0, 609.0)),  # Llama 3 405B on 16,384 devices
        (100.0, FailureModel(1_000.0, 5.0, 20.0, 60.0)),
        (100.0, FailureModel(200.0, 10.0, 50.0, 100.0)),
        (100.0, FailureModel(100.0, 1.0, 99.0, 150.0)),  # most segments fail, and most restarts too
    ],
)
def test_expected_times_are_those_of_a_simulation(interval_s: float, model: FailureModel) -> None:
    segments = 100_000
    work_s = segments * interval_s
    expected, found = expected_times(work_s, interval_s, model), simulated(segments, interval_s, model)
    total_s = work_s + found.checkpoints_s + found.lost_s + found.restarts_s
    assert expected.checkpoints_s == pytest.approx(found.checkpoints_s)
    assert work_s + expected.checkpoints_s + expected.lost_s + expected.restarts_s == pytest.approx(total_s, rel=0.02)
    assert expected.lost_s == pytest.approx(found.lost_s, rel=0.08)
    assert expected.restarts_s == pytest.approx(found.restarts_s, rel=0.08)
    assert expected.failures == pytest.approx(found.failures, rel=0.08)


@pytest.mark.parametrize("stall_s", [0.1, 5.0, 100.0])
def test_the_best_interval_is_better_than_others(stall_s: float) -> None:
    model = FailureModel(1_000.0, stall_s, 0.0, 10.0)
    best = best_interval_s(model)
    times = expected_times(1e6, best, model)
    for factor in (0.7, 0.9, 1.1, 1.4):
        other = expected_times(1e6, best * factor, model)
        beside = times.checkpoints_s + times.lost_s + times.restarts_s
        assert beside < other.checkpoints_s + other.lost_s + other.restarts_s


def simulated_waiting(nodes_in_repair: float, spares: int, repairs: int = 60_000) -> float:
    """Follow the nodes that are away, each for the same time 1; failures come while the job runs."""
    draw = random.Random(1)
    back: list[float] = []
    now = waiting = 0.0
    for _ in range(repairs):
        now += draw.expovariate(nodes_in_repair)
        while back and back[0] <= now:
            heappop(back)
        heappush(back, now + 1)
        if len(back) > spares:
            waiting += back[0] - now
            now = heappop(back)
    return waiting / now


def simulated_whole(work_s: float, interval_s: float, model: FailureModel, repair_s: float, spares: int) -> float:
    """Follow a training and the nodes in repair from beginning to end, failure by failure; return its mean time."""
    total_s, runs = 0.0, 2000
    for seed in range(runs):
        draw = random.Random(seed)
        now = done = 0.0
        back: list[float] = []
        while True:
            fails = now + draw.expovariate(1 / model.mtbf_s)
            if now + work_s - done <= fails:
                total_s += now + work_s - done
                break
            done += (fails - now) // interval_s * interval_s
            now = fails
            while True:  # restarts, each of which a failure may interrupt
                while back and back[0] <= now:
                    heappop(back)
                heappush(back, now + draw.expovariate(1 / repair_s))
                if len(back) > spares:
                    now = heappop(back)
                over = now + model.restart_s
                now = min(over, now + draw.expovariate(1 / model.mtbf_s))
                if now == over:
                    break
    return total_s / runs


@pytest.mark.parametrize(
    ("work_s", "repair_s", "spares"),
    [(24, 168, 8), (72, 168, 8), (48, 48, 4), (240, 120, 8), (720, 24, 2), (50, 20, 0)],
)
def test_whole_trainings_with_repairs_take_as_long_as_simulated_ones(
    work_s: float, repair_s: float, spares: int
) -> None:
    """All spares are there at the beginning, which matters for trainings that aren't much longer than a repair."""
    model = FailureModel(mtbf_s=12.0, stall_s=0.0, write_s=0.0, restart_s=0.3)
    beside = expected_times(work_s, 1.0, model)
    running_s = work_s + beside.lost_s + beside.restarts_s
    expected_s = running_s + waiting_s(running_s, model.mtbf_s, repair_s, spares)
    assert expected_s == pytest.approx(simulated_whole(work_s, 1.0, model, repair_s, spares), rel=0.02)


def test_a_long_training_waits_for_its_usual_share() -> None:
    for spares in (0, 3, 9):
        share = waiting_share(4.0, spares)
        assert waiting_s(1e7, 1.0, 4.0, spares) == pytest.approx(1e7 * share / (1 - share), rel=1e-4)
    assert waiting_s(1e7, 1e305, 1e6, 9) == 0
    assert waiting_s(1e300, 1e-3, 1.0, 0) == pytest.approx(1e303)


@pytest.mark.parametrize(("nodes_in_repair", "spares"), [(0.3, 0), (3.0, 0), (3.0, 2), (3.0, 5), (8.0, 9)])
def test_waiting_for_repairs_is_that_of_a_simulation(nodes_in_repair: float, spares: int) -> None:
    """Erlang's formula holds for any distribution of the repair's time."""
    found = simulated_waiting(nodes_in_repair, spares)
    assert waiting_share(nodes_in_repair, spares) == pytest.approx(found, abs=0.005)


def test_a_training_that_never_ends_is_refused_even_where_exponentials_overflow() -> None:
    for mtbf_s in (100.0, 0.1):
        with pytest.raises(ConfigError, match="the training would never end"):
            expected_times(1e6, 60.0, FailureModel(mtbf_s, 1.0, 1.0, 600.0))


def test_more_spares_than_are_ever_needed_cost_no_time() -> None:
    assert waiting_share(3.0, 10**9) == 0
