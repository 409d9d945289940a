"""Writing of plain data as YAML for people: one value per line, each with a comment."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml


def yaml_text(tree: Mapping[str, Any], comment: Callable[[str], str] | None = None) -> str:
    """Return the tree as YAML; `comment` gives the remark behind the value under a dotted key."""
    return "".join(line + "\n" for line in _lines(tree, "", comment))


def _lines(tree: Mapping[str, Any], prefix: str, comment: Callable[[str], str] | None) -> list[str]:
    indent = "  " * prefix.count(".")
    lines = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{key}:", *_lines(value, path + ".", comment)]
        else:
            remark = f"  # {' '.join(comment(path).split())}" if comment else ""
            lines.append(f"{indent}{key}: {_scalar(value)}{remark}")
    return lines


def _scalar(value: object) -> str:
    """Return one value on one line: lists in brackets, text quoted where it would read as something else."""
    options: dict[str, Any] = {"default_flow_style": True, "allow_unicode": True, "width": float("inf")}
    return yaml.dump([value], Dumper=_OneLine, **options).strip()[1:-1]


class _OneLine(yaml.SafeDumper):
    """Dumper that quotes text with line breaks of any kind, with escapes: unquoted, they would be read back as
    spaces."""


_OneLine.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that at every moment either the old or the new one is complete on disk. Raises OSError."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def write_durably(path: Path, text: str) -> None:
    """Write a small file atomically and durably: afterwards it has all of `text` or, if that fails, stays as it was."""
    tmp_path = path.with_name(path.name + ".tmp")
    with open(tmp_path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(tmp_path, path)


def fsync_directory(folder: Path) -> None:
    """Flush the names within a directory to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
