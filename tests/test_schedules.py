"""Every schedule by name: what it costs and keeps, and that its order can be followed.

Bubbles and activations are those that the papers state, or that others reach, in units of a rank's whole share.
"""

import re
import sys
from itertools import combinations
from math import ceil, inf
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.config.named_model import load_model
from muster.schedule.build import build_program, program_key
from muster.schedule.check import check
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.timing import time_schedule
from muster.spec.errors import InfeasibleError
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.schedules import SCHEDULES, ScheduleEntry
from muster.spec.stage_placement import bidirectional_placement, looped_placement, wave_placement
from muster.spec.workload import Workload

MODEL = ModelSpec(vocab_size=32, hidden_size=8, num_layers=4, num_heads=2, num_kv_heads=2, intermediate_size=16)
PAGE = (Path(__file__).resolve().parents[1] / "docs/schedules.md").read_text()

RUNNABLE = {name for name, entry in SCHEDULES.items() if not (entry.searched or entry.is_asynchronous)}

many = settings(max_examples=100, deadline=None)


def setting_of(name: str, ranks: int, micro_batches: int, times=(1.0, 1.0, 1.0), **more) -> ScheduleSpec:
    """With the chunks and replicas that the schedule has if nobody says how many."""
    entry = SCHEDULES[name]
    own = {"chunks": entry.default_chunks, "replicas": entry.default_replicas}
    return ScheduleSpec.uniform(ranks, micro_batches, times, **{**own, **more})


def cost(name: str, *args, **more) -> list[float]:
    """Bubble, longest span bubble, and the most activations on any rank."""
    setting = setting_of(name, *args, **more)
    timing = time_schedule(make_schedule(name, setting), setting)
    found = timing.bubble_s, max(timing.span_bubble_s), max(timing.peak_activation)
    return [round(number, 9) for number in found]


def falling(first: float, by: float, ranks: int) -> tuple[float, ...]:
    return tuple(first - by * rank for rank in range(ranks))


# ----------------------------------------------------------------------------------------------------------------------
# Bubble, span bubble and peak activation at 4 ranks × 8 and × 16 micro-batches and at 8 × 32, all passes taking 1

COSTS = [
    ("gpipe", {}, [9, 9, 8], [9, 9, 16], [21, 21, 32]),
    ("1f1b", {}, [9, 9, 4], [9, 9, 4], [21, 21, 8]),
    ("interleaved", {}, [4.5, 4.5, 5.5], [4.5, 4.5, 5.5], [10.5, 10.5, 11.5]),
    ("interleaved", {"chunks": 4}, [2.25, 2.25, 4.75], [2.25, 2.25, 4.75], [5.25, 5.25, 9.75]),
    ("gis", {}, [4.5, 4.5, 4], [4.5, 4.5, 4], [10.5, 10.5, 8]),
    ("gis", {"chunks": 4}, [2.25, 2.25, 4], [2.25, 2.25, 4], [5.25, 5.25, 8]),
    ("breadth-first", {}, [4.5, 4.5, 8], [4.5, 4.5, 16], [10.5, 10.5, 32]),
    ("2bp-gpipe", {}, [6, 6, 8], [6, 6, 16], [14, 14, 32]),
    ("2bp-gpipe", {"fill": True}, [6, 6, 8], [6, 6, 16], [14, 14, 32]),
    ("2bp-1f1b", {}, [6, 6, 8], [6, 6, 16], [14, 14, 32]),
    ("2bp-1f1b", {"fill": True}, [3, 3, 8], [3, 3, 16], [7, 7, 32]),
    ("zb-h1", {}, [3, 3, 4], [3, 3, 4], [7, 7, 8]),
    ("zb-h2", {}, [3, 0, 7], [3, 0, 7], [7, 0, 15]),
    ("zb-v", {}, [1.5, 0, 4], [1.5, 0, 4], [3.5, 0, 8]),
    ("v-half", {}, [2.5, 2.5, 3], [2.5, 2.5, 3], [8.5, 8.5, 5]),
    ("v-min", {}, [5.5, 5.5, 2], [5.5, 5.5, 2], [13.0, 13.0, 4]),
    ("v-zb", {}, [1.5, 0, 4], [1.5, 0, 4], [3.5, 0, 8]),
    ("bitpipe", {}, [3, 3, 4], [5, 5, 4], [15, 15, 8]),
    ("dualpipe", {}, [1, 1, 5], [1, 1, 5], [3, 3, 9]),
    ("dualpipe-v", {}, [1.5, 1.5, 4.5], [1.5, 1.5, 4.5], [3.5, 3.5, 8.5]),
    ("zeropp", {}, [3, 3, 8], [3, 3, 8], [7, 7, 16]),
    ("zeropp", {"chunks": 4}, [1.5, 1.5, 8], [1.5, 1.5, 8], [3.5, 3.5, 16]),
]


