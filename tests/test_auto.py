"""The automatic and the exact schedule: valid, in memory, and never behind what else is known."""

import csv
import json
import sys
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.cli.main import main
from muster.schedule import auto as auto_schedule
from muster.schedule import exact, registry
from muster.schedule.auto import makespan_bound_s
from muster.schedule.check import check
from muster.schedule.compare import CompareRequest, compare_schedules, make_with_best_chunks
from muster.schedule.interleaved import interleaved
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.registry import make_schedule, solve_exact
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.timing import Timing, time_schedule
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.schedules import SCHEDULES, ScheduleEntry
from tests.sampling import quick_sample

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[list[float]]:
    with (DATA / f"{name}.csv").open() as file:
        return [[float(word) for word in row] for row in list(csv.reader(file))[1:]]


def auto(setting: ScheduleSpec) -> tuple[Schedule, Timing]:
    schedule = make_schedule("auto", setting)
    timing = time_schedule(schedule, setting)
    assert max(timing.peak_activation) <= setting.memory_limit + 1e-9
    return schedule, timing


# ----------------------------------------------------------------------------------------------------------------------
# Against public schedulers and proven optima


@cache
def public_settings() -> dict[tuple[float, ...], list[tuple[float, float]]]:
    """(ranks, micro-batches, F, I, W, hop) → (peak, makespan) of every row."""
    found: dict[tuple[float, ...], list[tuple[float, float]]] = {}
    for *setting, _, peak, makespan in rows("public_schedules"):
        found.setdefault(tuple(setting), []).append((peak, makespan))
    return found


def check_public(setting: tuple[float, ...]) -> None:
    ranks, micro_batches, forward, inputs, weights, hop = setting
    public = public_settings()[setting]
    for limit in sorted({peak for peak, _ in public}):
        best = min(makespan for peak, makespan in public if peak <= limit)
        request = CompareRequest(
            int(ranks), int(micro_batches), None, (forward, inputs, weights), hop, limit, replicas=None, fill=False
        )
        _, timing = make_with_best_chunks("auto", request)
        assert max(timing.peak_activation) <= limit + 1e-9
        assert timing.makespan_s <= best + 1e-6, (setting, limit)


@pytest.mark.parametrize("number", range(0, 480, 120))
def test_never_behind_public_schedulers(number: int):
    small = sorted(key for key in public_settings() if key[0] <= 4 and key[1] <= 8)
    check_public(small[number % len(small)])


def test_never_behind_v_half_where_the_pipeline_drains_as_soon_as_it_is_full():
    check_public((16, 16, 1, 1, 1, 0))


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len([key for key in public_settings() if key[0] <= 8])))
def test_never_behind_public_schedulers_up_to_8_ranks(number: int):
    check_public(sorted(public_settings())[number])


@pytest.mark.soak
@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize(
    ("ranks", "micro_batches"),
    [(16, 16), (16, 32), (16, 49), (16, 64), (32, 32), (32, 64), (32, 97), (32, 128)],
)
def test_never_behind_public_schedulers_on_more_ranks(ranks: int, micro_batches: int, third: int):
    for setting in [key for key in sorted(public_settings()) if key[:2] == (ranks, micro_batches)][third::3]:
        check_public(setting)


@pytest.mark.parametrize("row", rows("optimal_schedules"), ids=str)
def test_within_a_hundredth_of_the_optimum(row: list[float]):
    ranks, micro_batches, limit, *times, hop, optimum = row
    setting = ScheduleSpec.uniform(int(ranks), int(micro_batches), times, p2p_s=hop, memory_limit=limit)
    assert optimum - 1e-6 <= auto(setting)[1].makespan_s <= 1.01 * optimum
    assert makespan_bound_s(setting) <= optimum + 1e-6


# ----------------------------------------------------------------------------------------------------------------------
# Any setting

SECONDS = st.sampled_from([0.0, 0.5, 0.7, 1.0, 1.3, 2.0])


