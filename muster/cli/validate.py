"""`muster validate`: predictions against published measurements."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from muster.cli.parser import Parser, output_file
from muster.spec.errors import ConfigError
from muster.spec.units import pluralize

if TYPE_CHECKING:
    from muster.spec.plan import Plan
    from muster.validate.recipes import RecipeJob
    from muster.validate.summary import Summary

TOLD_REASONS = 5
"""Rows whose reasons are told where none can be predicted."""

SEARCH_EFFORT = 1.5
"""Effort of the planner's search for each recipe."""


def run(arguments: list[str]) -> int:
    """Predict a table's rows and print the scores. Returns the exit code."""
    parser = Parser("validate", "Compare predictions with published measurements.")
    add = parser.add_argument
    add(
        "--csv",
        type=Path,
        metavar="FILE",
        help="your own table of measurements (default: the tables that come with Muster)",
    )
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--csv-out", type=output_file, metavar="FILE", help="write every row with its prediction and interval as CSV")
    add("--html", type=output_file, metavar="FILE", help="write a page that plots predicted against measured")
    add("--markdown", type=output_file, metavar="FILE", help="write the tables as a page of documentation")
    add(
        "--errors",
        type=output_file,
        metavar="FILE",
        help="write the errors from which predictions take their uncertainty",
    )
    add(
        "--recipes",
        action="store_true",
        help="evaluate published recipes of large runs, and the planner's own plans for them",
    )
    args = parser.parse(arguments)
    if args.recipes:
        if args.csv or args.csv_out or args.html or args.errors:
            raise ConfigError(
                "--recipes takes no --csv, --csv-out, --html or --errors: expected --json, --markdown FILE or none"
            )
        return _recipes(args.json, args.markdown)
    from muster.cli.progress import RowProgress
    from muster.planner.lockstep import usable_processes
    from muster.validate.summary import to_json, validate_table

    unread = [] if args.csv is None else _check_table(args.csv, args.csv_out)
    with RowProgress("predicting rows") as bar:
        summary = validate_table(args.csv, processes=usable_processes(), on_progress=bar.update)
    predicted = any(result.predicted for result in summary.results)
    if args.json:
        print(json.dumps(to_json(summary) | {"columns_not_read": unread}, indent=1))
    elif predicted:
        _show(summary, unread)
    _write_files(args, summary, predicted)
    if not predicted:
        raise _no_predictions(summary, args.csv, unread)
    return 0


def _show(summary: "Summary", unread: list[str]) -> None:
    """Print the tables."""
    from muster.report.accuracy_terminal import accuracy_text
    from muster.report.console import table_console, text_width

    table_console().print(accuracy_text(summary, text_width()))
    if unread:
        print(f"Columns not read: {', '.join(unread)}")


def _write_files(args: argparse.Namespace, summary: "Summary", predicted: bool) -> None:
    """Write the files that were asked for; of a table without predictions its rows, with the reasons, alone."""
    if args.csv_out is not None:
        from muster.config.file_writer import write_output
        from muster.validate.row_table import row_table_csv

        write_output(args.csv_out, row_table_csv(summary.results), "the table")
    if args.html is not None and predicted:
        from muster.report.accuracy_page import write_accuracy_page

        write_accuracy_page(args.html, summary)
    if args.markdown is not None and predicted:
        from muster.report.accuracy_markdown import write_markdown

        write_markdown(args.markdown, summary)
    if args.errors is not None and predicted:
        from muster.validate.error_table import write_error_table

        write_error_table(args.errors, summary)


def _check_table(table: Path, rows: Path | None) -> list[str]:
    """Return the columns that aren't read. Raises ConfigError for files that can't be read or written."""
    from muster.validate.table import read_table_text
    from muster.validate.table_header import unread_columns

    unread = unread_columns(read_table_text(table))
    if rows is not None and rows.exists() and rows.samefile(table):
        raise ConfigError(f"--csv-out {rows} is the table itself: expected another file")
    return unread


def _recipes(as_json: bool, markdown: Path | None) -> int:
    """Evaluate the published recipes. Returns the exit code."""
    from muster.report.recipe_rows import recipe_notes, recipe_section, recipes_json
    from muster.validate.recipes import evaluate_recipes

    found = evaluate_recipes(_planner_choice)
    if markdown is not None:
        from muster.report.recipe_markdown import write_recipes

        write_recipes(markdown, found)
    if as_json:
        print(json.dumps({"version": 1, "recipes": recipes_json(found)}, indent=1))
        return 0
    from muster.report.accuracy_terminal import section_text
    from muster.report.console import table_console, text_width, wrap_text

    width = text_width()
    table_console().print(section_text([recipe_section(found)], width))
    for name, note in recipe_notes(found):
        print(wrap_text(f"{name}: {note}", width))
    return 0


def _planner_choice(job: "RecipeJob") -> "Plan | None":
    """Return the planner's best plan for a recipe's model, devices and batch."""
    from muster.planner.heterogeneous import find_best_plans
    from muster.planner.request import PlanRequest
    from muster.planner.search_budget import SearchBudget
    from muster.spec.framework_traits import FrameworkTraits

    request = PlanRequest(
        job.model,
        job.cluster,
        job.workload,
        precision=job.plan.precision,
        fixed=job.fixed_fields,
        framework=FrameworkTraits(),  # fused and overlapped as the recipes' programs are, in Muster's storage
    )
    best = find_best_plans(request, 1, SearchBudget.start(SEARCH_EFFORT)).result.best
    return best[0].plan if best else None


def _no_predictions(summary: "Summary", path: Path | None, unread: list[str]) -> ConfigError:
    """Return the error about a table of which no row was predicted: the reasons of the first rows, and the columns that
    weren't read."""
    reasons = [f"{result.row.location}: {result.reason}" for result in summary.results if result.reason]
    told = "".join(f"{': ' if not number else '; '}{reason}" for number, reason in enumerate(reasons[:TOLD_REASONS]))
    others = f" (and {len(reasons) - TOLD_REASONS} more; --csv-out FILE lists all)" if reasons[TOLD_REASONS:] else ""
    columns = f"; columns not read: {', '.join(unread)}" if unread else ""
    count = pluralize(len(summary.results), "row")
    return ConfigError(f"{path}: none of the {count} can be predicted{told}{others}{columns}")
