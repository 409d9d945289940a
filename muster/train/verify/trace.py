"""What a few steps of training leave behind to be compared, by whomever they were made."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GRADIENTS_FOLDER, UPDATED_FOLDER = "gradients", "updated"
"""Folders of the checkpoints that hold the first step's gradients before clipping, and the parameters after it."""


@dataclass(frozen=True)
class Trace:
    """Step by step, the loss, the norm of the gradients and the sketches of the hidden states."""

    losses: list[float]
    grad_norms: list[float]
    sketches: np.ndarray
    """(steps, parts, samples, draws), float64."""
    unwatched: tuple[str, ...] = ()
    """Parts whose outputs are not in the sketches."""

    def write(self, folder: Path) -> None:
        """Writes it into the folder."""
        numbers = {"losses": self.losses, "grad_norms": self.grad_norms, "unwatched": self.unwatched}
        (folder / "trace.json").write_text(json.dumps(numbers))
        np.save(folder / "sketches.npy", self.sketches, allow_pickle=False)

    @classmethod
    def read(cls, folder: Path) -> "Trace":
        """The trace that was written into the folder."""
        numbers = json.loads((folder / "trace.json").read_text())
        sketches = np.load(folder / "sketches.npy", allow_pickle=False)
        return cls(numbers["losses"], numbers["grad_norms"], sketches, tuple(numbers["unwatched"]))
