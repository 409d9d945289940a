"""Trace of a few training steps, for comparison with another trace."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GRADIENTS_FOLDER, UPDATED_FOLDER = "gradients", "updated"
"""Folders of the checkpoints with the first step's gradients before clipping, and the parameters after it."""


@dataclass(frozen=True)
class Trace:
    """Loss, gradient norm and sketches of the hidden states, step by step."""

    losses: list[float]
    grad_norms: list[float]
    sketches: np.ndarray
    """Sketches (steps, parts, samples, draws), float64."""
    unwatched: tuple[str, ...] = ()
    """Parts whose outputs are not in the sketches."""

    def write(self, folder: Path) -> None:
        """Write the trace into the folder."""
        numbers = {"losses": self.losses, "grad_norms": self.grad_norms, "unwatched": self.unwatched}
        (folder / "trace.json").write_text(json.dumps(numbers))
        np.save(folder / "sketches.npy", self.sketches, allow_pickle=False)

    @classmethod
    def read(cls, folder: Path) -> "Trace":
        """Read the trace in the folder."""
        numbers = json.loads((folder / "trace.json").read_text())
        sketches = np.load(folder / "sketches.npy", allow_pickle=False)
        return cls(numbers["losses"], numbers["grad_norms"], sketches, tuple(numbers["unwatched"]))
