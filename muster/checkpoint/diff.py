"""What differs between two directories with a model's weights, of whatever kinds they are."""

from collections.abc import Callable, Mapping
from typing import Any

from muster.checkpoint.model_directory import ModelDirectory, state_tensors
from muster.checkpoint.statistics import distance
from muster.checkpoint.tensors import TensorMeta


def compare(
    a: ModelDirectory, b: ModelDirectory, set_total: Callable[[int], None], progress: Callable[[int], None]
) -> dict[str, Any]:
    """What a and b say otherwise, and how the tensors of the kinds (`model`, `optim`) that both hold differ, as JSON.

    `equal` says whether all of those are the same, number by number, whatever their dtypes. `begin` receives the bytes
    that will be compared, `progress` those of each tensor that was. Raises as `state_of` and reading do.
    """
    first, second = state_tensors(a), state_tensors(b)
    kinds_a, kinds_b = ({_group_of(name) for name in tensors.metas} for tensors in (first, second))
    names_a, names_b = (
        [name for name in tensors.metas if _group_of(name) in kinds_a & kinds_b] for tensors in (first, second)
    )
    shared = [name for name in names_a if name in second.metas]
    misfits = {n: (k, second.metas[n]) for n in shared if (k := first.metas[n]).shape != second.metas[n].shape}
    set_total(sum(first.metas[name].nbytes for name in shared))
    distances = []
    for name in shared:
        if name not in misfits:
            distances.append(distance(first, second, name))
        progress(first.metas[name].nbytes)
    apart = sorted((found for found in distances if not found.equal), key=lambda found: -found.relative)
    only_a, only_b = ([n for n in names if n not in other] for names, other in ((names_a, names_b), (names_b, names_a)))
    return {
        "version": 1,
        "equal": not (apart or misfits or only_a or only_b),
        "a": _directory_facts(a, sorted(kinds_a - kinds_b)),
        "b": _directory_facts(b, sorted(kinds_b - kinds_a)),
        "facts": {key: list(pair) for key, pair in _different_facts(a, b).items()},
        "compared": len(distances),
        "different": [
            {
                "name": found.name,
                "max_abs": found.max_abs,
                "relative": found.relative,
                "dtypes": [_dtype(tensors.metas[found.name]) for tensors in (first, second)],
            }
            for found in apart
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
    """A directory, and the kinds of tensors that only it holds and that weren't compared."""
    return {"path": str(directory.folder), "format": directory.format, "not_compared": not_compared}


def _different_facts(a: ModelDirectory, b: ModelDirectory) -> dict[str, tuple[Any, Any]]:
    """What both know and say otherwise: `step`, `plan.…`, `model.…`, `counters.…`."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in ("step", "plan", "model", "counters"):
        one, other = ({key: value} if value not in (None, {}) else {} for value in (_fact(a, key), _fact(b, key)))
        one, other = flatten(one), flatten(other)
        if one and other:
            found |= {
                path: (one.get(path), other.get(path))
                for path in sorted(one | other)
                if one.get(path) != other.get(path)
            }
    return found


def _fact(directory: ModelDirectory, key: str) -> Any:
    value = getattr(directory, key)
    return value.model_dump(mode="json") if key == "model" and value is not None else value


def flatten(tree: object, prefix: str = "") -> dict[str, Any]:
    """The values of a tree by dotted path."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return found