@pytest.mark.parametrize(("name", "more", "at_4_8", "at_4_16", "at_8_32"), COSTS)
def test_costs(name: str, more: dict, at_4_8: list[float], at_4_16: list[float], at_8_32: list[float]):
    assert [cost(name, *size, **more) for size in ((4, 8), (4, 16), (8, 32))] == [at_4_8, at_4_16, at_8_32]


def test_every_schedule_has_a_line_of_costs():
    assert {name for name, *_ in COSTS} >= RUNNABLE - {"hanayo"}


@pytest.mark.parametrize(
    ("ranks", "chunks", "bubble", "peak"), [(4, 2, 6, 4), (4, 4, 3.25, 4), (8, 2, 14, 8), (8, 4, 7.5, 8)]
)
def test_waves_cost_least_with_one_micro_batch_per_rank(ranks: int, chunks: int, bubble: float, peak: float):
    assert cost("hanayo", ranks, ranks, chunks=chunks) == [bubble, bubble, peak]


PEAKS = {
    "gpipe": lambda p, m: (m,) * p,
    "1f1b": lambda p, m: falling(p, 1, p),
    "interleaved": lambda p, m: falling((3 * p - 1) / 2, 1, p),
    "gis": lambda p, m: falling(p, 0.5, p),
    "zb-h1": lambda p, m: (p,) * p,
    "zb-h2": lambda p, m: (2 * p - 1,) * p,
    "zb-v": lambda p, m: (p,) * p,
    "v-half": lambda p, m: (p / 2 + 1,) * p,
    "bitpipe": lambda p, m: tuple(p - 0.5 * max(p // 2 - 1 - rank, rank - p // 2) for rank in range(p)),
    "dualpipe": lambda p, m: (p + 1,) * p,
    "dualpipe-v": lambda p, m: (p + 0.5,) * p,
}
"""Activations on each rank with an even number of them and twice as many micro-batches or more."""


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_of_every_rank(name: str):
    for ranks, micro_batches in ((4, 8), (4, 16), (8, 32)):
        setting = setting_of(name, ranks, micro_batches)
        peaks = time_schedule(make_schedule(name, setting), setting).peak_activation
        assert peaks == PEAKS[name](ranks, micro_batches)


# ----------------------------------------------------------------------------------------------------------------------
# Closed forms, for unequal times and p2p times


@many
@given(
    ranks=st.integers(1, 12),
    rounds=st.integers(1, 4),
    extra=st.integers(0, 11),
    chunks=st.integers(1, 4),
    times=st.tuples(st.floats(0.5, 2), st.floats(0.5, 2), st.floats(0.5, 2)),
)
def test_closed_forms_hold(ranks: int, rounds: int, extra: int, chunks: int, times: tuple[float, float, float]):
    """From as many micro-batches as ranks on, multiples or not."""
    forward, inputs, weights = times
    size = (ranks, ranks * rounds + extra, times)
    whole, split = (ranks - 1) * sum(times), (ranks - 1) * (forward + inputs)
    assert cost("gpipe", *size)[0] == pytest.approx(whole)
    assert cost("1f1b", *size)[0] == pytest.approx(whole)
    for name in ("interleaved", "gis", "breadth-first"):
        assert cost(name, *size, chunks=chunks)[0] == pytest.approx(whole / chunks)
    assert cost("2bp-gpipe", *size)[0] == pytest.approx(split)
    if weights <= min(forward, inputs):
        assert cost("zb-h1", *size)[0] == pytest.approx(split - (ranks - 1) * weights)


# Bubble and most activations of a rank that the entries of the registry and the page claim, all passes taking 1, for p
# ranks, m ≥ p micro-batches and v stages per rank.
CLAIMS = {
    "gpipe": lambda p, m, v: (3 * (p - 1), m),
    "1f1b": lambda p, m, v: (3 * (p - 1), p),
    "interleaved": lambda p, m, v: (3 * (p - 1) / v, p + (p - 1) / v if m % p == 0 else None),
    "gis": lambda p, m, v: (3 * (p - 1) / v, p if m % p == 0 else None),
    "breadth-first": lambda p, m, v: (3 * (p - 1) / v, m),
    "2bp-gpipe": lambda p, m, v: (2 * (p - 1), m),
    "2bp-1f1b": lambda p, m, v: (2 * (p - 1), m),
    "zb-h1": lambda p, m, v: (p - 1, p),
    "zb-h2": lambda p, m, v: (p - 1 + ceil(max(0, 2 * p - 2 - m) / 2), 2 * p - 1),
    "zb-v": lambda p, m, v: (max((p - 1) / 2, 2 * p - 1 - m), p),
    "v-half": lambda p, m, v: (None, p // 2 + 1),
    "v-min": lambda p, m, v: (None, None),
    "v-zb": lambda p, m, v: ((p - 1) / 2, p),
    "hanayo": lambda p, m, v: (None, p if m == p else None),
    "bitpipe": lambda p, m, v: ((p - 2) * (1 + (m / p - 1) / 2) if m % p == 0 else None, p),
    "dualpipe": lambda p, m, v: (p / 2 - 1 + max(0, min(p - 2, 2 * p - m)) if m % 2 == 0 else None, p + 1),
    "dualpipe-v": lambda p, m, v: ((p - 1) / 2 + max(0, min(p - 1, 2 * p - m)), p + 0.5),
    "zeropp": lambda p, m, v: (2 * (p - 1) / v, 2 * p if m % p == 0 else None),
}
"""A claim of None stands for one that the page gives as a bound; those are `BOUNDS`."""
BOUNDS = {
    "v-half": lambda p, m, v: (2 * (p - 1), p / 2 + 1),  # "about half of 1F1B's": up to two thirds where m is near p
    "v-min": lambda p, m, v: (2 * (p - 1), p / 3 + 4 / 3),
    "hanayo": lambda p, m, v: (4.5 * (p - 1) / v if m == p else inf, 2 * p - 1),
}


def check_claims(name: str, ranks: int, micro_batches: int) -> None:
    """Compare a schedule with what it claims, for each number of stages per rank."""
    entry = SCHEDULES[name]
    for chunks in (entry.chunks,) if entry.chunks else (2, 4):
        bubble, _, peak = cost(name, ranks, micro_batches, chunks=chunks)
        claimed = CLAIMS[name](ranks, micro_batches, chunks)
        most = BOUNDS.get(name, lambda *_: (inf, inf))(ranks, micro_batches, chunks)
        assert bubble == pytest.approx(claimed[0] if claimed[0] is not None else bubble), (name, ranks, micro_batches)
        expected = peak if claimed[1] is None else min(claimed[1], micro_batches)
        assert peak == pytest.approx(expected), (name, ranks, micro_batches)
        assert bubble <= most[0] + 1e-9, (name, ranks, micro_batches)
        assert peak <= most[1] + 1e-9, (name, ranks, micro_batches)


def micro_batch_numbers(ranks: int) -> list[int]:
    near = (
        ranks,
        ranks + 1,
        3 * ranks // 2 - 1,
        3 * ranks // 2,
        2 * ranks - 2,
        2 * ranks - 1,
        2 * ranks,
        3 * ranks + 1,
    )
    return sorted({number for number in near if number >= ranks})


@pytest.mark.parametrize("name", CLAIMS)
def test_schedules_keep_what_they_claim_from_as_many_micro_batches_as_ranks_on(name: str):
    for ranks in (2, 3, 4, 7):
        if SCHEDULES[name].default_replicas == 1 or ranks % 2 == 0:
            for micro_batches in micro_batch_numbers(ranks):
                check_claims(name, ranks, micro_batches)


@pytest.mark.soak
@pytest.mark.parametrize("name", CLAIMS)
def test_claims_on_more_ranks(name: str):
    for ranks in (*range(2, 9), 12, 16):
        if SCHEDULES[name].default_replicas == 1 or ranks % 2 == 0:
            for micro_batches in range(ranks, 3 * ranks + 2):
                check_claims(name, ranks, micro_batches)


def test_every_schedule_has_claims():
    assert set(CLAIMS) == RUNNABLE


def test_the_page_gives_the_bubbles_of_few_micro_batches():
    for name in ("zb-h2", "zb-v", "dualpipe", "dualpipe-v"):
        row = re.search(rf"^\| `{name}` \| m = .*$", PAGE, re.MULTILINE)
        assert row is not None
        few, many_ = (float(cell) for cell in row[0].strip("| ").split(" | ")[-2:])
        assert [cost(name, 8, 8)[0], cost(name, 8, 16)[0]] == [few, many_]


P2P_AND_TIMES = [
    ("gpipe", [9.6, 10.8, 9.0]),
    ("1f1b", [11.8, 17.4, 9.0]),
    ("interleaved", [5.9, 8.7, 4.5]),
    ("breadth-first", [5.1, 6.3, 4.5]),
    ("zb-h1", [4.2, 6.6, 4.2]),
    ("zb-h2", [3.3, 3.9, 3.0]),
    ("zb-v", [2.8, 5.5, 1.8]),
]


@pytest.mark.parametrize(("name", "bubbles"), P2P_AND_TIMES)
def test_costs_of_p2p_and_unequal_times(name: str, bubbles: list[float]):
    """At 4 ranks × 16 micro-batches: p2p times of 0.1 and of 0.3, and times of 1, 1.2 and 0.8."""
    cases = ({"p2p_s": 0.1}, {"p2p_s": 0.3}, {"times": (1, 1.2, 0.8)})
    assert [cost(name, 4, 16, **more)[0] for more in cases] == bubbles


@pytest.mark.parametrize(
    ("name", "static"), [("v-half", [8.9, 17.7, 5.9]), ("v-min", [12.9, 27.1, 15.2]), ("v-zb", [3.0, 6.3, 2.0])]
)
def test_orders_made_for_the_times_lose_less(name: str, static: list[float]):
    """Lose less than orders made for equal times and no p2p time, in the cases of `P2P_AND_TIMES`."""
    cases = ({"p2p_s": 0.1}, {"p2p_s": 0.3}, {"times": (1, 1.2, 0.8)})
    assert all(cost(name, 4, 16, **more)[0] < bubble for more, bubble in zip(cases, static, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# Any setting


SECONDS = st.floats(0, 3)


@st.composite
def any_settings(draw) -> tuple[str, ScheduleSpec]:
    name = draw(st.sampled_from(sorted(RUNNABLE)))
    entry = SCHEDULES[name]
    replicas = entry.replicas or draw(st.integers(1, 2))
    chunks = entry.chunks or replicas * draw(st.integers(1, 4))
    ranks, micro_batches = draw(st.integers(1, 16)), draw(st.integers(1, 64))
    depth = ranks * chunks // replicas
    forward, inputs, weights = (tuple(draw(st.lists(SECONDS, min_size=depth, max_size=depth))) for _ in range(3))
    p2p_s, fill = draw(SECONDS), draw(st.booleans())
    return name, ScheduleSpec(
        ranks, micro_batches, chunks, forward, inputs, weights, p2p_s, replicas=replicas, fill=fill
    )


@many
@given(any_settings())
def test_every_schedule_can_be_followed_or_says_why_not(drawn: tuple[str, ScheduleSpec]):
    name, setting = drawn
    if (name in ("dualpipe", "bitpipe") and setting.num_ranks % 2) or (name == "hanayo" and setting.chunks % 2):
        with pytest.raises(InfeasibleError, match="the nearest that runs"):
            make_schedule(name, setting)
        return
    schedule = make_schedule(name, setting)
    assert schedule.name == name
    assert time_schedule(schedule, setting).bubble_s >= -1e-9
    check(lower(schedule, LoweringOptions()))


def test_placements():
    assert looped_placement(3, 2) == (0, 1, 2, 0, 1, 2)
    assert wave_placement(3, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    assert bidirectional_placement(wave_placement(2, 2), 2) == (0, 1, 1, 0, 1, 0, 0, 1)


def test_groups_get_smaller_until_they_fit_in_memory():
    """With groups of half as many micro-batches as ranks GIS keeps (v + 1) / 2v as much."""
    assert cost("gis", 8, 24, memory_limit=8) == [10.5, 10.5, 8]
    assert cost("gis", 8, 24, memory_limit=7.5) == [13.5, 13.5, 7]
    assert cost("gis", 8, 24, memory_limit=6) == [26.5, 26.5, 6]
    with pytest.raises(InfeasibleError, match="gis keeps at least 6 micro-batches' activations .* the limit of 5"):
        cost("gis", 8, 32, memory_limit=5)


def test_units_get_smaller_until_they_fit_in_memory():
    assert cost("zeropp", 4, 16, memory_limit=8)[2] == 8
    assert cost("zeropp", 4, 16, memory_limit=3)[2] == 3
    with pytest.raises(InfeasibleError, match="zeropp keeps one micro-batch's activations or more"):
        cost("zeropp", 4, 16, memory_limit=0.5)


def test_requirements_of_schedules():
    for name in ("dualpipe", "bitpipe"):
        with pytest.raises(
            InfeasibleError, match="an even number of pipeline ranks, got 3; the nearest that runs is 4"
        ):
            cost(name, 3, 8)
        with pytest.raises(InfeasibleError, match="runs 2 copies of the model, got replicas 1; the nearest"):
            cost(name, 4, 8, replicas=1)
    with pytest.raises(InfeasibleError, match="two stages per pipeline rank for each wave, got 3; the nearest .* 4"):
        cost("hanayo", 4, 8, chunks=3)
    with pytest.raises(InfeasibleError, match="zb-v runs 2 stages per pipeline rank, got 4"):
        cost("zb-v", 4, 8, chunks=4)


# ----------------------------------------------------------------------------------------------------------------------
# What the page says


def test_the_page_lists_costs_of_p2p_and_unequal_times():
    rows = {
        row[1]: [float(cell) for cell in row[2].split("|")]
        for row in re.finditer(r"^\| `(\S+)` \|([\d.| ]*)\|$", PAGE, re.M)
    }
    assert set(rows) == RUNNABLE
    cases = ({}, {"p2p_s": 0.1}, {"p2p_s": 0.3}, {"times": (1, 1.2, 0.8)})
    for name, bubbles in rows.items():
        assert [cost(name, 4, 16, **more)[0] for more in cases] == bubbles, name


def test_the_schedule_that_the_page_adds(monkeypatch: pytest.MonkeyPatch):
    file, entry, line = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert sum(part.count("\n") for part in (file, entry, line)) <= 30
    module = ModuleType("muster.schedule.eager_1f1b")
    exec(file, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(SCHEDULES, "eager-1f1b", eval(f"{{{entry}}}", {"ScheduleEntry": ScheduleEntry})["eager-1f1b"])
    name, more, *costs = eval(line)
    test_costs(name, more, *costs)
    assert [cost(name, 4, 16, p2p_s=p2p_s)[0] for p2p_s in (0.1, 0.3)] == [9.6, 10.8]
    check(build_program(Plan(pp=4, schedule=name), MODEL, Workload(seq_len=8, global_batch_size=8)))


def test_plans_of_one_key_have_one_program():
    """Plans that differ where it matters to their order, and where not: equal keys mean equal Programs."""
    model = load_model("llama3-8b")
    workload = Workload(seq_len=2048, global_batch_size=32)
    names = [
        *("dp8", "dp4-tp2", "dp4-tp2-sp", "dp8-z1", "dp4-mb2-z1", "dp2-pp4", "dp2-pp4-z1", "dp2-pp4-z2", "dp1-pp4-z1"),
        *("dp2-pp4-mb2-z1", "dp4-pp4-z1", "dp2-pp4v2-z1-sinterleaved", "dp2-pp4-z1-szbh1", "dp2-pp4-z1-oact"),
        *("dp2-pp4-z1-rfull", "dp2-tp2-pp4-sp-z1", "dp1-pp4-mb2-z1", "dp2-pp4-mb2-z1-relem", "dp2-pp4-z1-fp8"),
    ]
    plans = [parse_plan_name(name) for name in names]
    found = [(program_key(plan, model, workload), build_program(plan, model, workload)) for plan in plans]
    for (key, program), (other_key, other) in combinations(found, 2):
        assert key != other_key or program == other
    assert len(plans) / 2 < len({key for key, _ in found}) < len(plans)
