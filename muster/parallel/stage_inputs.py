"""Data of a step for the stages of one rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

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
    valid_M: tuple[int, ...] = ()
    """The same of the step of each micro-batch, where the data are those of several steps."""
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

    def num_valid_of(self, micro_batch: int) -> int:
        """Return the number that the losses of a micro-batch are divided by."""
        return self.valid_M[micro_batch] if self.valid_M else self.num_valid


def join_steps(steps: Sequence[StageInputs], num_micro_batches: int) -> StageInputs:
    """Return the data of several steps, of as many micro-batches each, as one."""

    def joined(field: str) -> tuple:
        return tuple(chain.from_iterable(getattr(one, field) for one in steps))

    optional = ("documents_M", "dropout_keys_M", "parts_M", "counted_M")
    fields = ["tokens_M", "labels_M", "further_M", *(name for name in optional if getattr(steps[0], name) is not None)]
    valid_M = tuple(one.num_valid for one in steps for _ in range(num_micro_batches))
    return replace(steps[0], valid_M=valid_M, **{field: joined(field) for field in fields})
