"""The data of a run, free of torch: the launcher builds it, every rank opens it."""

import os
from collections.abc import Mapping
from pathlib import Path

from muster.config.run_config import DataConfig, RunConfig
from muster.data.blend import BlendWeights
from muster.data.blended_dataset import BlendedDataset
from muster.data.chat import read_template
from muster.data.dataset import Dataset, SampleStream
from muster.data.prepare import (
    PrepareOptions,
    Progress,
    cannot_write_store,
    open_or_prepare,
    prepare_trial,
    store_path,
)
from muster.data.sample_order import random_key
from muster.data.store import TokenStore
from muster.data.tokenizer import Tokenizer, load_tokenizer
from muster.report.token_stores import skipped_rows_text
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec
from muster.spec.units import pluralize
from muster.train.run_directory import require_writable


def open_dataset(config: RunConfig, run_dir: Path) -> SampleStream:
    """Open the run's data; token stores that don't exist yet are built."""
    tokenizer = _checked_tokenizer(config)
    cache = token_store_folder(config.data, run_dir)
    stores = {source: open_token_store(config.data, source, tokenizer, cache) for source in _sources(config.data)}
    return _dataset(config, stores)


def trial_dataset(config: RunConfig, run_dir: Path, folder: Path) -> SampleStream | None:
    """Open the run's data without building it: of sources that have no token store yet the beginning is prepared in
    `folder`. Returns None where that is not all of a source. Raises as `open_dataset` does."""
    tokenizer = _checked_tokenizer(config)
    cache = token_store_folder(config.data, run_dir)
    stores: dict[str, TokenStore] = {}
    is_whole = True
    for source in _sources(config.data):
        options = _prepare_options(config.data, source, tokenizer)
        if (place := store_path(options, cache)).exists():
            stores[source] = TokenStore.open(place, tokenizer)
            continue
        try:
            require_writable(place)  # the store's own folder: a run names its error
        except OSError as error:
            raise cannot_write_store(place, error) from error
        store = prepare_trial(options, folder)
        if store is None:
            is_whole = False
        else:
            stores[source] = store
    return _dataset(config, stores) if is_whole else None


def _checked_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the run's tokenizer, whose ids the model has."""
    tokenizer = run_tokenizer(config.data)
    require_vocab_size(config.model, tokenizer, config.data)
    return tokenizer


def _sources(data: DataConfig) -> list[str]:
    return [data.source] if data.source is not None else [part.source for part in data.blend]


def _dataset(config: RunConfig, stores: Mapping[str, TokenStore]) -> SampleStream:
    """Return the samples of the run's token stores, which are given by source."""

    def samples_of(source: str, seed: int) -> Dataset:
        data = config.data
        return Dataset(stores[source], config.train.seq_len, seed, data.validation_split, data.packing)

    if config.data.source is not None:
        return samples_of(config.data.source, config.seed)
    sources = {
        part.name: samples_of(part.source, random_key(config.seed, "source", part.name)) for part in config.data.blend
    }
    return BlendedDataset(sources, mix_stages(config), config.seed)


def require_vocab_size(model: ModelSpec, tokenizer: Tokenizer, data: DataConfig) -> None:
    """Raise ConfigError where the tokenizer has ids beyond the model's vocabulary."""
    if model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size {model.vocab_size} is smaller than the {tokenizer.vocab_size} ids of data.tokenizer"
            f" {data.tokenizer}: expected {tokenizer.vocab_size} or more"
        )


def token_store_folder(data: DataConfig, run_dir: Path) -> Path:
    """Return the folder of a run's token stores: `data.cache`, or .data beside the run directory."""
    return Path(data.cache) if data.cache else run_dir.resolve().parent / ".data"


def mix_stages(config: RunConfig) -> list[BlendWeights]:
    """Return the weights of a blend's sources, from sample to sample."""
    data = config.data
    stages = [BlendWeights(0, tuple(part.weight for part in data.blend))]
    for first, change in zip(config.weight_change_samples, data.weight_schedule, strict=True):
        stages.append(BlendWeights(first, tuple(change.weights.get(part.name, 0.0) for part in data.blend)))
    return stages


def describe_data(config: RunConfig, dataset: SampleStream) -> list[str]:
    """Return a line about each source of the data."""
    if isinstance(dataset, Dataset):
        header = dataset.store.header
        left_out = f", left out: {skipped_rows_text(header.skipped)}" if header.skipped else ""
        source = config.data.source
        return [f"{header.num_tokens:,} tokens in {header.num_documents:,} documents from {source}{left_out}"]
    assert isinstance(dataset, BlendedDataset)
    lines, total = [], sum(part.weight for part in config.data.blend)
    for part in config.data.blend:
        own = config.model_copy(update={"data": config.data.model_copy(update={"source": part.source, "blend": ()})})
        lines += [
            f"{part.name} {part.weight / total:.1%}: {line}" for line in describe_data(own, dataset.by_name[part.name])
        ]
    return lines


def describe_missing_validation(config: RunConfig, dataset: SampleStream) -> list[str]:
    """Return a line when there are no or too few validation samples for the validation loss that was asked for."""
    if config.eval.every and not (config.data.validation_split and config.eval.batches):
        key = "eval.batches" if config.data.validation_split else "data.validation_split"
        return [f"eval: no validation loss every {config.eval.every} steps, since {key} is 0"]
    count = dataset.num_validation_samples
    batch = config.train.global_batch_size
    if not config.eval.batches or not config.data.validation_split or count >= batch:
        return []
    return [
        f"eval: no validation loss, since {pluralize(count, 'validation sample')} don't fill a batch of {batch}: give"
        " data.validation_split more, or set eval.batches to 0"
    ]


def describe_epochs(config: RunConfig, dataset: SampleStream) -> str:
    """Describe the samples and steps of `train.epochs`, and the passes over each source of a blend."""
    train, samples = config.train, dataset.num_train_samples
    text = f"epochs: {train.epochs:g} of {samples:,} samples, in {train.num_steps:,} steps"
    if isinstance(dataset, BlendedDataset):
        taken = dataset.order.samples_per_source(train.num_steps * train.global_batch_size).tolist()
        own = zip(dataset.by_name.items(), taken, strict=True)
        text += "; " + ", ".join(f"{name} {count / one.num_train_samples:.3g} times" for (name, one), count in own)
    return text


def run_tokenizer(data: DataConfig) -> Tokenizer:
    """Return the tokenizer of a run, with the run's own chat template if it names one."""
    tokenizer = load_tokenizer(data.tokenizer, data.eos_token, data.add_bos)
    if data.chat_template is not None:
        tokenizer.chat_template = read_template(Path(data.chat_template), tokenizer.chat_template.special_tokens)
    return tokenizer


def open_token_store(
    data: DataConfig, source: str, tokenizer: Tokenizer, cache: Path, progress: Progress | None = None
) -> TokenStore:
    """Open the token store of one source; it is built under `cache` if it doesn't exist."""
    return open_or_prepare(_prepare_options(data, source, tokenizer), cache, progress)


def _prepare_options(data: DataConfig, source: str, tokenizer: Tokenizer) -> PrepareOptions:
    workers = len(os.sched_getaffinity(0))
    return PrepareOptions(source, tokenizer, data.max_bytes, data.text_key, data.on_invalid_row, workers)
