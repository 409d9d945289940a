"""`muster eval`: loss of a trained model on validation or other data, computed by one process with the whole
decoder."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from muster.checkpoint.checkpoint_dir import named_checkpoint
from muster.checkpoint.initial_weights import load_initial_weights
from muster.checkpoint.load import load
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import MANIFEST
from muster.checkpoint.model_directory import model_weights, open_directory
from muster.config.load_config import load_run_config
from muster.config.named_model import HF_PREFIX, load_model
from muster.config.run_config import DataConfig
from muster.data.dataset import IGNORE_INDEX, Batch, Dataset, require_known_ids
from muster.data.invalid_rows import InvalidRowPolicy
from muster.data.tokenizer import Tokenizer
from muster.layout.tensor_layout import TensorLayout
from muster.model.chunk_sizes import chunk_elements
from muster.model.decoder import Decoder
from muster.model.documents import Documents
from muster.model.loss import loss_sums
from muster.parallel.inference import build_inference_decoder
from muster.parallel.world import pick_device
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec
from muster.spec.plan import Precision
from muster.train.data import open_dataset, open_token_store, require_vocab_size, run_tokenizer, token_store_folder
from muster.train.text_generation import find_trained_model, stored_precision
from muster.train.validation_loss import perplexity

BATCH_SIZE, BATCH_TOKENS = 8, 8192
"""Most samples of a forward, and most tokens where it has more than one sample."""
HEAD_ROWS = 256
"""Fewest positions whose logits are made at once: enough that reading the head's weights isn't what takes the time."""
MAX_SEQ_LEN = 2048


@dataclass(frozen=True)
class EvalOptions:
    """Options of the command line."""

    model_path: Path
    """Run directory, checkpoint in one, or Hugging Face directory."""
    source: str | None = None
    """Data other than the run's validation samples."""
    tokenizer: str | None = None
    """Tokenizer other than the run's or the directory's own."""
    seq_len: int | None = None
    samples: int = 256
    """Largest number of samples of each source."""
    on_invalid_row: InvalidRowPolicy | None = None
    """Treatment of invalid rows of `source`; None: as the run treats its own."""
    precision: Precision | None = None
    """Precision of weights and passes; None: the run's, or that of the directory's weights."""

    def data_config(self, own: DataConfig) -> DataConfig:
        """Return how `source` is read: as the model's own data, but for what these options say."""
        given = {"tokenizer": self.tokenizer, "on_invalid_row": self.on_invalid_row}
        update: dict[str, object] = {key: value for key, value in given.items() if value is not None}
        if self.tokenizer is not None:  # the tokens that begin and end documents are its own
            update |= {"eos_token": None, "add_bos": None}
        return own.model_copy(update=update)


def evaluate(options: EvalOptions) -> dict[str, dict[str, float]]:
    """Return loss, perplexity and number of tokens by source; data that is no blend has the name `all`.

    Raises ConfigError where there is no model or no data, or they don't fit each other.
    """
    place, device = named_checkpoint(options.model_path), pick_device(0, 1)
    if not place.is_dir():
        raise ConfigError(f"there is no directory {place}: expected a run, a checkpoint or a Hugging Face directory")
    if (place / "config.yaml").exists() or (place / MANIFEST).exists():
        return _evaluate_run(options, device)
    spec = load_model(f"{HF_PREFIX}{place}")
    precision = options.precision or stored_precision(model_weights(open_directory(place)))
    model, layouts = build_inference_decoder(spec, precision, device, None)
    load_initial_weights(place, spec, _pieces(model, layouts))
    data = options.data_config(DataConfig(source=options.source or "", tokenizer=str(place)))
    if not options.source:
        raise ConfigError(f"{place} has no data of its own: name some with --source")
    seq_len = options.seq_len or min(MAX_SEQ_LEN, spec.max_positions or MAX_SEQ_LEN)
    _require_positions(spec, seq_len)
    own = _open_whole_dataset(options.source, data, run_tokenizer(data), spec, seq_len, Path(".data"))
    return {"all": _loss(model, spec.vocab_size, _train_batches(own, options.samples), device)}


