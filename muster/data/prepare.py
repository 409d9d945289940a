"""Preparation of a token store from a source: shard by shard, on several processes, resumable after a kill.

A store is written to `DIRECTORY.partial` and renamed when it is complete. A shard is finished once its `shard-N.json`
exists; a later attempt keeps it. One builder at a time holds the lock file in the folder; others wait, and then open
the finished store.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for
from pathlib import Path

import numpy as np

from muster.config.file_writer import fsync_directory
from muster.data.invalid_rows import InvalidRowLog, InvalidRowPolicy
from muster.data.readers import Encoding, FileSpan, split_file, tokenize_span
from muster.data.rows import RowReader
from muster.data.shard import ChecksummedFile, Shard, ShardWriter, starts_path
from muster.data.sources import source_digest, source_files
from muster.data.store import HEADER_FILE, VERSION, StoreHeader, TokenStore, is_store
from muster.data.tokenizer import Tokenizer
from muster.spec.errors import ConfigError, MusterError

MIN_SHARD_BYTES = 16 << 20
"""Smallest amount of source that becomes a shard of its own."""
MAX_SHARDS = 1024
"""Approximate limit of the number of shards."""
TRIAL_BYTES = 1 << 20
"""Largest amount of source that a trial reads."""
Progress = Callable[[int], None]
"""Callback that receives the bytes of the source done so far."""


@dataclass(frozen=True)
class PrepareOptions:
    """Source and tokenizer of a store, and the options of its preparation."""

    source: str
    tokenizer: Tokenizer
    max_bytes: int | None = None
    """Largest amount of text and JSON lines that is read; None: all."""
    text_key: str | None = None
    on_invalid_row: InvalidRowPolicy = "stop"
    workers: int = 1

    @property
    def row_reader(self) -> RowReader:
        return RowReader(self.tokenizer.chat_template, self.text_key)

    @property
    def content_key(self) -> str:
        """Hash of everything that the store's tokens depend on."""
        parts = (
            source_digest(self.source),
            self.tokenizer.fingerprint,
            self.tokenizer.chat_template.text,
            self.max_bytes,
        )
        return hashlib.sha256(repr((VERSION, parts, self.text_key, self.on_invalid_row)).encode()).hexdigest()


def open_or_prepare(options: PrepareOptions, cache_dir: Path, progress: Progress | None = None) -> TokenStore:
    """Open the store of a source, preparing it under `cache_dir` if it isn't there or the source has changed.

    A source that is a store itself is opened as it is. Raises as `prepare` and `TokenStore.open` do.
    """
    directory = store_path(options, cache_dir)
    if directory.exists():
        return TokenStore.open(directory, options.tokenizer)
    return prepare(options, directory, progress)


def store_path(options: PrepareOptions, cache_dir: Path) -> Path:
    """Return the place of the store of a source, existing or not: the source itself where it is a store, else a
    directory under `cache_dir`."""
    if is_store(Path(options.source)):
        return Path(options.source)
    return cache_dir / f"{Path(options.source).resolve().name[:40]}-{options.content_key[:16]}"


def prepare_trial(options: PrepareOptions, folder: Path) -> TokenStore | None:
    """Prepare the first megabyte of a source under `folder`, to see if it can be read; returns the store if that was
    all of it. Raises as `prepare` does. Functions of plugins are not called, nor are large tables read."""
    files = source_files(options.source)
    formats = {file.file_format for file in files}
    limit = min(TRIAL_BYTES, options.max_bytes or TRIAL_BYTES)
    total = sum(file.size_bytes for file in files)
    if "plugin" in formats or (formats - {"text", "jsonl", "json"} and total > limit and options.max_bytes is None):
        return None
    is_whole = total <= limit or options.max_bytes == limit
    trial = options if is_whole or formats - {"text", "jsonl", "json"} else replace(options, max_bytes=limit)
    store = open_or_prepare(replace(trial, workers=1), folder)
    return store if is_whole else None


def prepare(options: PrepareOptions, directory: Path, progress: Progress | None = None) -> TokenStore:
    """Write the store of a source to `directory`, where it appears as a whole, and open it.

    Shards that a killed builder of the same store has finished are kept. Raises ConfigError if the source can't be
    read, a row is invalid, or the directory holds another store, MusterError if the store can't be written; then
    nothing is left behind.
    """
    key = options.content_key
    plan = _ShardPlan(options)
    folder = directory.with_name(directory.name + ".partial")
    try:
        with _hold_build_lock(folder, directory) as is_ours:
            if is_ours:
                _build(plan, key, folder, directory, progress or (lambda _: None))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise cannot_write_store(directory, error) from error
    except BaseException:
        _remove_if_empty(folder)
        raise
    store = TokenStore.open(directory, options.tokenizer)
    if store.header.key not in (None, key):
        raise ConfigError(f"{directory} already holds a store of other data; delete it or choose another directory")
    return store


