"""What a stage holds, and when within its passes it holds most: what `muster.cost.memory.forecast` walks over."""

from collections.abc import Mapping
from dataclasses import dataclass

from muster.cost.precision_bytes import MemoryTerms


@dataclass(frozen=True, slots=True)
class PeakCandidate:
    """A point of a pass at which the rank may hold most."""

    name: str
    extra: MemoryTerms
    """Beside what the rank holds anyway and what the pass's own micro-batch keeps, which counts as a whole: what of it
    isn't there yet, or no more, is subtracted here."""
    first_gradients: int = 0
    """Of the gradients that the stage's first backward of a step leaves, those that are there already."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One stage on one rank: what it holds from when to when. Bytes."""

    resident: MemoryTerms
    """Always."""
    gathered_params: int
    """Of parameters, from the first forward on: to the end of the next backward, or to the step (`stays`)."""
    keeps_gathered: bool
    gradients: int
    """From the first backward on."""
    saved: MemoryTerms
    """Of each micro-batch from F to B, or to I."""
    offloaded: MemoryTerms
    """Of `kept`, what the host's memory can hold meanwhile."""
    deferred: MemoryTerms
    """Of each micro-batch from I to W."""
    vocab_parallel: MemoryTerms
    """Of each micro-batch from S to T, where the vocabulary is spread."""
    peak_candidates: Mapping[str, tuple[PeakCandidate, ...]]
    """By kind of instruction; `gather F` and `gather B` where a pass finds the stage's parameters not gathered."""
