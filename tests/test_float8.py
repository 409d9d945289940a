"""Linear layers in fp8: what they compute, against fp8 numbers multiplied in float64."""

import pytest
import torch
from torch import Tensor, nn

from muster.model.decoder import Decoder
from muster.model.float8 import (
    FORWARD_DTYPE,
    GRADIENT_DTYPE,
    Float8Linear,
    apply_float8,
    float8_note,
    float8_product,
    has_float8,
    to_float8,
)
from tests.parity import small_run


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers in fp8, whose exponents reach as far as the largest element needs."""
    mantissa = {FORWARD_DTYPE: 3, GRADIENT_DTYPE: 2}[dtype]
    fraction, exponent = torch.frexp(x.double())
    return torch.ldexp((fraction * 2 ** (mantissa + 1)).round() / 2 ** (mantissa + 1), exponent)


def sample(*shape: int, seed: int) -> Tensor:
    """Values between 0.5 and 2, none of which is too small for fp8."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (drawn.sign() * (0.5 + drawn.abs().clamp(max=1.5))).bfloat16()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-6)


def test_outputs_and_gradients_are_products_of_fp8_numbers() -> None:
    layer = Float8Linear(32, 48).bfloat16()
    with torch.no_grad():
        layer.weight.copy_(sample(48, 32, seed=1) / 8)
    x, grad = sample(2, 16, 32, seed=2).requires_grad_(), sample(2, 16, 48, seed=3)
    y = layer(x)
    y.backward(grad)
    x8, w8 = rounded(x.detach(), FORWARD_DTYPE).flatten(0, 1), rounded(layer.weight.detach(), FORWARD_DTYPE)
    g8 = rounded(grad, GRADIENT_DTYPE).flatten(0, 1)
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    assert x.grad is not None
    close(y.flatten(0, 1), x8 @ w8.t() + layer.bias.double())
    close(x.grad.flatten(0, 1), g8 @ w8)
    close(layer.weight.grad, g8.t() @ x8)
    close(layer.bias.grad, grad.double().flatten(0, 1).sum(0))
    exact = x.detach().double().flatten(0, 1) @ layer.weight.detach().double().t()
    assert (y.flatten(0, 1).double() - layer.bias.double() - exact).abs().max() > 2**-5, "fp8 rounds more than bf16"


@pytest.mark.parametrize("dtype", [FORWARD_DTYPE, GRADIENT_DTYPE])
def test_scales_are_powers_of_two_that_keep_the_largest_value_in_range(dtype: torch.dtype) -> None:
    for largest in (1e-20, 3e-3, 1.0, 448.0, 57344.0, 1e20):
        values, scale = to_float8(torch.tensor([[largest, -largest / 3, 0.0]]).bfloat16(), dtype)
        assert torch.frexp(scale).mantissa == 0.5
        assert torch.finfo(dtype).max / 2 < values.float().abs().max() <= torch.finfo(dtype).max
    assert not to_float8(torch.zeros(2, 2, dtype=torch.bfloat16), dtype).values.float().any()


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_what_overflowed_stays_visible(wrong: float) -> None:
    layer, x = Float8Linear(16, 16, bias=False).bfloat16(), torch.ones(16, 16, dtype=torch.bfloat16)
    x[0, 0] = wrong
    assert not layer(x).isfinite().all()


def test_a_gpus_product_gets_the_layouts_that_it_wants() -> None:
    """PyTorch's scaled matmul, which a CPU has too, on the operands of all three matmuls."""
    x, w = to_float8(sample(16, 32, seed=1), FORWARD_DTYPE), to_float8(sample(48, 32, seed=2), FORWARD_DTYPE)
    scaled = torch._scaled_mm(
        x.values, w.values.t(), scale_a=x.scale, scale_b=w.scale, out_dtype=torch.bfloat16, use_fast_accum=False
    )
    torch.testing.assert_close(scaled, float8_product(x, w.transposed(), torch.bfloat16), rtol=2**-7, atol=2**-6)


def test_layers_whose_sizes_no_kernel_takes_and_the_head_stay_as_they_are() -> None:
    module = Decoder(small_run().model, range(2), first=False, last=True)
    for block in module.blocks():
        apply_float8(block)
    kinds = {type(part) for block in module.blocks() for part in block.modules() if isinstance(part, nn.Linear)}
    assert kinds == {Float8Linear}
    assert sum(isinstance(part, Float8Linear) for part in module.modules()) == 2 * 7
    odd = nn.Sequential(nn.Linear(32, 40), nn.Linear(40, 32))
    apply_float8(odd)
    assert not any(isinstance(part, Float8Linear) for part in odd)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    layer = Float8Linear(32, 16)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias)), "three rows"


def test_a_gpu_without_fp8_computes_in_bf16_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not has_float8(torch.device("cuda"))
    assert "bf16 instead of fp8" in (float8_note(torch.device("cuda")) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert has_float8(torch.device("cuda"))
    assert float8_note(torch.device("cuda")) is None
    assert "emulated" in (float8_note(torch.device("cpu")) or "")
