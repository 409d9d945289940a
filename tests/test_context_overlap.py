"""Rings of context parallelism in logical time: what their own order of calls hides of the links behind the scores."""

from collections import Counter
from unittest.mock import patch

import pytest

from muster.cost.context_traffic import AttentionShape, attention_transfers, unhidden_share
from muster.parallel.cp_blocks import BlockAttention
from muster.parallel.cp_ring import RingAttention
from muster.parallel.cp_token_ring import TokenRingAttention
from muster.spec.context_kinds import ContextRanks
from tests.logical_ring import LogicalAxis, run_kind
from tests.sampling import quick_sample

KINDS: dict[str, tuple[type[BlockAttention], int, dict[str, float]]] = {
    "ring": (RingAttention, 1, {"ring": 1.0}),
    "double ring": (RingAttention, 2, {"ring": 0.5, "second": 2.0}),
    "token ring": (TokenRingAttention, 1, {"ring": 1.0, "second": 1.0}),
}
"""Class, ranks of an inner ring, and the time of each link for a rank's keys and values, as a part of a step's scores
where the inner ring and the outer one keep up with them."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", quick_sample([8, 16], 0))
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


@pytest.mark.parametrize("kind", ["ring", "double ring"])
@pytest.mark.parametrize("ranks", quick_sample([8, 16], 0))
def test_a_ring_over_slow_links_waits_for_little_else(kind: str, ranks: int) -> None:
    """With links that take half as long again as the scores, which the cost model says too."""
    of_kind, window, seconds = KINDS[kind]
    forward, backward = run_kind(of_kind, ranks, window, {link: 1.5 * time_s for link, time_s in seconds.items()})
    assert forward.link_s > 1.1 * forward.compute_s
    assert forward.ratio <= 1.05
    assert backward.ratio <= 1.055
    for one, is_backward in ((forward, False), (backward, True)):
        unhidden_s = unhidden_share(ContextRanks("p2p", ranks, window=window), is_backward) * one.compute_s
        assert max(one.compute_s, one.link_s + unhidden_s) == pytest.approx(one.seconds, rel=0.06)


def test_whole_blocks_over_slow_links_are_seen() -> None:
    """A ring whose blocks travel whole computes one after its last transfer."""
    with patch("muster.parallel.cp_ring.ring_parts", lambda positions, turns, last: ((range(positions),),) * turns):
        forward, _ = run_kind(RingAttention, 8, 1, {"ring": 1.5})
    assert forward.ratio > 1.08


@pytest.mark.parametrize("kind", ["ring", "double ring"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rings_send_what_the_cost_model_says(kind: str, ranks: int) -> None:
    of_kind, window, seconds = KINDS[kind]
    if ranks <= window:
        return
    passes = run_kind(of_kind, ranks, window, seconds)
    shape = AttentionShape(tokens=16, heads=2, kv_heads=2, head_dim=8)
    for one, transfers in zip(
        passes, attention_transfers(ContextRanks("p2p", ranks, window=window), shape), strict=True
    ):
        said = Counter[tuple[str, int]]()
        for sends in transfers:
            said["ring" if sends.among == "ring" else "second", sends.numel] += sends.calls
        assert one.sends == said


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