@st.composite
def any_setting(draw) -> ScheduleSpec:
    ranks, micro_batches = draw(st.integers(1, 8)), draw(st.integers(1, 16))
    replicas = draw(st.sampled_from([1, 1, 1, 2])) if ranks % 2 == 0 else 1
    chunks = replicas * draw(st.integers(1, 4 // replicas))
    depth = ranks * chunks // replicas
    times = [tuple(draw(st.lists(SECONDS, min_size=depth, max_size=depth))) for _ in range(3)]
    limit = draw(st.sampled_from([1.0, 1.5, 2.0, 3.5, 6.0, inf]))
    forward, inputs, weights = times
    return ScheduleSpec(
        ranks,
        micro_batches,
        chunks,
        forward,
        inputs,
        weights,
        p2p_s=draw(SECONDS),
        memory_limit=limit,
        replicas=replicas,
    )


@settings(deadline=None, max_examples=10)
@given(any_setting())
def test_valid_in_memory_and_never_behind_any_registered_schedule(setting: ScheduleSpec):
    check_any(setting)


@pytest.mark.soak
@settings(deadline=None, max_examples=100)
@given(any_setting())
def test_never_behind_any_registered_schedule_in_more_settings(setting: ScheduleSpec):
    check_any(setting)


def check_any(setting: ScheduleSpec) -> None:
    others = []
    for name, entry in SCHEDULES.items():
        if not entry.searched:
            try:
                timing = time_schedule(make_schedule(name, setting), setting)
            except InfeasibleError:
                continue
            if max(timing.peak_activation) <= setting.memory_limit:
                others.append(timing.makespan_s)
    cannot_be_searched = setting.num_micro_batches % setting.replicas or setting.memory_limit < setting.replicas
    if cannot_be_searched and not others:
        with pytest.raises(InfeasibleError, match="no schedule with 2 replicas"):
            make_schedule("auto", setting)
        return
    schedule, timing = auto(setting)
    assert timing.makespan_s <= min(others, default=inf) + 1e-9
    assert cannot_be_searched or timing.makespan_s >= makespan_bound_s(setting) - 1e-9
    check(lower(schedule, LoweringOptions()))
    assert make_schedule("auto", setting) == schedule


@pytest.mark.parametrize(
    ("times", "p2p_s", "limit"),
    quick_sample([((1, 1, 1), 0, inf), ((1, 1, 0.5), 0.1, 5), ((1, 1.3, 1), 0.1, 9)], 0, 2),
)
def test_two_searched_replicas_are_shorter_than_dualpipe_and_bitpipe(times: tuple, p2p_s: float, limit: float):
    """And than one searched replica, which has half of their weights."""
    for ranks, micro_batches in ((4, 8), (8, 10)):
        request = CompareRequest(ranks, micro_batches, None, times, p2p_s, limit, replicas=None, fill=False)
        schedule, timing = make_with_best_chunks("auto-bidirectional", request)
        assert schedule.replicas == 2
        assert max(timing.peak_activation) <= limit + 1e-9
        for other in ("dualpipe", "bitpipe", "auto"):
            try:
                other_timing = make_with_best_chunks(other, request)[1]
            except InfeasibleError:
                continue
            assert timing.makespan_s < other_timing.makespan_s - 1e-6, (other, ranks)


LONG_RUNS = [
    ("zb-h1", 16, 130, ScheduleSpec.uniform(16, 1300, (1, 1.2, 0.8), p2p_s=0.1, memory_limit=16)),
    ("interleaved", 10, 57, ScheduleSpec.uniform(40, 137, (1, 2, 0), 4, p2p_s=0.2, memory_limit=80)),
]
"""Schedules with a run that counts as a long one, and the ranks and micro-batches of one of a tenth of its passes."""


@pytest.mark.parametrize(("name", "ranks", "micro_batches", "setting"), LONG_RUNS, ids=[name for name, *_ in LONG_RUNS])
def test_runs_that_count_as_long_are_never_behind_either(
    name: str, ranks: int, micro_batches: int, setting: ScheduleSpec, monkeypatch: pytest.MonkeyPatch
):
    """Nor where a run with more micro-batches isn't a shorter one with more periods, as `interleaved`'s is not."""
    monkeypatch.setattr(auto_schedule, "_LARGE_SPEC", auto_schedule._LARGE_SPEC // 10)
    first = setting.forward_s[0], setting.input_backward_s[0], setting.weight_backward_s[0]
    times = [time_s * setting.chunks for time_s in first]
    limit = setting.memory_limit * ranks / setting.num_ranks
    check_long(
        name, ScheduleSpec.uniform(ranks, micro_batches, times, setting.chunks, p2p_s=setting.p2p_s, memory_limit=limit)
    )


@pytest.mark.soak
@pytest.mark.parametrize(("name", "ranks", "micro_batches", "setting"), LONG_RUNS, ids=[name for name, *_ in LONG_RUNS])
def test_long_runs_are_never_behind_either(name: str, ranks: int, micro_batches: int, setting: ScheduleSpec):
    check_long(name, setting)


def check_long(name: str, setting: ScheduleSpec) -> None:
    assert auto_schedule._is_large(setting)
    _, timing = auto(setting)
    assert timing.makespan_s <= time_schedule(make_schedule(name, setting), setting).makespan_s + 1e-9


def open_request(ranks: int, micro_batches: int, times: tuple, **more: Any) -> CompareRequest:
    """Return a request that leaves the number of chunks open."""
    values = {"p2p_s": 0.0, "memory_limit": inf, "replicas": None, "fill": False, **more}
    return CompareRequest(ranks, micro_batches, None, times, **values)


def test_long_runs_are_tried_with_each_number_of_stages(monkeypatch: pytest.MonkeyPatch):
    alone = {"interleaved": interleaved}  # making the others takes most of the time
    monkeypatch.setattr(registry, "_comparable_schedules", lambda spec: alone)
    request = open_request(128, 138, (1, 2, 0))
    other = make_with_best_chunks("interleaved", replace(request, chunks=4))[1]
    assert make_with_best_chunks("auto", request)[1].makespan_s <= other.makespan_s + 1e-9


def test_two_replicas_are_tried_with_the_stages_of_each_schedule_that_has_them():
    request = open_request(4, 4, (1, 2, 0), replicas=2)
    other = make_with_best_chunks("bitpipe", request)[1]
    assert make_with_best_chunks("auto", request)[1].makespan_s <= other.makespan_s + 1e-9


def test_a_plugins_number_of_stages_is_tried_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SCHEDULES, "three-chunks", ScheduleEntry(interleaved, "", 3))
    request = open_request(4, 6, (1, 2, 0), p2p_s=0.3)
    other = make_with_best_chunks("three-chunks", request)[1]
    assert make_with_best_chunks("auto", request)[1].makespan_s <= other.makespan_s + 1e-9


def test_makespans_of_billionths_are_told_apart():
    times = (1e-10, 1e-10, 1e-10)
    other = make_with_best_chunks("zb-v", open_request(4, 8, times))[1]
    assert make_with_best_chunks("auto", open_request(4, 8, times))[1].makespan_s <= other.makespan_s * (1 + 1e-9)


@pytest.mark.soak
@pytest.mark.parametrize(("micro_batches", "hop"), [(160, 0.5), (161, 0.05)])
def test_long_runs_of_64_ranks_are_behind_no_registered_schedule(micro_batches: int, hop: float):
    request = replace(open_request(64, micro_batches, (1, 1, 1)), chunks=2, p2p_s=hop)
    made, _ = compare_schedules(request)
    assert {schedule.name for schedule, _ in made} >= {"interleaved", "hanayo", "zb-v"}
    check_first(made)


@pytest.mark.soak
def test_a_long_comparison_has_auto_first():
    check_first(compare_schedules(open_request(64, 600, (1, 1, 1)))[0])


def check_first(made: list[tuple[Schedule, Timing]]) -> None:
    """Check that nothing among schedules is shorter than `auto`, of those with one copy of the model."""
    makespan_s = {schedule.name: timing.makespan_s for schedule, timing in made if schedule.replicas == 1}
    assert makespan_s["auto"] <= min(makespan_s.values()) + 1e-6


def test_too_little_memory_is_refused():
    with pytest.raises(InfeasibleError, match=r"memory_limit 0.9 doesn't hold one micro-batch's activations"):
        make_schedule("auto", ScheduleSpec.uniform(4, 8, memory_limit=0.9))


# ----------------------------------------------------------------------------------------------------------------------
# Exact


@pytest.mark.parametrize(("chunks", "limit"), [(1, 2.0), (2, 3.0)])
def test_exact_is_proven_and_auto_near_it(chunks: int, limit: float):
    pytest.importorskip("ortools")
    setting = ScheduleSpec.uniform(3, 4, (1, 1.2, 0.8), chunks, p2p_s=0.2, memory_limit=limit)
    proof = solve_exact(setting)
    assert str(proof.gap) == f"proven optimal: no schedule on its placement takes less than {proof.gap.bound_s:.6g}"
    assert max(time_schedule(proof.schedule, setting).peak_activation) <= limit
    check(lower(proof.schedule, LoweringOptions()))
    makespan_s = auto(setting)[1].makespan_s
    assert makespan_bound_s(setting) - 1e-9 <= proof.gap.makespan_s <= makespan_s + 1e-9
    assert makespan_s <= 1.01 * proof.gap.makespan_s


def test_exact_agrees_with_a_known_optimum():
    pytest.importorskip("ortools")
    setting = ScheduleSpec.uniform(4, 8, (1, 1.2, 0.8), p2p_s=0.2, memory_limit=4)
    assert solve_exact(setting).gap.makespan_s == pytest.approx(30.6)


@pytest.mark.parametrize("limit_s", [1e-3, 0.5])
def test_exact_says_how_far_it_is_where_time_runs_out(limit_s: float):
    """Also before the solver has any bound."""
    pytest.importorskip("ortools")
    setting = ScheduleSpec.uniform(6, 12, (1, 1.3, 0.9), 2, p2p_s=0.2, memory_limit=3)
    proof = exact.solve(setting, make_schedule("auto", setting), limit_s)
    assert not proof.gap.proven
    assert proof.gap.share > 0
    assert str(proof.gap).startswith("at most ")


def test_exact_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(MusterError, match=r"^schedule exact needs OR-Tools: pip install 'muster-llm\[solver\]'$"):
        solve_exact(ScheduleSpec.uniform(2, 2))


def known_of(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[str, dict]:
    """The line on how good the schedule is, and what --json says of that."""
    assert main(["schedule", *flags]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "no schedule" in line]
    assert main(["schedule", *flags, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data)[-3:] == ["proven", "bound", "gap"]
    assert data["gap"] == pytest.approx(max(0.0, data["makespan"] / data["bound"] - 1), abs=1e-6)
    return line, data


def test_the_verb_says_how_good_the_schedule_is(capsys: pytest.CaptureFixture[str]):
    line, data = known_of(capsys, "auto", "--ranks", "2", "--microbatches", "4", "--vpp", "1")
    assert line == "proven optimal: no schedule with 1 stage per rank takes less than 13"
    assert (data["proven"], data["bound"], data["makespan"]) == (True, 13, 13)
    flags = ["--ranks", "4", "--microbatches", "8", "--p2p-time", "0.2", "--memory-limit", "2"]
    line, data = known_of(capsys, "auto", *flags)
    assert "above the optimum: no schedule with 2 stages per rank takes less than" in line
    assert not data["proven"]


def test_the_verb_says_what_exact_has_proven(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("ortools")
    line, data = known_of(capsys, "exact", "--ranks", "2", "--microbatches", "4", "--p2p-time", "0.5")
    assert line == f"proven optimal: no schedule on its placement takes less than {data['bound']:g}"
    assert data["proven"]
    assert data["makespan"] == data["bound"]
