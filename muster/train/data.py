"""The data of a run, free of torch: the launcher builds it, every rank opens it."""

from pathlib import Path

from muster.data.dataset import Dataset
from muster.data.store import open_or_build
from muster.data.tokenizer import ByteTokenizer
from muster.spec.run import RunConfig


def open_dataset(config: RunConfig, run_dir: Path) -> Dataset:
    """The run's data; builds the token store if nobody has yet."""
    cache = Path(config.data.cache) if config.data.cache else run_dir.resolve().parent / ".data"
    store = open_or_build(config.data.source, cache, ByteTokenizer(), config.data.max_bytes)
    return Dataset(store, config.train.seq_len, config.seed, config.data.held_out)
