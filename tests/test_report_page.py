"""The report in a real browser: drawn, legible and quiet at every width and in both colour schemes."""

import re
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.planner.training_cost import training_cost
from muster.report.page import render_report, write_report
from muster.report.prediction import prediction_page
from muster.simulate.predict import predict
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.workload import Workload
from tests.chromium import Browser
from tests.conftest import require_chromium
from tests.page_audit import audit, blank_pictures
from tests.report_example import metrics, report, write_run
from tests.sampling import quick_sample

PHONE, DESKTOP = 390, 1280


def spiky() -> list[dict]:
    rows = metrics(120)
    for row in rows[20:30]:
        del row["train/loss"]
    for row in rows[60:63]:
        row["train/loss"], row["train/grad_norm"] = None, float("nan")
    rows[90]["train/grad_norm"] = 5e4
    return rows


EXAMPLES = {
    "demo": report,
    "one step": lambda: report(1, micro_batches=1, validation_loss=None, notes=(), comparison=()),
    "gaps and spikes": lambda: report(metrics=spiky(), validation_loss=float("nan")),
    "64 ranks": lambda: report(3000, pp=64, micro_batches=64, copies=1),
    "long words": lambda: report(title="a" * 200, plan_name="dp2-" * 60, sample_text="x" * 500, notes=("y" * 300,)),
}
WINDOWS = [(PHONE, "light"), (PHONE, "dark"), (DESKTOP, "light"), (DESKTOP, "dark")]


@lru_cache
def example_page(example: str) -> str:
    return render_report(EXAMPLES[example]())


SIDEWAYS = (
    "[...document.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1"
    " && /auto|scroll/.test(getComputedStyle(e).overflowX)).map(e => e.className)"
)
"""Boxes of a page that scroll sideways."""


def test_nothing_to_complain_about_in_a_prediction(browser: Browser, tmp_path: Path) -> None:
    """The prediction has many ranks, and memory with more columns than a window."""
    model, cluster, workload = (
        load_model("llama3-8b"),
        load_cluster("64xa100"),
        Workload(seq_len=4096, global_batch_size=64),
    )
    found = predict(model, parse_plan_name("dp2-tp4-pp8-mb1-z1-sp"), workload, cluster)
    training = training_cost(found, 1e12)
    (tmp_path / "prediction.html").write_text(prediction_page(found, "llama3-8b on 64xa100", training))
    for width, scheme in WINDOWS:
        page = browser.open(tmp_path / "prediction.html", width, dark=scheme == "dark")
        assert audit(page, pictures=1) == []
    page = browser.open(tmp_path / "prediction.html", 1280)
    assert page.evaluate(SIDEWAYS) == []
    text = page.evaluate("document.body.innerText")
    for words in ("dp2-tp4-sp-pp8-mb1-z1-bf16", "64 sequences × 4,096", "1f1b, 32 micro-batches of 1", "64xa100"):
        assert words in text
    assert "The whole training" in text


def test_a_prediction_that_does_not_fit_keeps_all_changes(browser: Browser, tmp_path: Path) -> None:
    workload = Workload(seq_len=4096, global_batch_size=64)
    own = load_model("llama3-8b"), parse_plan_name("dp2-pp4-z1"), workload, load_cluster("8xa100-40")
    found = predict(*own)
    assert len(found.memory_fixes) > 1
    (tmp_path / "prediction.html").write_text(prediction_page(found, "llama3-8b on 8xa100-40"))
    page = browser.open(tmp_path / "prediction.html", 1280)
    assert page.evaluate(SIDEWAYS) == []
    text = page.evaluate("document.body.innerText")
    for fix in found.memory_fixes:
        assert f"{', '.join(fix.changes)}: {format_plan_name(fix.plan)}" in text


@pytest.mark.parametrize("count", quick_sample([3, 12], 1))
def test_nothing_to_complain_about_in_a_comparison(browser: Browser, tmp_path: Path, count: int) -> None:
    """At phone and desktop width, in light and dark; twelve runs have long names, too."""
    names = [f"run-{i}" if count < 12 else f"a-run-with-a-long-name-{i}" for i in range(count)]
    runs = [write_run(tmp_path / name, metrics(30 + 20 * i), lr=f"{1 + i}e-4") for i, name in enumerate(names)]
    page_file = tmp_path / "comparison.html"
    assert main(["report", *map(str, runs), "--html", str(page_file)]) == 0
    for width, scheme in WINDOWS:
        page = browser.open(page_file, width, dark=scheme == "dark")
        assert audit(page, pictures=1) == []
    assert blank_pictures(page) == []
    looks = page.evaluate(
        "[...document.querySelectorAll('#loss .mark:not(.dots)')]"
        ".map(m => getComputedStyle(m).stroke + getComputedStyle(m).strokeDasharray)"
    )
    assert len(set(looks)) == len(looks) == count


