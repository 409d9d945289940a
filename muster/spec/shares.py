"""Relative numbers of micro-batches on data-parallel ranks of unequal speed."""

from collections.abc import Sequence
from itertools import groupby
from math import gcd


def normalize_shares(shares: Sequence[int]) -> tuple[int, ...]:
    """Return the canonical form of relative numbers of micro-batches: smallest integers, one entry for as many
    neighbouring ranks as possible, nothing where all are equal. (6, 6, 2, 2) becomes (3, 1)."""
    if len(set(shares)) < 2:
        return ()
    common = gcd(*shares)
    run = gcd(*(len(list(alike)) for _, alike in groupby(shares)))
    return tuple(share // common for share in shares[::run])
