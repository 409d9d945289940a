"""Float32 matmuls by oneDNN: the products of MKL, whatever lies how in memory."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muster.parallel import cpu_matmul
from muster.parallel.cpu_matmul import MIN_MULTIPLICATIONS, MIN_ROWS, use_wide_matmuls

needs_wide = pytest.mark.skipif(not use_wide_matmuls(), reason="MKL uses this processor's whole width")
LAYOUTS = ("plain", "transposed", "columns of a wider one", "every second row", "one row repeated", "offset")


def matrix(rows: int, columns: int, layout: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix that lies in memory in one of several ways."""
    if layout == "transposed":
        return torch.randn(columns, rows, dtype=dtype).t()
    if layout == "columns of a wider one":
        return torch.randn(rows, columns + 7, dtype=dtype)[:, 3 : columns + 3]
    if layout == "every second row":
        return torch.randn(2 * rows, columns, dtype=dtype)[::2]
    if layout == "one row repeated":
        return torch.randn(1, columns, dtype=dtype).expand(rows, columns)
    if layout == "offset":
        return torch.randn(rows * columns + 5, dtype=dtype)[5:].view(rows, columns)
    return torch.randn(rows, columns, dtype=dtype)


def is_near(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4)


@needs_wide
@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 300), st.integers(1, 200), st.integers(1, 200)),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_every_form_of_a_matmul_gives_the_product(sizes, left_layout, right_layout, dtype):
    rows, inner, columns = sizes
    left, right = matrix(rows, inner, left_layout, dtype), matrix(inner, columns, right_layout, dtype)
    exact = left.double() @ right.double()
    wider = torch.randn(columns, 2, dtype=dtype)
    bias, term = wider[:, 1], torch.randn(rows, columns, dtype=dtype)
    assert is_near(left @ right, exact)
    assert is_near(torch.mm(left, right, out=torch.empty(rows, columns, dtype=dtype)), exact)
    assert is_near(torch.mm(left, right, out=torch.empty(columns, rows, dtype=dtype).t()), exact)
    assert is_near(torch.addmm(bias, left, right), exact + bias.double())
    assert is_near(torch.addmm(term, left, right, beta=0.5, alpha=2), 0.5 * term.double() + 2 * exact)
    assert is_near(term.clone().addmm_(left, right, alpha=2), term.double() + 2 * exact)
    assert is_near(torch.addmm(torch.zeros(1, dtype=dtype), left, right), exact)


@needs_wide
def test_a_part_of_the_rows_has_the_same_bits():
    """Ranks that compute a part of a batch agree with one that computes all of it."""
    left, right = torch.randn(512, 96), torch.randn(256, 96).t()
    whole = left @ right
    assert torch.equal(left[:128] @ right, whole[:128])
    assert torch.equal(left @ right, whole)


@needs_wide
def test_only_large_float32_matmuls_are_replaced(monkeypatch):
    calls = []
    multiply = cpu_matmul.multiply
    monkeypatch.setattr(cpu_matmul, "multiply", lambda *args: (calls.append(args[0].shape), multiply(*args))[1])
    side = round(MIN_MULTIPLICATIONS ** (1 / 3))
    large = torch.randn(2 * side, 2 * side)
    linear = torch.nn.Linear(2 * side, 2 * side)
    linear(large.requires_grad_()).sum().backward()
    assert len(calls) == 3, "forward, gradient of the input, gradient of the weight"
    calls.clear()
    for left, right in (
        (large[: MIN_ROWS - 1], large),
        (large[:MIN_ROWS, :8], large[:8]),
        (large.double(), large.double()),
        (large.bfloat16(), large.bfloat16()),
    ):
        left @ right
    assert not calls


@needs_wide
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_is_left_to_a_reference_kernel(layout, monkeypatch):
    """oneDNN has one for parts of matrices, which takes 1,000 times as long."""
    given = []
    operator = torch.ops.mkldnn._linear_pointwise
    kernels = SimpleNamespace(_linear_pointwise=lambda *args: (given.append(args[1]), operator(*args))[1])
    monkeypatch.setattr(torch.ops, "mkldnn", kernels)
    matrix(256, 128, layout) @ matrix(128, 192, layout)
    (weight,) = given
    assert weight.is_contiguous() or weight.t().is_contiguous()


@needs_wide
def test_matrices_that_do_not_fit_are_refused_as_ever():
    left, right = torch.randn(256, 128), torch.randn(256, 128)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        left @ right


@pytest.mark.parametrize(
    ("vendor", "capability", "is_narrow"),
    [("AuthenticAMD", "AVX512", True), ("GenuineIntel", "AVX512", False), ("AuthenticAMD", "AVX2", False)]
    + [("", "AVX512", False)],
)
def test_the_kind_of_processor_decides(monkeypatch, vendor, capability, is_narrow):
    monkeypatch.setattr(cpu_matmul, "_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert cpu_matmul._is_mkl_narrow() == is_narrow
