"""The decoder family as plain single-device code: the layers of `ModelSpec`, from GPT-2 to Gemma 3 and Mixtral.

Suffixes of tensors: B sequences, S positions, D hidden width, H query heads, K key/value heads, V vocabulary, d head
width.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.model.documents import Documents, per_document_attention
from muster.model.dropout import AFTER_ATTENTION, AFTER_MLP, DropoutState, LayerDropout, ScoreDropout, drop_hidden
from muster.model.dtypes import DTYPES
from muster.model.experts import MoeMlp
from muster.model.kernels import activate, apply_rotary, gated_activation, soft_cap
from muster.model.linear_attention import LinearAttention
from muster.model.norms import RmsNorm, make_norm, make_norms
from muster.model.piecewise_attention import ScoreRules, piecewise_attention, soft_capped_attention
from muster.model.plugin_layer import make_plugin_layer
from muster.model.positions import PositionState
from muster.model.projections import project_in, project_normed, project_out, recomputable
from muster.model.routing import RouterState
from muster.model.varlen_attention import varlen_attention
from muster.spec.model import ModelSpec
from muster.spec.plugin_model import plugin_model


def core_attention(
    q_BHSd: Tensor,
    k_BKSd: Tensor,
    v_BKSd: Tensor,
    mask_SS: Tensor | None,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return causal attention, (B, H, S, d): each position sees itself and those before it, as far as `window` reaches.

    The mask says the same; it is None where the window reaches everywhere. Scores are multiplied by `scale` (None:
    1 / √d).
    """
    if softcap is not None:
        return soft_capped_attention(q_BHSd, k_BKSd, v_BKSd, window, scale or q_BHSd.shape[-1] ** -0.5, softcap)
    is_grouped = q_BHSd.shape[1] != k_BKSd.shape[1]
    return F.scaled_dot_product_attention(
        q_BHSd, k_BKSd, v_BKSd, attn_mask=mask_SS, is_causal=mask_SS is None, scale=scale, enable_gqa=is_grouped
    )


def __getattr__(name: str) -> Callable[..., Any]:
    """Return a projection by the name under which plugins for version 0.1 import it."""
    old_names = {"spread": project_in, "join": project_out}
    if name not in old_names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return old_names[name]


def normalize_projections(q: Tensor, k: Tensor, q_norm: RmsNorm, k_norm: RmsNorm) -> tuple[Tensor, Tensor]:
    """Apply norms over all heads to queries and keys (B, S, heads · d); tensor parallelism replaces this function."""
    return q_norm(q), k_norm(k)


def attend(
    attention: "Attention", qkv_BHSd: tuple[Tensor, ...], mask_SS: Tensor | None, documents: Documents | None
) -> Tensor:
    """Return the attention of queries to keys and values (B, H, S, d); context parallelism replaces this function."""
    window, (q_BHSd, *_) = attention.window, qkv_BHSd
    batch, length = q_BHSd.shape[0], q_BHSd.shape[2]
    hides = documents is not None or (window is not None and length > window)
    # A cache in place of the kernel has masks of its own; soft caps have a kernel of their own.
    is_plain = attention.core_attention is core_attention and attention.softcap is None
    if hides and is_plain:
        lengths, starts = ((length,) * batch, None) if documents is None else (documents.lengths, documents.starts)
        out_BHSd = attention.varlen_attention(qkv_BHSd, lengths, starts, window, attention.scale)
        if out_BHSd is not None:
            return out_BHSd
    core = partial(attention.core_attention, scale=attention.scale, softcap=attention.softcap)
    if documents is None:
        return core(*qkv_BHSd, mask_SS, window)
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
    return piecewise_attention(*qkv_BHSd, rules)


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
    attend: Callable[["Attention", tuple[Tensor, ...], Tensor | None, Documents | None], Tensor] = staticmethod(attend)
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
        q, k, v = project_normed(self, norm, x_BSD, self.q, self.k, self.v)
        if self.norms_projections and self.q_norm is not None and self.k_norm is not None:
            q, k = self.normalize_projections(q, k, self.q_norm, self.k_norm)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if not self.norms_projections and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.has_rotary and cos is not None and sin is not None:
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        # The attention kernels take strided heads: a copy into (B, H, S) order would gain nothing.
        qkv_BHSd = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        if dropout is not None and dropout.attention:
            out_BHSd = self.attend_with_dropout(self, qkv_BHSd, documents, dropout)
        else:
            out_BHSd = self.attend(self, qkv_BHSd, mask, documents)
        return self.project_out(out_BHSd.transpose(1, 2).flatten(2), self.o)


