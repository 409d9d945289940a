"""`muster eval`: the loss of a trained model on held-out data, or on any, by one process and a whole decoder."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from muster.checkpoint.initial import load_initial
from muster.checkpoint.load import load
from muster.checkpoint.manifest import MANIFEST
from muster.checkpoint.piece import Piece
from muster.data.dataset import NOT_COUNTED, Batch, Dataset
from muster.data.tokenizer import Tokenizer
from muster.model.decoder import Decoder
from muster.model.documents import Documents
from muster.model.loss import cross_entropy_sum
from muster.parallel.generation import decoder_for_text
from muster.parallel.world import pick_device
from muster.spec.errors import ConfigError
from muster.spec.layout import TensorLayout
from muster.spec.load import load_run
from muster.spec.model import ModelSpec
from muster.spec.named_model import HF_PREFIX, load_model
from muster.spec.run import DataConfig
from muster.train.data import cache_of, open_dataset, open_store, require_words, tokenizer_of
from muster.train.text import find_source
from muster.train.validation import perplexity

ROWS = 8
"""Samples that are computed at once."""
SEQ_LEN = 2048


@dataclass(frozen=True)
class EvalOptions:
    """What the command line says."""

    place: Path
    """A run, a checkpoint in one, or a Hugging Face directory."""
    source: str | None = None
    """Other data than the run's held-out samples."""
    tokenizer: str | None = None
    """Another than the run's, or than the directory's own."""
    seq_len: int | None = None
    samples: int = 256
    """Of each source at most."""


def evaluate(options: EvalOptions) -> dict[str, dict[str, float]]:
    """By source the loss, the perplexity, and how many tokens they are of; what is no mixture has the name `all`.

    Raises ConfigError where there is no model or no data, or they don't fit each other.
    """
    place, device = options.place, pick_device(0, 1)
    if not place.is_dir():
        raise ConfigError(f"there is no directory {place}: expected a run, a checkpoint or a Hugging Face directory")
    if (place / "config.yaml").exists() or (place / MANIFEST).exists():
        return _evaluate_run(options, device)
    spec = load_model(f"{HF_PREFIX}{place}")
    model, layouts = decoder_for_text(spec, "fp32", device, None)
    load_initial(place, spec, _pieces(model, layouts))
    data = DataConfig(source=options.source or "", tokenizer=options.tokenizer or str(place))
    if not options.source:
        raise ConfigError(f"{place} has no data of its own: name some with --source")
    seq_len = options.seq_len or min(SEQ_LEN, spec.max_positions or SEQ_LEN)
    own = _whole(options.source, data, tokenizer_of(data), spec, seq_len, Path(".data"))
    return {"all": _loss(model, _train_batches(own, options.samples), device)}


def _evaluate_run(options: EvalOptions, device: torch.device) -> dict[str, dict[str, float]]:
    source = find_source(options.place)
    run_dir = source.checkpoint.parent.parent
    config = load_run(None, run_dir / "config.yaml", []).config
    model, layouts = decoder_for_text(source.model, "fp32", device, None)
    load(source.checkpoint, _pieces(model, layouts), convert=True)
    seq_len = options.seq_len or config.train.seq_len
    if options.source is not None:
        data = config.data.model_copy(update={"tokenizer": options.tokenizer or config.data.tokenizer})
        own = _whole(options.source, data, tokenizer_of(data), config.model, seq_len, cache_of(data, run_dir))
        return {"all": _loss(model, _train_batches(own, options.samples), device)}
    dataset = open_dataset(
        config.model_copy(update={"train": config.train.model_copy(update={"seq_len": seq_len})}), run_dir
    )
    found = {}
    for name, part in {"all": dataset, **dataset.parts}.items():
        count = min(options.samples, part.num_held_out_samples)
        if count:
            batches = (part.held_out_batch(at, min(ROWS, count - at)) for at in range(0, count, ROWS))
            found[name] = _loss(model, batches, device)
    if not found:
        raise ConfigError(f"{run_dir} holds nothing out (data.held_out 0): name other data with --source")
    return found


def _whole(source: str, data: DataConfig, tokenizer: Tokenizer, spec: ModelSpec, seq_len: int, cache: Path) -> Dataset:
    """All of a source."""
    require_words(spec, tokenizer, data)
    return Dataset(open_store(data, source, tokenizer, cache), seq_len, packing=data.packing)


def _train_batches(dataset: Dataset, samples: int) -> Iterator[Batch]:
    count = min(samples, dataset.num_train_samples)
    return (dataset.train_batch(at, min(ROWS, count - at)) for at in range(0, count, ROWS))


def _pieces(model: Decoder, layouts: Mapping[str, TensorLayout]) -> list[Piece]:
    return [Piece(f"model/{name}", layouts[name], parameter) for name, parameter in model.named_parameters()]


@torch.no_grad()
def _loss(model: Decoder, batches: Iterator[Batch], device: torch.device) -> dict[str, float]:
    total, count = 0.0, 0
    for batch in batches:
        filled = 1 + int(np.flatnonzero((batch.labels_BS != NOT_COUNTED).any(0)).max(initial=0))
        tokens_BS, labels_BS = (
            torch.from_numpy(array[:, :filled]).to(device) for array in (batch.tokens_BS, batch.labels_BS)
        )
        positions = None if batch.positions_BS is None else batch.positions_BS[:, :filled]
        model.where.documents = None if positions is None else Documents.of(torch.from_numpy(positions), device)
        total += float(cross_entropy_sum(model(tokens_BS), labels_BS))
        count += batch.num_valid
    loss = total / max(1, count)
    return {"loss": loss, "perplexity": perplexity(loss), "tokens": count}
