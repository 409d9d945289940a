"""Centroids that travel to experts for alike hidden states: their number, their error, what losses make of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.api.verbs import predict
from muster.parallel.lsh_rows import LshRows, share_centroids
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.expert_kinds import num_centroids
from muster.spec.plan_name import format_plan_name, parse_plan_name
from tests.ranks import run_ranks
from tests.sampling import quick_sample

CASES: list[dict[str, Any]] = [
    {"plan": f"dp2-ep2-eplsh{rate}", "family": family, "precision": "fp64", "steps": 3, "micro_batch_size": 2}
    for rate, family in (("1", "experts"), ("1-rfull", "shortcut"), ("", "experts"), ("0.5-epint8-relem", "experts"))
]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.floats(0.01, 1))
def test_each_expert_with_rows_has_centroids_and_no_more_than_rows(counts: list[int], rate: float) -> None:
    found = share_centroids(torch.tensor(counts), sum(counts), rate).tolist()
    assert sum(found) == num_centroids(sum(counts), len(counts), rate)
    assert all(min(1, rows) <= own <= rows for own, rows in zip(found, counts, strict=True))


def test_alike_rows_share_a_centroid_and_the_error_is_as_small_as_it_says() -> None:
    """Rows that lie close around a few points; experts are linear, so that they stretch distances by their norm."""
    torch.manual_seed(0)
    points, near = torch.randn(5, 16, dtype=torch.float64), 1e-3 * torch.randn(60, 16, dtype=torch.float64)
    counts_E = torch.tensor([30, 0, 30])
    x_RD = (points[torch.arange(60) % 5] + near).requires_grad_()
    joined = LshRows(x_RD, counts_E, 0.2)
    assert joined.counts_E.tolist() == [7, 0, 8]
    weight_EDD = torch.randn(3, 16, 16, dtype=torch.float64)

    def experts(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part @ one for part, one in zip(rows.split(counts.tolist()), weight_EDD, strict=True)])

    centroid_RD = joined.centroids_KD[joined._group_R].detach()
    distance_R = (x_RD.detach() - centroid_RD).norm(dim=1)
    assert float(distance_R.max()) < 0.1, "rows around a point lie together"
    y_RD = joined.restore(experts(joined.centroids_KD, joined.counts_E))
    stretch = torch.linalg.matrix_norm(weight_EDD, 2).max()
    assert bool(((y_RD - experts(x_RD, counts_E)).norm(dim=1) <= (1 + stretch) * distance_R + 1e-12).all())


def test_gradients_are_those_of_what_is_computed_and_nothing_is_lost_where_each_row_is_a_centroid() -> None:
    torch.manual_seed(0)
    x_RD, counts_E = torch.randn(12, 4, dtype=torch.float64, requires_grad=True), torch.tensor([7, 5])

    def compressed(x: torch.Tensor, rate: float = 0.3) -> torch.Tensor:
        joined = LshRows(x, counts_E, rate)
        return joined.restore(joined.centroids_KD.tanh())

    assert torch.autograd.gradcheck(compressed, (x_RD,))
    torch.testing.assert_close(compressed(x_RD, 1.0), x_RD.tanh())
    assert LshRows(x_RD[:0], counts_E * 0, 0.2).centroids_KD.shape == (0, 4)


@pytest.mark.parametrize("cases", quick_sample([CASES[1:3], CASES], 0), ids=["two", "all"])
def test_losses_move_by_what_is_left_out(cases: list[dict[str, Any]], tmp_path: Path) -> None:
    """None where each row is a centroid; less than a twentieth for a toy whose tokens are all unlike."""
    results = run_ranks(2, "tests.parity:run_cases", {"cases": cases, "cache": str(tmp_path)})
    for case, *found in zip(cases, *results, strict=True):
        error = max(one["loss_error"] for one in found)
        if "eplsh1" in case["plan"]:
            assert max(error, *(one["gradient_error"] for one in found)) < 1e-10, case
        else:
            assert 1e-8 < error < 5e-2, (case, error)


def test_fewer_rows_take_less_time_over_a_network_and_are_named() -> None:
    seconds = [
        predict("qwen3-30b-a3b", "32xh100", f"dp32-ep32{word}-mb1-rfull", global_batch=32).step_time_s
        for word in ("", "-eplsh0.5", "-eplsh")
    ]
    assert seconds == sorted(seconds, reverse=True)
    for word in ("dp2-ep2-eplsh-mb1-bf16", "dp2-ep2-eplsh0.35-mb1-bf16"):
        assert format_plan_name(parse_plan_name(word)) == word
    for name in ("dp2-ep2g-eplsh", "dp2-ep2-epover2-eplsh", "dp2-ep2x1-eplsh", "dp2-eplsh"):
        with pytest.raises(InfeasibleError, match="centroids of hidden states .ep_lsh_rate. travel by the dispatcher"):
            predict("tiny-moe", "2xh100", name, global_batch=2)
    with pytest.raises(ConfigError):
        parse_plan_name("dp2-ep2-eplsh1.5")
