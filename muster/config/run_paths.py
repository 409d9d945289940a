"""Paths in a run file: which keys hold one, and where a relative one begins."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from muster.config.run_config import RunConfig
from muster.plugins.registry import component_names

BYTES = "bytes"
"""Name of the tokenizer whose ids are single bytes."""
PYTHON_STDLIB = "python-stdlib"
"""Source that is the .py files of the Python standard library."""

PATH_KEYS = (
    "data.source",
    "data.blend",
    "data.tokenizer",
    "data.chat_template",
    "data.cache",
    "train.init_from",
    "train.remote_checkpoint_dir",
    "train.in_memory_checkpoint_dir",
    "outer.secret_file",
    "swarm.secret_file",
)
"""Keys with a path; each item of data.blend has one as its `source`."""
CONTENT_KEYS = ("data.source", "data.blend", "data.tokenizer", "data.chat_template")
"""Keys among them whose files determine the tokens, wherever the files lie."""


def resolve_path_value(key: str, value: Any, base_dir: Path) -> Any:
    """Return the value of one of PATH_KEYS with each relative path in it begun at `base_dir`.

    Names (`bytes`, `python-stdlib`, a plugin's data set) and URLs stay; a `~` becomes the home directory. Values of a
    wrong type are returned as they are, for validation to refuse.
    """
    return _map_value(key, value, lambda path: _joined(base_dir, path))


def with_absolute_paths(config: RunConfig, within: Path | None = None) -> RunConfig:
    """Return the configuration with absolute paths; those inside the directory `within` are relative to it.

    So a run file in `within` keeps its meaning from any working directory, and when the directory is moved.
    """

    def portable(path: str) -> str:
        place = Path(os.path.abspath(path))
        if within is not None and place.is_relative_to(root := Path(os.path.abspath(within))) and place != root:
            return str(place.relative_to(root))
        return str(place)

    return _with_paths(config, PATH_KEYS, portable)


def without_data_locations(config: RunConfig) -> RunConfig:
    """Return the configuration without the locations of its data and tokenizer.

    Two of them are equal if the runs differ at most in where their files lie. That these have the same content is for
    the fingerprint of the tokens to say.
    """
    return _with_paths(config, CONTENT_KEYS, lambda path: "")


def _with_paths(config: RunConfig, keys: tuple[str, ...], change: Callable[[str], str]) -> RunConfig:
    """Return the configuration with another path under each of the keys that has one."""
    updates: dict[str, dict[str, Any]] = {"data": {}, "train": {}, "outer": {}, "swarm": {}}
    for key in keys:
        section, _, name = key.partition(".")
        value: Any = getattr(getattr(config, section), name, None)
        if key == "data.blend":
            updates[section][name] = tuple(
                part.model_copy(update={"source": _map_path(part.source, change)}) for part in value
            )
        elif value is not None:
            updates[section][name] = _map_path(value, change)
    return config.model_copy(
        update={
            section: getattr(config, section).model_copy(update=update) for section, update in updates.items() if update
        }
    )


def _map_value(key: str, value: Any, change: Callable[[str], str]) -> Any:
    if key == "data.blend":
        return [_map_blend_source(part, change) for part in value] if isinstance(value, list | tuple) else value
    return _map_path(value, change) if isinstance(value, str) else value


def _map_blend_source(part: Any, change: Callable[[str], str]) -> Any:
    if isinstance(part, Mapping) and isinstance(part.get("source"), str):
        return {**part, "source": _map_path(part["source"], change)}
    return part


def _map_path(value: str, change: Callable[[str], str]) -> str:
    if not value or "://" in value or value in (BYTES, PYTHON_STDLIB, *component_names("dataset")):
        return value
    return change(value)


def _joined(base_dir: Path, path: str) -> str:
    """Return a path as seen from the working directory: the text itself where it begins there."""
    if path.startswith("~"):
        path = str(Path(path).expanduser())
    return path if base_dir == Path() or os.path.isabs(path) else os.path.normpath(base_dir / path)
