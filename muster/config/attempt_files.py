"""Configuration and plan of an attempt at a run, which become the run's own once its ranks have loaded.

The ranks read `config.next.yaml` and `plan.next.yaml`. An attempt that fails before it resumes leaves `config.yaml` and
`plan.yaml` as they were, so that the former command still resumes.
"""

import os
from pathlib import Path
from typing import NamedTuple


class AttemptFiles(NamedTuple):
    """Paths of an attempt's configuration and plan."""

    config: Path
    plan: Path


def attempt_files(run_dir: Path) -> AttemptFiles:
    """Return the files that the ranks of an attempt read."""
    return AttemptFiles(run_dir / "config.next.yaml", run_dir / "plan.next.yaml")


def adopt_attempt_files(run_dir: Path) -> None:
    """Make the attempt's configuration and plan, where it has written them, the run's. Raises OSError."""
    files = attempt_files(run_dir)
    for draft, path in ((files.plan, run_dir / "plan.yaml"), (files.config, run_dir / "config.yaml")):
        if draft.exists():
            os.replace(draft, path)


def attempt_id(run_dir: Path) -> int:
    """Return a number that differs between attempts in one run directory, as each writes a configuration; 0 without
    one.

    It is the time of the last one written, which adopting it doesn't change.
    """
    return max(_modified_ns(run_dir / "config.yaml"), _modified_ns(attempt_files(run_dir).config))


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