EACH_IN_EACH = [(example, *window) for example in EXAMPLES for window in WINDOWS]
IN_TWO = [index for index in range(len(EACH_IN_EACH)) if index // 4 % 2 == (index % 4 in (1, 2))]
"""A phone and a desktop for each example, one of them light and one dark, which change places with each example."""


@pytest.mark.parametrize(("example", "width", "scheme"), quick_sample(EACH_IN_EACH, *IN_TWO))
def test_nothing_to_complain_about(browser: Browser, tmp_path: Path, example: str, width: int, scheme: str) -> None:
    (tmp_path / "report.html").write_text(example_page(example))
    page = browser.open(tmp_path / "report.html", width, dark=scheme == "dark")
    assert audit(page, pictures=6) == []


@pytest.mark.parametrize(("example", "width", "scheme"), [("demo", PHONE, "dark"), ("one step", DESKTOP, "light")])
def test_every_picture_is_seen(browser: Browser, tmp_path: Path, example: str, width: int, scheme: str) -> None:
    (tmp_path / "report.html").write_text(example_page(example))
    assert blank_pictures(browser.open(tmp_path / "report.html", width, dark=scheme == "dark")) == []


def test_blank_pictures_are_found(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(example_page("demo").replace("</style>", "#loss svg svg{opacity:0}</style>"))
    assert blank_pictures(browser.open(tmp_path / "report.html")) == ["Loss"]


FAULTS = {
    "throws": (lambda html: html.replace("</body>", "<script>nothing.here()</script></body>"), "not defined"),
    "logs an error": (
        lambda html: html.replace("</body>", "<script>console.error('oh')</script></body>"),
        "console: oh",
    ),
    "empty charts": (lambda html: re.sub(r'<path d="[^"]*" class="mark', '<path d="" class="mark', html), "is empty"),
    "invisible charts": (lambda html: html.replace("</style>", ".chart .mark{stroke:none}</style>"), "draws invisibly"),
    "a chart is missing": (
        lambda html: re.sub(r'<figure class="chart" id="loss">.*?</figure>', "", html),
        "5 pictures",
    ),
    "not a number": (lambda html: re.sub(r'd="M\d+', 'd="MNaN', html), "draws at no number"),
    "another host": (
        lambda html: re.sub(r"<meta http-equiv[^>]*>", "", html).replace(
            "<h1>", '<img src="http://127.0.0.1:9/x"><h1>'
        ),
        "request: http://127.0.0.1:9/x",
    ),
    "refused host": (lambda html: html.replace("<h1>", '<img src="http://127.0.0.1:9/x"><h1>'), "log: "),
    "too wide": (lambda html: html.replace("<h1>", '<div style="width:1500px">.</div><h1>'), "scrolls sideways"),
    "small print": (lambda html: html.replace("</style>", ".tick{font-size:7px}</style>"), "7 px small"),
    "pale": (lambda html: html.replace("</style>", ".quiet,.unit{color:#aaa}</style>"), "has a contrast"),
    "crowded": (lambda html: html.replace("</style>", ".tick{font-size:60px}</style>"), "lie upon each other"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_audit_sees(browser: Browser, tmp_path: Path, fault: str) -> None:
    break_it, complaint = FAULTS[fault]
    whole = example_page("demo")
    broken = break_it(whole)
    assert broken != whole
    (tmp_path / "report.html").write_text(broken)
    assert complaint in "\n".join(audit(browser.open(tmp_path / "report.html"), pictures=6))


def test_pointer_reads_values(browser: Browser, tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", report())
    page = browser.open(tmp_path / "report.html")

    def read_at(selector: str, part: float = 0.5) -> str:
        x, y = page.evaluate(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            f"return [r.left + {part} * r.width, r.top + r.height / 2]; }})(document.querySelector('{selector}'))"
        )
        page.move_pointer(x, y)
        shown = page.evaluate("getComputedStyle(document.querySelector('#tip')).display === 'block'")
        return page.evaluate("document.querySelector('#tip').textContent") if shown else ""

    assert re.fullmatch(r"step 200\neach step  1\.6\d*\nsmoothed  1\.6\d*", read_at("#loss .frame", 0.999))
    assert re.fullmatch(r"step \d+\neach step  \d\S+e−4", read_at("#learning-rate .frame"))
    first_forward = read_at("#timeline-measured .box.paint-forward", 0.01)
    assert first_forward.startswith("world rank 0: 0F0\nforward\n13.2 ms, from 10.0 ms on")
    assert page.complaints() == []


def test_both_timelines_share_one_axis(browser: Browser, tmp_path: Path) -> None:
    """Equal times lie at equal places: at desktop and phone widths, and when scrolled."""
    write_report(tmp_path / "report.html", report())
    for width in (PHONE, DESKTOP):
        page = browser.open(tmp_path / "report.html", width)
        page.evaluate("document.querySelector('.timelines').scrollLeft = 60")
        places = page.evaluate(
            "['predicted', 'measured'].map(name => document.querySelector(`#timeline-${name} .frame`))"
            ".map(frame => frame.getBoundingClientRect()).map(box => [box.left, box.width])"
        )
        assert places[0] == places[1]


@pytest.mark.parametrize(
    ("is_required", "outcome"), [(False, pytest.skip.Exception), (True, pytest.fail.Exception)], ids=["skip", "fail"]
)
def test_without_a_browser(monkeypatch: pytest.MonkeyPatch, is_required: bool, outcome: type[BaseException]) -> None:
    """Skipped with a reason, or failed where a browser is required."""
    monkeypatch.setattr("tests.conftest.find_chromium", lambda: None)
    config = SimpleNamespace(getoption={"--require-chromium": is_required}.__getitem__)
    with pytest.raises(outcome, match="Chromium is not installed"):
        require_chromium(config)  # type: ignore[arg-type]
