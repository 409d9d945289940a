"""`muster validate`: predictions against published measurements."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from muster.cli.parser import Parser
from muster.spec.errors import ConfigError

if TYPE_CHECKING:
    from muster.validate.summary import Summary


def run(arguments: list[str]) -> int:
    """Predicts a table's rows and prints the errors. Returns the exit code."""
    parser = Parser("validate", "Predict published measurements, and say how far off the predictions are.")
    add = parser.add_argument
    add("--csv", type=Path, metavar="FILE", help="a table with the columns of the shipped ones (default: those)")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--html", type=Path, metavar="FILE", help="write a page that plots predicted against measured")
    add("--markdown", type=Path, metavar="FILE", help="write the tables as a page of documentation")
    args = parser.parse(arguments)
    from muster.validate.summary import to_json, validate

    summary = validate(args.csv)
    _refuse_nothing(summary, args.csv)
    if args.html is not None:
        from muster.report.validation_page import write_validation_page

        write_validation_page(args.html, summary)
    if args.markdown is not None:
        from muster.report.validation_markdown import write_markdown

        write_markdown(args.markdown, summary)
    if args.json:
        print(json.dumps(to_json(summary), indent=1))
        return 0
    from rich.console import Console

    from muster.report.validation import validation_text

    Console(soft_wrap=False, highlight=False).print(validation_text(summary))
    return 0


def _refuse_nothing(summary: "Summary", path: Path | None) -> None:
    """Raises ConfigError where nothing of a table was predicted, with the first reason."""
    if any(result.answers for result in summary.results):
        return
    reasons = [result for result in summary.results if result.reason]
    first = f": {reasons[0].row.place}: {reasons[0].reason}" if reasons else ""
    others = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    raise ConfigError(f"{path}: none of the {len(summary.results)} rows can be predicted{first}{others}")
