"""`muster report`: the report of a run, or several runs compared in one page."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from muster.cli.parser import Parser
from muster.spec.errors import ConfigError

if TYPE_CHECKING:
    from muster.report.run_comparison import RunComparison

MAX_RUNS = 12
"""Most runs of a comparison: colours times line styles that are distinguishable."""


def run(arguments: list[str]) -> int:
    """Show the report. Returns the exit code."""
    parser = Parser("report", "Show the report of a run, or compare several runs in one page.")
    add = parser.add_argument
    add("runs", type=Path, metavar="RUN", nargs="+", help="a run directory, such as runs/demo; several are compared")
    add("--html", type=Path, metavar="FILE", help="path of the comparison page (default: comparison.html)")
    add("--json", action="store_true", help="print one JSON object: figures and differences")
    args = parser.parse(arguments)
    if len(args.runs) == 1 and not args.json and args.html is None:
        from muster.report.run_files import report_path

        print(f"report: {report_path(args.runs[0])}")
        return 0
    if len(args.runs) > MAX_RUNS:
        raise ConfigError(
            f"{len(args.runs)} runs are given, expected at most {MAX_RUNS}, which a chart can distinguish"
        )
    _compare(args.runs, args.html or (None if args.json else Path("comparison.html")), args.json)
    return 0


def _compare(directories: list[Path], html: Path | None, as_json: bool) -> None:
    """Compare runs: a page, and tables or JSON."""
    from muster.report.page import write_page
    from muster.report.run_comparison import compare_runs
    from muster.report.run_comparison_page import comparison_page
    from muster.report.run_files import read_runs

    found = compare_runs(read_runs(directories))
    if html is not None:
        write_page(html, comparison_page(found))
    if as_json:
        print(json.dumps(found.to_json(), indent=2, allow_nan=False))
    else:
        _show(found)
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
