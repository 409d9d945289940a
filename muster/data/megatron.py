"""Indexed data sets of Megatron-LM: token ids in PREFIX.bin, and the index of sequences and documents in PREFIX.idx.

Layout of the index, little-endian:

    9 bytes                `MMIDIDX`, 0, 0
    uint64                 version, 1
    uint8                  code of the ids' dtype
    uint64, uint64         number of sequences, number of document bounds
    int32 a sequence       its length in tokens
    int64 a sequence       its offset in PREFIX.bin in bytes
    int64 a bound          first sequence of each document, and the number of sequences at the end

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
"""Dtypes of token ids by code; 6 and 7 are floating-point types, which hold no ids."""


@dataclass(frozen=True, eq=False)
class IndexedTokens:
    """Open pair of files. Document d is tokens `bounds[d]` … `bounds[d + 1] − 1`."""

    tokens: np.ndarray
    bounds: np.ndarray
    """int64 [documents + 1]."""


def read_indexed(index: Path) -> IndexedTokens:
    """Memory-map PREFIX.idx and the PREFIX.bin beside it. Raises ConfigError if they are inconsistent."""
    data = np.memmap(index, np.uint8, "r")
    begin = len(MAGIC) + _HEAD.size
    if len(data) < begin or data[: len(MAGIC)].tobytes() != MAGIC:
        raise ConfigError(f"{index} is not an index of Megatron-LM: it doesn't begin with MMIDIDX")
    version, code, num_sequences, num_bounds = _HEAD.unpack(data[len(MAGIC) : begin].tobytes())
    if version != 1 or code not in DTYPES:
        raise ConfigError(f"{index} has version {version} and dtype {code}: expected version 1 and an integer dtype")
    needed = begin + num_sequences * 12 + num_bounds * 8
    if len(data) < needed:
        raise ConfigError(f"{index} has {len(data):,} bytes, but its header needs {needed:,}: it is truncated")
    cuts = np.cumsum([begin, num_sequences * 4, num_sequences * 8, num_bounds * 8]).tolist()
    lengths, offsets, first_sequences = (
        np.frombuffer(data[a:b].tobytes(), dtype)
        for a, b, dtype in zip(cuts[:-1], cuts[1:], ("<i4", "<i8", "<i8"), strict=True)
    )
    dtype = np.dtype(DTYPES[code])
    tokens_path = index.with_suffix(".bin")
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if not np.array_equal(offsets, starts[:-1] * dtype.itemsize):
        raise ConfigError(f"{index}: its sequences are not contiguous in {tokens_path.name}")
    size = tokens_path.stat().st_size
    if size != starts[-1] * dtype.itemsize:
        raise ConfigError(f"{tokens_path} has {size:,} bytes, but its index needs {starts[-1] * dtype.itemsize:,}")
    bounds_fit = num_bounds > 0 and first_sequences[0] == 0 and first_sequences[-1] == num_sequences
    if not bounds_fit or (np.diff(first_sequences) < 0).any():
        raise ConfigError(f"{index}: its documents don't cover the sequences from the first to the last")
    tokens = np.memmap(tokens_path, dtype, "r") if size else np.zeros(0, dtype)
    return IndexedTokens(tokens, starts[first_sequences])


def write_indexed(prefix: Path, parts: Iterable[np.ndarray], lengths: np.ndarray, dtype: np.dtype) -> None:
    """Write PREFIX.bin from the parts of a token stream, and PREFIX.idx with one sequence per document.

    `lengths` are the tokens of each document. Ids of 32 bits are written as int32, since Megatron-LM has no uint32.
    Raises ConfigError if a document is too long for the index, OSError.
    """
    code, id_dtype = (8, np.dtype("<u2")) if dtype.itemsize == 2 else (4, np.dtype("<i4"))
    if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
        raise ConfigError(f"a document of {lengths.max():,} tokens is too long for Megatron-LM's 32-bit index")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{prefix}.bin", "wb") as file:
        for part in parts:
            file.write(np.ascontiguousarray(part, id_dtype).data)
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))[:-1] * id_dtype.itemsize
    with open(f"{prefix}.idx", "wb") as file:
        file.write(MAGIC + _HEAD.pack(1, code, len(lengths), len(lengths) + 1))
        file.write(np.ascontiguousarray(lengths, "<i4").data)
        file.write(np.ascontiguousarray(offsets, "<i8").data)
        file.write(np.ascontiguousarray(np.arange(len(lengths) + 1), "<i8").data)
