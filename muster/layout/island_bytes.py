"""Bytes that a rank sends in an exchange between islands."""

import math
from collections.abc import Iterable
from typing import Literal

from muster.layout.tensor_layout import TensorLayout

Compression = Literal["none", "bf16", "int8", "int4"]

BLOCKS: dict[Compression, int] = {"int8": 1024, "int4": 64}
"""Elements that share a scale, 4 bytes, under each compression to integers."""


def island_chunk(numel: int, islands: int, compression: Compression) -> int:
    """Return the elements of the part of a tensor that each island owns in an all-reduce: whole blocks of integers."""
    return whole_blocks(-(-numel // islands), compression)


def whole_blocks(numel: int, compression: Compression) -> int:
    """Return the elements of the whole blocks that hold `numel`."""
    block = BLOCKS.get(compression, 1)
    return -(-numel // block) * block


def encoded_bytes(numel: int, compression: Compression, element_bytes: int = 4) -> int:
    """Return the bytes in which so many elements of `element_bytes` travel, whole blocks of them under integers."""
    if compression not in BLOCKS:
        return numel * (2 if compression == "bf16" else element_bytes)
    return (numel if compression == "int8" else numel // 2) + 4 * (numel // BLOCKS[compression])


def encoded_element_bytes(compression: Compression) -> float | None:
    """Return the bytes of an element in integers, with its share of a scale; None for numbers as they are."""
    if compression not in BLOCKS:
        return None
    return encoded_bytes(BLOCKS[compression], compression) / BLOCKS[compression]


def island_reduce_bytes(numel: int, islands: int, compression: Compression, element_bytes: int = 4) -> int:
    """Return the bytes that a rank sends to all-reduce `numel` elements of `element_bytes` between islands.

    A reduce-scatter and an all-gather: 2 · (islands − 1) parts of ceil(numel / islands) elements, in 2 bytes each under
    bf16, under int8 in one byte each, under int4 in a half, and 4 for each block (the bandwidth-optimal all-reduce of
    R. Thakur et al. 2005, §4.5, with compressed elements).
    """
    chunk = island_chunk(numel, islands, compression)
    return 2 * (islands - 1) * encoded_bytes(chunk, compression, element_bytes)


def travels_in_factors(shape: tuple[int, ...], rank: int | None) -> bool:
    """Return True where a change of this shape travels as two factors of a rank: matrices that these make smaller."""
    return rank is not None and len(shape) == 2 and rank * sum(shape) < shape[0] * shape[1]


def exchanged_shape(layout: TensorLayout) -> tuple[int, ...]:
    """Return the shape of the change of a rank's part of a parameter; a part of several boxes is flat."""
    return layout.boxes[0].size if len(layout.boxes) == 1 else (layout.numel,)


def exchanged_numels(
    changes: Iterable[tuple[tuple[int, ...], int | None]], compression: Compression
) -> tuple[int, int]:
    """Return the elements of the two all-reduces that exchange changes of these shapes and ranks: first what travels
    whole with the left factors (m, rank), then the right factors (n, rank) (arXiv:1905.13727, algorithm 1). Each
    travels in blocks of its own, so that ranks of an island with copies of one get the same bits."""
    first = second = 0
    for shape, rank in changes:
        if travels_in_factors(shape, rank):
            assert rank is not None
            first += whole_blocks(shape[0] * rank, compression)
            second += whole_blocks(shape[1] * rank, compression)
        else:
            first += whole_blocks(math.prod(shape), compression)
    return first, second


def island_exchange_bytes(
    changes: Iterable[tuple[tuple[int, ...], int | None]],
    islands: int,
    compression: Compression,
    element_bytes: int = 4,
) -> int:
    """Return the bytes that a rank sends to exchange changes of these shapes, each with the rank of its factors where
    it travels in such."""
    numels = exchanged_numels(changes, compression)
    return sum(island_reduce_bytes(numel, islands, compression, element_bytes) for numel in numels)
