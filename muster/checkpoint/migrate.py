"""Migration of manifests of earlier schemas."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def from_schema_1(folder: Path, old: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a manifest of schema 1 to schema 2.

    Schema 1 named each chunk by its key in a safetensors file, whose header has the chunk's offset. Missing or
    malformed parts are left out, so that validation reports them.
    """
    names = list(old["files"]) if isinstance(old.get("files"), dict) else []
    headers = {name: _tensor_offsets(folder / name) for name in names}
    tensors = {}
    for name, tensor in (old["tensors"] if isinstance(old.get("tensors"), dict) else {}).items():
        pieces = tensor["pieces"]
        dims = range(len(tensor["shape"]))
        tensors[name] = {
            "shape": tensor["shape"],
            "dtype": tensor["dtype"],
            "files": [names.index(piece["file"]) for piece in pieces],
            "offsets": [headers[piece["file"]].get(piece["key"], 0) for piece in pieces],
            "crc32": [piece["crc32"] for piece in pieces],
            "starts": [[piece["start"][dim] for piece in pieces] for dim in dims],
            "sizes": [[piece["size"][dim] for piece in pieces] for dim in dims],
        }
    return {**old, "version": 2, "tensors": tensors}


def _tensor_offsets(path: Path) -> dict[str, int]:
    """Return the offset of each tensor in a safetensors file, in bytes; empty if the file can't be read."""
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
            return {k: 8 + size + v["data_offsets"][0] for k, v in entries.items() if k != "__metadata__"}
    except (OSError, ValueError, LookupError, OverflowError, MemoryError):
        return {}
