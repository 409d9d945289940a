"""Nested data as values by dotted key, and the way back."""

from collections.abc import Iterator, Mapping
from typing import Any


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a tree; an empty section yields nothing."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, path + ".")
        else:
            yield path, value


def unflatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree with these values by dotted key, none of which may lie below another."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, key = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return tree
