"""The report as text: numbers, curves, scales, and the page made of them."""

import math
import re
import stat
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.report.charts import Chart, Series, draw_chart
from muster.report.curves import MAX_BUCKETS, Point, downsample, line_segments, metric_points, non_finite_steps, smooth
from muster.report.html import Html, element
from muster.report.page import render_report, write_report
from muster.report.report_data import PredictedVsMeasured, RunInfo
from muster.report.scales import fit_scale, log_scale, tick_labels, time_labels
from muster.simulate.timeline import Timeline
from muster.spec import formatting
from muster.spec.errors import MusterError
from tests.report_example import metrics, report
from tests.sampling import quick_sample

# ----------------------------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (formatting.format_seconds(0), "0 s"),
        (formatting.format_seconds(1.2e-8), "12.0 ns"),
        (formatting.format_seconds(0.00999996), "10.0 ms"),
        (formatting.format_seconds(0.99996), "1.00 s"),
        (formatting.format_seconds(59.96), "1 min 00 s"),
        (formatting.format_seconds(7630), "2 h 07 min"),
        (formatting.format_seconds(-0.5), "−500 ms"),
        (formatting.format_seconds(None), "n/a"),
        (formatting.format_bytes(0), "0 B"),
        (formatting.format_bytes(1.5 * 2**20), "1.50 MiB"),
        (formatting.format_bytes(2**30 - 1), "1.00 GiB"),
        (formatting.format_count(412_345), "412k"),
        (formatting.format_count(999_990), "1.00M"),
        (formatting.format_count(87), "87"),
        (formatting.format_change(-0.0314), "3.1%"),
        (formatting.format_change(15.72), "16.7x"),
        (formatting.format_number(3e-4), "3e−4"),
        (formatting.format_number(1.23456), "1.235"),
        (formatting.format_loss(3.3801), "3.380"),
        (formatting.format_loss(12345.0), "1.234e4"),
        (formatting.format_loss(math.nan), "NaN"),
        (formatting.format_number(math.nan), "NaN"),
        (formatting.format_number(-math.inf), "−∞"),
        (formatting.format_error(1.1, 1.0, "s"), "+10.0 %"),
        (formatting.format_error(0.14, 0.16, "fraction"), "−2.0 points"),
        (formatting.format_error(1, 0, "bytes"), "n/a"),
        (formatting.format_error(None, 1, "s"), "n/a"),
    ],
)
def test_formatted_numbers(words: str, expected: str) -> None:
    assert words == expected


@given(st.floats())
def test_any_number_can_be_formatted(value: float) -> None:
    for unit in ("s", "bytes", "fraction"):
        assert formatting.format_value(value, unit)
    assert formatting.format_count(value)
    assert formatting.format_number(value)


# ----------------------------------------------------------------------------------------------------------------------
# Curves and scales


def test_points_of_a_resumed_run() -> None:
    rows = [{"step": 2, "x": 5.0}, {"step": 1, "x": 7}, {"step": 2, "x": 6.0}, {"step": 3}, {"step": 4, "x": None}, {}]
    points = metric_points(rows, "x")
    assert points[:3] == [(1, 7), (2, 6), (3, None)]
    assert non_finite_steps(points) == [4]
    assert [len(run) for run in line_segments(points)] == [2]


def test_thinning_keeps_peaks_ends_and_gaps() -> None:
    points = [Point(step, math.sin(step)) for step in range(50_000)]
    points[31_234] = Point(31_234, 99.0)
    points[40_000:42_000] = [Point(step, None) for step in range(40_000, 42_000)]
    few = downsample(points)
    assert len(few) <= 2 * MAX_BUCKETS + 2
    assert few[0] == points[0]
    assert few[-1] == points[-1]
    assert points[31_234] in few
    assert len(line_segments(few)) == 2
    assert [point.step for point in few] == sorted(point.step for point in few)


def test_smoothing_neither_lags_nor_follows_a_spike() -> None:
    line = [Point(step, 2.0 * step) for step in range(1000)]
    assert all(p.value == pytest.approx(2 * p.step, abs=30 if p.step > 970 else 1e-9) for p in smooth(line))
    line[500] = Point(500, 1e30)
    assert max(p.value for p in smooth(line) if p.value is not None) < 2000
    assert smooth([]) == []


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.booleans())
def test_axes_hold_their_values_and_name_their_ticks(low: float, span: float, from_zero: bool) -> None:
    scale = fit_scale([low, low + span], from_zero)
    assert scale.low <= low < low + span <= scale.high
    assert 2 <= len(scale.ticks) <= 6
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks)
    assert len(set(scale.labels)) == len(scale.ticks)
    assert scale.fraction(low) < scale.fraction(low + span)


