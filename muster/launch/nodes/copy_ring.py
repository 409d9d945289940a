"""Nodes whose memory holds a run's newest copies: who may be missing, and who goes on where fewer ranks do.

The nodes form a ring: each holds the parts of its own ranks and a copy of those of the node before it
(`checkpoint/in_memory/`). So the copies are complete as long as one of every two neighbours has a rank to read them.
"""

from collections.abc import Collection, Mapping, Sequence


def missing_pairs(ring: Sequence[int], present: Collection[int]) -> list[tuple[int, int]]:
    """Return the neighbours in the ring, each with the one after it, of which neither is present: nobody else has the
    parts of the first."""
    pairs = zip(ring, [*ring[1:], *ring[:1]], strict=True)
    return [(one, other) for one, other in pairs if one not in present and other not in present]


def choose_ranks_per_node(ring: Sequence[int], left: Mapping[int, int], size: int) -> dict[int, int]:
    """Return how many of the ranks that are `left` on each node go on where `size` of all do.

    Nodes with the fewest ranks are left out first, so that whole nodes stay together, but none whose memory the others
    need, and two nodes stay, if there are: copies on one alone are lost with it. Where more than `size` nodes would
    stay so, every other one is left out instead, from a lost node backwards. Where still more would, the copies are
    lost, and count no more. Ranks beyond `size` are then taken from the nodes with the fewest, which keep one.
    """
    lost = next((place for place, node in enumerate(ring) if node not in left), 0)
    distance = {node: (lost - 1 - place) % len(ring) for place, node in enumerate(ring)}
    every_other = sorted(left, key=lambda node: (distance.get(node, -1), -node))
    fewest_first = sorted(every_other, key=left.__getitem__)
    for order in (fewest_first, every_other):
        kept = _leave_out(order, ring, left, size)
        if len(kept) <= size:
            break
    else:
        return choose_ranks_per_node((), left, size)
    for node in filter(kept.__contains__, fewest_first):
        too_many = max(0, sum(kept.values()) - size)
        kept[node] -= min(kept[node] - 1, too_many)
    return kept


def _leave_out(order: Sequence[int], ring: Sequence[int], left: Mapping[int, int], size: int) -> dict[int, int]:
    """Return the ranks on each node that stays where nodes leave in this order, as long as the others can do without
    them."""
    kept = dict(left)
    for node in order:
        rest = {other: count for other, count in kept.items() if other != node}
        is_enough = sum(rest.values()) >= size and len(rest) >= min(2, size)
        if is_enough and missing_pairs(ring, rest) == missing_pairs(ring, kept):
            kept = rest
    return kept