def cannot_write_store(directory: Path, error: OSError) -> MusterError:
    """Return the error of a store that can't be written."""
    return MusterError(
        f"the token store {directory} can't be written: {error.strerror}; free space there or set data.cache to another"
        " directory"
    )


@dataclass
class _ShardPlan:
    """Division of a source into shards, each a list of spans of files."""

    options: PrepareOptions

    def __post_init__(self) -> None:
        files = source_files(self.options.source)
        total = sum(file.size_bytes for file in files)
        target = max(MIN_SHARD_BYTES, total // MAX_SHARDS)
        spans = _limit_bytes((span for file in files for span in split_file(file, target)), self.options.max_bytes)
        self.shards: list[list[FileSpan]] = [[]]
        for span in spans:
            if sum(one.size_bytes for one in self.shards[-1]) + span.size_bytes > target and self.shards[-1]:
                self.shards.append([])
            self.shards[-1].append(span)


def make_encoding(options: PrepareOptions) -> Encoding:
    """Return the encoding of rows and texts to tokens."""
    dtype = np.dtype("uint16" if options.tokenizer.vocab_size <= 1 << 16 else "uint32").newbyteorder("<")
    return Encoding(options.tokenizer, options.row_reader, dtype)


def _limit_bytes(spans: Iterator[FileSpan], max_bytes: int | None) -> Iterator[FileSpan]:
    """Yield the spans that make up the first `max_bytes` bytes."""
    left = max_bytes
    for span in spans:
        if left is None:
            yield span
            continue
        if span.file.file_format == "plugin":
            yield replace(span, end=left)
            return
        if span.file.file_format not in ("text", "jsonl", "compressed-jsonl", "json"):
            raise ConfigError(f"data.max_bytes is for text and JSON, but {span.file.path} is {span.file.file_format}")
        if left <= 0:
            return
        size = min(left, span.size_bytes)
        yield replace(span, end=span.begin + size, size_bytes=size)
        left -= size


def _build(plan: _ShardPlan, key: str, folder: Path, directory: Path, progress: Progress) -> None:
    job = folder / "job.json"
    if not job.exists() or job.read_text() != key:
        for path in folder.iterdir():
            if path.name != "lock":
                path.unlink()
        job.write_text(key)
    try:
        _write_shards(plan, folder, progress)
        _write_header(plan, key, folder)
    except ConfigError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    for path in [job, *folder.glob("shard-*.json"), *folder.glob("starts-*.bin")]:
        path.unlink()
    fsync_directory(folder)
    folder.rename(directory)
    (directory / "lock").unlink()
    fsync_directory(directory.parent)


def _write_shards(plan: _ShardPlan, folder: Path, progress: Progress) -> None:
    """Write all missing shards, in this process or in several."""
    sizes = [sum(span.size_bytes for span in part) for part in plan.shards]
    missing = [index for index in range(len(plan.shards)) if _read_shard(folder, index) is None]
    done = sum(sizes) - sum(sizes[index] for index in missing)
    work = partial(_write_shard, folder, make_encoding(plan.options), plan.options.on_invalid_row)
    if len(missing) < 2 or plan.options.workers < 2:
        for index in missing:
            work(index, plan.shards[index], _cumulative(progress, done, done + sizes[index]))
            done += sizes[index]
            progress(done)
        return
    workers = min(plan.options.workers, len(missing))
    # Spawned, not forked: a fork of a process with threads may hang. Tokenizers of workers are single-threaded.
    with ProcessPoolExecutor(workers, get_context("spawn"), _init_worker) as pool:
        with _deferred_stop():  # a process that is being started would print a traceback
            futures = {pool.submit(work, index, plan.shards[index]): index for index in missing}
        left = set(futures)
        try:
            while left:
                finished, left = wait(left, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                    done += sizes[futures[future]]
                    progress(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _deferred_stop() -> Iterator[None]:
    """Handle the signals that ask this process to stop only at the end; the main thread alone handles them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = signal.SIGTERM, signal.SIGINT
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in came:
        signal.raise_signal(number)


def _cumulative(progress: Progress, done: int, total: int) -> Progress:
    """Return a callback for increments that reports their running sum, at most `total`, to `progress`.

    The sum is capped because the last line of a span may reach beyond its end.
    """

    def more(size_bytes: int) -> None:
        nonlocal done
        done = min(done + size_bytes, total)
        progress(done)

    return more


def _init_worker() -> None:
    """Set up a worker process so that it ends with its builder: the next builder writes the same files."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    builder = parent_process()
    assert builder is not None

    def follow() -> None:
        wait_for([builder.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _write_shard(
    folder: Path,
    encoding: Encoding,
    policy: InvalidRowPolicy,
    index: int,
    spans: list[FileSpan],
    progress: Progress = lambda _: None,
) -> None:
    """Write one shard, and its shard-N.json last."""
    invalid = InvalidRowLog(policy)
    writer = ShardWriter(folder, index, encoding.dtype)
    for span in spans:
        tokenize_span(span, encoding, invalid, writer, progress)
    content = {"shard": writer.finish().model_dump(), "skipped": invalid.counts, "examples": invalid.examples}
    tmp_path = folder / f"shard-{index:05d}.tmp"
    with open(tmp_path, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    tmp_path.rename(_shard_path(folder, index))


def _shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.json"


def _read_shard(folder: Path, index: int) -> tuple[Shard, Counter[str]] | None:
    try:
        content = json.loads(_shard_path(folder, index).read_bytes())
        return Shard.model_validate(content["shard"]), Counter(content["skipped"])
    except (OSError, ValueError, KeyError):
        return None


def _write_header(plan: _ShardPlan, key: str, folder: Path) -> None:
    """Join the shards' document starts in documents.bin, and write store.json. Empty shards are left out."""
    starts = ChecksummedFile(folder / "documents.bin", np.dtype("<i8"))
    shards: list[Shard] = []
    skipped = Counter[str]()
    num_tokens = 0
    for index in range(len(plan.shards)):
        found = _read_shard(folder, index)
        assert found is not None
        shard, skipped_there = found
        skipped += skipped_there
        if shard.num_tokens:
            starts.write(np.fromfile(starts_path(folder, index), "<i8") + num_tokens)
            num_tokens += shard.num_tokens
            shards.append(shard)
        else:
            (folder / shard.file).unlink()
    starts.close()
    options = plan.options
    if not num_tokens:
        reasons = ", ".join(f"{count} {kind}" for kind, count in skipped.items())
        raise ConfigError(
            f"data.source: {options.source} has no usable document"
            + (f": all of its rows are invalid ({reasons})" if reasons else "")
        )
    header = StoreHeader(
        source=options.source if options.max_bytes is None else f"{options.source}, first {options.max_bytes} bytes",
        tokenizer=options.tokenizer.fingerprint,
        vocab_size=options.tokenizer.vocab_size,
        dtype="uint16" if make_encoding(options).dtype.itemsize == 2 else "uint32",
        num_tokens=num_tokens,
        num_documents=starts.length,
        documents_crc32=starts.crc32,
        shards=tuple(shards),
        skipped=dict(skipped),
        key=key,
    )
    with open(folder / HEADER_FILE, "wb") as file:
        file.write(json.dumps(header.model_dump(), indent=1).encode())
        file.flush()
        os.fsync(file.fileno())


# ----------------------------------------------------------------------------------------------------------------------
# One builder at a time


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder without finished shards, unless another builder is at work in it."""
    with contextlib.suppress(OSError), (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not list(folder.glob("shard-*.json")):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _hold_build_lock(folder: Path, directory: Path) -> Iterator[bool]:
    """Hold the lock in `folder`. Yields False if another builder has finished `directory` meanwhile."""
    while True:
        if directory.exists():
            yield False
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "lock").open("w")
        except (FileExistsError, FileNotFoundError) as error:
            if folder.is_file() or folder.is_symlink():
                raise ConfigError(f"{folder}, where the store is built, must be a folder or not be there") from error
            continue  # the lock's holder has just renamed or removed the folder
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                is_held = os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / "lock"))
            except FileNotFoundError:
                is_held = False
            if is_held and not directory.exists():
                yield True
                return
            if is_held:  # created just after another builder had renamed the folder before it
                shutil.rmtree(folder, ignore_errors=True)
