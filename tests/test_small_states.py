"""Optimizers with small states: equal to their papers' forms and to one process under any plan; states counted."""

from typing import Any

import pytest
import torch
from torch import Tensor

from muster.checkpoint.load import load
from muster.checkpoint.save import save
from muster.cli.main import main
from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import mean_state_bytes
from muster.config.optimizers import is_layer_matrix
from muster.model.init import keyed_generator
from muster.optim.adamw_8bit import dequantize, quantize_
from tests.optim_ranks import LR, draw, pieces, walk
from tests.ranks import run_ranks
from tests.test_optim import WHOLE, make_whole, single_rank_exchange

CONFIGS: dict[str, dict[str, Any]] = {
    "galore": {"name": "galore", "rank": 3, "update_proj_gap": 2},
    "natural_galore": {"name": "natural_galore", "rank": 3, "update_proj_gap": 2, "gradient_history": 3},
    "apollo": {"name": "apollo", "rank": 3, "update_proj_gap": 2},
    "apollo_mini": {"name": "apollo_mini", "update_proj_gap": 2},
    "adafactor": {"name": "adafactor"},
    "adamw_8bit": {"name": "adamw_8bit"},
}
MATRICES = [name for name, one in WHOLE.items() if is_layer_matrix(name, one.shape)]


def plain(config: OptimConfig, name: str, steps: int) -> Tensor:
    """A matrix after some steps of `walk`, as the published code computes it; always with the longer side as rows."""
    w = draw(name, WHOLE[name].shape, 0)
    turned = w.shape[0] < w.shape[1]
    w = w.T.clone() if turned else w
    rows, cols = w.shape
    r = min(config.rank, cols)
    m, v = (torch.zeros(rows, r, dtype=w.dtype) for _ in range(2))
    p, norm_before = torch.zeros(r, cols, dtype=w.dtype), 0.0
    row, col = torch.zeros(rows, dtype=w.dtype), torch.zeros(cols, dtype=w.dtype)
    last: list[Tensor] = []
    for step in range(1, steps + 1):
        g = draw(name, WHOLE[name].shape, step)
        g = g.T if turned else g
        if config.name == "adafactor":
            beta = 1 - step**-0.8
            row, col = (beta * old + (1 - beta) * (g * g).mean(d) for old, d in ((row, 1), (col, 0)))
            update = g / (torch.outer(row, col) / row.mean()).sqrt()
            update = update / max(1.0, float(update.square().mean().sqrt()))
        else:
            if (step - 1) % config.update_proj_gap == 0:
                if config.name in ("galore", "natural_galore"):
                    p = torch.linalg.svd(g, full_matrices=False)[2][:r]
                    p = p * torch.sign(p.gather(1, p.abs().argmax(1, keepdim=True)))
                else:
                    generator = keyed_generator(0, f"apollo/{name}/{(step - 1) // config.update_proj_gap}")
                    p = torch.randn(r, cols, generator=generator).double() / r**0.5
            low = g @ p.T
            if config.name == "natural_galore":
                last = [*last, low.flatten()][-config.gradient_history :]
                fisher = torch.stack(last).T @ torch.stack(last) + config.damping * torch.eye(low.numel()).double()
                low = torch.linalg.solve(fisher, low.flatten()).view(low.shape)
            m, v = config.beta1 * m + (1 - config.beta1) * low, config.beta2 * v + (1 - config.beta2) * low * low
            adam = (m / (1 - config.beta1**step)) / ((v / (1 - config.beta2**step)).sqrt() + config.eps)
            if config.name in ("galore", "natural_galore"):
                update = config.scale * adam @ p
            else:
                ratio = adam.norm() / (low.norm() + 1e-8)
                if config.name == "apollo":
                    ratio = adam.norm(dim=1, keepdim=True) / (low.norm(dim=1, keepdim=True) + 1e-8)
                update = g * ratio
                growth = float(update.norm()) / norm_before if norm_before else 0.0
                update = update / max(growth / 1.01, 1.0)
                norm_before = float(update.norm())
                update = update * config.scale**0.5
        w = w - LR / step * (config.weight_decay * w + update)
    return w.T if turned else w


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "adamw_8bit"])
def test_an_optimizer_equals_its_published_form(name: str) -> None:
    config = OptimConfig(lr=LR, **CONFIGS[name])
    optimizer = make_whole(config)
    walk(optimizer, WHOLE, range(1, 6))
    for matrix in MATRICES:
        assert float((optimizer.params[matrix] - plain(config, matrix, 5)).abs().max()) < 1e-7, matrix
    adamw = make_whole(OptimConfig(lr=LR))
    walk(adamw, WHOLE, range(1, 6))
    assert torch.equal(optimizer.params["embed.weight"], adamw.params["embed.weight"])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_an_optimizer_with_a_small_state_goes_on_from_a_checkpoint_bit_for_bit(config: dict, tmp_path) -> None:
    first, other = (make_whole(OptimConfig(lr=LR, **config)) for _ in range(2))
    walk(first, WHOLE, range(1, 4))
    folder = save(
        tmp_path, 3, pieces(first, WHOLE), {"plan": {}, "model": {}, "counters": {}}, 0, 1, single_rank_exchange
    )
    other.step_count = load(folder, pieces(other, WHOLE)).step
    for optimizer in (first, other):
        walk(optimizer, WHOLE, range(4, 6))
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(pieces(first, WHOLE), pieces(other, WHOLE), strict=True))


