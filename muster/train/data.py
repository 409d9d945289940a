"""The data of a run, free of torch: the launcher builds it, every rank opens it."""

import os
from pathlib import Path

from muster.data.chat import read_template
from muster.data.dataset import Dataset
from muster.data.prepare import Preparation, Progress, open_or_prepare
from muster.data.store import TokenStore
from muster.data.tokenizer import Tokenizer, load_tokenizer
from muster.spec.errors import ConfigError
from muster.spec.run import DataConfig, RunConfig


def open_dataset(config: RunConfig, run_dir: Path) -> Dataset:
    """The run's data; builds the token store if nobody has yet."""
    tokenizer = tokenizer_of(config.data)
    if config.model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the {tokenizer.vocab_size} ids of"
            f" data.tokenizer {config.data.tokenizer}: expected {tokenizer.vocab_size} or more"
        )
    cache = Path(config.data.cache) if config.data.cache else run_dir.resolve().parent / ".data"
    store = open_store(config.data, config.data.source, tokenizer, cache)
    return Dataset(store, config.train.seq_len, config.seed, config.data.held_out)


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
