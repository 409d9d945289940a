"""Plugin files: a run names them, every process of the run imports them, and their hash identifies them."""

import hashlib
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from muster.plugins.registry import LOADING, has_components_from
from muster.spec.base import Frozen
from muster.spec.errors import ConfigError, MusterError


class PluginFile(Frozen):
    """A file with registered components."""

    file: str
    """Path of a Python file, or name of an importable module, such as `my_package.components`."""
    sha256: str
    """Hash of the file when the run was requested."""


def resolve_plugin(entry: object, folder: Path = Path()) -> PluginFile:
    """Return the plugin that a run file's entry means: a path relative to `folder`, a module's name, or both fields.
    Raises ConfigError where there is no such file."""
    if isinstance(entry, PluginFile):
        return entry
    if isinstance(entry, dict) and entry.keys() == {"file", "sha256"}:
        return PluginFile(**entry)
    if not isinstance(entry, str) or not entry:
        raise ConfigError(f"plugins: expected Python files or modules, such as my_plugin.py, got {entry!r}")
    file = str((folder / Path(entry).expanduser()).resolve()) if _is_file(entry) else entry
    return PluginFile(file=file, sha256=plugin_sha256(file))


def plugin_sha256(file: str) -> str:
    """Return the hash of a plugin as it is now. Raises ConfigError where there is none."""
    path = plugin_path(file)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"plugins: can't read {path}: {error.strerror}") from None


def plugin_path(file: str) -> Path:
    """Return the path of a plugin. Raises ConfigError where there is none."""
    if _is_file(file):
        if Path(file).is_file():
            return Path(file)
        raise ConfigError(f"plugins: there is no file {file}")
    try:
        found = find_spec(file)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        raise ConfigError(f"plugins: Python finds no module {file}; for a file give its path, such as {file}.py")
    return Path(found.origin)


def load_plugins(plugins: Iterable[PluginFile]) -> None:
    """Import each, once, so that it registers its components. Raises ConfigError, with file and line, where an import
    fails."""
    for plugin in plugins:
        path = plugin_path(plugin.file)
        name = f"muster_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if not _is_file(plugin.file):
            _guarded(path, lambda plugin=plugin: import_module(plugin.file))
        elif _LOADED.get(name) != plugin.sha256 and not (name not in _LOADED and has_components_from(path)):
            _LOADED[name] = plugin.sha256
            _guarded(path, lambda path=path, name=name: _execute(path, name))


def require_unchanged_plugins(plugins: Iterable[PluginFile]) -> None:
    """Raise ConfigError where a file is not what it was when its hash was written down."""
    for plugin in plugins:
        if (now := plugin_sha256(plugin.file)) != plugin.sha256:
            raise ConfigError(
                f"plugins: {plugin.file} has changed since this run was trained (sha256 {plugin.sha256}…, now {now}…):"
                " restore the file, or write the new hash into config.yaml"
            )


def is_loading_plugin() -> bool:
    """Return True while this process is importing a plugin."""
    return bool(LOADING)


# ----------------------------------------------------------------------------------------------------------------------

_LOADED: dict[str, str] = {}
"""Module name → hash of the imported file."""


def _is_file(text: str) -> bool:
    return text.endswith(".py") or "/" in text


def _execute(path: Path, name: str) -> None:
    made = spec_from_file_location(name, path)
    assert made is not None
    assert made.loader is not None
    module = module_from_spec(made)
    sys.modules[name] = module  # dataclasses look for the module that they are in
    made.loader.exec_module(module)


def _guarded(path: Path, read: Any) -> None:
    LOADING.append(set())
    try:
        read()
    except MusterError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"plugins: {error_location(path, error)}: {type(error).__name__}: {error}") from error
    finally:
        LOADING.pop()


def error_location(path: Path, error: BaseException) -> str:
    """Return `FILE:LINE` of the last line of a file that led to an error; the file alone where none did."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f"{path}:{frames[-1].lineno}" if frames else str(path)
