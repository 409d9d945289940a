"""Context parallelism: the positions that each rank keeps, and the blocks of queries and keys that it computes.

Every function is of positions alone. The runtime cuts tokens, labels and positions by `kept_positions` and computes
`attention_blocks`; the cost model and tests read the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

BlockMask = Literal["none", "causal", "band"]
"""Scores that a block hides. none: nothing. causal: of a square block, keys after their query. band: keys after their
query, and those that a sliding window doesn't reach."""


class AttentionBlock(NamedTuple):
    """Some queries of a rank, and keys of which they see all or some."""

    sequence: int | None
    """Sequence of the micro-batch; None: all of them."""
    queries: range
    """Indices among the rank's queries."""
    keys: range
    """Indices among the keys at hand."""
    mask: BlockMask
    offset: int
    """Position of the first query minus that of the first key."""


def kept_positions(length: int, cp: int, index: int, is_contiguous: bool = False) -> tuple[range, ...]:
    """Return the positions of a sequence that rank `index` of `cp` keeps, in the order in which it holds them.

    Zigzag: of 2 · cp chunks, rank r keeps chunks r and 2 · cp − 1 − r, an early and a late one, so that all ranks see
    equally many keys under a causal mask (Megatron-LM's context parallelism; arXiv:2310.01889 has contiguous shards).
    Rank 1 of 2 keeps positions 2–3 and 4–5 of 8. `length` is a multiple of 2 · cp. Linear attention, whose states go
    from one position to the next, and whose work is the same for all, wants consecutive ones (`is_contiguous`).
    """
    if cp == 1:
        return (range(length),)
    if is_contiguous:
        return (range(index * (length // cp), (index + 1) * (length // cp)),)
    chunk = length // (2 * cp)
    return tuple(range(n * chunk, (n + 1) * chunk) for n in (index, 2 * cp - 1 - index))


def chunk_places(cp: int) -> list[tuple[int, int]]:
    """Return for each of a sequence's 2 · cp chunks, in order, the rank that keeps it and its place there, 0 or 1."""
    return [(n, 0) if n < cp else (2 * cp - 1 - n, 1) for n in range(2 * cp)]


@lru_cache(maxsize=256)
def attention_blocks(
    length: int,
    queries: tuple[range, ...],
    keys: tuple[range, ...],
    window: int | None,
    documents: tuple[int, ...] | None = None,
) -> tuple[AttentionBlock, ...]:
    """Return the blocks in which queries at some positions see keys at some positions of sequences of `length`, under a
    causal mask.

    `queries` and `keys` are runs of positions in the order in which they are held; a run of keys has all or none of the
    positions of a run of queries, or ends before it. `documents` has the lengths of all documents, sequence after
    sequence, each of which sees itself alone; None: each sequence is one document.
    """
    blocks: list[AttentionBlock] = []
    if documents is None:
        return tuple(_blocks_of_document(None, range(length), queries, keys, window))
    for sequence, bounds in enumerate(_documents_by_sequence(documents, length)):
        for document in bounds:
            blocks += _blocks_of_document(sequence, document, queries, keys, window)
    return tuple(blocks)


@lru_cache(maxsize=256)
def packed_blocks(
    lengths: tuple[int, ...], cp: int, queries_of: int, keys_of: int, window: int | None
) -> tuple[AttentionBlock, ...]:
    """Return the blocks of one rank's queries and another's keys of documents that lie one behind another, each cut
    over `cp` ranks by itself (`kept_positions`); each rank holds an equal part of every document."""
    blocks: list[AttentionBlock] = []
    start = 0
    for length in lengths:
        kept = (kept_positions(length, cp, rank) for rank in (queries_of, keys_of))
        for block in attention_blocks(length, *kept, window):
            queries, keys = (range(part.start + start, part.stop + start) for part in (block.queries, block.keys))
            blocks.append(AttentionBlock(None, queries, keys, block.mask, block.offset))
        start += length // cp
    return tuple(blocks)


def last_hop_parts(inner_ranks: int, backward: bool) -> int:
    """Return the parts of each chunk of a block in the last hop around a ring: one, or more where it is the outer one
    of two rings. The ranks of an inner ring then hand what comes last to each other, so that no transfer hides the work
    on as many last parts; a backward also has sums to hide them."""
    return 1 if inner_ranks == 1 else 2 if backward else 4


@lru_cache(maxsize=256)
def ring_parts(positions: int, turns: int, last_parts: int) -> tuple[tuple[range, ...], ...]:
    """Return the parts, of a rank's positions, in which its keys and values arrive at another one, for each turn of the
    (outer) ring: its early and its late chunk, each of them in `last_parts` in the last turn."""
    halves = range(positions // 2), range(positions // 2, positions)
    last = [
        half[len(half) * n // last_parts : len(half) * (n + 1) // last_parts]
        for half in halves
        for n in range(last_parts)
    ]
    return (halves,) * (turns - 1) + (tuple(part for part in last if part),)


@lru_cache(maxsize=4096)
def blocks_of_keys(blocks: tuple[AttentionBlock, ...], part: range) -> tuple[AttentionBlock, ...]:
    """Return the blocks that some of the keys have, whose indices are counted from the first of these keys. All keys
    are of another rank than the queries, and before those that see them."""
    found: list[AttentionBlock] = []
    for block in blocks:
        if keys := _intersect(block.keys, part):
            moved = range(keys.start - part.start, keys.stop - part.start)
            found.append(block._replace(keys=moved, offset=block.offset - (keys.start - block.keys.start)))
    return tuple(found)


def _documents_by_sequence(lengths: Iterable[int], length: int) -> Iterator[list[range]]:
    """Yield the positions of each sequence's documents."""
    bounds: list[range] = []
    for begin, end in pairwise(accumulate(lengths, initial=0)):
        bounds.append(range(begin % length, begin % length + end - begin))
        if end % length == 0:
            yield bounds
            bounds = []


def _blocks_of_document(
    sequence: int | None, document: range, queries: Sequence[range], keys: Sequence[range], window: int | None
) -> Iterator[AttentionBlock]:
    for query_run, query_start in _with_starts(queries):
        seen_by = _intersect(query_run, document)
        for key_run, key_start in _with_starts(keys):
            found = _intersect(key_run, document)
            for part, mask in _visible_parts(seen_by, found, window):
                local_queries = range(
                    query_start + seen_by.start - query_run.start, query_start + seen_by.stop - query_run.start
                )
                local_keys = range(key_start + part.start - key_run.start, key_start + part.stop - key_run.start)
                yield AttentionBlock(sequence, local_queries, local_keys, mask, seen_by.start - part.start)


def _visible_parts(queries: range, keys: range, window: int | None) -> Iterator[tuple[range, BlockMask]]:
    """Yield the keys that some of the queries see, in at most two parts: those before the first query, and those among
    them; under a window in one part."""
    if not queries or not keys:
        return
    last = range(keys.start, min(keys.stop, queries.stop))
    if window is not None and queries[-1] - last.start >= window:
        reached = range(max(last.start, queries.start - window + 1), last.stop)
        if reached:
            yield reached, "band"
        return
    before = range(last.start, min(last.stop, queries.start))
    among = range(max(last.start, queries.start), last.stop)
    if before:
        yield before, "none"
    if among:
        yield among, "causal" if among == queries else "band"


def _with_starts(runs: Sequence[range]) -> Iterator[tuple[range, int]]:
    """Yield each run with the index of its first position among all held ones."""
    start = 0
    for run in runs:
        yield run, start
        start += len(run)


def _intersect(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
