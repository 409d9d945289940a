"""Dropout: masks by formula, the same under every plan, none outside of training."""

from pathlib import Path

import numpy as np
import pytest
import torch

from muster.cost.time.sublayer import DROPOUT_BYTES
from muster.model import dropout, piecewise_attention
from muster.model.dropout import LayerDropout, ScoreDropout, keep_mask, kept_scale, sample_keys
from muster.model.piecewise_attention import ScoreRules
from muster.model.split_mix import counted, signed
from muster.spec.model import ModelSpec
from muster.spec.plan_name import parse_plan_name
from muster.spec.supported import not_run_yet
from tests.fake_gpu import OperatorLog
from tests.parity import FAMILIES, with_two_layers
from tests.plans import unequal
from tests.test_memory_forecast import SHORT_LLAMA, assert_forecast_is_accounting
from tests.test_parity import check_parity

CPU = torch.device("cpu")
CASES = {
    1: [
        {"plan": "dp1-rfull", "family": "dropout"},
        {"plan": "dp1-mb2-relem", "family": "hidden dropout", "packing": "none"},
    ],
    2: [
        {"plan": "tp2-sp", "family": "dropout", "tied": True, "profile": True},
        {"plan": "tp2-rfull", "family": "dropout", "packing": "next_fit"},
        {"plan": "dp2", "family": "dropout"},
        {"plan": "dp2-z1-uneven3.1-relem", "family": "dropout"},
        {"plan": "pp2-mb2-szbh1", "family": "dropout", "packing": "none"},
        {"plan": "pp2-vocab-oact", "family": "hidden dropout", "tied": True},
        {"plan": "cp2", "family": "hidden dropout", "packing": "document_mask"},
        {"plan": "cp2a", "family": "hidden dropout"},
    ],
    4: [
        {"plan": "tp2-sp-pp2-mb2", "family": "dropout", "packing": "none"},
        {"plan": "dp2-pp2v2-sdualpipe", "family": "hidden dropout"},
        {"plan": "dp2x2-z2-rfull", "family": "dropout"},
        {"plan": "cp2-tp2-sp", "family": "hidden dropout"},
        {"plan": "pp2-sp", "family": "dropout", "changes": unequal((1, {"dp_shard": 2}), (3, {"tp": 2}))},
    ],
}


def splitmix64(state: int) -> int:
    """Output of the generator at a state, as in the paper's Java code."""
    bits = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & bits
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & bits
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & bits
    return state ^ (state >> 31)


def lanes(number: int) -> list[int]:
    """Four signed numbers of 16 bits, the lowest first."""
    return np.array([number], dtype=np.uint64).view(np.int16).tolist()


@pytest.mark.parametrize(("start", "width"), [(0, 8), (3, 6), (5, 1)])
def test_a_mask_is_that_of_splitmix64(start: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert splitmix64(1234567) == 6457827717110365317  # first output of the published code for this seed
    keys, gamma, bits = [5, (1 << 64) - 9, 1 << 63], 0x9E3779B97F4A7C15, (1 << 64) - 1
    row_keys = torch.tensor([signed(key) for key in keys])
    monkeypatch.setattr(dropout, "chunk_elements", lambda *_: 4)
    drawn = [[lane for index in range(4) for lane in lanes(splitmix64((key + index * gamma) & bits))] for key in keys]
    expected = [[lane >= round(0.3 * 65536) - 32768 for lane in row[start : start + width]] for row in drawn]
    assert keep_mask(row_keys, start, width, 0.3).tolist() == expected


def test_masks_have_the_rate_and_don_t_resemble_each_other() -> None:
    keys = sample_keys(3, range(64), CPU)
    layers = [counted(keys, layer) for layer in range(3)]
    rows = [counted(counted(one, place).unsqueeze(1), torch.arange(32)) for one in layers for place in (1, 2)]
    masks = torch.stack([keep_mask(row.flatten(), 0, 48, 0.1) for row in rows]).double()
    assert masks.mean() == pytest.approx(0.9, abs=0.002)
    for dim in range(3):
        others = [one for one in range(3) if one != dim]
        spread = 0.3 / (masks.numel() / masks.shape[dim]) ** 0.5
        assert (masks.mean(others) - 0.9).abs().max() < 5 * spread
    flat = (masks - 0.9).flatten(1)
    correlation = flat @ flat.t() / flat.shape[1] / 0.09
    assert correlation.fill_diagonal_(0).abs().max() < 5 / flat.shape[1] ** 0.5
    assert kept_scale(0.1) == pytest.approx(1 / 0.9, rel=1e-4)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, 1.5)])
