"""Timelines and tables, on the page and in the terminal, and the colours that both use."""

import io
import math
import re
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from muster.report.gantt import draw_timelines
from muster.report.palette import PAINTS, paint_of
from muster.report.terminal import comparison_table, gantt_text, plan_lines
from muster.report.timeline_rows import MAX_RANKS, timeline_rows
from muster.schedule.action import Action
from muster.simulate.timeline import Event, Timeline
from muster.spec.layer_strategy import LayerOverride, LayerStrategy
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload
from tests.report_example import pipeline, report

# ----------------------------------------------------------------------------------------------------------------------
# Colours


def _rgb(colour: str) -> list[float]:
    """Linear light of `#rrggbb`."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def _times(matrix: list[list[float]], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def _lab(rgb: list[float]) -> list[float]:
    xyz = _times([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]], rgb)
    x, y, z = (max(v / w, 0) ** (1 / 3) for v, w in zip(xyz, (0.9505, 1.0, 1.089), strict=True))
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


VISIONS = {  # Machado, Oliveira and Fernandes 2009, table 1, severity 1.0
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("paper", ["light", "dark"])
def test_colours_of_one_lane_differ_for_every_eye(vision: str, paper: str) -> None:
    """CIE76 distances; 10 is clearly different side by side."""
    for lane in (("F", "B", "I", "W", "STEP"), ("UNSHARD", "GRAD_NORM")):
        seen = {kind: _lab(_times(VISIONS[vision], _rgb(getattr(paint_of(kind), paper)))) for kind in lane}
        for one, two in combinations(lane, 2):
            assert math.dist(seen[one], seen[two]) > 12, (one, two)


def test_text_on_colours_is_legible() -> None:
    def luminance(colour: str) -> float:
        return sum(a * b for a, b in zip(_rgb(colour), (0.2126, 0.7152, 0.0722), strict=True))

    for paint in PAINTS:
        for ground, text in ((paint.light, paint.light_text), (paint.dark, paint.dark_text)):
            low, high = sorted((luminance(ground), luminance(text)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, paint.key


# ----------------------------------------------------------------------------------------------------------------------
# Timelines


def test_boxes_are_as_long_as_their_events() -> None:
    events = (
        Event(0, "compute", Action("F", 0, 0), 5.0, 6.0),
        Event(0, "compute", Action("B", 0, 0), 7.0, 9.0),
        Event(0, "compute", Action("F", 0, 1), 6.5, 6.5),
    )
    markup = draw_timelines(Timeline("predicted", 1, events), Timeline("measured", 1, events[:1]))
    boxes = re.findall(r'd="M(\d+) \S+?h(\d+)"[^>]*class="mark box paint-(\w+)" data-boxes="([^"]*)"', markup)
    assert boxes == [
        ("0", "25000", "forward", "0F0"),
        ("50000", "50000", "backward", "0B0"),
        ("0", "25000", "forward", "0F0"),
    ]
    assert "pipeline rank 0" in markup
    assert "world rank 0" in markup


def test_very_many_ranks_are_sampled() -> None:
    rows = timeline_rows(Timeline("predicted", 500, pipeline(500, 2)))
    assert (rows.ranks[0], rows.ranks[-1]) == (0, 499)
    assert len(rows.ranks) == MAX_RANKS
    assert "64 of 500 ranks are shown" in draw_timelines(Timeline("predicted", 500, pipeline(500, 2)))


# ----------------------------------------------------------------------------------------------------------------------
# The terminal


def test_comparison_table() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(comparison_table(report().comparison))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["step", "210", "ms", "200", "ms", "+5.0", "%"] in lines
    assert ["bubble", "14.0", "%", "16.0", "%", "−2.0", "points"] in lines
    assert ["memory:", "peak", "n/a", "412", "MiB", "n/a"] in lines


def test_plan_lines() -> None:
    model = ModelSpec(name="small", vocab_size=256, hidden_size=64, num_layers=5, num_heads=4, intermediate_size=128)
    plan = Plan(pp=2, dp_shard=2, micro_batch_size=2, precision="fp32")
    assert plan_lines(plan, model, Workload(seq_len=128, global_batch_size=32), 8).splitlines() == [
        f"plan      dp2-pp2-mb2-fp32  ({plan.hash})",
        "model     small, 5 layers, 238k parameters",
        "ranks     4 = pp 2 × dp_shard 2",
        "stages    0: embedding, layers 0–2",
        "          1: layers 3–4, head",
        "schedule  1f1b, 8 micro-batches of 2",
        "storage   fp32 compute; z3, no recompute, no offload",
        "step      32 sequences × 128 = 4,096 tokens",
    ]
    mixed = Plan(pp=12, overrides=(LayerOverride(start=0, count=1, strategy=LayerStrategy(recompute="full")),))
    text = plan_lines(mixed, model, Workload(seq_len=128, global_batch_size=1), 1)
    assert "… 4 more" in text
    assert "no ZeRO, full recompute, no offload or, by layer, no ZeRO, no recompute, no offload" in text


@given(st.integers(1, 4), st.integers(1, 12), st.integers(30, 120))
def test_grid_is_legible_without_colour(pp: int, micro_batches: int, width: int) -> None:
    lines = gantt_text(Timeline("predicted", pp, pipeline(pp, micro_batches)), width).plain.splitlines()
    rows = lines[2 : 2 + pp]
    assert {len(row) for row in rows} == {width}
    for row in rows:
        assert re.fullmatch(r"\d [A-Za-z0-9_.=\- ]+", row)
        boxes = [int(number) for number in re.findall(r"F(\d+)", row)]
        assert boxes == sorted(boxes)


def test_grid_shows_the_pipeline() -> None:
    first, second = gantt_text(Timeline("measured", 2, pipeline(2, 2)), 82).plain.splitlines()[2:4]
    assert re.fullmatch(r"0 un.*F0-+F1-+\.+B0=+B1=+\.*gr.*STEP.*", first)
    assert re.fullmatch(r"1 un[sh.]+F0-+F1-+\.*B0=+B1=+\.+gr.*STEP.*", second)
    starts = [line.index("F0") for line in (first, second)]
    assert all(one < two for one, two in pairwise(starts))
    assert gantt_text(Timeline("measured", 2, ())).plain == "no timeline was recorded"
