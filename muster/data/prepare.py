"""Preparing: from a source to its token store, shard by shard, on several processes, going on after a kill.

While it is written, the store is `DIRECTORY.partial`; a shard whose `shard-N.json` is there is finished. One builder
holds the lock in it; others wait, and open what it made.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
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

from muster.config.yaml_writer import fsync_directory
from muster.data.invalid_rows import InvalidRowLog, InvalidRowPolicy
from muster.data.readers import Encoding, FileSpan, split_file, tokenize_span
from muster.data.rows import RowReader
from muster.data.shard import ChecksummedFile, Shard, ShardWriter, starts_path
from muster.data.sources import source_digest, source_files
from muster.data.store import HEADER_FILE, VERSION, StoreHeader, TokenStore, is_store
from muster.data.tokenizer import Tokenizer
from muster.spec.errors import ConfigError, MusterError

MIN_SHARD_BYTES = 16 << 20
MAX_SHARDS = 1024
"""A source becomes as many shards at most, about, unless each would hold less than `MIN_SHARD_BYTES`."""
Progress = Callable[[int], None]


@dataclass(frozen=True)
class PrepareOptions:
    """What is made into a store, and how."""

    source: str
    tokenizer: Tokenizer
    max_bytes: int | None = None
    """Of text and JSON lines that are read at most."""
    text_key: str | None = None
    bad_rows: InvalidRowPolicy = "stop"
    workers: int = 1

    @property
    def row_reader(self) -> RowReader:
        return RowReader(self.tokenizer.chat_template, self.text_key)

    @property
    def content_key(self) -> str:
        """A hash of all that the store's tokens depend on."""
        parts = (
            source_digest(self.source),
            self.tokenizer.fingerprint,
            self.tokenizer.chat_template.text,
            self.max_bytes,
        )
        return hashlib.sha256(repr((VERSION, parts, self.text_key, self.bad_rows)).encode()).hexdigest()


def open_or_prepare(options: PrepareOptions, cache_dir: Path, progress: Progress | None = None) -> TokenStore:
    """The store of a source: the source itself where it is a store, else the one under `cache`, made when there is none
    of the source as it is now. Raises as `prepare` and `TokenStore.open` do."""
    if is_store(Path(options.source)):
        return TokenStore.open(Path(options.source), options.tokenizer)
    directory = cache_dir / f"{Path(options.source).resolve().name[:40]}-{options.content_key[:16]}"
    if directory.exists():
        return TokenStore.open(directory, options.tokenizer)
    return prepare(options, directory, progress)


def prepare(options: PrepareOptions, directory: Path, progress: Progress | None = None) -> TokenStore:
    """Writes the store of a source; all of it appears in `directory` at once.

    What a killed builder of the same has finished is used. `progress` is called with the bytes that are done so far.
    Raises ConfigError where the source can't be read, a row is bad, or the directory holds another store, MusterError
    where the store can't be written; nothing is left behind then.
    """
    key, planned = options.content_key, _ShardPlan(options)
    folder = directory.with_name(directory.name + ".partial")
    try:
        with _hold_build_lock(folder, directory) as is_ours:
            if is_ours:
                _build(planned, key, folder, directory, progress or (lambda _: None))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise MusterError(
            f"the token store {directory} can't be written: {error.strerror}; free space there or set data.cache to"
            " another directory"
        ) from error
    except BaseException:
        _remove_if_empty(folder)
        raise
    store = TokenStore.open(directory, options.tokenizer)
    if store.header.key not in (None, key):
        raise ConfigError(f"{directory} already holds a store of other text; delete it or choose another directory")
    return store


@dataclass
class _ShardPlan:
    """A preparation and its parts, one shard each."""

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
    """How its rows and texts become tokens."""
    dtype = np.dtype("uint16" if options.tokenizer.vocab_size <= 1 << 16 else "uint32").newbyteorder("<")
    return Encoding(options.tokenizer, options.row_reader, dtype)


