"""The data of a run, free of torch: the launcher builds it, every rank opens it."""

import os
from pathlib import Path

from muster.data.chat import read_template
from muster.data.dataset import Dataset, Samples
from muster.data.mixed import MixedDataset
from muster.data.mixture import MixStage
from muster.data.order import key_of
from muster.data.prepare import Preparation, Progress, open_or_prepare
from muster.data.store import TokenStore
from muster.data.tokenizer import Tokenizer, load_tokenizer
from muster.report.stores import skipped_words
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec
from muster.spec.run import DataConfig, RunConfig
from muster.spec.sizes import counted


def open_dataset(config: RunConfig, run_dir: Path) -> Samples:
    """The run's data; builds the token stores that nobody has built yet."""
    tokenizer = tokenizer_of(config.data)
    require_words(config.model, tokenizer, config.data)
    cache = cache_of(config.data, run_dir)

    def open_one(source: str, seed: int) -> Dataset:
        store = open_store(config.data, source, tokenizer, cache)
        return Dataset(store, config.train.seq_len, seed, config.data.held_out, config.data.packing)

    if config.data.source is not None:
        return open_one(config.data.source, config.seed)
    sources = {part.name: open_one(part.source, key_of(config.seed, "source", part.name)) for part in config.data.mix}
    return MixedDataset(sources, mix_stages(config), config.seed)


def require_words(model: ModelSpec, tokenizer: Tokenizer, data: DataConfig) -> None:
    """Raises ConfigError where the tokenizer gives ids that the model has no words for."""
    if model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size {model.vocab_size} is smaller than the {tokenizer.vocab_size} ids of data.tokenizer"
            f" {data.tokenizer}: expected {tokenizer.vocab_size} or more"
        )


def cache_of(data: DataConfig, run_dir: Path) -> Path:
    """Where a run's token stores lie that nobody has named."""
    return Path(data.cache) if data.cache else run_dir.resolve().parent / ".data"


def mix_stages(config: RunConfig) -> list[MixStage]:
    """The weights of a mixture's sources from sample to sample."""
    data = config.data
    stages = [MixStage(0, tuple(part.weight for part in data.mix))]
    for first, change in zip(config.change_samples, data.changes, strict=True):
        stages.append(MixStage(first, tuple(change.weights.get(part.name, 0.0) for part in data.mix)))
    return stages


def data_lines(config: RunConfig, dataset: Samples) -> list[str]:
    """What a run says of its data: a line for each source."""
    if isinstance(dataset, Dataset):
        header = dataset.store.header
        left_out = f", left out: {skipped_words(header.skipped)}" if header.skipped else ""
        source = config.data.source
        return [f"{header.num_tokens:,} tokens in {header.num_documents:,} documents from {source}{left_out}"]
    assert isinstance(dataset, MixedDataset)
    lines, total = [], sum(part.weight for part in config.data.mix)
    for part in config.data.mix:
        own = config.model_copy(update={"data": config.data.model_copy(update={"source": part.source, "mix": ()})})
        lines += [
            f"{part.name} {part.weight / total:.1%}: {line}" for line in data_lines(own, dataset.sources[part.name])
        ]
    return lines


def too_few_lines(config: RunConfig, dataset: Samples) -> list[str]:
    """Why a run takes no validation loss, where its data are too few for the one that was asked for."""
    held_out, batch = dataset.num_held_out_samples, config.train.global_batch_size
    if not config.eval.batches or not config.data.held_out or held_out >= batch:
        return []
    return [
        f"eval: no validation loss, since {counted(held_out, 'held-out sample')} don't fill a batch of {batch}: give"
        " data.held_out more, or set eval.batches to 0"
    ]


def epochs_line(config: RunConfig, dataset: Samples) -> str:
    """What `train.epochs` comes to, for a mixture of each source, too."""
    train, samples = config.train, dataset.num_train_samples
    text = f"epochs: {train.epochs:g} of {samples:,} samples, in {train.num_steps:,} steps"
    if isinstance(dataset, MixedDataset):
        taken = dataset.order.taken(train.num_steps * train.global_batch_size).tolist()
        own = zip(dataset.sources.items(), taken, strict=True)
        text += "; " + ", ".join(f"{name} {count / one.num_train_samples:.3g} times" for (name, one), count in own)
    return text


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """The tokenizer of a run, with the run's own chat template where it names one."""
    tokenizer = load_tokenizer(data.tokenizer, data.end_token)
    if data.chat_template is not None:
        tokenizer.template = read_template(Path(data.chat_template), tokenizer.template.special_tokens)
    return tokenizer


def open_store(
    data: DataConfig, source: str, tokenizer: Tokenizer, cache: Path, progress: Progress | None = None
) -> TokenStore:
    """The token store of one source, made under `cache` where there is none yet."""
    workers = len(os.sched_getaffinity(0))
    what = Preparation(source, tokenizer, data.max_bytes, data.text_key, data.bad_rows, workers)
    return open_or_prepare(what, cache, progress)
