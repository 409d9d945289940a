"""`muster report`: where the report of a run lies."""

from pathlib import Path

from muster.cli.parser import Parser
from muster.cli.runtime import runtime
from muster.spec.errors import ConfigError


def run(arguments: list[str]) -> int:
    """Shows the report. Returns the exit code."""
    parser = Parser("report", "Show the report of a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as runs/demo")
    run_dir = parser.parse(arguments).run
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}")
    return runtime().show_report(run_dir)
