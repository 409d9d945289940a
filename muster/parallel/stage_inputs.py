"""What a step feeds to the stages of a rank."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from muster.model.documents import Documents


@dataclass
class StageInputs:
    """One rank's share of one step's data, by micro-batch, and what makes a loss of it."""

    tokens_M: tuple[Tensor, ...]
    """Of each micro-batch, (B, S); micro-batches may have other lengths S. None are given to a rank that needs no
    data."""
    labels_M: tuple[Tensor, ...]
    num_valid: int
    """Counted target tokens of the whole step, over all ranks: what the sum of the losses is divided by."""
    z_loss_coefficient: float = 0.0
    """Of the z-loss; see `muster.model.loss`."""
    loss_scale: float = 1.0
    """What the loss, and so every gradient, is multiplied by."""
    plugin_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    """A plugin's, of logits (N, V) and labels (N): the sum over those that count; None: cross-entropy."""
    documents_M: tuple[Documents | None, ...] | None = None
    """Of each micro-batch; None: every sequence is one document."""
