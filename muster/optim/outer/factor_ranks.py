"""Ranks of the factors as which changes of matrices travel between islands."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil

from muster.config.outer_config import OuterConfig


class FactorRanks:
    """Rank of the factors of each matrix, the same on all ranks of a run.

    It is `low_rank`, or with `rank_window` w the mean numerical rank of the matrix' last w mean changes, rounded up:
    changes lose rank as training goes on (arXiv:2506.21263 §2.4). `low_rank` holds until w have been measured. A mean
    change in factors of rank R has no higher rank than R, so that ranks never rise.
    """

    def __init__(self, config: OuterConfig) -> None:
        self.config = config
        self.measured: dict[str, list[float]] = {}
        """Last numerical ranks of each matrix, of which there are at most `rank_window`."""

    def rank_of(self, name: str) -> int | None:
        """Return the rank of a parameter's factors in the next exchange; None where changes travel whole."""
        window, measured = self.config.rank_window, self.measured.get(name, ())
        if window is None or len(measured) < window:
            return self.config.low_rank
        return max(1, ceil(sum(measured) / window))

    def ranks_of(self, names: Iterable[str]) -> dict[str, int]:
        """Return the ranks of the factors of some matrices; empty where changes travel whole."""
        return {name: rank for name in names if (rank := self.rank_of(name)) is not None}

    def record(self, name: str, rank: float) -> None:
        """Remember the numerical rank of a mean change."""
        assert self.config.rank_window is not None
        self.measured[name] = [*self.measured.get(name, ()), rank][-self.config.rank_window :]

    def restore(self, measured: Mapping[str, Sequence[float]]) -> None:
        """Take up the ranks that a checkpoint holds."""
        self.measured = {name: list(ranks) for name, ranks in measured.items()}
