"""`muster validate`: predictions against published measurements."""

import json
from pathlib import Path

from muster.cli.parser import Parser


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