class Mlp(nn.Module):
    """activation(gate) · up, or activation(up), through `down`; the replaceable functions are those of `Attention`."""

    project_in = staticmethod(project_in)
    project_out = staticmethod(project_out)
    recomputable = staticmethod(recomputable)

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias) if spec.gated else None
        self.up = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)
        self._activate = partial(gated_activation if spec.gated else activate, kind=spec.activation)

    def forward(self, x_BSD: Tensor, norm: nn.Module | None) -> Tensor:
        linears = (self.up,) if self.gate is None else (self.gate, self.up)
        inner = project_normed(self, norm, x_BSD, *linears)
        return self.recomputable(self._activate, inner, self.project_out, self.down)


def _softmax_attention(spec: ModelSpec, layer: int) -> Attention:
    return Attention(spec, spec.attention_window(layer), has_rotary=layer not in spec.nope_layers)


class Layer(nn.Module):
    """One decoder layer: attention and MLP or experts, added to the residual stream one after the other, or together.

    `attn_norm` and `mlp_norm` are of their inputs, `attn_post_norm` and `mlp_post_norm` of their outputs, which dropout
    follows; a compiler replaces `drop_hidden`.
    """

    drop_hidden = staticmethod(drop_hidden)

    def __init__(self, spec: ModelSpec, layer: int, router_state: RouterState | None = None) -> None:
        super().__init__()
        self.attn_norm, post_norm = make_norms(spec)
        self.attn = LinearAttention(spec) if spec.has_linear_attention(layer) else _softmax_attention(spec, layer)
        self.attn_post_norm = post_norm
        self.mlp_norm, post_norm = make_norms(spec)
        has_experts = spec.has_experts(layer)
        self.mlp = MoeMlp(spec, router_state or RouterState(), recomputable) if has_experts else Mlp(spec)
        self.mlp_post_norm = post_norm
        self.parallel_residual = spec.parallel_residual

    def forward(
        self,
        x_BSD: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        documents: Documents | None = None,
        dropout: LayerDropout | None = None,
    ) -> Tensor:
        # Added in place: autograd saves the output neither of a linear layer nor of a norm, and fresh memory costs time
        # on a CPU.
        y_BSD = self.attn(x_BSD, self.attn_norm, cos, sin, mask, documents, dropout)
        if self.attn_post_norm is not None:
            y_BSD = self.attn_post_norm(y_BSD)
        y_BSD = self.drop_hidden(y_BSD, dropout, AFTER_ATTENTION)
        if not self.parallel_residual:
            x_BSD = y_BSD.add_(x_BSD)
        z_BSD = self.mlp(x_BSD, self.mlp_norm)
        if self.mlp_post_norm is not None:
            z_BSD = self.mlp_post_norm(z_BSD)
        z_BSD = self.drop_hidden(z_BSD, dropout, AFTER_MLP)
        return z_BSD.add_(y_BSD).add_(x_BSD) if self.parallel_residual else z_BSD.add_(x_BSD)


def _rounded(value: float) -> dict[torch.dtype, float]:
    """Return a value as each dtype has it."""
    return {dtype: float(torch.tensor(value, dtype=dtype, device="cpu")) for dtype in DTYPES.values()}


