"""Where data come from: the Python standard library, a file, a directory, a data set of Hugging Face, Megatron's pair
of files, a plugin's function."""

import hashlib
import json
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster.plugins.registry import PluginComponent, component_names, find_component
from muster.spec.errors import ConfigError
from muster.spec.suggest import did_you_mean

PYTHON_STDLIB = "python-stdlib"
FileFormat = Literal["text", "jsonl", "parquet", "arrow", "megatron", "plugin"]
TEXT_SUFFIXES: dict[str, FileFormat] = {".txt": "text", ".md": "text", ".py": "text"}
ROW_SUFFIXES: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".idx": "megatron",
}
SUFFIXES = TEXT_SUFFIXES | ROW_SUFFIXES
_NOT_STDLIB = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source; `name` is its path within the source, with `/`."""

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int
    file_format: FileFormat = "text"
    must_be_utf8: bool = True
    """Whether its text must be UTF-8; the standard library has files that are not, to test Python itself."""


def source_files(source: str) -> list[SourceFile]:
    """The files of a source by name, without empty ones. Raises ConfigError where there are no data.

    `source` is `python-stdlib`; a file, of the kind that its ending says and text otherwise; the stem of Megatron's
    .bin and .idx; or a directory, at any depth, but for hidden names: its *.jsonl, *.ndjson, *.parquet, *.arrow and
    *.idx files, or if it has none of them its *.txt, *.md and *.py files. Of a directory that the library `datasets`
    has saved, those files count that it names, of several splits those of `train`.
    """
    if (part := find_component("dataset", source)) is not None:
        return [_plugin_file(part)]
    if source == PYTHON_STDLIB:
        stdlib = _scan(Path(sysconfig.get_path("stdlib")), {".py": "text"}, must_be_utf8=False)
        files = [file for file in stdlib if os.access(file.path, os.R_OK)]
    elif (path := Path(source)).is_dir():
        files = _saved_dataset_files(path) or _scan(path, ROW_SUFFIXES) or _scan(path, TEXT_SUFFIXES)
    elif path.is_file():
        files = [_source_file(path, path.parent, _format_of(path))]
    elif (index := Path(f"{source}.idx")).is_file():
        files = [_source_file(index, path.parent, "megatron")]
    else:
        raise ConfigError(
            f"data.source: there is no file or directory {source!r}"
            + (did_you_mean(source, known) if (known := component_names("dataset")) else "")
            + f"; give a file, a directory, or {', '.join([PYTHON_STDLIB, *known])}"
        )
    if not files:
        raise ConfigError(f"data.source: {source} has no {', '.join('*' + s for s in SUFFIXES)} files")
    full = [file for file in files if file.size_bytes]
    if not full:
        raise ConfigError(f"data.source: {source} has no text: every file is empty")
    return full


def source_digest(source: str) -> str:
    """A hash that changes when the source does, from its place and its files' names, sizes and times of change."""
    if (part := find_component("dataset", source)) is not None:
        code = b"" if part.file is None else part.file.read_bytes()
        return hashlib.sha256(source.encode() + b"\n" + code).hexdigest()
    lines = [f"{source} {platform.python_version()}" if source == PYTHON_STDLIB else str(Path(source).resolve())]
    lines += [f"{file.name}\0{file.size_bytes}\0{file.mtime_ns}" for file in source_files(source)]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def _plugin_file(plugin: PluginComponent) -> SourceFile:
    if plugin.file is None:
        raise ConfigError(f"data.source: data set {plugin.name} must be registered in a file, which plugins names")
    return SourceFile(plugin.name, plugin.file, plugin.file.stat().st_size, plugin.file.stat().st_mtime_ns, "plugin")


def raise_unreadable(error: OSError) -> None:
    """Raises ConfigError for a file that can't be read."""
    raise ConfigError(f"data.source: {error.filename} can't be read: {error.strerror}") from error


def _format_of(path: Path) -> FileFormat:
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        return "megatron"
    return SUFFIXES.get(path.suffix, "text")


def _scan(root: Path, suffixes: dict[str, FileFormat], must_be_utf8: bool = True) -> list[SourceFile]:
    found = []
    for folder, folders, names in os.walk(root, onerror=raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NOT_STDLIB]
        for name in names:
            path = Path(folder, name)
            if path.suffix in suffixes and not name.startswith(".") and path.is_file():
                found.append(_source_file(path, root, suffixes[path.suffix], must_be_utf8))
    return sorted(found, key=lambda file: file.name)


def _source_file(path: Path, root: Path, file_format: FileFormat, must_be_utf8: bool = True) -> SourceFile:
    if file_format == "megatron":
        path = path.with_suffix(".idx")
    status = path.stat()
    size = status.st_size
    if file_format == "megatron":
        numbers = path.with_suffix(".bin")
        if not numbers.is_file():
            raise ConfigError(f"data.source: {path} has no {numbers.name} beside it, where its tokens should be")
        size = numbers.stat().st_size
    return SourceFile(path.relative_to(root).as_posix(), path, size, status.st_mtime_ns, file_format, must_be_utf8)


def _saved_dataset_files(folder: Path) -> list[SourceFile]:
    """The Arrow files of a directory made by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`; none if it is no
    such directory. Files of its cache lie beside them and don't count."""
    if (splits := folder / "dataset_dict.json").is_file():
        names = json.loads(splits.read_bytes()).get("splits", [])
        if "train" not in names:
            raise ConfigError(f"data.source: {folder} has no split train: give one of {', '.join(names)} as {folder}/…")
        folder = folder / "train"
    if not (state := folder / "state.json").is_file():
        return []
    try:
        names = [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
        return [_source_file(folder / name, folder, "arrow") for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"data.source: {state} is damaged: expected a list of files in _data_files") from error
    except OSError as error:
        raise ConfigError(f"data.source: {error.filename} is missing, which {state} names") from error
