"""HD-PiSSA: equal to its published rule in one process under every plan, and of the published rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from muster.cli.main import main
from muster.config.run_config import RunConfig
from muster.data.dp_slice import parts_of_micro_batches
from muster.layout.mesh import coordinates_of
from muster.spec.adapters import AdapterSpec
from muster.spec.errors import InfeasibleError
from muster.spec.plan_name import parse_plan_name
from tests.hd_pissa_ranks import reference, run_of
from tests.ranks import run_ranks

CASES: dict[int, list[dict[str, Any]]] = {
    1: [{"plan": "dp1", "parts": 2}, {"plan": "dp1-rfull", "parts": 4}],
    2: [
        {"plan": "dp2-z3-rfull", "parts": 2},
        {"plan": "pp2", "parts": 2},
        {"plan": "dp2-z1", "parts": 2, "fault": True},
        {"plan": "dp2-z1", "parts": 2},
        {"plan": "dp2-z2", "parts": 4},
        {"plan": "dp2x1", "parts": 2},
        {"plan": "cp2", "parts": 2},
        {"plan": "pp2-slice2", "parts": 1},
        {"plan": "pp2-sgpipe-rfull", "parts": 2},
        {"plan": "dp2-z2-tile2", "parts": 2},
    ],
    4: [
        {"plan": "dp4-z3", "parts": 4},
        {"plan": "dp2x2-z2", "parts": 4},
        {"plan": "dp2-pp2-z1", "parts": 2},
        {"plan": "dp2-cp2-z3", "parts": 2},
    ],
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def check(num_ranks: int, cases: list[dict[str, Any]], cache: Path) -> None:
    results = run_ranks(num_ranks, "tests.hd_pissa_ranks:on_rank", {"cases": cases, "cache": str(cache)})
    for index, case in enumerate(cases):
        worst = max(found[index]["error"] for found in results)
        assert sum(found[index]["num_compared"] for found in results) >= 8, case
        if case.get("fault"):
            assert worst > 1e-3, case
            continue
        assert worst < 1e-10, (case, worst)
        assert max(found[index]["loss_error"] for found in results) < 1e-10, case
        for found in results:
            counted, forecast = found[index]["sent"]
            assert counted == forecast, case


def test_hd_pissa_trains_as_published(cache: Path) -> None:
    """Under data parallelism and in a pipeline; gradients that go to another part's adapters are found."""
    check(2, CASES[2][:3], cache)


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", CASES)
def test_hd_pissa_trains_as_published_under_every_plan(num_ranks: int, cache: Path) -> None:
    check(num_ranks, CASES[num_ranks], cache)


def test_an_update_has_the_published_rank(cache: Path) -> None:
    """2 · r · parts in a step (arXiv:2505.18777), of matrices of rank 32 here."""
    for parts in (2, 4):
        weights, _ = reference(parts, str(cache))
        for module, before in weights[0].items():
            values = torch.linalg.svdvals(weights[1][module] - before)
            rank = int((values > 1e-9 * values[0]).sum())
            assert rank == 2 * 2 * parts, module


def test_what_hd_pissa_cannot_do_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train = ["train", "--preset", "tiny", "--adapter.kind", "hd_pissa", "--dry-run"]
    assert main(train) == 2
    assert "adapter.kind hd_pissa decomposes given weights: give train.init_from" in capsys.readouterr().err
    train += ["--train.init_from", str(tmp_path)]
    assert main([*train, "--optim.name", "lion"]) == 2
    assert "adapter.kind hd_pissa has AdamW's updates, but optim.name is lion" in capsys.readouterr().err
    assert main([*train, "--optim.freeze", "!*norm.weight"]) == 2
    assert "adapter.kind hd_pissa trains adapters alone" in capsys.readouterr().err
    assert main([*train, "--parallel", "tp2"]) == 3
    assert "hd_pissa with tensor parallelism" in capsys.readouterr().err
    with pytest.raises(ValueError, match="parts 2 is for kind hd_pissa, but lora is chosen"):
        AdapterSpec(parts=2)
    with pytest.raises(ValueError, match=r"adapter.r 8 times adapter.parts 8 is more .*: take adapter.r 4 or less"):
        RunConfig.model_validate(run_of(1).model_dump() | {"adapter": {"kind": "hd_pissa", "r": 8, "parts": 8}})
    plan = parse_plan_name("dp2-mb4")
    with pytest.raises(
        InfeasibleError, match=r"micro-batch of 4 samples has some of 2 of the 4 parts .* of 2 samples each"
    ):
        parts_of_micro_batches(plan, coordinates_of(plan, 0), 1, 8, 4)
    with pytest.raises(
        InfeasibleError, match=r"adapter.parts 3 doesn't divide the 8 samples .* expected one of 1, 2, 4, 8"
    ):
        parts_of_micro_batches(plan, coordinates_of(plan, 0), 1, 8, 3)
