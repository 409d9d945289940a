"""Sources of data.

The Python standard library, a file, a directory, a data set that Hugging Face `datasets` saved, a pair of Megatron-LM
files, or a function that a plugin registers.
"""

import hashlib
import json
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster.config.run_paths import PYTHON_STDLIB
from muster.data.json_files import COMPRESSIONS, json_layout
from muster.plugins.registry import PluginComponent, component_names, find_component
from muster.spec.errors import ConfigError
from muster.spec.suggest import did_you_mean

FileFormat = Literal["text", "jsonl", "compressed-jsonl", "json", "parquet", "arrow", "megatron", "plugin"]
TEXT_SUFFIXES: dict[str, FileFormat] = {".txt": "text", ".md": "text", ".py": "text"}
ROW_SUFFIXES: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".idx": "megatron",
    ".jsonl.gz": "compressed-jsonl",
    ".jsonl.zst": "compressed-jsonl",
    ".ndjson.gz": "compressed-jsonl",
    ".ndjson.zst": "compressed-jsonl",
}
JSON_SUFFIXES = (".json", ".json.gz", ".json.zst")
"""Suffixes of files that may hold rows, as one list or one a line: their beginning shows which."""
SUFFIXES = TEXT_SUFFIXES | ROW_SUFFIXES
_LISTED_SUFFIXES = [suffix for suffix in (*SUFFIXES, ".json") if suffix.count(".") == 1]
_NOT_STDLIB = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source. `name` is its path within the source, with `/`."""

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int
    file_format: FileFormat = "text"
    must_be_utf8: bool = True
    """True if text that is not UTF-8 is invalid. The standard library has such files, to test Python itself."""


def source_files(source: str) -> list[SourceFile]:
    """Return the non-empty files of a source, sorted by name. Raises ConfigError if there are none.

    `source` is one of:

    * a data set that a plugin registers;
    * `python-stdlib`;
    * a file; its suffix gives the format, text otherwise;
    * a directory, searched at any depth without hidden names: its *.jsonl, *.ndjson (also compressed), *.parquet,
      *.arrow and *.idx files, and those *.json that hold rows, or if there are none its *.txt, *.md and *.py files;
    * a directory that Hugging Face `datasets` saved: the files that it lists, of the split `train`;
    * the common stem of Megatron-LM's .bin and .idx.
    """
    if (plugin := find_component("dataset", source)) is not None:
        return [_plugin_file(plugin)]
    if source == PYTHON_STDLIB:
        stdlib = _scan(Path(sysconfig.get_path("stdlib")), {".py": "text"}, must_be_utf8=False)
        files = [file for file in stdlib if os.access(file.path, os.R_OK)]
    elif (path := Path(source)).is_dir():
        files = _saved_dataset_files(path) or _scan(path, ROW_SUFFIXES) or _scan(path, TEXT_SUFFIXES)
    elif path.is_file():
        files = [_source_file(path, path.parent, _require_format(path))]
    elif (index := Path(f"{source}.idx")).is_file():
        files = [_source_file(index, path.parent, "megatron")]
    else:
        raise ConfigError(
            f"data.source: there is no file or directory {source!r}"
            + (did_you_mean(Path(source).name, known) if (known := component_names("dataset")) else "")
            + f"; give a file, a directory, or {', '.join([PYTHON_STDLIB, *known])}"
        )
    if not files and (Path(source) / "store.json").exists():
        raise ConfigError(f"data.source: {source} is a token store already: train on it, or name what it was made of")
    if not files:
        raise ConfigError(f"data.source: {source} has no {', '.join('*' + s for s in _LISTED_SUFFIXES)} files")
    full = [file for file in files if file.size_bytes]
    if not full:
        raise ConfigError(f"data.source: {source} has no text: every file is empty")
    return full


def source_digest(source: str) -> str:
    """Return a hash of the source's location and its files' names, sizes and modification times."""
    if (plugin := find_component("dataset", source)) is not None:
        code = b"" if plugin.file is None else plugin.file.read_bytes()
        return hashlib.sha256(source.encode() + b"\n" + code).hexdigest()
    lines = [f"{source} {platform.python_version()}" if source == PYTHON_STDLIB else str(Path(source).resolve())]
    lines += [
        f"{file.name}\0{file.size_bytes}\0{file.mtime_ns}"
        + (f"\0{file.file_format}" if _suffix(file.path) in JSON_SUFFIXES else "")
        for file in source_files(source)
    ]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def _plugin_file(plugin: PluginComponent) -> SourceFile:
    if plugin.file is None:
        raise ConfigError(f"data.source: data set {plugin.name} must be registered in a file listed under plugins")
    return SourceFile(plugin.name, plugin.file, plugin.file.stat().st_size, plugin.file.stat().st_mtime_ns, "plugin")


def raise_unreadable(error: OSError) -> None:
    """Raise ConfigError for a file that can't be read."""
    raise ConfigError(f"data.source: {error.filename} can't be read: {error.strerror}") from error


