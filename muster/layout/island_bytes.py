"""Bytes that a rank sends in an all-reduce between islands."""

from typing import Literal

INT8_BLOCK = 1024
"""Elements that share a scale under int8."""


def island_chunk(numel: int, islands: int, compression: Literal["none", "bf16", "int8"]) -> int:
    """Return the elements of the part of a tensor that each island owns in an all-reduce: under int8 whole blocks."""
    chunk = -(-numel // islands)
    return -(-chunk // INT8_BLOCK) * INT8_BLOCK if compression == "int8" else chunk


def island_reduce_bytes(
    numel: int, islands: int, compression: Literal["none", "bf16", "int8"], element_bytes: int = 4
) -> int:
    """Return the bytes that a rank sends to all-reduce `numel` elements of `element_bytes` between islands.

    A reduce-scatter and an all-gather: 2 · (islands − 1) parts of ceil(numel / islands) elements, in 2 bytes each under
    bf16, under int8 in one byte each and 4 for each block (the bandwidth-optimal all-reduce of R. Thakur et al. 2005,
    §4.5, with compressed elements).
    """
    chunk = island_chunk(numel, islands, compression)
    if compression == "int8":
        part = chunk + 4 * (chunk // INT8_BLOCK)
    else:
        part = chunk * (2 if compression == "bf16" else element_bytes)
    return 2 * (islands - 1) * part
