"""Hidden states that travel to experts in 8 bits: how much they are rounded, and what that does to losses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from muster.api.verbs import predict
from muster.parallel.row_casts import row_cast
from muster.spec.expert_kinds import DispatchDtype
from tests.ranks import run_ranks
from tests.sampling import quick_sample

CASES: list[dict[str, Any]] = [
    {"plan": f"dp2-ep2{word}", "family": "experts", "precision": "fp64", "steps": 3, "micro_batch_size": 2}
    for word in ("-epfp8", "-epint8", "-epover2-epfp8-rfull", "x1-epint8")
]


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_rounding_is_as_small_as_it_says(dtype: DispatchDtype) -> None:
    cast = row_cast(dtype)
    assert cast is not None
    torch.manual_seed(0)
    x_RD = torch.randn(64, 100) * torch.logspace(-20, 20, 64).unsqueeze(1)
    x_RD[3] = 0
    packed = cast.pack(x_RD)
    assert packed.shape == (64, 104)
    assert packed.dtype == torch.uint8
    error_RD = (cast.unpack(packed, x_RD.dtype) - x_RD).abs()
    largest_R1 = x_RD.abs().amax(1, keepdim=True)
    allowed_RD = largest_R1 / 254 if dtype == "int8" else torch.maximum(x_RD.abs() / 16, 2**-10 * largest_R1 / 448)
    assert bool((error_RD <= allowed_RD * (1 + 1e-4)).all())
    assert bool((error_RD > 0).any())
    assert cast.pack(x_RD[:0]).shape == (0, 104)
    x_RD[5, 7] = torch.nan
    assert bool(cast.unpack(cast.pack(x_RD), x_RD.dtype)[5].isnan().any()), "what is undefined stays so"
    assert cast.unpack(cast.pack(x_RD.bfloat16()), torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("cases", quick_sample([CASES[1:3], CASES], 0), ids=["two", "all"])
def test_losses_move_by_less_than_a_hundredth(cases: list[dict[str, Any]], tmp_path: Path) -> None:
    results = run_ranks(2, "tests.parity:run_cases", {"cases": cases, "cache": str(tmp_path)})
    for case, *found in zip(cases, *results, strict=True):
        errors = [one["loss_error"] for one in found]
        assert 1e-8 < max(errors) < 1e-2, (case, errors)


def test_fewer_bytes_take_less_time_over_a_network() -> None:
    """Qwen3-30B-A3B on 4 nodes, experts over all of them."""
    plain, short = (
        predict("qwen3-30b-a3b", "32xh100", f"dp32-ep32{word}-mb1-rfull", global_batch=32).step_time_s
        for word in ("", "-epfp8")
    )
    assert short < plain
