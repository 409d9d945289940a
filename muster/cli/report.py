"""`muster report`: the report of a run, or several runs compared in one page."""

import json
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

from muster.cli.parser import Parser, output_file
from muster.spec.errors import ConfigError

if TYPE_CHECKING:
    from muster.report.run_comparison import RunComparison

MAX_RUNS = 12
"""Most runs of a comparison: colours times line styles that are distinguishable."""

FOLLOW_INTERVAL_S = 5
"""Seconds between pages of a run that is followed."""


def run(arguments: list[str]) -> int:
    """Show the report. Returns the exit code."""
    parser = Parser(
        "report",
        "Show the report of a run, or compare several runs in one page. A run that is training, was stopped or failed"
        " gets a page of what there is so far, progress.html.",
    )
    add = parser.add_argument
    add("runs", type=Path, metavar="RUN", nargs="+", help="a run directory, such as runs/demo; several are compared")
    add("--html", type=output_file, metavar="FILE", help="path of the comparison page (default: comparison.html)")
    add("--follow", action="store_true", help="write the page of a run that is training anew until it ends")
    add("--json", action="store_true", help="print one JSON object: figures and differences")
    add("--as-measurement", action="store_true", help="print the run as a row of a table for 'muster validate --csv'")
    args = parser.parse(arguments)
    if args.as_measurement:
        if len(args.runs) > 1 or args.json or args.html or args.follow:
            raise ConfigError("--as-measurement is for one run: leave out --json, --html, --follow and other runs")
        _print_measurement(args.runs[0])
        return 0
    if args.follow and (len(args.runs) > 1 or args.json or args.html):
        raise ConfigError("--follow is for the page of one run: leave out --json, --html and other runs")
    if len(args.runs) == 1 and not args.json and args.html is None:
        _show_run(args.runs[0], args.follow)
        return 0
    if len(args.runs) > MAX_RUNS:
        raise ConfigError(
            f"{len(args.runs)} runs are given, expected at most {MAX_RUNS}, which a chart can distinguish"
        )
    _compare(args.runs, args.html or (None if args.json else Path("comparison.html")), args.json)
    return 0


def _show_run(run_dir: Path, follow: bool) -> None:
    """Print where the report of one run is: its own, or one of what there is so far, written anew while it is
    followed."""
    report, status = run_dir / "report.html", ""
    while not report.exists():
        from muster.report.page import render_report, write_page
        from muster.report.unfinished_run import unfinished_run

        found, page = unfinished_run(run_dir), run_dir / "progress.html"
        write_page(page, render_report(found.report, FOLLOW_INTERVAL_S if follow and found.is_running else None))
        if found.status != status:
            status = found.status
            print(status, flush=True)
        if not (follow and found.is_running):
            report = page
            break
        sleep(FOLLOW_INTERVAL_S)
    print(f"report: {report}")


def _print_measurement(run_dir: Path) -> None:
    """Print a run as a table with one row."""
    from muster.report.measurement_row import measurement_csv
    from muster.report.run_files import read_runs

    print(measurement_csv(read_runs([run_dir])[0]), end="")


def _compare(directories: list[Path], html: Path | None, as_json: bool) -> None:
    """Compare runs: a page, and tables or JSON."""
    from muster.report.page import write_page
    from muster.report.run_comparison import compare_runs
    from muster.report.run_comparison_page import comparison_page
    from muster.report.run_files import read_runs

    found = compare_runs(read_runs(directories))
    if as_json:
        print(json.dumps(found.to_json(), indent=2, allow_nan=False))
    else:
        _show(found)
    if html is not None:
        write_page(html, comparison_page(found))
        if not as_json:
            print(f"report: {html}")


def _show(found: "RunComparison") -> None:
    """Print plans, figures and differences."""
    from muster.report.prediction import align_columns
    from muster.report.run_comparison_page import difference_rows, figure_rows
    from muster.spec.plan_name import format_plan_name

    plans = [(run.name, format_plan_name(run.plan)) for run in found.runs]
    print("\n".join([*(f"{name}: {plan}" for name, plan in plans), "", *align_columns(figure_rows(found))]))
    rows = difference_rows(found)
    print("\n".join(["", "differences:", *align_columns(rows[1:])] if found.differences else ["", "no differences"]))
