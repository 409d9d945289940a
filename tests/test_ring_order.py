"""Ring order: no order of few peers has a faster slowest link, and of many none that is faster by more than 2 %."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.layout.ring_order import EXACT_PEERS, ring_order, ring_value

KINDS = ("even", "heavy-tailed", "sites", "few values")


def matrix(count: int, kind: str, seed: int) -> list[list[float]]:
    """Random bandwidths, other ones in each direction."""
    random = np.random.default_rng(seed)
    site = random.integers(0, 3, count)
    rates = {
        "even": random.uniform(1, 10, (count, count)),
        "heavy-tailed": np.exp(random.normal(0, 1.5, (count, count))),
        "sites": np.where(site[:, None] == site, 10.0, 1.0) * random.uniform(0.8, 1.2, (count, count)),
        "few values": random.integers(1, 5, (count, count)).astype(float),
    }
    return rates[kind].tolist()


SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.sampled_from(KINDS), SEEDS)
def test_the_order_of_few_peers_is_the_best_of_all(count: int, kind: str, seed: int) -> None:
    rates = matrix(count, kind, seed)
    order = ring_order(rates)
    assert sorted(order) == list(range(count))
    assert order[0] == 0
    best = max(ring_value(rates, (0, *others)) for others in permutations(range(1, count)))
    assert ring_value(rates, order) == pytest.approx(best)


def test_eight_peers_have_the_best_of_all_orders() -> None:
    for seed, kind in enumerate(KINDS):
        rates = matrix(8, kind, seed)
        every = (ring_value(rates, (0, *others)) for others in permutations(range(1, 8)))
        assert ring_value(rates, ring_order(rates)) == pytest.approx(max(every))


@settings(max_examples=40, deadline=None)
@given(st.integers(4, 12), st.sampled_from(KINDS), SEEDS)
def test_the_local_search_is_within_2_percent_of_the_exact_order(count: int, kind: str, seed: int) -> None:
    rates = matrix(count, kind, seed)
    exact, found = ring_order(rates), ring_order(rates, exact_peers=3)
    assert count <= EXACT_PEERS
    assert sorted(found) == list(range(count))
    assert found[0] == 0
    slowest, total = ring_value(rates, exact)
    assert slowest >= ring_value(rates, found)[0] >= 0.98 * slowest
    if ring_value(rates, found)[0] == slowest:
        assert ring_value(rates, found)[1] <= total + 1e-9


@pytest.mark.soak
def test_rings_beyond_the_exact_ones_are_within_2_percent_of_the_exact_order() -> None:
    for count in (15, 16):
        for seed in range(40):
            rates = matrix(count, KINDS[seed % 4], seed)
            slowest = ring_value(rates, ring_order(rates, exact_peers=count))[0]
            assert ring_value(rates, ring_order(rates))[0] >= 0.98 * slowest


def test_large_rings_come_near_to_what_no_ring_exceeds() -> None:
    for count in (24, 48):
        for kind in ("even", "few values"):
            rates = np.array(matrix(count, kind, count))
            found = ring_order(rates.tolist())
            np.fill_diagonal(rates, -np.inf)  # every peer sends over one link and receives over one
            assert ring_value(rates.tolist(), found)[0] >= 0.98 * min(rates.max(axis=0).min(), rates.max(axis=1).min())


def test_sites_are_visited_once_each_and_the_better_direction_is_taken() -> None:
    site = [0, 1, 0, 1, 0, 1]
    rates = [[10.0 if one == other else 1.0 for other in site] for one in site]
    order = ring_order(rates)
    changes = sum(site[one] != site[other] for one, other in zip(order, order[1:] + order[:1], strict=True))
    assert changes == 2
    assert ring_order([[0, 5, 1], [1, 0, 5], [5, 1, 0]]) == (0, 1, 2)
    assert ring_order([[0, 1, 5], [5, 0, 1], [1, 5, 0]]) == (0, 2, 1)
    with pytest.raises(ValueError, match="2 rows and 3 columns"):
        ring_order([[0, 1, 2], [1, 0, 2]])
