"""Where text comes from: the Python standard library, a file, or a directory."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from muster.spec.errors import ConfigError

PYTHON_STDLIB = "python-stdlib"
SUFFIXES = (".txt", ".md", ".py")
CHUNK_BYTES = 1 << 20
_NOT_STDLIB = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source; `name` is its path within the source, with `/`."""

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Document:
    """One text, read piece by piece so that a document may be larger than the memory."""

    name: str
    chunks: Iterator[bytes]
    """Readable once."""


def documents(source: str) -> Iterator[Document]:
    """The documents of a source, always in the same order: one for each file that is not empty.

    `source` is `python-stdlib`, a text file, or a directory, of which all *.txt, *.md and *.py files count, at any
    depth, but for hidden ones. Raises ConfigError where there is no text.
    """
    for file in source_files(source):
        yield Document(file.name, _chunks(file.path))


def source_files(source: str) -> list[SourceFile]:
    """The files of a source by name, without empty ones. Raises ConfigError where there is no text."""
    if source == PYTHON_STDLIB:
        files = [file for file in _scan(Path(sysconfig.get_path("stdlib")), (".py",)) if os.access(file.path, os.R_OK)]
    elif (path := Path(source)).is_dir():
        files = _scan(path, SUFFIXES)
    elif path.is_file():
        files = [_source_file(path, path.parent)]
    else:
        raise ConfigError(
            f"data.source: there is no file or directory {source!r}; give a text file, a directory, or {PYTHON_STDLIB}"
        )
    if not files:
        raise ConfigError(f"data.source: {source} has no {', '.join('*' + s for s in SUFFIXES)} files")
    full = [file for file in files if file.size_bytes]
    if not full:
        raise ConfigError(f"data.source: {source} has no text: every file is empty")
    return full


def identity(source: str) -> str:
    """A hash that changes when the source does, from its place and its files' names, sizes and times of change."""
    lines = [f"{source} {platform.python_version()}" if source == PYTHON_STDLIB else str(Path(source).resolve())]
    lines += [f"{file.name}\0{file.size_bytes}\0{file.mtime_ns}" for file in source_files(source)]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def _scan(root: Path, suffixes: tuple[str, ...]) -> list[SourceFile]:
    found = []
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NOT_STDLIB]
        paths = [Path(folder, name) for name in names if name.endswith(suffixes) and not name.startswith(".")]
        found += [_source_file(path, root) for path in paths if path.is_file()]
    return sorted(found, key=lambda file: file.name)


def _source_file(path: Path, root: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(path.relative_to(root).as_posix(), path, status.st_size, status.st_mtime_ns)


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> None:
    raise ConfigError(f"data.source: {error.filename} can't be read: {error.strerror}") from error