class Decoder(nn.Module):
    """The given layers of a model, with the embedding if `first` and the output head if `last`.

    Without `has_vocab`, embedding and head are left out: the decoder takes hidden states, and returns them (after the
    norm if `last`).

    Parameters have the names, shapes and order of `muster.spec.model.stage_parameter_shapes`. A tied head uses
    `embed.weight`; a last stage that is not the first holds a copy of its own under that name. The module may be built
    on the meta device. Its values are PyTorch's defaults until `muster.model.init.init_stage` sets them. Tensor
    parallelism replaces `embed_tokens` (tokens and weight (V, D) to hidden states) and `project_logits` (hidden states
    and weight (V, D) to logits).
    """

    embed_tokens = staticmethod(F.embedding)
    project_logits = staticmethod(F.linear)

    def __init__(self, spec: ModelSpec, layers: range, first: bool, last: bool, has_vocab: bool = True) -> None:
        super().__init__()
        self.first = first and has_vocab
        self.has_vocab = has_vocab
        self.position_state = PositionState(spec)
        self.router_state = RouterState()
        self.dropout_state = DropoutState(spec)
        self.begins_model = first
        self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size) if self.first else None
        learned = first and spec.position == "learned"
        self.positions = nn.Embedding(spec.max_positions or 0, spec.hidden_size) if learned else None
        plugin = plugin_model(spec)
        make = partial(Layer, router_state=self.router_state) if plugin is None else partial(make_plugin_layer, plugin)
        self.layers = nn.ModuleDict({str(layer): make(spec, layer) for layer in layers})
        self.position_state.knows_attention = plugin is None
        self.has_plugin_layers = plugin is not None
        """True if the layers are a plugin's, of which nothing is known but the arguments and the result of
        `Layer.forward`."""
        self._embedding_scale = _rounded(spec.hidden_size**0.5) if first and spec.scale_embeddings else None
        self.reduce_hidden: Callable[[Tensor], Tensor] | None = None
        """Function of the hidden states that the head reads, whose result `forward` returns in place of logits."""
        self.logit_softcap = spec.logit_softcap
        self.caps_logits = True
        """False: `forward` returns logits without their soft cap, for a loss that caps them itself."""
        self.norm = make_norm(spec) if last else None
        self.head = None
        if not has_vocab:
            return
        if last and not spec.tied_embeddings:
            self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        elif last and not first:
            self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, S) int64 if first, else hidden (B, S, D), to logits (B, S, V) if last, else hidden (B, S,
        D)."""
        x_BSD = self._through_layers(x)
        return x_BSD if self.norm is None else (self.reduce_hidden or self.logits)(self.norm(x_BSD))

    def final_hidden(self, tokens_BS: Tensor) -> Tensor:
        """Return the hidden states (B, S, D) that the head reads; for a whole model."""
        assert self.norm is not None, "only a last stage has a norm before the head"
        return self.norm(self._through_layers(tokens_BS))

    def next_logits(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits (B, V) after the last token; for a whole model."""
        assert self.norm is not None, "only a last stage has logits"
        logits_BV = self.logits(self.norm(self._through_layers(tokens_BS)[:, -1:])).squeeze(1)
        return logits_BV if self.caps_logits or self.logit_softcap is None else soft_cap(logits_BV, self.logit_softcap)

    def _through_layers(self, x: Tensor) -> Tensor:
        x_BSD = self.embed_tokens(x, self.embed.weight) if self.first and self.embed is not None else x
        if self._embedding_scale is not None:
            x_BSD = x_BSD * self._embedding_scale[x_BSD.dtype]
        if self.positions is not None:
            x_BSD = x_BSD + self.position_state.learned_rows(self.positions.weight, x_BSD)
        positions_S = None
        if self.dropout_state.is_active:
            positions_S = self.position_state.positions_in_sample(x_BSD)
            x_BSD = self.dropout_state.drop_embeddings(x_BSD, positions_S) if self.begins_model else x_BSD
        angles: dict[bool, tuple[Tensor | None, Tensor | None]] = {}
        for index, layer in cast(Iterator[tuple[str, Layer]], self.layers.items()):
            window = getattr(getattr(layer, "attn", None), "window", None)
            kind = self.position_state.has_own_angles(window)
            if kind not in angles:
                angles[kind] = self.position_state.rotary_cos_sin(x_BSD, window)
            mask, documents = self.position_state.mask(window, x_BSD), self.position_state.documents
            # A plugin's layers know no dropout.
            dropout = () if positions_S is None else (self.dropout_state.of_layer(int(index), positions_S),)
            x_BSD = layer(x_BSD, *angles[kind], mask, documents, *dropout)
        return x_BSD

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Return the logits of hidden states after the last norm (…, D); without a vocabulary, the hidden states."""
        if not self.has_vocab:
            return x_BSD
        logits = self.project_logits(x_BSD, self.head_weight)
        return soft_cap(logits, self.logit_softcap) if self.logit_softcap and self.caps_logits else logits

    @property
    def head_weight(self) -> nn.Parameter:
        """Weight of the head (V, D), which may be the embedding's; of a last stage."""
        head = self.head or self.embed
        assert head is not None, "a last stage has a head or an embedding"
        return head.weight  # type: ignore[return-value]

    def resident_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that autograd may save at no cost, since they stay anyway: parameters, and constants of all
        layers."""
        yield from self.parameters()
        yield from self.position_state.shared_constants()

    def blocks(self) -> list[Layer]:
        """Return the decoder layers in order: the unit of sharding, recompute and compilation."""
        return cast(list[Layer], list(self.layers.values()))