def test_attention_with_dropout_is_the_formula_in_any_pieces(window, softcap, monkeypatch) -> None:
    """The second sequence has two documents; six query heads share two key/value heads."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, heads, 11, 4, dtype=torch.float64, generator=generator).requires_grad_() for heads in (6, 2, 2)
    )
    starts = torch.tensor([[0] * 11, [0] * 4 + [4] * 7])
    drop = ScoreDropout(
        LayerDropout(0.0, 0.25, sample_keys(7, (4, 9), CPU), torch.arange(11), torch.arange(11)), first_head=6
    )
    kept = drop.kept(6, slice(0, 11), slice(0, 11))
    assert torch.equal(drop.kept(3, slice(2, 5), slice(3, 9)), kept[:, :3, 2:5, 3:9]), "a part is drawn as the whole is"
    scores = 0.3 * q @ k.repeat_interleave(3, 1).mT
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    behind = torch.arange(11).unsqueeze(1) - torch.arange(11)
    hidden = (behind < 0) | (behind >= (window or 11)) | (torch.arange(11) < starts[:, None, :, None])
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1) * kept * drop.scale
    expected = p @ v.repeat_interleave(3, 1)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    monkeypatch.setattr(piecewise_attention, "chunk_elements", lambda *_: 2 * 2 * 6 * 11)
    ours = piecewise_attention.piecewise_attention(q, k, v, ScoreRules(0.3, window, softcap, drop, starts))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad(ours.square().sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_attention_dropout_is_refused_where_blocks_of_a_sequence_are_attended_to() -> None:
    shape = {"vocab_size": 257, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    plan = parse_plan_name("cp2")
    (found,) = not_run_yet(ModelSpec.model_validate(shape | FAMILIES["dropout"]), plan)
    assert found.startswith("attention_dropout with context parallelism")
    assert not not_run_yet(ModelSpec.model_validate(shape | FAMILIES["hidden dropout"]), plan)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_plans_drop_the_same(num_ranks: int, tmp_path: Path) -> None:
    """Gradients in float64 and the first losses equal those of one process; the validation loss is without dropout."""
    cases = CASES[num_ranks] if num_ranks == 1 else [CASES[2][at] for at in (0, 4, 6)]
    check_parity(num_ranks, [with_two_layers(case) | {"precision": "fp64", "steps": 2} for case in cases], tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_every_larger_plan_drops_the_same(tmp_path: Path) -> None:
    for num_ranks in (2, 4):
        check_parity(num_ranks, [case | {"precision": "fp64", "steps": 2} for case in CASES[num_ranks]], tmp_path)
    compiled = [{"plan": plan, "family": "dropout", "changes": {"compile": True}} for plan in ("dp2", "tp2-sp-rfull")]
    check_parity(2, [case | {"precision": "fp64", "steps": 2} for case in compiled], tmp_path)


def test_predictions_count_the_bytes_that_dropout_moves() -> None:
    x = torch.ones(4, 64, 128, dtype=torch.bfloat16)
    with OperatorLog(0) as log:
        dropout._drop_(x, sample_keys(0, range(4), CPU), torch.arange(64), dropout.AFTER_MLP, 0.1)
    moved = sum(one.moved_bytes for one in log.operators) / x.numel()
    assert moved == pytest.approx(DROPOUT_BYTES + 4 * x.element_size(), rel=0.1)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tp4-sp-rfull", "pp2-szbh1", "dp1-relem-fp32"])
def test_forecast_of_dropout_is_what_pytorch_counts(name: str) -> None:
    rates = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1, "vocab_size": 4096}
    assert_forecast_is_accounting(SHORT_LLAMA.model_copy(update=rates), name, 4096, 2)