def test_axes_of_hard_values() -> None:
    assert fit_scale([]).low == 0
    for value in (0.0, -3.0, 1e-12, 1e99):
        scale = fit_scale([value], from_zero=True)
        assert scale.low <= value < scale.high
    wide = fit_scale([1e-3, 1.0, 1e6], allow_log=True)
    assert wide.log
    assert wide.fraction(1.0) == pytest.approx(1 / 3, abs=0.02)
    assert len(log_scale(25.0, 80.0).ticks) >= 3
    assert tick_labels([0, 2.5e-4, 5e-4]) == ("0", "2.5e−4", "5.0e−4")
    assert tick_labels([0, 12_500, 25_000]) == ("0", "12.5k", "25.0k")
    assert time_labels([0, 0.025, 0.05]) == ("0 ms", "25 ms", "50 ms")


# ----------------------------------------------------------------------------------------------------------------------
# The page as text


class _Nesting(HTMLParser):
    """Parser that fails on tags closed out of order, and collects everything that a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [
            f"{name}={value}" for name, value in attrs if name in ("src", "href", "data", "action", "srcset")
        ]
        self.loads += [f"{name}={value}" for name, value in attrs if name.startswith("on") or "url(" in (value or "")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["style"]:
            self.loads += re.findall(r"@import\S*|url\([^)]*\)", data)


def parse(page: str) -> _Nesting:
    parser = _Nesting()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_page_is_whole_and_loads_nothing() -> None:
    parser = parse(render_report(report()))
    assert parser.loads == []
    assert parser.tags.count("script") == 6  # one each for the four charts, the timelines and the page
    assert not {"link", "iframe", "img", "object", "embed", "base"} & set(parser.tags)


def test_all_text_is_escaped() -> None:
    evil = "</script></style></pre><img src=\"http://evil/\" onerror='alert(1)'>&amp;\ud800"
    facts = RunInfo(1, 1, 1, evil, 0, evil, evil, evil)
    rows = (PredictedVsMeasured(evil, 1.0, None, "s"),)
    whole = {"title": evil, "plan_name": evil, "sample_prompt": evil, "sample_text": evil, "notes": (evil,)}
    page = render_report(report(facts=facts, comparison=rows, **whole))
    parser = parse(page)
    assert "img" not in parser.tags
    assert parser.loads == []
    assert "&amp;amp;" in page


def test_names_of_curves_are_escaped_in_scripts() -> None:
    markup = draw_chart(Chart("key", "Title", [Series("</script><b>", [Point(1, 1.0), Point(2, 2.0)])]))
    assert "</script><b>" not in markup


def test_element_escapes_all_but_markup() -> None:
    assert element("p", "<", Html("<b>"), class_='"', x=1.5, y=None) == '<p class="&quot;" x="1.5">&lt;<b></p>'


@pytest.mark.parametrize(
    "rows",
    [
        [],
        metrics(1),
        [{"step": 1, "train/loss": math.nan}],
        [{"step": 1, "train/loss": None, "train/grad_norm": math.inf}, {"step": 2, "train/loss": 1e300}],
        [{"step": step, "train/loss": 2.0} for step in range(5)],
        [{"train/loss": 1.0}],
    ],
    ids=["no rows", "one step", "NaN", "all broken", "constant", "no step"],
)
def test_odd_metrics_make_a_page(rows: list[dict]) -> None:
    page = render_report(report(metrics=rows, validation_loss=1e9))
    parse(page)
    assert not re.search(r'(?:d|x|y|x1|y1)="[^"]*(?:nan|inf)', page, re.IGNORECASE)


def test_validation_losses_are_a_curve_and_skipped_steps_are_marked() -> None:
    rows = metrics(60)
    plain = render_report(report(metrics=rows))
    assert "validation</span>" not in plain
    assert "skipped step" not in plain
    for row in rows[9::10]:
        row["eval/loss"] = 2.0 + 1 / row["step"]
    rows[20] |= {"skipped": "its loss 90 is a spike", "train/loss": 90.0}
    page = render_report(report(metrics=rows))
    assert "validation</span>" in page
    loss, norm, rate = (page.split('class="chart"')[n] for n in (1, 2, 3))
    assert '["validation",[10,20,30,40,50,60],["2.1' in loss
    assert "skipped step" in loss
    assert ">▽<" in loss
    assert ">▽<" in norm
    assert ">▽<" not in rate
    parse(page)


def test_no_timeline_makes_a_page() -> None:
    page = render_report(report(predicted=Timeline("predicted", 2, ()), measured=Timeline("measured", 4, ())))
    assert "No timeline was recorded" in page


@pytest.mark.parametrize(("steps", "most_bytes"), quick_sample([(20_000, 1.5e6), (100_000, 2e6)], 0))
def test_large_runs_make_small_files(tmp_path: Path, steps: int, most_bytes: float) -> None:
    write_report(tmp_path / "report.html", report(steps, pp=64, micro_batches=64, copies=1))
    assert (tmp_path / "report.html").stat().st_size < most_bytes


def test_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, report(1))
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert path.stat().st_mode & stat.S_IRUSR
    with pytest.raises(MusterError, match="can't be written to .*Not a directory"):
        write_report(path / "report.html", report(1))
    assert "</html>" in path.read_text()
