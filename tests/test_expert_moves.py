"""Moves of experts between steps: what they change, what they cost, and when they pay."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.spec.routing_load import rank_shares, rebalanced_order
from tests.ranks import run_ranks

CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"plan": "dp2-ep2-z1", "later": "dp2-z3", "ema": True},
        {"plan": "tp2-ep2-sp", "family": "gpt_oss"},
        {"plan": "dp2-ep2-z2-oopth", "family": "grouped"},
        {"plan": "dp2-ep2", "fault": True},
        {"plan": "dp2-ep2", "is_free": False},
    ],
    4: [
        {"plan": "dp4-ep2-z3-rfull", "later": "dp4-ep4"},
        {"plan": "dp2-tp2-ep2-etp2-z2", "family": "gpt_oss"},
        {"plan": "dp2-pp2-ep2", "family": "deepseek mtp", "later": "dp2-tp2-ep4"},
    ],
}
SOAK: dict[int, list[dict[str, Any]]] = {
    2: [
        {"plan": "cp2-ep2"},
        {"plan": "tp2-ep2s", "family": "grouped"},
        {"plan": "dp2-ep2x1", "family": "grouped"},
        {"plan": "dp2-ep2", "family": "shortcut"},
        {"plan": "dp2-ep2-epover2", "family": "balanced"},
        {"plan": "dp2-ep2", "optim": "muon"},
        {"plan": "dp2-ep2-ooptd", "later": "tp2-etp2"},
    ],
    4: [
        {"plan": "dp4-ep4h", "later": "dp2-pp2-ep2"},
        {"plan": "dp2x2-ep2-z2"},
        {"plan": "dp4-ep2g-z1", "family": "capacity"},
        {"plan": "dp2-pp2v2-ep2-sdualpipe", "family": "balanced"},
        {"plan": "dp4-ep2-z3", "family": "switch"},
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_experts_that_move_train_as_those_that_stay(ranks: int, tmp_path: Path) -> None:
    check_moves(ranks, CASES[ranks], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", SOAK)
def test_experts_move_under_more_plans(ranks: int, tmp_path: Path) -> None:
    check_moves(ranks, SOAK[ranks], tmp_path)


def check_moves(ranks: int, cases: list[dict[str, Any]], tmp_path: Path) -> None:
    """Losses to 1e-12 in float64, resumed ones to the bit; bytes as the formula has them."""
    results = run_ranks(ranks, "tests.expert_move_ranks:run_moves", {"cases": cases, "cache": str(tmp_path)})
    for case, found in zip(cases, zip(*results, strict=True), strict=True):
        one = found[0]
        assert all(other["moves"] == one["moves"] and other["placement"] == one["placement"] for other in found), case
        assert one["moves"][0][0] > 0, case
        assert all(after <= before for _, before, after in one["moves"]), case
        assert one["instructions"] == len(one["moves"]) == 3
        error = max(abs(a - b) / b for a, b in zip(one["moved"], one["stayed"], strict=True))
        if "fault" in case:
            assert error > 1e-7, case
            continue
        assert sum(other["bytes"][0] for other in found) == one["bytes"][1] > 0, case
        assert error < 1e-12, (case, error)
        assert one["resumed"] == one["moved"][-len(one["resumed"]) :], case
        if "later" in case:
            assert one["later"] == pytest.approx(one["moved"][-len(one["later"]) :], rel=1e-11), case


@given(st.lists(st.integers(0, 1000), min_size=8, max_size=8), st.permutations(range(8)), st.integers(0, 400))
def test_moves_pay_and_leave_each_expert_once(counts: list[int], order: list[int], cost: int) -> None:
    """What the fullest rank saves is more than the exchanges cost."""
    found = rebalanced_order(counts, 4, order, cost)
    assert sorted(found) == list(range(8))
    moved = sum(a != b for a, b in zip(order, found, strict=True))
    saved = max(rank_shares(counts, 4, order)) - max(rank_shares(counts, 4, found))
    assert (found == tuple(order) and not moved) or saved > cost * moved / 2
    dearer = rebalanced_order(counts, 4, order, cost + 50)
    assert max(rank_shares(counts, 4, dearer)) >= max(rank_shares(counts, 4, found)), "dearer exchanges save no more"


def test_only_exchanges_that_pay_are_made() -> None:
    counts = [40, 30, 20, 10, 5, 5]
    assert rebalanced_order(counts, 2, range(6)) != tuple(range(6))
    assert max(rank_shares(counts, 2, rebalanced_order(counts, 2))) == 55
    assert rebalanced_order(counts, 2, range(6), 35) == tuple(range(6)), "the most that exchanges save is 35"
    assert rebalanced_order([9, 1, 9, 1], 2, (0, 2, 1, 3)) in ((0, 1, 2, 3), (0, 3, 1, 2), (1, 2, 0, 3), (3, 2, 1, 0))