def _suffix(path: Path) -> str:
    """Return the suffix that tells the format, such as `.jsonl` or `.jsonl.gz`."""
    return path.with_suffix("").suffix + path.suffix if path.suffix in COMPRESSIONS else path.suffix


def _require_format(path: Path) -> FileFormat:
    """Return the format of a file that is named as the source. Raises ConfigError for one that can't be read."""
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        return "megatron"
    suffix = _suffix(path)
    if suffix in JSON_SUFFIXES:
        if (found := _json_format(path)) is None and path.stat().st_size:
            raise ConfigError(f"data.source: {path} holds no rows: expected a list of objects, or an object a line")
        return found or "jsonl"
    if path.suffix in COMPRESSIONS and suffix not in SUFFIXES:
        raise ConfigError(
            f"data.source: {path} can't be read: expected a compressed file's name to end with .jsonl, .ndjson or .json"
            f" and then {' or '.join(COMPRESSIONS)}"
        )
    return SUFFIXES.get(suffix, "text")


def _json_format(path: Path) -> FileFormat | None:
    """Return the format of a JSON file; None if it holds no rows."""
    layout = json_layout(path)
    if layout in ("lines", "object"):
        return "compressed-jsonl" if path.suffix in COMPRESSIONS else "jsonl"
    return "json" if layout == "list" else None


def _scan(root: Path, suffixes: dict[str, FileFormat], must_be_utf8: bool = True) -> list[SourceFile]:
    endings = (*suffixes, *JSON_SUFFIXES) if suffixes is ROW_SUFFIXES else tuple(suffixes)
    found = []
    for folder, folders, names in os.walk(root, onerror=raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NOT_STDLIB]
        for name in names:
            # A directory may hold thousands of other files: only those whose names end right are looked at.
            if name.startswith(".") or not name.endswith(endings) or not (path := Path(folder, name)).is_file():
                continue
            suffix = _suffix(path)
            own = suffixes.get(suffix)
            if suffixes is ROW_SUFFIXES and suffix in JSON_SUFFIXES and os.access(path, os.R_OK):
                own = None if json_layout(path) == "object" else _json_format(path)  # such as dataset_infos.json
            if own is not None:
                found.append(_source_file(path, root, own, must_be_utf8))
    return sorted(found, key=lambda file: file.name)


def _source_file(path: Path, root: Path, file_format: FileFormat, must_be_utf8: bool = True) -> SourceFile:
    if file_format == "megatron":
        path = path.with_suffix(".idx")
    status = path.stat()
    size = status.st_size
    if file_format == "megatron":
        tokens = path.with_suffix(".bin")
        if not tokens.is_file():
            raise ConfigError(f"data.source: {path} has no {tokens.name} beside it, which should hold its tokens")
        size = tokens.stat().st_size
    return SourceFile(path.relative_to(root).as_posix(), path, size, status.st_mtime_ns, file_format, must_be_utf8)


def _saved_dataset_files(folder: Path) -> list[SourceFile]:
    """Return the Arrow files that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` listed in a directory.

    Empty for any other directory. Files of the library's cache, which lie beside them, are not listed.
    """
    if (splits := folder / "dataset_dict.json").is_file():
        names = json.loads(splits.read_bytes()).get("splits", [])
        if "train" not in names:
            raise ConfigError(f"data.source: {folder} has no split train; give {folder}/ and one of {', '.join(names)}")
        folder = folder / "train"
    if not (state := folder / "state.json").is_file():
        return []
    try:
        names = [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
        return [_source_file(folder / name, folder, "arrow") for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"data.source: {state} is damaged: expected a list of files in _data_files") from error
    except OSError as error:
        raise ConfigError(f"data.source: {state} lists {error.filename}, which is missing") from error
