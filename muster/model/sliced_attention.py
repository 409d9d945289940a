"""Attention of a slice of a sequence to the keys and values of the slices before it, which stay on the device.

The slices of a sequence pass through a stage one after another, and back in reverse order (SPPO, arXiv:2503.10377 §4;
Seq1F1B, arXiv:2406.03488). A slice's forward adds its keys and values to those kept of its sequence. Its backward adds
to the gradients of all of these; those of its own are then complete, since all later slices have run before, and go on
to its key and value projections.

Suffixes of tensors: B sequences, H query heads, K key/value heads, s positions of a slice, S positions of whole
sequences, d head width; 2 stands for keys and values.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from muster.layout.context_parallel import AttentionBlock, attention_blocks
from muster.model.attention import Attention
from muster.model.attention_sinks import sink_gradients
from muster.model.block_attention import BlockGradients, MergedAttention, ScoreRule, score_rule
from muster.model.decoder import Decoder
from muster.model.documents import Documents
from muster.model.kernels import accumulation_dtype


class KeptKeys:
    """Keys and values of the sequences of one micro-batch in one layer, and their gradients."""

    def __init__(self, k_BKsd: Tensor, length: int) -> None:
        """Make room for sequences of `length`, of keys and values like `k_BKsd`."""
        batch, heads, _, width = k_BKsd.shape
        self.kv_2BKSd = k_BKsd.new_empty(2, batch, heads, length, width)
        self._grad_2BKSd: Tensor | None = None

    def store(self, positions: range, k_BKsd: Tensor, v_BKsd: Tensor) -> None:
        """Keep the keys and values of a slice."""
        own_2BKsd = self.kv_2BKSd[:, :, :, positions.start : positions.stop]
        own_2BKsd[0].copy_(k_BKsd)
        own_2BKsd[1].copy_(v_BKsd)

    def gradients(self) -> Tensor:
        """Return the gradients (2, B, K, S, d) in the accumulation dtype, to be added to: zeros at first."""
        if self._grad_2BKSd is None:
            self._grad_2BKSd = torch.zeros_like(self.kv_2BKSd, dtype=accumulation_dtype(self.kv_2BKSd.dtype))
        return self._grad_2BKSd


@dataclass
class SliceState:
    """Slice that a stage's pass is of, and the keys and values that its layers keep."""

    micro_batch: int = 0
    positions: range = range(0)
    """Positions of the slice in its sequence."""
    length: int = 0
    """Positions of the whole sequence."""
    kept: dict[int, dict[Attention, KeptKeys]] = field(default_factory=dict)
    """Keys and values by micro-batch and layer."""

    def of_layer(self, attention: Attention, k_BKsd: Tensor) -> KeptKeys:
        """Return the keys and values of the present micro-batch in a layer."""
        layers = self.kept.setdefault(self.micro_batch, {})
        if attention not in layers:
            layers[attention] = KeptKeys(k_BKsd, self.length)
        return layers[attention]

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(one.kv_2BKSd.nbytes for layers in self.kept.values() for one in layers.values())

    def drop(self) -> None:
        """Free the keys and values of the present micro-batch."""
        self.kept.pop(self.micro_batch, None)


def apply_slices(module: Decoder) -> SliceState:
    """Let the attention of a stage see the slices before the one in the returned state."""
    state = SliceState()
    attend = SlicedAttention(state)
    module.position_state.makes_masks = False
    for part in module.modules():
        if isinstance(part, Attention):
            part.attend = attend  # type: ignore[method-assign]
    return state


class SlicedAttention:
    """Attention of a slice's queries to the keys of its sequence up to its end."""

    def __init__(self, state: SliceState) -> None:
        self._state = state

    def __call__(
        self,
        attention: Attention,
        qkv: tuple[Tensor, ...],
        mask: Tensor | None,
        documents: Documents | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return the output (B, H, s, d)."""
        positions, kept = self._state.positions, self._state.of_layer(attention, qkv[1])
        lengths = None if documents is None else documents.lengths
        held = (range(positions.stop),)
        blocks = attention_blocks(self._state.length, (positions,), held, attention.window, lengths)
        rule = score_rule(attention)
        return _SlicedAttention.apply(*qkv, sinks_H, kept, positions, blocks, rule)  # type: ignore[return-value]


class _SlicedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHsd: Tensor,
        k_BKsd: Tensor,
        v_BKsd: Tensor,
        sinks_H: Tensor | None,
        kept: KeptKeys,
        positions: range,
        blocks: tuple[AttentionBlock, ...],
        rule: ScoreRule,
    ) -> Tensor:
        kept.store(positions, k_BKsd, v_BKsd)
        merged = MergedAttention(q_BHsd, sinks_H)
        merged.add(q_BHsd, kept.kv_2BKSd[0], kept.kv_2BKSd[1], blocks, rule)
        out_BHsd = merged.out_BHSd.to(q_BHsd.dtype)
        ctx.kept, ctx.positions, ctx.blocks, ctx.rule = kept, positions, blocks, rule
        ctx.save_for_backward(q_BHsd, out_BHsd, merged.lse_BHS, sinks_H)
        return out_BHsd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BHsd, out_BHsd, lse_BHs, sinks_H = ctx.saved_tensors
        kv_2BKSd, grad_2BKSd = ctx.kept.kv_2BKSd, ctx.kept.gradients()
        summed = BlockGradients(grads[0], q_BHsd, out_BHsd, lse_BHs, ctx.rule)
        summed.add(kv_2BKSd[0], kv_2BKSd[1], ctx.blocks, grad_2BKSd[0], grad_2BKSd[1])
        own_2BKsd = grad_2BKSd[:, :, :, ctx.positions.start : ctx.positions.stop]
        grad_k_BKsd, grad_v_BKsd = own_2BKsd.to(q_BHsd.dtype, copy=True)
        grad_sinks_H = sink_gradients(grads[0], out_BHsd, lse_BHs, sinks_H)
        return summed.q_BHSd.to(q_BHsd.dtype), grad_k_BKsd, grad_v_BKsd, grad_sinks_H, None, None, None, None