@pytest.mark.parametrize(
    "names", [("apollo",), pytest.param(tuple(CONFIGS), marks=pytest.mark.soak)], ids=["one", "all"]
)
def test_cut_matrices_are_updated_as_in_one_process_and_states_move_to_any_plan(names, tmp_path) -> None:
    """Under data and tensor parallelism and pipelines; saved under one plan and loaded under another; bytes as
    forecast."""
    cases = []
    for name in names:
        optim = CONFIGS[name]
        folder = str(tmp_path / name)
        cases += [
            {"plan": "tp2-dp2", "optim": optim},
            {"plan": "dp4", "optim": optim, "steps": (1, 4), "save_to": folder},
            {"plan": "dp2x2-z1", "optim": optim, "steps": (4, 6), "load_from": f"{folder}/step-00000003"},
            {"plan": "dp2-pp2", "optim": optim, "steps": (4, 6), "load_from": f"{folder}/step-00000003"},
        ]
    results = run_ranks(4, "tests.optim_ranks:on_rank", {"cases": cases})
    for index, case in enumerate(cases):
        assert max(found[index]["error"] for found in results) < 1e-9, case
        for found in results:
            counted, forecast = found[index]["state"]
            assert counted == forecast, case


def test_moments_in_8_bits_keep_small_values() -> None:
    """The largest error is a part of the element where it is not too small, and of the block's largest where it is."""
    values = draw("x", (64, 40), 1).float() * torch.logspace(-3, 0, 40)
    codes, scales = torch.zeros(64, 40, dtype=torch.uint8), torch.zeros(10)
    quantize_(values, codes, scales, is_signed=True)
    error = (dequantize(codes, scales, is_signed=True) - values).abs()
    largest = scales.repeat_interleave(256).view(64, 40)
    assert bool((error <= 0.02 * largest).all())
    large = values.abs() > 0.1 * largest
    assert float((error[large] / values.abs()[large]).mean()) < 0.02
    zeros = torch.zeros(64, 40)
    quantize_(zeros, codes, scales, is_signed=False)
    assert not dequantize(codes, scales, is_signed=False).any()


def test_adamw_in_8_bits_stays_near_adamw() -> None:
    ours, theirs = make_whole(OptimConfig(lr=LR, name="adamw_8bit")), make_whole(OptimConfig(lr=LR))
    for optimizer in (ours, theirs):
        walk(optimizer, WHOLE, range(1, 9))
    moved = torch.cat([(theirs.params[n] - draw(n, WHOLE[n].shape, 0)).flatten() for n in MATRICES])
    apart = torch.cat([(theirs.params[n] - ours.params[n]).flatten() for n in MATRICES])
    assert float(apart.norm() / moved.norm()) < 0.05


def test_states_are_small() -> None:
    """Bytes a parameter of a layer's matrices of width 4096, beside AdamW's 8."""
    shapes = {"layers.0.mlp.up.weight": (14336, 4096)}
    found: dict[str, float] = {
        name: mean_state_bytes(OptimConfig(lr=LR, name=name, **({} if rank is None else {"rank": rank})), shapes, 4)
        for name, rank in (
            ("galore", 1024),
            ("natural_galore", 64),
            ("apollo", 256),
            ("apollo_mini", None),
            ("adafactor", None),
            ("adamw_8bit", None),
        )
    }
    assert found["galore"] == pytest.approx(4 * 1024 * (2 * 14336 + 4096) / (14336 * 4096))
    assert found["natural_galore"] == pytest.approx(4 * 64 * (22 * 14336 + 4096) / (14336 * 4096))
    assert found["apollo"] == pytest.approx(4 * 256 * 2 / 4096, rel=1e-5)
    assert found["apollo_mini"] < 0.01
    assert found["adafactor"] < 0.01
    assert found["adamw_8bit"] == pytest.approx(2 * (1 + 4 / 256))


def test_host_memory_is_for_elementwise_updates(capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "--preset", "tiny", "--optim.name", "galore", "--parallel", "dp2-oopth", "--dry-run"]) == 3
    assert "optim.name galore can't step in host memory" in capsys.readouterr().err


def test_keys_of_other_optimizers_are_refused() -> None:
    with pytest.raises(
        ValueError, match="rank 4 is for galore, natural_galore, apollo and apollo_mini, but adamw is chosen"
    ):
        OptimConfig(lr=LR, rank=4)
