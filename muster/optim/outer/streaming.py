"""Streaming DiLoCo: fragments of the layers one after another, beside later steps (arXiv:2501.18512)."""

from torch import Tensor

from muster.optim.outer.base import OuterMethod


class StreamingDiLoCo(OuterMethod):
    """Fragments of every `fragments`-th layer; islands train on while one travels."""

    def merge(self, local: Tensor, outer: Tensor) -> None:
        """Continue with mixing · own + (1 − mixing) · outer parameters: an island has trained on since the exchange
        began (§2.3)."""
        if self.config.mixing:
            local.mul_(self.config.mixing).add_(outer, alpha=1 - self.config.mixing)
        else:
            local.copy_(outer)
