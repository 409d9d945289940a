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

from muster.data.bad_rows import BadRows, Policy
from muster.data.readers import Encoding, Span, spans_of, write_span
from muster.data.rows import RowReader
from muster.data.shard import Output, Shard, ShardWriter, starts_path
from muster.data.sources import identity, source_files
from muster.data.store import HEADER, VERSION, Header, TokenStore, is_store
from muster.data.tokenizer import Tokenizer
from muster.spec.errors import ConfigError, MusterError
from muster.spec.write import sync_folder

LEAST_PART_BYTES = 16 << 20
MOST_PARTS = 1024
"""A source becomes as many shards at most, about, unless each would hold less than `LEAST_PART_BYTES`."""
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Preparation:
    """What is made into a store, and how."""

    source: str
    tokenizer: Tokenizer
    max_bytes: int | None = None
    """Of text and JSON lines that are read at most."""
    text_key: str | None = None
    bad_rows: Policy = "stop"
    workers: int = 1

    @property
    def rows(self) -> RowReader:
        return RowReader(self.tokenizer.template, self.text_key)

    @property
    def key(self) -> str:
        """A hash of all that the store's tokens depend on."""
        parts = (identity(self.source), self.tokenizer.fingerprint, self.tokenizer.template.text, self.max_bytes)
        return hashlib.sha256(repr((VERSION, parts, self.text_key, self.bad_rows)).encode()).hexdigest()


def open_or_prepare(what: Preparation, cache: Path, progress: Progress | None = None) -> TokenStore:
    """The store of a source: the source itself where it is a store, else the one under `cache`, made when there is none
    of the source as it is now. Raises as `prepare` and `TokenStore.open` do."""
    if is_store(Path(what.source)):
        return TokenStore.open(Path(what.source), what.tokenizer)
    directory = cache / f"{Path(what.source).resolve().name[:40]}-{what.key[:16]}"
    if directory.exists():
        return TokenStore.open(directory, what.tokenizer)
    return prepare(what, directory, progress)


def prepare(what: Preparation, directory: Path, progress: Progress | None = None) -> TokenStore:
    """Writes the store of a source; all of it appears in `directory` at once.

    What a killed builder of the same has finished is used. `progress` is called with the bytes that are done so far.
    Raises ConfigError where the source can't be read, a row is bad, or the directory holds another store, MusterError
    where the store can't be written; nothing is left behind then.
    """
    key, planned = what.key, _Planned(what)
    folder = directory.with_name(directory.name + ".partial")
    try:
        with _alone(folder, directory) as is_ours:
            if is_ours:
                _prepare(planned, key, folder, directory, progress or (lambda _: None))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise MusterError(
            f"the token store {directory} can't be written: {error.strerror}; free space there or set data.cache to"
            " another directory"
        ) from error
    except BaseException:
        _tidy(folder)
        raise
    store = TokenStore.open(directory, what.tokenizer)
    if store.header.key not in (None, key):
        raise ConfigError(f"{directory} already holds a store of other text; delete it or choose another directory")
    return store


