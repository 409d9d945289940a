"""Differences between two directories with a model's weights, in any formats."""

from collections.abc import Callable, Mapping
from typing import Any

from muster.checkpoint.model_directory import ModelDirectory, state_tensors
from muster.checkpoint.statistics import distance
from muster.checkpoint.tensors import TensorMeta


def compare(
    a: ModelDirectory, b: ModelDirectory, set_total: Callable[[int], None], progress: Callable[[int], None]
) -> dict[str, Any]:
    """Return the differences between directories a and b, in metadata and tensors, as JSON.

    Tensors of a group (`model`, `optim`) are compared if both hold that group. `equal` is true if all of those are
    equal element by element, whatever their dtypes. `set_total` receives the bytes to compare, `progress` those of each
    tensor. Raises as `state_tensors` and reading do.
    """
    first, second = state_tensors(a), state_tensors(b)
    groups_a = {_group_of(name) for name in first.metas}
    groups_b = {_group_of(name) for name in second.metas}
    names_a = [name for name in first.metas if _group_of(name) in groups_a & groups_b]
    names_b = [name for name in second.metas if _group_of(name) in groups_a & groups_b]
    shared = [name for name in names_a if name in second.metas]
    misfits = {n: (k, second.metas[n]) for n in shared if (k := first.metas[n]).shape != second.metas[n].shape}
    set_total(sum(first.metas[name].nbytes for name in shared))
    distances = []
    for name in shared:
        if name not in misfits:
            distances.append(distance(first, second, name))
        progress(first.metas[name].nbytes)
    different = sorted((found for found in distances if not found.equal), key=lambda found: -found.relative)
    only_a = [name for name in names_a if name not in names_b]
    only_b = [name for name in names_b if name not in names_a]
    return {
        "version": 1,
        "equal": not (different or misfits or only_a or only_b),
        "a": _directory_facts(a, sorted(groups_a - groups_b)),
        "b": _directory_facts(b, sorted(groups_b - groups_a)),
        "facts": {key: list(pair) for key, pair in _different_facts(a, b).items()},
        "compared": len(distances),
        "different": [
            {
                "name": found.name,
                "max_abs": found.max_abs,
                "relative": found.relative,
                "dtypes": [_dtype(tensors.metas[found.name]) for tensors in (first, second)],
            }
            for found in different
        ],
        "shapes": {name: [list(meta.shape) for meta in pair] for name, pair in misfits.items()},
        "only_a": only_a,
        "only_b": only_b,
    }


def _group_of(name: str) -> str:
    return name.partition("/")[0]


def _dtype(meta: TensorMeta) -> str:
    return str(meta.dtype).removeprefix("torch.")


def _directory_facts(directory: ModelDirectory, not_compared: list[str]) -> dict[str, Any]:
    """Return a directory's facts, with the groups of tensors that only it holds and that weren't compared."""
    return {"path": str(directory.folder), "format": directory.format, "not_compared": not_compared}


def _different_facts(a: ModelDirectory, b: ModelDirectory) -> dict[str, tuple[Any, Any]]:
    """Return metadata that both have and that differ: `step`, `plan.…`, `model.…`, `counters.…`."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in ("step", "plan", "model", "counters"):
        facts_a = _flat_fact(a, key)
        facts_b = _flat_fact(b, key)
        if facts_a and facts_b:
            found |= {
                path: (facts_a.get(path), facts_b.get(path))
                for path in sorted(facts_a | facts_b)
                if facts_a.get(path) != facts_b.get(path)
            }
    return found


def _flat_fact(directory: ModelDirectory, key: str) -> dict[str, Any]:
    value = getattr(directory, key)
    if key == "model" and value is not None:
        value = value.model_dump(mode="json")
    return {} if value in (None, {}) else flatten({key: value})


def flatten(tree: object, prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by dotted path."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return found