def _limit_bytes(spans: Iterator[FileSpan], max_bytes: int | None) -> Iterator[FileSpan]:
    """The first `limit` bytes of them."""
    left = max_bytes
    for span in spans:
        if left is None:
            yield span
            continue
        if span.file.file_format == "plugin":
            yield replace(span, end=left)
            return
        if span.file.file_format not in ("text", "jsonl"):
            raise ConfigError(
                f"data.max_bytes is for text and JSON lines, but {span.file.path} is {span.file.file_format}"
            )
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
    """All shards that are not there yet, in this process or in several."""
    sizes = [sum(span.size_bytes for span in part) for part in plan.shards]
    missing = [index for index in range(len(plan.shards)) if _read_shard(folder, index) is None]
    done = sum(sizes) - sum(sizes[index] for index in missing)
    work = partial(_write_shard, folder, make_encoding(plan.options), plan.options.bad_rows)
    if len(missing) < 2 or plan.options.workers < 2:
        for index in missing:
            work(index, plan.shards[index], _cumulative(progress, done, done + sizes[index]))
            done += sizes[index]
            progress(done)
        return
    workers = min(plan.options.workers, len(missing))
    # Spawned, since a fork of a process with threads may hang; a worker's tokenizer has no threads of its own.
    with ProcessPoolExecutor(workers, get_context("spawn"), _init_worker) as pool:
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


def _cumulative(progress: Progress, done: int, total: int) -> Progress:
    """Takes bytes as they come and gives their sum to `progress`. The last line of a part may reach beyond it."""

    def more(size_bytes: int) -> None:
        nonlocal done
        done = min(done + size_bytes, total)
        progress(done)

    return more


def _init_worker() -> None:
    """Begins a worker, which ends with the builder: the next one writes the same files."""
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
    """Writes one shard, and as the last its shard-N.json."""
    bad, writer = InvalidRowLog(policy), ShardWriter(folder, index, encoding.dtype)
    for span in spans:
        tokenize_span(span, encoding, bad, writer, progress)
    said = {"shard": writer.finish().model_dump(), "skipped": bad.counts, "examples": bad.examples}
    beside = folder / f"shard-{index:05d}.tmp"
    with open(beside, "w") as file:
        json.dump(said, file)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(_shard_path(folder, index))


def _shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.json"


def _read_shard(folder: Path, index: int) -> tuple[Shard, Counter[str]] | None:
    try:
        said = json.loads(_shard_path(folder, index).read_bytes())
        return Shard.model_validate(said["shard"]), Counter(said["skipped"])
    except (OSError, ValueError, KeyError):
        return None


def _write_header(plan: _ShardPlan, key: str, folder: Path) -> None:
    """Makes one documents.bin of all shards' starts, and writes store.json. Shards without a token are left out."""
    starts, shards, skipped = ChecksummedFile(folder / "documents.bin", np.dtype("<i8")), [], Counter[str]()
    num_tokens = 0
    for index in range(len(plan.shards)):
        found = _read_shard(folder, index)
        assert found is not None
        shard, bad = found
        skipped += bad
        if shard.num_tokens:
            starts.write(np.fromfile(starts_path(folder, index), "<i8") + num_tokens)
            num_tokens += shard.num_tokens
            shards.append(shard)
        else:
            (folder / shard.file).unlink()
    starts.close()
    what = plan.options
    if not num_tokens:
        reasons = ", ".join(f"{count} {kind}" for kind, count in skipped.items())
        raise ConfigError(
            f"data.source: {what.source} has no document that can be used"
            + (f": all of its rows are bad ({reasons})" if reasons else "")
        )
    header = StoreHeader(
        source=what.source if what.max_bytes is None else f"{what.source}, first {what.max_bytes} bytes",
        tokenizer=what.tokenizer.fingerprint,
        vocab_size=what.tokenizer.vocab_size,
        dtype="uint16" if make_encoding(what).dtype.itemsize == 2 else "uint32",
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
    """Removes a folder in which nothing is finished that could be gone on from, unless another builder is at work."""
    with contextlib.suppress(OSError), (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not list(folder.glob("shard-*.json")):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _hold_build_lock(folder: Path, directory: Path) -> Iterator[bool]:
    """Holds the lock in `folder`; false where another builder has finished `directory` meanwhile."""
    while True:
        if directory.exists():
            yield False
            return
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = (folder / "lock").open("w")
        except FileNotFoundError:  # its holder has just published or removed the folder
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                is_held = os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / "lock"))
            except FileNotFoundError:
                is_held = False
            if is_held and not directory.exists():
                yield True
                return
            if is_held:  # made anew just after its holder had published what was in it
                shutil.rmtree(folder, ignore_errors=True)
