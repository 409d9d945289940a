"""Blocks of attention by a GPU's kernel: its arguments, by what FlashAttention's documentation says of them, and its
shapes and dtypes, by PyTorch's tensors without memory."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from muster.cost.time.context_parallel import MERGE_BYTES, MERGE_KERNELS
from muster.layout.context_parallel import AttentionBlock, attention_blocks, kept_positions
from muster.model import block_attention, block_kernels
from muster.model.block_attention import BlockGradients, MergedAttention, ScoreRule
from muster.model.block_kernels import SavedAttention, fused_backward, fused_forward, trim_block

LENGTH = 48
DOCUMENTS = {"one": None, "packed": (20, 5, 23, 17, 31)}


def visible(block: AttentionBlock, window: int | None) -> set[tuple[int, int]]:
    """Return the pairs (query, key) of a band."""
    return {
        (query, key)
        for row, query in enumerate(block.queries)
        for column, key in enumerate(block.keys)
        if 0 <= row + block.offset - column < (window or 1000)
    }


@given(st.integers(1, 9), st.integers(1, 9), st.integers(-9, 9), st.one_of(st.none(), st.integers(1, 9)))
def test_a_trimmed_band_shows_the_same_and_every_query_sees_a_key(
    num_queries: int, num_keys: int, offset: int, window: int | None
) -> None:
    block = AttentionBlock(None, range(3, 3 + num_queries), range(5, 5 + num_keys), "band", offset)
    pairs, trimmed = visible(block, window), trim_block(block, window)
    assert (trimmed is None) == (not pairs)
    if trimmed is not None:
        assert visible(trimmed, window) == pairs
        assert {query for query, _ in pairs} == set(trimmed.queries)
        assert {key for _, key in pairs} == set(trimmed.keys)


def hidden_by_flash(queries: int, keys: int, is_causal: bool, left: int | None, right: int | None) -> Tensor:
    """Return the scores that FlashAttention hides: the last query lies over the last key."""
    assert left is None or left >= 0
    assert right is None or right >= 0, "a negative number means all keys"
    ahead = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - (keys - queries)
    right = 0 if is_causal else right
    hidden = (ahead > (keys if right is None else right)) | (-ahead > (keys + queries if left is None else left))
    assert not hidden.all(1).any(), "the log-sum-exp of a query without keys is +∞"
    return hidden


def scores(q: Tensor, k: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Return the scores (B, H, S, T) of q (B, S, H, d) and k (B, T, K, d)."""
    wide = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bshd,bthd->bhst", q, wide).mul(scale).masked_fill(hidden, -torch.inf)


def stand_in_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_q: None, cum_k: None, max_q: int, max_k: int, dropout: float, is_causal: bool,
    debug: bool, *, scale: float, window_size_left: int | None, window_size_right: int | None,
) -> tuple[Any, ...]:  # fmt: skip
    assert (max_q, max_k, dropout, debug) == (q.shape[1], k.shape[1], 0.0, False)
    hidden = hidden_by_flash(max_q, max_k, is_causal, window_size_left, window_size_right)
    found = scores(q, k, hidden, scale)
    wide = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhst,bthd->bshd", found.softmax(-1), wide), found.logsumexp(-1), None, None, None


def stand_in_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: None, cum_k: None, max_q: int,
    max_k: int, dropout: float, is_causal: bool, seed: Tensor, unused: Tensor, *, scale: float,
    window_size_left: int | None, window_size_right: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert lse.is_contiguous()
    hidden, groups = (
        hidden_by_flash(max_q, max_k, is_causal, window_size_left, window_size_right),
        q.shape[2] // k.shape[2],
    )
    p = (scores(q, k, hidden, scale) - lse.unsqueeze(-1)).exp()
    wide = v.repeat_interleave(groups, 2)
    slope = torch.einsum("bshd,bthd->bhst", grad, wide) - (grad * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    ds = p * slope * scale
    summed = lambda x: x.unflatten(2, (-1, groups)).sum(3)  # noqa: E731
    grad_k, grad_v = torch.einsum("bhst,bshd->bthd", ds, q), torch.einsum("bhst,bshd->bthd", p, grad)
    return torch.einsum("bhst,bthd->bshd", ds, k.repeat_interleave(groups, 2)), summed(grad_k), summed(grad_v)


def attend(window: int | None, documents: tuple[int, ...] | None) -> list[Tensor]:
    """Return outputs and gradients of three ranks' queries, from the keys of all ranks."""
    torch.manual_seed(0)
    rule, found = ScoreRule(0.3, window=window), []
    kept = [kept_positions(LENGTH, 3, rank) for rank in range(3)]
    kv = [torch.randn(2, 2, 2, LENGTH // 3, 8, dtype=torch.float64) for _ in kept]
    for own in kept:
        q, grad = torch.randn(2, 2, 4, LENGTH // 3, 8, dtype=torch.float64)
        blocks = [attention_blocks(LENGTH, own, keys, window, documents) for keys in kept]
        merged = MergedAttention(q)
        for keys, seen in zip(kv, blocks, strict=True):
            merged.add(q, *keys, seen, rule)
        summed = BlockGradients(grad, q, merged.out_BHSd, merged.lse_BHS, rule)
        kv_grads = [torch.zeros_like(keys) for keys in kv]
        for keys, grads, seen in zip(kv, kv_grads, blocks, strict=True):
            summed.add(*keys, seen, *grads)
        found += [merged.out_BHSd, summed.q_BHSd, *kv_grads]
    return found


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("window", [None, 1, 5, 11, 40])
def test_blocks_by_the_kernel_of_a_gpu_are_the_formula(
    window: int | None, documents: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = attend(window, documents)
    monkeypatch.setattr(block_attention, "has_block_kernel", lambda *_: True)
    monkeypatch.setattr(block_attention, "fused_forward", block_kernels.flash_forward)
    monkeypatch.setattr(block_attention, "fused_backward", block_kernels.flash_backward)
    monkeypatch.setattr(block_kernels, "_forward_gpu", stand_in_forward)
    monkeypatch.setattr(block_kernels, "_backward_gpu", stand_in_backward)
    for ours, theirs in zip(attend(window, documents), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mask", ["none", "causal", "band"])
def test_pytorch_takes_the_arguments_on_a_gpu_and_returns_these_shapes(mask: Any) -> None:
    with FakeTensorMode():
        q, grad = (torch.empty(2, 8, 16, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        k, v = (torch.empty(2, 2, 16, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        block = AttentionBlock(None, range(16), range(16), mask, 3 if mask == "band" else 0)
        out, lse = fused_forward(q, k, v, block, 0.1, 7 if mask == "band" else None)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:3], torch.float32)
        grads = fused_backward(SavedAttention(grad, q, k, v, out, lse), block, 0.1, 7 if mask == "band" else None)
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


class Kernels(TorchDispatchMode):
    """Counts the operators that make or change tensors, and the bytes that they read and write of large ones."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.large, self.number, self.num_bytes = large, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.number += 1
            tensors = [x for x in (*args, out) if isinstance(x, Tensor) and x.numel() == self.large]
            self.num_bytes += sum(x.numel() * x.element_size() for x in tensors)
        return out


def test_merging_a_block_takes_the_kernels_and_bytes_of_the_cost_model() -> None:
    q, lse = torch.randn(2, 4, 16, 8, dtype=torch.bfloat16), torch.randn(2, 4, 16)
    merged = MergedAttention(q)
    with Kernels(q.numel()) as kernels:
        merged.merge(q, lse)
    assert (kernels.num_bytes, kernels.number) == (MERGE_BYTES * q.numel(), MERGE_KERNELS)