def _evaluate_run(options: EvalOptions, device: torch.device) -> dict[str, dict[str, float]]:
    for key in ("tokenizer", "on_invalid_row"):
        if options.source is None and getattr(options, key) is not None:
            raise ConfigError(
                f"--{key.replace('_', '-')} {getattr(options, key)} is for the data of --source, which is missing: a"
                " run's validation samples are tokens already"
            )
    source = find_trained_model(named_checkpoint(options.model_path))
    run_dir = source.checkpoint.parent.parent
    config = load_run_config(None, run_dir / "config.yaml", []).config
    seq_len = options.seq_len or config.train.seq_len
    _require_positions(source.model, seq_len)
    model, layouts = build_inference_decoder(source.model, options.precision or source.plan.precision, device, None)
    load(source.checkpoint, _pieces(model, layouts), convert=True)
    if options.source is not None:
        data = options.data_config(config.data)
        own = _open_whole_dataset(
            options.source, data, run_tokenizer(data), config.model, seq_len, token_store_folder(data, run_dir)
        )
        return {"all": _loss(model, source.model.vocab_size, _train_batches(own, options.samples), device)}
    dataset = open_dataset(
        config.model_copy(update={"train": config.train.model_copy(update={"seq_len": seq_len})}), run_dir
    )
    found = {}
    for name, part in {"all": dataset, **dataset.sources}.items():
        count = min(options.samples, part.num_validation_samples)
        if count:
            size = _samples_per_forward(seq_len)
            batches = (part.validation_batch(at, min(size, count - at)) for at in range(0, count, size))
            found[name] = _loss(model, source.model.vocab_size, batches, device)
    if not found:
        raise ConfigError(f"{run_dir} holds nothing out (data.validation_split 0): name other data with --source")
    return found


def _require_positions(spec: ModelSpec, seq_len: int) -> None:
    """Raise ConfigError for samples that are longer than the model's learned positions."""
    if spec.position == "learned" and seq_len > (spec.max_positions or 0):
        raise ConfigError(
            f"--seq-len {seq_len} is longer than the model's {spec.max_positions} learned positions: expected at most"
            f" {spec.max_positions}"
        )


def _open_whole_dataset(
    source: str, data: DataConfig, tokenizer: Tokenizer, spec: ModelSpec, seq_len: int, cache: Path
) -> Dataset:
    """Open all samples of a source, none held out."""
    require_vocab_size(spec, tokenizer, data)
    return Dataset(open_token_store(data, source, tokenizer, cache), seq_len, packing=data.packing)


def _train_batches(dataset: Dataset, samples: int) -> Iterator[Batch]:
    count, size = min(samples, dataset.num_train_samples), _samples_per_forward(dataset.seq_len)
    return (dataset.train_batch(at, min(size, count - at)) for at in range(0, count, size))


def _samples_per_forward(seq_len: int) -> int:
    return max(1, min(BATCH_SIZE, BATCH_TOKENS // seq_len))


def _pieces(model: Decoder, layouts: Mapping[str, TensorLayout]) -> list[LocalShard]:
    return [LocalShard(f"model/{name}", layouts[name], parameter) for name, parameter in model.named_parameters()]


@torch.no_grad()
def _loss(model: Decoder, vocab_size: int, batches: Iterator[Batch], device: torch.device) -> dict[str, float]:
    model.caps_logits = False  # the loss caps them, in float32
    total, count = 0.0, 0
    for batch in batches:
        require_known_ids(batch, vocab_size)
        filled = 1 + int(np.flatnonzero((batch.labels_BS != IGNORE_INDEX).any(0)).max(initial=0))
        tokens_BS, labels_BS = (
            torch.from_numpy(array[:, :filled]).to(device) for array in (batch.tokens_BS, batch.labels_BS)
        )
        positions = None if batch.positions_BS is None else batch.positions_BS[:, :filled]
        model.position_state.documents = (
            None if positions is None else Documents.from_positions(torch.from_numpy(positions), device)
        )
        total += _cross_entropy(model, vocab_size, tokens_BS, labels_BS)
        count += batch.num_valid_tokens
    loss = total / max(1, count)
    return {"loss": loss, "perplexity": perplexity(loss), "tokens": count}


def _cross_entropy(model: Decoder, vocab_size: int, tokens_BS: Tensor, labels_BS: Tensor) -> float:
    """Return the cross-entropy summed over labels, from the logits of some positions at a time.

    The logits of a whole sample would be the largest tensor by far: 8k positions of 128k words are 4 GB in float32.
    """
    hidden_ND, labels_N = model.final_hidden(tokens_BS).flatten(0, 1), labels_BS.flatten()
    rows = max(HEAD_ROWS, chunk_elements("loss", hidden_ND.device.type) // vocab_size)
    sums = [
        loss_sums(model.logits(hidden_RD).unsqueeze(0), labels_R.unsqueeze(0), softcap=model.logit_softcap).total
        for hidden_RD, labels_R in zip(hidden_ND.split(rows), labels_N.split(rows), strict=True)
    ]
    return float(torch.stack(sums).double().sum())
