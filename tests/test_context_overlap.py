"""Rings of context parallelism in logical time: what their own order of calls hides of the links behind the scores."""

from unittest.mock import patch

import pytest

from muster.parallel.cp_blocks import BlockAttention
from muster.parallel.cp_ring import RingAttention
from muster.parallel.cp_token_ring import TokenRingAttention
from tests.logical_ring import LogicalAxis, run_kind

KINDS: dict[str, tuple[type[BlockAttention], int, dict[str, float]]] = {
    "ring": (RingAttention, 1, {"ring": 1.0}),
    "double ring": (RingAttention, 2, {"ring": 0.5, "second": 2.0}),
    "token ring": (TokenRingAttention, 1, {"ring": 1.0, "second": 1.0}),
}
"""Class, ranks of an inner ring, and the time of each link for a rank's keys and values, as a part of a step's scores
where the inner ring and the outer one keep up with them."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [8, 16])
def test_rings_hide_links_that_keep_up(kind: str, ranks: int) -> None:
    """With links that take 90 % of the time of the scores of a step, and an outer ring as much slower as it has time,
    passes take no longer than 1.05 times the longer of computation and communication."""
    of_kind, window, seconds = KINDS[kind]
    passes = run_kind(of_kind, ranks, window, {link: 0.9 * time_s for link, time_s in seconds.items()})
    assert max(one.ratio for one in passes) <= 1.05, passes
    assert all(one.link_s > 0.3 * one.compute_s for one in passes), passes


def test_a_single_ring_hides_all_of_it() -> None:
    for one in run_kind(RingAttention, 8, 1, {"ring": 0.9}):
        assert one.seconds == pytest.approx(one.compute_s)


def test_a_ring_over_slow_links_waits_for_nothing_else() -> None:
    """Only the scores of the last block come after the last transfer."""
    forward, _ = run_kind(RingAttention, 16, 1, {"ring": 1.5})
    assert forward.link_s > 1.3 * forward.compute_s
    assert forward.seconds <= 1.05 * forward.link_s


def test_a_ring_that_waits_at_once_is_seen() -> None:
    """A ring whose sends are waited for where they begin hides nothing."""

    class Waited:
        def __init__(self, data: object) -> None:
            self.data = data

        def wait(self) -> object:
            return self.data

    shift = LogicalAxis.ring_shift
    with patch.object(LogicalAxis, "ring_shift", lambda *arguments: Waited(shift(*arguments).wait())):
        forward, backward = run_kind(RingAttention, 8, 1, {"ring": 0.9})
    assert min(forward.ratio, backward.ratio) > 1.3
