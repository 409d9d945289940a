"""Causal softmax attention as a layer's module, and the functions in which its queries meet keys and values.

Suffixes of tensors as in `muster.model.decoder`.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.model.documents import Documents, per_document_attention
from muster.model.dropout import LayerDropout, ScoreDropout
from muster.model.kernels import apply_rotary
from muster.model.low_rank import last_matrix
from muster.model.norms import RmsNorm
from muster.model.piecewise_attention import ScoreRules, piecewise_attention
from muster.model.projections import project_in, project_normed, project_out, recomputable
from muster.model.varlen_attention import varlen_attention
from muster.spec.model import ModelSpec


def core_attention(
    q_BHSd: Tensor,
    k_BKSd: Tensor,
    v_BKSd: Tensor,
    mask_SS: Tensor | None,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return causal attention, (B, H, S, d): each position sees itself and those before it, as far as `window` reaches.

    The mask says the same; it is None where the window reaches everywhere. Scores are multiplied by `scale` (None:
    1 / √d), and soft-capped. `sinks_H` are logits of keys without values (None: there are none).
    """
    if softcap is not None or sinks_H is not None:
        rules = ScoreRules(scale or q_BHSd.shape[-1] ** -0.5, window, softcap)
        return piecewise_attention(q_BHSd, k_BKSd, v_BKSd, rules, sinks_H)
    is_grouped = q_BHSd.shape[1] != k_BKSd.shape[1]
    return F.scaled_dot_product_attention(
        q_BHSd, k_BKSd, v_BKSd, attn_mask=mask_SS, is_causal=mask_SS is None, scale=scale, enable_gqa=is_grouped
    )


def normalize_projections(q: Tensor, k: Tensor, q_norm: RmsNorm, k_norm: RmsNorm) -> tuple[Tensor, Tensor]:
    """Apply norms over all heads to queries and keys (B, S, heads · d); tensor parallelism replaces this function."""
    return q_norm(q), k_norm(k)


