"""The integer program of `benchmarks.expert_affinity` finds the best placement."""

from itertools import combinations, product

import numpy as np
import pytest

from benchmarks.expert_affinity import crossings, place_by_affinity


@pytest.mark.parametrize("seed", range(3))
def test_the_integer_program_equals_brute_force(seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 50, (2, 4, 4))
    halves = [[int(expert in half) for expert in range(4)] for half in combinations(range(4), 2)]
    best = min(crossings(counts, places) for places in product(halves, repeat=3))
    assert crossings(counts, place_by_affinity(counts, 2)) == best