@dataclass
class _Planned:
    """A preparation and its parts, one shard each."""

    what: Preparation

    def __post_init__(self) -> None:
        files = source_files(self.what.source)
        total = sum(file.size_bytes for file in files)
        target = max(LEAST_PART_BYTES, total // MOST_PARTS)
        spans = _first_bytes((span for file in files for span in spans_of(file, target)), self.what.max_bytes)
        self.parts: list[list[Span]] = [[]]
        for span in spans:
            if sum(one.size_bytes for one in self.parts[-1]) + span.size_bytes > target and self.parts[-1]:
                self.parts.append([])
            self.parts[-1].append(span)


def encoding_of(what: Preparation) -> Encoding:
    """How its rows and texts become tokens."""
    dtype = np.dtype("uint16" if what.tokenizer.vocab_size <= 1 << 16 else "uint32").newbyteorder("<")
    return Encoding(what.tokenizer, what.rows, dtype)


def _first_bytes(spans: Iterator[Span], limit: int | None) -> Iterator[Span]:
    """The first `limit` bytes of them."""
    left = limit
    for span in spans:
        if left is None:
            yield span
            continue
        if span.file.kind == "plugin":
            yield replace(span, end=left)
            return
        if span.file.kind not in ("text", "jsonl"):
            raise ConfigError(f"data.max_bytes is for text and JSON lines, but {span.file.path} is {span.file.kind}")
        if left <= 0:
            return
        size = min(left, span.size_bytes)
        yield replace(span, end=span.begin + size, size_bytes=size)
        left -= size


def _prepare(planned: _Planned, key: str, folder: Path, directory: Path, progress: Progress) -> None:
    job = folder / "job.json"
    if not job.exists() or job.read_text() != key:
        for path in folder.iterdir():
            if path.name != "lock":
                path.unlink()
        job.write_text(key)
    try:
        _write_shards(planned, folder, progress)
        _finish(planned, key, folder)
    except ConfigError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    for path in [job, *folder.glob("shard-*.json"), *folder.glob("starts-*.bin")]:
        path.unlink()
    sync_folder(folder)
    folder.rename(directory)
    (directory / "lock").unlink()
    sync_folder(directory.parent)


def _write_shards(planned: _Planned, folder: Path, progress: Progress) -> None:
    """All shards that are not there yet, in this process or in several."""
    sizes = [sum(span.size_bytes for span in part) for part in planned.parts]
    missing = [index for index in range(len(planned.parts)) if _read_shard(folder, index) is None]
    done = sum(sizes) - sum(sizes[index] for index in missing)
    work = partial(_write_shard, folder, encoding_of(planned.what), planned.what.bad_rows)
    if len(missing) < 2 or planned.what.workers < 2:
        for index in missing:
            work(index, planned.parts[index], _counting(progress, done, done + sizes[index]))
            done += sizes[index]
            progress(done)
        return
    workers = min(planned.what.workers, len(missing))
    # Spawned, since a fork of a process with threads may hang; a worker's tokenizer has no threads of its own.
    with ProcessPoolExecutor(workers, get_context("spawn"), _alone_in_process) as pool:
        futures = {pool.submit(work, index, planned.parts[index]): index for index in missing}
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


def _counting(progress: Progress, done: int, most: int) -> Progress:
    """Takes bytes as they come and gives their sum to `progress`. The last line of a part may reach beyond it."""

    def more(size_bytes: int) -> None:
        nonlocal done
        done = min(done + size_bytes, most)
        progress(done)

    return more


def _alone_in_process() -> None:
    """Begins a worker, which ends with the builder: the next one writes the same files."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    builder = parent_process()
    assert builder is not None

    def follow() -> None:
        wait_for([builder.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _write_shard(
    folder: Path, encoding: Encoding, policy: Policy, index: int, part: list[Span], progress: Progress = lambda _: None
) -> None:
    """Writes one shard, and as the last its shard-N.json."""
    bad, writer = BadRows(policy), ShardWriter(folder, index, encoding.dtype)
    for span in part:
        write_span(span, encoding, bad, writer, progress)
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


def _finish(planned: _Planned, key: str, folder: Path) -> None:
    """Makes one documents.bin of all shards' starts, and writes store.json. Shards without a token are left out."""
    starts, shards, skipped = Output(folder / "documents.bin", np.dtype("<i8")), [], Counter[str]()
    num_tokens = 0
    for index in range(len(planned.parts)):
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
    what = planned.what
    if not num_tokens:
        reasons = ", ".join(f"{count} {kind}" for kind, count in skipped.items())
        raise ConfigError(
            f"data.source: {what.source} has no document that can be used"
            + (f": all of its rows are bad ({reasons})" if reasons else "")
        )
    header = Header(
        source=what.source if what.max_bytes is None else f"{what.source}, first {what.max_bytes} bytes",
        tokenizer=what.tokenizer.fingerprint,
        vocab_size=what.tokenizer.vocab_size,
        dtype="uint16" if encoding_of(what).dtype.itemsize == 2 else "uint32",
        num_tokens=num_tokens,
        num_documents=starts.length,
        documents_crc32=starts.crc32,
        shards=tuple(shards),
        skipped=dict(skipped),
        key=key,
    )
    with open(folder / HEADER, "wb") as file:
        file.write(json.dumps(header.model_dump(), indent=1).encode())
        file.flush()
        os.fsync(file.fileno())


# ----------------------------------------------------------------------------------------------------------------------
# One builder at a time


def _tidy(folder: Path) -> None:
    """Removes a folder in which nothing is finished that could be gone on from, unless another builder is at work."""
    with contextlib.suppress(OSError), (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not list(folder.glob("shard-*.json")):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _alone(folder: Path, directory: Path) -> Iterator[bool]:
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
