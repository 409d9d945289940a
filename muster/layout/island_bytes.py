"""Bytes that a rank sends in an all-reduce between islands."""

from typing import Literal

Compression = Literal["none", "bf16", "int8", "int4"]

BLOCKS: dict[Compression, int] = {"int8": 1024, "int4": 64}
"""Elements that share a scale, 4 bytes, under each compression to integers."""


def island_chunk(numel: int, islands: int, compression: Compression) -> int:
    """Return the elements of the part of a tensor that each island owns in an all-reduce: whole blocks of integers."""
    chunk = -(-numel // islands)
    block = BLOCKS.get(compression, 1)
    return -(-chunk // block) * block


def island_reduce_bytes(numel: int, islands: int, compression: Compression, element_bytes: int = 4) -> int:
    """Return the bytes that a rank sends to all-reduce `numel` elements of `element_bytes` between islands.

    A reduce-scatter and an all-gather: 2 · (islands − 1) parts of ceil(numel / islands) elements, in 2 bytes each under
    bf16, under int8 in one byte each, under int4 in a half, and 4 for each block (the bandwidth-optimal all-reduce of
    R. Thakur et al. 2005, §4.5, with compressed elements).
    """
    chunk = island_chunk(numel, islands, compression)
    if compression in BLOCKS:
        part = (chunk if compression == "int8" else chunk // 2) + 4 * (chunk // BLOCKS[compression])
    else:
        part = chunk * (2 if compression == "bf16" else element_bytes)
    return 2 * (islands - 1) * part
