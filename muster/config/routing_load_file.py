"""Files with the load of experts that a run measured, and the text that names a load."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec
from muster.spec.routing_load import RoutingLoad, zipf_load

FILE_NAME = "expert-load.json"
VERSION = 1
_MOST_UNEVEN = 10
"""Largest exponent of Zipf's law: the second expert is then chosen a thousandth as often as the first."""
EXPECTED = "a run's directory, its expert-load.json, or Zipf's law such as zipf:1.0"


def parse_routing_load(text: str, model: ModelSpec) -> RoutingLoad:
    """Return the load that a flag names: a run directory, its file, or `zipf:1.0`. Raises ConfigError."""
    if model.moe is None or not model.expert_layers:
        raise ConfigError(f"--expert-load {text}: model {model.name} has no experts; leave it out")
    kind, colon, rest = text.partition(":")
    if colon and kind == "zipf":
        try:
            exponent = float(rest)
        except ValueError:
            exponent = -1.0
        if not 0 <= exponent <= _MOST_UNEVEN:
            raise ConfigError(f"--expert-load {text}: expected an exponent from 0 to {_MOST_UNEVEN}, such as zipf:1.0")
        return zipf_load(exponent, len(model.expert_layers), model.moe.num_experts, model.moe.top_k)
    path = Path(text) / FILE_NAME if Path(text).is_dir() else Path(text)
    return _read(path, text, model)


def _read(path: Path, text: str, model: ModelSpec) -> RoutingLoad:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--expert-load {text}: {path} can't be read ({error.strerror}); expected {EXPECTED}"
        ) from None
    except ValueError:
        raise ConfigError(f"--expert-load {text}: {path} is no JSON; expected {EXPECTED}") from None
    layers = found.get("layers") if isinstance(found, Mapping) else None
    if not isinstance(layers, Mapping) or not all(_are_counts(counts) for counts in layers.values()):
        raise ConfigError(f"--expert-load {text}: {path} has no counts of experts by layer; expected {EXPECTED}")
    if found.get("version") != VERSION:
        raise ConfigError(f"--expert-load {text}: version {found.get('version')!r} isn't known; expected {VERSION}")
    moe = model.moe
    assert moe is not None
    wanted = {str(layer) for layer in model.expert_layers}
    sizes = {len(counts) for counts in layers.values()}
    if set(layers) != wanted or sizes != {moe.num_experts}:
        raise ConfigError(
            f"--expert-load {text}: it has {len(layers)} layers of {', '.join(map(str, sorted(sizes)))} experts, but"
            f" {model.name} has {len(wanted)} of {moe.num_experts}: give the load of a run of this model"
        )
    rows = [layers[str(layer)] for layer in model.expert_layers]
    return RoutingLoad(tuple(tuple(count / sum(row) for count in row) for row in rows), str(path))


def _are_counts(row: Any) -> bool:
    is_list = isinstance(row, Sequence) and not isinstance(row, str) and len(row) > 0
    return is_list and all(isinstance(count, int | float) and 0 <= count < 1e30 for count in row) and sum(row) > 0


def routing_load_json(counts: Mapping[int, Sequence[float]], steps: tuple[int, int]) -> str:
    """Return the text of a file with the choices of each expert by layer, summed over some steps."""
    layers = {str(layer): [int(count) for count in row] for layer, row in counts.items()}
    return json.dumps({"version": VERSION, "steps": list(steps), "layers": layers}) + "\n"
