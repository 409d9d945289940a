"""Run files as layers: the values of each, and where they stand."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from muster.catalog import names, read
from muster.config.migrations import Format, migrate_values
from muster.config.yaml_reader import YAML_LOADER, read_yaml
from muster.plugins.registry import component_names
from muster.spec.dotted_keys import flatten
from muster.spec.errors import ConfigError
from muster.spec.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class ConfigLayer:
    """Values of one file, or of the command line."""

    name: str
    """Name shown to people: `run.yaml`, `preset tiny`, `command line`."""
    values: Mapping[str, Any]
    """Values by dotted key; a list is one value."""
    base_dir: Path
    """Directory that relative paths in the layer begin at."""
    lines: Mapping[str, int] = field(default_factory=dict)
    is_file: bool = True
    """True for a file, which may be of an earlier schema; a command line never is."""

    @property
    def data_base_dir(self) -> Path:
        """Directory that paths of data, tokenizers and weights begin at.

        In a file that names a schema before 3 that is the working directory.
        """
        version = self.values.get("version") if self.is_file else None
        return Path() if str(version) in ("1", "2") else self.base_dir

    def origin(self, path: str) -> str:
        """Return the place of the value under `path`, as `file:line` where there is a line."""
        line = self.lines.get(path)
        return self.name if line is None else f"{self.name}:{line}"


def read_file_layer(path: Path) -> ConfigLayer:
    """Read a YAML file. Raises ConfigError when it can't be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"can't read {path}: expected YAML in UTF-8") from None
    return _parse(text, str(path), path.parent)


def current_layer(file_format: Format, layer: ConfigLayer) -> ConfigLayer:
    """Return the layer with today's keys and values in the place of former ones. Raises ConfigError as `migrate`."""
    values, former = migrate_values(file_format, layer.values, layer.origin, versioned=layer.is_file)
    lines = {key: layer.lines[old] for key in values if (old := former.get(key, key)) in layer.lines}
    return replace(layer, values=values, lines={**layer.lines, **lines})


def looks_like_path(text: str) -> bool:
    """Return True if a text that is a name or a path is a path."""
    return "/" in text or text.endswith((".yaml", ".yml"))


def read_catalog_layer(kind: str, name: str) -> ConfigLayer:
    """Read a file of the catalogue: `kind` is `presets` or `models`. Raises ConfigError for an unknown name."""
    noun = "model" if kind == "models" else "preset"
    known = names(kind) + (component_names("model") if kind == "models" else [])
    if name not in names(kind):
        raise ConfigError(f"there is no {noun} '{name}'{did_you_mean(name, known)} (there are {', '.join(known)})")
    layer = _parse(read(kind, name), f"{noun} {name}", Path())
    return ConfigLayer(layer.name, layer.values, layer.base_dir)


def _parse(text: str, name: str, folder: Path) -> ConfigLayer:
    tree = read_yaml(text, name)
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{name}: expected 'key: value' lines, got {str(tree)[:40]!r}")
    root = yaml.compose(text, Loader=YAML_LOADER)
    try:
        lines = dict(_lines(root)) if isinstance(root, yaml.MappingNode) else {}
        values = dict(flatten(tree or {}))
    except RecursionError as error:  # a mapping that contains itself
        raise ConfigError(f"{name} is not valid YAML: {error}") from None
    return ConfigLayer(name, values, folder, lines)


def _lines(node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        yield path, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _lines(value, path + ".")
