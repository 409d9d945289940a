"""Linear layers in fp8: what they compute, against fp8 numbers multiplied in float64."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from muster.model.decoder import Decoder
from muster.model.float8 import (
    FORWARD_DTYPE,
    GRADIENT_DTYPE,
    Float8Linear,
    apply_float8,
    float8_note,
    float8_product,
    has_float8,
    swizzled,
    to_float8,
)
from muster.spec.plan import Float8Recipe
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


RECIPES: dict[Float8Recipe, torch.dtype] = {
    "tensorwise": GRADIENT_DTYPE,
    "rowwise": FORWARD_DTYPE,
    "mxfp8": FORWARD_DTYPE,
}
"""Recipes, and the dtype of gradients."""


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-6)


def test_outputs_and_gradients_are_products_of_fp8_numbers() -> None:
    """Under every recipe: values between 0.5 and 2 keep their mantissas whatever their neighbours are."""
    for recipe, gradient_dtype in RECIPES.items():
        layer = Float8Linear(32, 64).bfloat16()
        layer.recipe = recipe
        with torch.no_grad():
            layer.weight.copy_(sample(64, 32, seed=1) / 8)
        x, grad = sample(2, 16, 32, seed=2).requires_grad_(), sample(2, 16, 64, seed=3)
        y = layer(x)
        y.backward(grad)
        x8, w8 = rounded(x.detach(), FORWARD_DTYPE).flatten(0, 1), rounded(layer.weight.detach(), FORWARD_DTYPE)
        g8 = rounded(grad, gradient_dtype).flatten(0, 1)
        assert layer.weight.grad is not None
        assert layer.bias.grad is not None
        assert x.grad is not None
        close(y.flatten(0, 1), x8 @ w8.t() + layer.bias.double())
        close(x.grad.flatten(0, 1), g8 @ w8)
        close(layer.weight.grad, g8.t() @ x8)
        close(layer.bias.grad, grad.double().flatten(0, 1).sum(0))
        exact = x.detach().double().flatten(0, 1) @ layer.weight.detach().double().t()
        assert (y.flatten(0, 1).double() - layer.bias.double() - exact).abs().max() > 2**-5, "fp8 rounds more than bf16"


def test_a_large_value_costs_only_its_tensor_its_row_or_its_block() -> None:
    """Elements a millionth of it underflow where they share its scale."""
    x = torch.full((2, 64), 2.0**-10)
    x[0, 0] = 2.0**10
    lost = {"tensorwise": 127, "rowwise": 63, "mxfp8": 31}
    for recipe in RECIPES:
        operand = to_float8(x, FORWARD_DTYPE, recipe)
        assert int((operand.values.float() == 0).sum()) == lost[recipe]


def test_scales_lie_as_tensor_cores_read_them() -> None:
    scale = torch.exp2(torch.arange(200 * 5).view(200, 5) % 40 - 20.0)
    held = swizzled(scale).view(torch.uint8)
    assert len(held) == 256 * 8
    for row, group in ((0, 0), (33, 3), (127, 4), (199, 2)):
        tile, within = (row // 128) * 2 + group // 4, (row % 32) * 16 + row % 128 // 32 * 4 + group % 4
        assert 2.0 ** (int(held[512 * tile + within]) - 127) == scale[row, group]


def test_layers_that_recipes_cant_take_stay_as_they_are() -> None:
    layers = nn.Sequential(nn.Linear(48, 64))
    apply_float8(layers, "mxfp8")
    assert type(layers[0]) is nn.Linear
    apply_float8(layers, "rowwise")
    assert type(layers[0]) is Float8Linear


@pytest.mark.parametrize("dtype", [FORWARD_DTYPE, GRADIENT_DTYPE])
def test_scales_are_powers_of_two_that_keep_the_largest_value_in_range(dtype: torch.dtype) -> None:
    for largest in (1e-20, 3e-3, 1.0, 448.0, 57344.0, 1e20):
        values, scale, _ = to_float8(torch.tensor([[largest, -largest / 3, 0.0]]).bfloat16(), dtype)
        assert torch.frexp(scale).mantissa == 0.5
        assert torch.finfo(dtype).max / 2 < values.float().abs().max() <= torch.finfo(dtype).max
    assert not to_float8(torch.zeros(2, 2, dtype=torch.bfloat16), dtype).values.float().any()


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_what_overflowed_stays_visible(wrong: float) -> None:
    layer, x = Float8Linear(16, 16, bias=False).bfloat16(), torch.ones(16, 16, dtype=torch.bfloat16)
    x[0, 0] = wrong
    assert not layer(x).isfinite().all()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_gpus_product_gets_the_scales_that_it_wants(recipe: Float8Recipe) -> None:
    """PyTorch's scaled matmul, which a CPU has too."""
    x, w = (to_float8(sample(rows, 32, seed=rows), FORWARD_DTYPE, recipe) for rows in (16, 48))
    scale = w.scale.t() if recipe == "rowwise" else w.scale
    scaled = torch._scaled_mm(x.values, w.values.t(), scale_a=x.scale, scale_b=scale, out_dtype=torch.bfloat16)
    torch.testing.assert_close(scaled, float8_product(x, w, torch.bfloat16), rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_pytorch_takes_a_gpus_products(recipe: Float8Recipe) -> None:
    """By the checks that it makes of sizes, layouts and scales, on tensors without values."""
    with FakeTensorMode():
        x, w = (torch.empty(rows, 160, device="cuda", dtype=torch.bfloat16) for rows in (224, 96))
        a, b = to_float8(x, FORWARD_DTYPE, recipe), to_float8(w, FORWARD_DTYPE, recipe)
        assert float8_product(a, b, torch.bfloat16).shape == (224, 96)


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
    assert "fp8 (mxfp8), which" in (float8_note(torch.device("cuda"), "mxfp8") or "")
    assert "emulated" in (float8_note(torch.device("cpu")) or "")
