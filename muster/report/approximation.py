"""In what a recovery is approximate, where ranks keep no copies of their state (CheckFree); free of torch.

Ranks tell the launcher in a file, from which it goes into the run's record.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muster.config.file_writer import write_durably
from muster.spec.units import numbered


@dataclass(frozen=True)
class RebuiltStage:
    """A lost stage of the pipeline that is the weighted mean of two others since, or a copy of one."""

    stage: int
    neighbours: tuple[int, ...]
    """Stage before it and stage after it, or the one that learns to act in its place (CheckFree+)."""
    weights: tuple[float, ...]
    """Weights of these, with the sum 1."""

    def __str__(self) -> str:
        if len(self.neighbours) == 1:
            return f"stage {self.stage} is approximated by a copy of stage {self.neighbours[0]}"
        (before, after), (one, other) = self.neighbours, self.weights
        return f"stage {self.stage} is approximated by {one:.2f} x stage {before} + {other:.2f} x stage {after}"


@dataclass(frozen=True)
class Approximation:
    """Stages whose state isn't the one after the last step; of a recovery to the bit there are none."""

    rebuilt: tuple[RebuiltStage, ...] = ()
    updated_twice: tuple[int, ...] = ()
    """Stages that have seen the update of a step that is done again."""
    went_back_to: int | None = None
    """Step whose checkpoint on disk all ranks have gone back to, 0 for the beginning, as nothing else was left; that is
    exact."""

    @property
    def sentences(self) -> list[str]:
        """Sentences about them, for people."""
        told = list(map(str, self.rebuilt))
        if stages := self.updated_twice:
            see = "sees" if len(stages) == 1 else "see"
            told.append(f"{numbered('stage', stages)} {see} the update of the step under way twice")
        if self.went_back_to is not None:
            told.append(f"all ranks have gone back to step {self.went_back_to}")
        return told


def approximation_from_json(row: Mapping[str, Any]) -> Approximation:
    """Read an Approximation from plain data."""
    rebuilt = (RebuiltStage(one["stage"], tuple(one["neighbours"]), tuple(one["weights"])) for one in row["rebuilt"])
    return Approximation(tuple(rebuilt), tuple(row["updated_twice"]), row["went_back_to"])


def write_approximation(run_dir: Path, generation: int, found: Approximation) -> None:
    """Write in what the beginning of a generation is approximate; a full disk is ignored."""
    with contextlib.suppress(OSError):
        write_durably(_path(run_dir, generation), json.dumps(asdict(found)))


def pop_approximation(run_dir: Path, generation: int) -> Approximation | None:
    """Return in what the beginning of a generation is approximate, and remove the file; None where there is nothing."""
    path = _path(run_dir, generation)
    try:
        found = approximation_from_json(json.loads(path.read_text()))
        path.unlink()
    except (OSError, ValueError, LookupError):
        return None
    return found if found.sentences else None


def _path(run_dir: Path, generation: int) -> Path:
    return run_dir / "logs" / f"generation-{generation}.json"
