"""Plugin components: registered by name from files outside the package (`muster.register_model` and the like)."""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from muster.spec.errors import ConfigError
from muster.spec.plugin_model import PLUGIN_MODELS, PluginModel
from muster.spec.suggest import did_you_mean

ComponentKind = Literal["model", "dataset", "optimizer", "schedule", "loss", "step", "callback"]


@dataclass(frozen=True, slots=True)
class PluginComponent:
    """One registered component."""

    kind: ComponentKind
    name: str
    target: Any
    """The registered object, with its declarations."""
    file: Path | None
    """File that registered it; None in a notebook or at a prompt, whose code other processes can't read."""


_COMPONENTS: dict[tuple[ComponentKind, str], PluginComponent] = {}
LOADING: list[set[tuple[ComponentKind, str]]] = []
"""Components registered so far by each plugin that is being imported, one within another."""
_PACKAGE = Path(__file__).resolve().parents[1]


def register_component(kind: ComponentKind, name: str, target: Any, builtin_names: Iterable[str] = ()) -> None:
    """Register a component; `builtin_names` are Muster's names of that kind. A file that is imported again registers
    anew.

    Raises ConfigError for an invalid name and for one that is taken.
    """
    require_component_name(kind, name)
    part = PluginComponent(kind, name, target, _caller())
    before = _COMPONENTS.get((kind, name))
    if name in builtin_names:
        raise ConfigError(f"register_{kind}: '{name}' is a built-in {kind}; choose another name")
    if before is not None and before.file != part.file:
        raise ConfigError(
            f"register_{kind}: {part.file or 'this session'} registers '{name}', which {before.file or 'this session'}"
            " has registered; choose another name for one of them"
        )
    if LOADING:
        if (kind, name) in LOADING[-1]:
            raise ConfigError(
                f"register_{kind}: {part.file} registers '{name}' twice; choose another name for one of them"
            )
        LOADING[-1].add((kind, name))
    _COMPONENTS[kind, name] = part
    if isinstance(target, PluginModel):
        PLUGIN_MODELS[name] = target


def require_component_name(kind: ComponentKind, name: object) -> None:
    """Raise ConfigError for anything that can't be a component's name, such as the function itself where a decorator
    has no name."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*(-[a-z0-9_]+)*", name):
        raise ConfigError(
            f"register_{kind}: expected a name of lowercase letters, digits and hyphens, got {name!r}: write"
            f" register_{kind}('mine')"
        )


def require_callable(kind: ComponentKind, name: str, target: object) -> None:
    """Raise ConfigError for an object that is neither a function nor a class."""
    if not callable(target):
        raise ConfigError(f"register_{kind}: expected a function or a class for '{name}', got {target!r}")


def component_names(kind: ComponentKind) -> list[str]:
    """Return the registered names of a kind."""
    return [name for known, name in _COMPONENTS if known == kind]


def find_component(kind: ComponentKind, name: str) -> PluginComponent | None:
    """Return a component, or None where there is none of that name."""
    return _COMPONENTS.get((kind, name))


def get_component(kind: ComponentKind, name: str, builtin_names: Iterable[str] = ()) -> Any:
    """Return the object registered under a name. Raises ConfigError, with the closest of all names, where there is
    none; `builtin_names` are Muster's."""
    if (part := _COMPONENTS.get((kind, name))) is not None:
        return part.target
    known = [*builtin_names, *component_names(kind)]
    there = f"there are {', '.join(known)}" if known else "none is registered: add the file that does so to plugins"
    raise ConfigError(f"there is no {kind} '{name}'{did_you_mean(name, known)} ({there})")


def require_component(kind: ComponentKind, name: str, builtin_names: tuple[str, ...] = ()) -> str:
    """Return the name. Raises ValueError where no plugin registers a component of it."""
    try:
        get_component(kind, name, builtin_names)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return name


def has_components_from(file: Path) -> bool:
    """Return True if a file has registered anything."""
    return any(part.file == file for part in _COMPONENTS.values())


def _caller() -> Path | None:
    """Return the file, outside the package, that registers a component."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if not path.resolve().is_relative_to(_PACKAGE):
            return path.resolve() if path.is_file() else None
        frame = frame.f_back
    return None
