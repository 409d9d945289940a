"""Data of a step for the stages of one rank."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from muster.model.documents import Documents
from muster.model.further_tokens import FurtherTokens


@dataclass
class StageInputs:
    """One rank's data of one step, by micro-batch, and the constants that turn its logits into a loss.

    Where sequences are cut into slices, each slice of a micro-batch has an entry of its own.
    """

    tokens_M: tuple[Tensor, ...]
    """Tokens of each micro-batch, (B, S); S may differ between micro-batches. Empty on a rank that needs no data."""
    labels_M: tuple[Tensor, ...]
    """Labels of each micro-batch, (B, S); -100 marks positions that don't count."""
    num_valid: int
    """Non-ignored labels of the whole step, over all ranks; the sum of the losses is divided by it."""
    z_loss_coefficient: float = 0.0
    """Coefficient of the z-loss; see `muster.model.loss`."""
    loss_scale: float | Tensor = 1.0
    """Factor of the loss, and so of every gradient (fp16 loss scaling); a scalar on the device for passes that are
    captured, which remember no numbers of the host that change."""
    plugin_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    """A plugin's loss of logits (N, V) and labels (N), summed over the labels that count; None: cross-entropy."""
    documents_M: tuple[Documents | None, ...] | None = None
    """Documents of each micro-batch; None if every sequence is one document."""
    dropout_keys_M: tuple[Tensor, ...] | None = None
    """Key of each sample of each micro-batch (`muster.model.dropout.sample_keys`); None: nothing is dropped."""
    further_M: tuple[tuple[FurtherTokens, ...], ...] = ()
    """Data of each micro-batch for each depth of multi-token prediction; empty in a model without it."""
    parts_M: tuple[int, ...] | None = None
    """Part of the batch that each micro-batch is of, where parts train adapters of their own."""
    counted_M: tuple[Tensor, ...] | None = None
    """Positions of each micro-batch that are no padding, bool (B, S); None: all."""
