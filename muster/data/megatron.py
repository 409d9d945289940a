"""Megatron's indexed data sets: PREFIX.bin has the ids, PREFIX.idx says where each sequence begins.

The layout of the index, little-endian: the 9 bytes `MMIDIDX`, 0, 0; a version (uint64, 1); a code for the dtype of the
ids (uint8); the number of sequences (uint64) and of document bounds (uint64); the length of each sequence (int32); its
place in PREFIX.bin in bytes (int64); the sequence with which each document begins, and the number of all (int64).
Source: `megatron/core/datasets/indexed_dataset.py` of NVIDIA/Megatron-LM.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from muster.spec.errors import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""By code; 6 and 7 are floating-point numbers, which are no ids."""


@dataclass(frozen=True, eq=False)
class IndexedTokens:
    """An open pair of files. Document d is tokens `bounds[d]` … `bounds[d + 1] − 1`."""

    tokens: np.ndarray
    bounds: np.ndarray
    """int64 [documents + 1]."""


def read_indexed(index: Path) -> IndexedTokens:
    """Opens PREFIX.idx and the PREFIX.bin beside it, as maps. Raises ConfigError where they can't be right."""
    data = np.memmap(index, np.uint8, "r")
    begin = len(MAGIC) + _HEAD.size
    if len(data) < begin or data[: len(MAGIC)].tobytes() != MAGIC:
        raise ConfigError(f"{index} is no index of Megatron: expected it to begin with MMIDIDX")
    version, code, num_sequences, num_bounds = _HEAD.unpack(data[len(MAGIC) : begin].tobytes())
    if version != 1 or code not in DTYPES:
        raise ConfigError(f"{index} has version {version} and dtype {code}: expected version 1 and whole numbers")
    needed = begin + num_sequences * 12 + num_bounds * 8
    if len(data) < needed:
        raise ConfigError(f"{index} has {len(data):,} bytes where its header says {needed:,}: it is cut short")
    cuts = np.cumsum([begin, num_sequences * 4, num_sequences * 8, num_bounds * 8]).tolist()
    lengths, places, first = (
        np.frombuffer(data[a:b].tobytes(), dtype)
        for a, b, dtype in zip(cuts[:-1], cuts[1:], ("<i4", "<i8", "<i8"), strict=True)
    )
    dtype, numbers = np.dtype(DTYPES[code]), index.with_suffix(".bin")
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if not np.array_equal(places, starts[:-1] * dtype.itemsize):
        raise ConfigError(f"{index}: its sequences don't follow on one another in {numbers.name}")
    size = numbers.stat().st_size
    if size != starts[-1] * dtype.itemsize:
        raise ConfigError(f"{numbers} has {size:,} bytes where the index says {starts[-1] * dtype.itemsize:,}")
    if num_bounds == 0 or first[0] != 0 or first[-1] != num_sequences or (np.diff(first) < 0).any():
        raise ConfigError(f"{index}: its documents don't go from the first sequence to the last")
    tokens = np.memmap(numbers, dtype, "r") if size else np.zeros(0, dtype)
    return IndexedTokens(tokens, starts[first])


def write_indexed(prefix: Path, parts: Iterable[np.ndarray], lengths: np.ndarray, dtype: np.dtype) -> None:
    """Writes PREFIX.bin from the parts of a stream of tokens, and PREFIX.idx with one sequence for each document.

    `lengths`: tokens of each document. ids of 32 bits become int32, which Megatron has. Raises ConfigError where a
    document is too long for the index, OSError.
    """
    code, kind = (8, np.dtype("<u2")) if dtype.itemsize == 2 else (4, np.dtype("<i4"))
    if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
        raise ConfigError(f"a document of {lengths.max():,} tokens is too long for Megatron's index of 32 bits")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{prefix}.bin", "wb") as file:
        for part in parts:
            file.write(np.ascontiguousarray(part, kind).data)
    places = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))[:-1] * kind.itemsize
    with open(f"{prefix}.idx", "wb") as file:
        file.write(MAGIC + _HEAD.pack(1, code, len(lengths), len(lengths) + 1))
        for numbers, of in ((lengths, "<i4"), (places, "<i8"), (np.arange(len(lengths) + 1), "<i8")):
            file.write(np.ascontiguousarray(numbers, of).data)
