"""Writing of plain data as YAML for people: one value per line, each with a comment."""

from collections.abc import Callable, Mapping
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
