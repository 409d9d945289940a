"""Parameters, gradients and optimizer state sharded over groups of different sizes (`zpNgM`)."""

from pathlib import Path
from typing import Any

import pytest

from tests.test_parity import GRADIENT_TOLERANCE, cache, check_parity, run

__all__ = ["cache"]  # a fixture

SAMPLE: list[dict[str, Any]] = [
    {"plan": "dp4-zp2g4", "tied": True},
    {"plan": "dp4-zp1g2", "profile": True},
    {"plan": "dp2-cp2-zp2g1-rfull"},
]
MORE: list[dict[str, Any]] = [
    *({"plan": f"dp4-zp{p}g{g}"} for p in (1, 2, 4) for g in (1, 2, 4) if p * g < 16),
    {"plan": "dp4-zp2g2", "optim": "muon"},
    {"plan": "dp4-zp2g2", "changes": {"bucket_layers": 3, "prefetch_buckets": 2}},
    {"plan": "dp4-mb2-zp2g2", "tied": True},
    {"plan": "dp2-pp2-zp1g1", "tied": True, "profile": True},
    {"plan": "dp2-pp2-szbh1-zp1g1"},
    {"plan": "dp2-tp2-sp-zp1g1", "packing": "next_fit"},
    {"plan": "cp4-zp2g2"},
]


def test_gradients_equal_one_process(cache: Path) -> None:
    """In float64, beside two bugs that are sown: sums of earlier micro-batches lost, copies of the step before kept."""
    cases = [case | {"precision": "fp64", "steps": 1, "layers": 2} for case in SAMPLE]
    check_parity(4, cases[1:], cache)
    faulty = [cases[1] | {"fault": "lost sums"}, cases[0] | {"fault": "stale copies", "precision": "fp32", "steps": 3}]
    lost, stale = run(4, faulty, cache)
    assert max(rank["gradient_error"] for rank in lost) > 1e4 * GRADIENT_TOLERANCE
    assert max(rank["loss_error"] for rank in stale) > 1e-4


ROUNDED = {"dp4-zp2g2-qwint8": (1e-5, 5e-3), "dp4-zp2g2-qgint8": (1e-7, 1e-3), "dp4-zp1g2-qgint4": (1e-7, 1e-3)}
"""Plans that round on the way, with bounds of the relative error of a step's loss and of the loss behind it. In a model
as narrow as the tests' a block with a scale spans several parameters, whose own gradients may round to nothing."""


def test_rounded_exchanges_change_losses_by_little_and_alike_on_all_ranks(cache: Path) -> None:
    cases = [{"plan": plan, "precision": "fp64", "steps": 1} for plan in ROUNDED]
    for case, found in zip(cases, run(4, cases, cache), strict=True):
        least, most = ROUNDED[case["plan"]]
        assert least < max(rank["loss_error"] for rank in found) < most, case
        assert len({str(rank["losses"]) for rank in found}) == 1, case


@pytest.mark.soak
def test_more_plans_equal_one_process(cache: Path) -> None:
    check_parity(4, [case | {"precision": "fp64", "steps": 1} for case in SAMPLE + MORE], cache)
    check_parity(4, [case | {"precision": "fp32", "steps": 5} for case in MORE], cache)
    (rounded,) = run(4, [{"plan": "dp4-zp2g2-qwint8-qgint4", "steps": 20}], cache)
    assert max(rank["loss_error"] for rank in rounded) < 0.02
    plain, offloaded = run(4, [{"plan": f"dp4-zp2g2{word}", "steps": 3} for word in ("", "-ooptd")], cache)
    assert [one["parameters"] for one in plain] == [one["parameters"] for one in offloaded]
