"""Attention of packed documents and of windows against the formula, and the calls of kernels that only GPUs have."""

from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from muster.model import varlen_attention as varlen
from muster.model.piecewise_attention import ScoreRules, piecewise_attention
from muster.model.varlen_attention import _attend_on_gpu, _FlashWithSinks, sequence_pieces, varlen_attention

LENGTHS = (1, 70, 3, 129, 53)


def formula(
    qkv: tuple[Tensor, ...],
    lengths: tuple[int, ...],
    window: int | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention with one mask of all positions of the batch."""
    batch, heads, length, width = qkv[0].shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1) for x in qkv)
    k, v = (x.repeat_interleave(heads // len(x), 0) for x in (k, v))
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    behind = torch.arange(batch * length).unsqueeze(1) - torch.arange(batch * length)
    hidden = (behind < 0) | (behind >= (window or batch * length)) | (number.unsqueeze(1) != number)
    scores = (q @ k.mT * (scale or width**-0.5)).masked_fill(hidden, -torch.inf)
    if sinks is not None:  # one more key, whose value is zero
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, batch * length, 1)), -1)
        v = torch.cat((v, torch.zeros_like(v[:, :1])), 1)
    return (scores.softmax(-1) @ v).transpose(0, 1).unflatten(0, (batch, length)).transpose(1, 2)


def make_qkv(batch: int, length: int, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    shapes = [(batch, length, count, 8) for count in (heads, kv_heads, kv_heads)]
    return tuple(torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes)


def gradients(out: Tensor, qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return torch.autograd.grad(out, qkv, torch.randn(out.shape).bfloat16().to(out.dtype))


@pytest.mark.parametrize("window", [None, 1, 5, 64, 100, 300])
@pytest.mark.parametrize("lengths", [LENGTHS, (128, 128), (256,)], ids=str)
def test_attention_of_documents_and_windows_is_the_formula(lengths: tuple[int, ...], window: int | None) -> None:
    qkv = make_qkv(2, sum(lengths) // 2)
    ours, theirs = varlen_attention(qkv, lengths, None, window, 0.3), formula(qkv, lengths, window, 0.3)
    assert ours is not None
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for one, other in zip(gradients(ours, qkv), gradients(theirs, qkv), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
    assert (ours - formula(qkv, (sum(lengths),), 7)).abs().max() > 1e-3


@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("lengths", [LENGTHS, (128, 128)], ids=str)
def test_sinks_are_keys_without_values(lengths: tuple[int, ...], window: int | None) -> None:
    qkv, sinks = make_qkv(2, 128), torch.randn(4, dtype=torch.float64, requires_grad=True)
    theirs = formula(qkv, lengths, window, 0.3, sinks)
    expected = gradients(theirs, (*qkv, sinks))
    found = [varlen_attention(qkv, lengths, None, window, 0.3, sinks)]
    if lengths == (128, 128):
        found.append(piecewise_attention(*qkv, ScoreRules(0.3, window), sinks))
    for ours in found:
        assert ours is not None
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        for one, other in zip(gradients(ours, (*qkv, sinks)), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_gradients_of_bands_are_summed_in_float32() -> None:
    qkv = make_qkv(1, 512, dtype=torch.bfloat16)
    wide = tuple(x.detach().double().requires_grad_() for x in qkv)
    ours = gradients(varlen_attention(qkv, (512,), None, 200, None), qkv)  # type: ignore[arg-type]
    for one, other in zip(ours, gradients(formula(wide, (512,), 200), wide), strict=True):
        assert (one.double() - other).norm() < 0.01 * other.norm()


@pytest.mark.parametrize("window", [None, 64])
def test_no_score_of_another_document_or_beyond_the_window_is_computed(window: int | None) -> None:
    lengths = (100, 1000, 400)
    computed = sum(
        (piece.end - piece.begin) * (piece.end - piece.first_key) for piece in sequence_pieces(lengths, window)
    )
    whole = sum(length**2 for length in lengths)
    assert computed == whole if window is None else computed < 2 * window * sum(lengths) < whole / 4


# ----------------------------------------------------------------------------------------------------------------------
# Kernels of GPUs, by what their documentation says of their arguments


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, max_q: int, window_size: tuple[int, int], scale: float | None
) -> Tensor:
    lengths = tuple(end - begin for begin, end in pairwise(cu_seq_q.tolist()))
    assert (max_q, cu_seq_q.dtype, window_size[1]) == (max(lengths), torch.int32, 0)
    window = None if window_size[0] < 0 else window_size[0] + 1
    out = formula(tuple(x.unsqueeze(0).transpose(1, 2) for x in (q, k, v)), lengths, window, scale)
    return out.transpose(1, 2)[0]


def of_torch(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert cu_seq_k is cu_seq_q
    assert max_k == max_q
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return stand_in(query, key, value, cu_seq_q, max_q, window_size, scale)


def of_flash_attn(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, softmax_scale: float | None, causal: bool, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    assert cu_seqlens_k is cu_seqlens_q
    assert max_seqlen_k == max_seqlen_q
    assert causal
    return stand_in(q, k, v, cu_seqlens_q, max_seqlen_q, window_size, softmax_scale)


def without_windows(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, is_causal: bool = False) -> None:
    raise AssertionError("the kernel of an older PyTorch")


@pytest.mark.parametrize("newest", ["torch", "flash_attn"])
@pytest.mark.parametrize(("window", "scale"), [(None, None), (5, 0.3), (400, None)])
def test_a_gpu_takes_all_documents_in_one_call(
    newest: str, window: int | None, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {
        "torch.nn.attention.varlen": SimpleNamespace(varlen_attn=of_torch if newest == "torch" else without_windows),
        "flash_attn": SimpleNamespace(flash_attn_varlen_func=of_flash_attn),
    }
    monkeypatch.setattr(varlen, "import_module", made.__getitem__)
    varlen.gpu_kernel.cache_clear()
    try:
        qkv, starts = make_qkv(2, 128), torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
        for lengths, given in ((LENGTHS, starts), ((128, 128), None)):
            ours = _attend_on_gpu(qkv, lengths, given, window, scale)
            torch.testing.assert_close(ours, formula(qkv, lengths, window, scale), rtol=0, atol=1e-12)
    finally:
        varlen.gpu_kernel.cache_clear()


def test_a_machine_without_such_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(varlen, "import_module", missing)
    varlen.gpu_kernel.cache_clear()
    try:
        assert varlen.gpu_kernel() is None
        assert varlen_attention(tuple(x.to("meta") for x in make_qkv(1, 4)), (4,), None, 2, None) is None
    finally:
        varlen.gpu_kernel.cache_clear()


class Context(SimpleNamespace):
    """What autograd hands to a function, which its engine can't run for a GPU that isn't there."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


@pytest.mark.parametrize("left", [-1, 4])
def test_pytorch_s_flash_attention_takes_the_arguments_with_sinks(left: int) -> None:
    """On tensors without memory: what the kernels take and return."""
    with FakeTensorMode():
        q, k, v = (torch.empty(32, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
        sinks = torch.empty(8, dtype=torch.bfloat16, device="cuda")
        starts, context = torch.empty(4, dtype=torch.int32, device="cuda"), Context()
        out = _FlashWithSinks.forward(context, q, k, v, sinks, starts, 16, left, 0.125)
        assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
        assert context.saved_tensors[-1].shape == (8, 32)
        found = _FlashWithSinks.backward(context, torch.empty_like(out))
        assert [x.shape for x in found[:4] if x is not None] == [q.shape, k.shape, v.shape, sinks.shape]
