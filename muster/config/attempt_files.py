"""Configuration and plan of an attempt at a run, which become the run's own once its ranks have loaded.

The ranks read `config.next.yaml` and `plan.next.yaml`. An attempt that fails before it resumes leaves `config.yaml` and
`plan.yaml` as they were, so that the former command still resumes.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from muster.config.file_writer import write_atomically
from muster.spec.plan import Plan

SCRATCH_PREFIX = "scratch-"
"""Beginning of the names of files of tiers on disk, for the moment in which they have one."""
TOKENIZER_FOLDER = "tokenizer"
"""Folder in a run directory with the run's tokenizer, and the configuration files of the model that it began with."""
NEXT_TOKENIZER_FOLDER = "tokenizer.next"
"""Folder with another tokenizer that an attempt at resuming brings, which the ranks read; empty: it has none."""


PLANS_FOR_LOSSES_FILE = "plans-for-losses.json"
"""File in a run directory with the plans under which fewer ranks go on when others are lost."""


class AttemptFiles(NamedTuple):
    """Paths of an attempt's configuration and plan."""

    config: Path
    plan: Path


def attempt_files(run_dir: Path) -> AttemptFiles:
    """Return the files that the ranks of an attempt read."""
    return AttemptFiles(run_dir / "config.next.yaml", run_dir / "plan.next.yaml")


def current_files(run_dir: Path) -> AttemptFiles:
    """Return the files of the attempt under way, wherever they are by now."""
    files = attempt_files(run_dir)
    adopted = run_dir / "config.yaml", run_dir / "plan.yaml"
    return AttemptFiles(*(draft if draft.exists() else path for draft, path in zip(files, adopted, strict=True)))


def write_plans_for_losses(run_dir: Path, plans: Mapping[int, Plan]) -> None:
    """Write the plans under which the ranks that are left go on, by their number. Raises OSError."""
    content = {number: plan.model_dump(mode="json") for number, plan in plans.items()}
    write_atomically(run_dir / PLANS_FOR_LOSSES_FILE, json.dumps(content))


def read_plans_for_losses(run_dir: Path) -> dict[int, Plan]:
    """Read the plans that `write_plans_for_losses` has written."""
    content = json.loads((run_dir / PLANS_FOR_LOSSES_FILE).read_text(encoding="utf-8"))
    return {int(number): Plan.model_validate(plan) for number, plan in content.items()}


def adopt_attempt_files(run_dir: Path) -> None:
    """Make the attempt's configuration and plan, where it has written them, the run's, and its tokenizer, where that is
    another. Raises OSError."""
    files = attempt_files(run_dir)
    if (run_dir / NEXT_TOKENIZER_FOLDER).exists():
        _adopt_tokenizer(run_dir, files.config)
    for draft, path in ((files.plan, run_dir / "plan.yaml"), (files.config, run_dir / "config.yaml")):
        if draft.exists():
            os.replace(draft, path)


def _adopt_tokenizer(run_dir: Path, config: Path) -> None:
    """Copy the attempt's tokenizer, which the ranks go on to read where it is, to the place of the run's."""
    folder, waiting = run_dir / TOKENIZER_FOLDER, run_dir / NEXT_TOKENIZER_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    if any(waiting.iterdir()):
        shutil.copytree(waiting, folder)
    if config.exists():
        text, before = config.read_text(encoding="utf-8"), config.stat()
        config.write_text(text.replace(f"{NEXT_TOKENIZER_FOLDER}/", f"{TOKENIZER_FOLDER}/"), encoding="utf-8")
        os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))  # it is the same attempt: see `attempt_id`


def attempt_id(run_dir: Path) -> int:
    """Return a number that differs between attempts in one run directory, as each writes a configuration; 0 without
    one.

    It is the time at which the configuration of the attempt under way was written, which adopting it doesn't change.
    """
    return _modified_ns(current_files(run_dir).config)


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