def attend(
    attention: "Attention",
    qkv_BHSd: tuple[Tensor, ...],
    mask_SS: Tensor | None,
    documents: Documents | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the attention of queries to keys and values (B, H, S, d), with a sink for each head or None; context
    parallelism replaces this function."""
    window, (q_BHSd, k_BHSd, v_BHSd) = attention.window, qkv_BHSd
    batch, length = q_BHSd.shape[0], q_BHSd.shape[2]
    hides = documents is not None or (window is not None and length > window)
    # A cache in place of the kernel has masks of its own; soft caps have a kernel of their own.
    is_plain = attention.core_attention is core_attention and attention.softcap is None
    if (hides or sinks_H is not None) and is_plain:
        lengths, starts = ((length,) * batch, None) if documents is None else (documents.lengths, documents.starts)
        out_BHSd = attention.varlen_attention(qkv_BHSd, lengths, starts, window, attention.scale, sinks_H)
        if out_BHSd is not None:
            return out_BHSd
    core = partial(attention.core_attention, scale=attention.scale, softcap=attention.softcap, sinks_H=sinks_H)
    if documents is None:
        return core(q_BHSd, k_BHSd, v_BHSd, mask_SS, window)
    return per_document_attention(core, documents, qkv_BHSd, mask_SS, window)


def attend_with_dropout(
    attention: "Attention", qkv_BHSd: tuple[Tensor, ...], documents: Documents | None, dropout: LayerDropout
) -> Tensor:
    """Return attention (B, H, S, d) of which some probabilities are dropped; each position's document is known from
    its position in it."""
    starts_BS = None
    if documents is not None:
        starts_BS = torch.arange(documents.positions_BS.shape[1], device=documents.positions_BS.device)
        starts_BS = starts_BS - documents.positions_BS
    rules = ScoreRules(
        attention.scale or attention.head_dim**-0.5,
        attention.window,
        attention.softcap,
        ScoreDropout(dropout, attention.first_head),
        starts_BS,
    )
    return piecewise_attention(qkv_BHSd[0], qkv_BHSd[1], qkv_BHSd[2], rules, attention.sinks)


class Attention(nn.Module):
    """Causal grouped-query attention; the numbers of heads follow from the widths of the weights.

    Eight functions are attributes so that they can be replaced: `project_in` and `project_out`, through which the
    hidden state enters and leaves, and `normalize_projections`, by tensor parallelism; `attend`, where queries meet
    keys and values of the whole sequence, by context parallelism; `core_attention`, the kernel, by a key/value cache;
    `varlen_attention`, the kernel for documents and windows, and `attend_with_dropout` by a compiler, which leaves them
    as they are; and `recomputable`, where a linear layer reads a tensor that is cheap to make again, by elementwise
    recompute.
    """

    project_in = staticmethod(project_in)
    project_out = staticmethod(project_out)
    normalize_projections = staticmethod(normalize_projections)
    attend: Callable[..., Tensor] = staticmethod(attend)
    core_attention = staticmethod(core_attention)
    varlen_attention = staticmethod(varlen_attention)
    attend_with_dropout = staticmethod(attend_with_dropout)
    recomputable = staticmethod(recomputable)

    def __init__(self, spec: ModelSpec, window: int | None = None, has_rotary: bool = True) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.first_head = 0
        """Index, in the whole model, of the first query head, which tensor parallelism sets."""
        self.window = window
        self.has_rotary = has_rotary
        self.scale = None if spec.query_pre_attn_scalar is None else spec.query_pre_attn_scalar**-0.5
        self.softcap = spec.attention_softcap
        self.sinks = nn.Parameter(torch.zeros(spec.num_heads)) if spec.attention_sinks else None
        self._make_projections(spec)

    def _make_projections(self, spec: ModelSpec) -> None:
        q_width = spec.num_heads * spec.head_dim
        kv_width = spec.num_kv_heads * spec.head_dim
        self.q = nn.Linear(spec.hidden_size, q_width, bias=spec.qkv_bias)
        self.k = nn.Linear(spec.hidden_size, kv_width, bias=spec.qkv_bias)
        self.v = nn.Linear(spec.hidden_size, kv_width, bias=spec.qkv_bias)
        self.norms_projections = spec.qk_norm and spec.qk_norm_width == "projection"
        q_norm_width, k_norm_width = (q_width, kv_width) if self.norms_projections else (spec.head_dim, spec.head_dim)
        offset = float(spec.norm_unit_offset)
        self.q_norm = RmsNorm(q_norm_width, spec.norm_eps, offset) if spec.qk_norm else None
        self.k_norm = RmsNorm(k_norm_width, spec.norm_eps, offset) if spec.qk_norm else None
        self.o = nn.Linear(q_width, spec.hidden_size, bias=spec.out_bias)

    def forward(
        self,
        x_BSD: Tensor,
        norm: nn.Module | None,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None = None,
        documents: Documents | None = None,
        dropout: LayerDropout | None = None,
    ) -> Tensor:
        """Return the attention's output (B, S, D), to be added to the residual.

        `cos` and `sin` (S or B, S; 1, rotary_dim) are None without rotary positions, `mask` (S, S) is None without a
        window, `documents` is None if each sequence is one document, `dropout` is None if nothing is dropped.
        """
        # The attention kernels take strided heads: a copy into (B, H, S) order would gain nothing.
        qkv_BHSd = tuple(x.transpose(1, 2) for x in self.queries_keys_values(x_BSD, norm, cos, sin))
        if dropout is not None and dropout.attention:
            out_BHSd = self.attend_with_dropout(self, qkv_BHSd, documents, dropout)
        else:
            out_BHSd = self.attend(self, qkv_BHSd, mask, documents, self.sinks)
        return self.project_out(self.join_heads(out_BHSd.transpose(1, 2)), self.o)

    def queries_keys_values(
        self, x_BSD: Tensor, norm: nn.Module | None, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return queries, keys and values (B, S, H or K, d), with their positions."""
        q, k, v = project_normed(self, norm, x_BSD, self.q, self.k, self.v)
        if self.norms_projections and self.q_norm is not None and self.k_norm is not None:
            q, k = self.normalize_projections(q, k, self.q_norm, self.k_norm)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if not self.norms_projections and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.has_rotary and cos is not None and sin is not None:
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        return q, k, v

    def join_heads(self, out_BSHd: Tensor) -> Tensor:
        """Return the outputs of all heads as the output projection reads them: (B, S, heads · width of a value)."""
        return out_BSHd.flatten(2)

    @property
    def num_local_heads(self) -> int:
        """Query heads on this rank."""
        return len(last_matrix(self.q)) // self.head_dim
