"""Validation losses over all data and over each source of a blend."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from muster.train.trainer import Trainer

ALL_DATA = ""
"""Name of all data together."""


def validation_losses(trainer: Trainer, num_batches: int) -> dict[str, float]:
    """Return the mean loss over the first validation batches of all data, and of each source that has enough of them.

    All ranks call it, and all get the same; with islands, the loss of the model that they share.
    """
    found = {}
    if trainer.swarm is not None and num_batches:
        trainer.swarm.pull()
    with trainer.outer.shared_parameters() if trainer.outer and num_batches else nullcontext():
        for name in (ALL_DATA, *trainer.dataset.sources) if num_batches else ():
            if (loss := trainer.evaluator.mean_loss(num_batches, name or None)) is not None:
                found[name] = loss
    return found


def validation_metrics(losses: Mapping[str, float]) -> dict[str, Any]:
    """Return the losses as metrics, for a line of metrics.jsonl."""
    row = {}
    for name, loss in losses.items():
        key = f"eval/{name}/" if name else "eval/"
        row |= {f"{key}loss": loss, f"{key}perplexity": perplexity(loss)}
    return row


def validation_text(losses: Mapping[str, float]) -> str:
    """Return `validation loss 3.2100 (code 3.0000, perplexity 20.1; books 3.4000, perplexity 30.0)`."""
    text = f"validation loss {losses[ALL_DATA]:.4f}"
    parts = [f"{name} {loss:.4f}, perplexity {perplexity(loss):.4g}" for name, loss in losses.items() if name]
    return text + (f" ({'; '.join(parts)})" if parts else f", perplexity {perplexity(losses[ALL_DATA]):.4g}")


def perplexity(loss: float) -> float:
    """Return e to the loss; infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
