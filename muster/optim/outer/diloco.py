"""DiLoCo: all parameters at once, and islands continue with the outer ones (arXiv:2311.08105)."""

from torch import Tensor

from muster.optim.outer.base import OuterMethod


class DiLoCo(OuterMethod):
    """One fragment, exchanged while islands wait."""

    def merge(self, local: Tensor, outer: Tensor) -> None:
        """Continue with the outer parameters."""
        local.copy_(outer)
