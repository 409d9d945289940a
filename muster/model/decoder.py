"""The decoder family as plain single-device code: the layers of `ModelSpec`, from GPT-2 to Gemma 3 and Mixtral.

Suffixes of tensors: B sequences, S positions, D hidden width, H query heads, K key/value heads, V vocabulary, d head
width.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.model.adapters import LoraLinear, add_adapters
from muster.model.attention import Attention
from muster.model.documents import Documents
from muster.model.dropout import AFTER_ATTENTION, AFTER_MLP, DropoutState, LayerDropout, drop_hidden
from muster.model.dtypes import DTYPES
from muster.model.experts import MoeMlp, local_linears
from muster.model.further_tokens import FurtherTokens
from muster.model.kernels import mlp_activation, soft_cap
from muster.model.kraken import Streams, add_to_streams, make_sublayers
from muster.model.ladder import Ladder, LadderState
from muster.model.latent_attention import LatentAttention
from muster.model.linear_attention import LinearAttention
from muster.model.low_rank import make_low_rank
from muster.model.norms import make_norm, make_norms
from muster.model.plugin_layer import make_plugin_layer
from muster.model.positions import PositionState
from muster.model.projections import project_in, project_normed, project_out, recomputable
from muster.model.routing import RouterState
from muster.spec.model import ModelSpec
from muster.spec.plugin_model import plugin_model


def __getattr__(name: str) -> Callable[..., Any]:
    """Return a projection by the name under which plugins for version 0.1 import it."""
    old_names = {"spread": project_in, "join": project_out}
    if name not in old_names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return old_names[name]


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
        self._activate = mlp_activation(spec)

    def forward(self, x_BSD: Tensor, norm: nn.Module | None) -> Tensor:
        linears = (self.up,) if self.gate is None else (self.gate, self.up)
        inner = project_normed(self, norm, x_BSD, *linears)
        return self.recomputable(self._activate, inner, self.project_out, self.down)


def _softmax_attention(spec: ModelSpec, layer: int) -> Attention:
    if spec.mla is not None:
        return LatentAttention(spec, spec.attention_window(layer))
    return Attention(spec, spec.attention_window(layer), has_rotary=layer not in spec.nope_layers)


class Layer(nn.Module):
    """One decoder layer: attention and MLP or experts, added to the residual stream one after the other, or together.

    `attn_norm` and `mlp_norm` are of their inputs, `attn_post_norm` and `mlp_post_norm` of their outputs, which dropout
    follows; a compiler replaces `drop_hidden`. With `moe.shortcut` routed experts read the layer's input by
    `shortcut_norm`, and tokens travel to them and back while attention and shared experts compute (ScMoE,
    arXiv:2404.05019).
    """

    drop_hidden = staticmethod(drop_hidden)

    def __init__(self, spec: ModelSpec, layer: int, router_state: RouterState | None = None) -> None:
        super().__init__()
        self.attn_norm, post_norm = make_norms(spec)
        self.attn = LinearAttention(spec) if spec.has_linear_attention(layer) else _softmax_attention(spec, layer)
        self.attn_post_norm = post_norm
        self.mlp_norm, post_norm = make_norms(spec)
        self.shortcut_norm = make_norm(spec) if spec.has_shortcut(layer) else None
        has_experts = spec.has_experts(layer)
        self.mlp = MoeMlp(spec, router_state or RouterState(), recomputable) if has_experts else Mlp(spec)
        self.mlp_post_norm = post_norm
        self.parallel_residual = spec.parallel_residual
        if spec.low_rank is not None:
            make_low_rank(self, spec.low_rank)
        if spec.adapter is not None:
            add_adapters(self, spec.adapter)
        self.adapters = [part for part in self.modules() if isinstance(part, LoraLinear) and part.dropout_rate]
        """Linear layers whose adapters drop elements of their input."""

    def forward(
        self,
        x_BSD: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        documents: Documents | None = None,
        dropout: LayerDropout | None = None,
    ) -> Tensor:
        for linear in self.adapters:
            linear.enter_pass(dropout)
        # Added in place: autograd saves the output neither of a linear layer nor of a norm, and fresh memory costs time
        # on a CPU.
        experts = () if self.shortcut_norm is None else (cast(MoeMlp, self.mlp).start(x_BSD, self.shortcut_norm),)
        y_BSD = self.attn(x_BSD, self.attn_norm, cos, sin, mask, documents, dropout)
        if self.attn_post_norm is not None:
            y_BSD = self.attn_post_norm(y_BSD)
        y_BSD = self.drop_hidden(y_BSD, dropout, AFTER_ATTENTION)
        if not self.parallel_residual:
            x_BSD = y_BSD.add_(x_BSD)
        z_BSD = self.mlp(x_BSD, self.mlp_norm, *experts)
        if self.mlp_post_norm is not None:
            z_BSD = self.mlp_post_norm(z_BSD)
        z_BSD = self.drop_hidden(z_BSD, dropout, AFTER_MLP)
        return z_BSD.add_(y_BSD).add_(x_BSD) if self.parallel_residual else z_BSD.add_(x_BSD)


class LadderLayer(Layer):
    """A decoder layer whose attention and MLP read the residual stream without the output of the sub-layer right before
    (`muster.model.ladder`). Tensor parallelism replaces `ladder`."""

    ladder = Ladder()

    def forward(  # type: ignore[override]
        self,
        state: LadderState,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        documents: Documents | None = None,
        dropout: LayerDropout | None = None,
    ) -> LadderState:
        state = self.ladder.step(
            state, lambda x_BSD: self.attn(x_BSD, self.attn_norm, cos, sin, mask, documents, dropout)
        )
        return self.ladder.step(state, lambda x_BSD: self.mlp(x_BSD, self.mlp_norm))


class KrakenLayer(Layer):
    """A decoder layer of sub-layers side by side (`muster.model.kraken`), on streams (B, S, E). Tensor parallelism
    replaces `streams`."""

    streams = Streams()

    def __init__(self, spec: ModelSpec, layer: int, router_state: RouterState | None = None) -> None:
        super().__init__(spec, layer, router_state)
        make_sublayers(self, spec.parallel_sublayers)
        self.width, self.is_first = spec.hidden_size, layer == 0

    def forward(
        self,
        x_BSD: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        documents: Documents | None = None,
        dropout: LayerDropout | None = None,
    ) -> Tensor:
        x_BSE = x_BSD
        started = None if self.is_first else self.streams.start_sum(x_BSE, self.width)
        y_BSE = self.attn(x_BSE, self.attn_norm, cos, sin, mask, documents, dropout)
        if started is None:
            z_BSE = add_to_streams(y_BSE, x_BSE[..., : self.width])
        else:
            z_BSE = self.streams.add_sum(y_BSE, started)
        return self.mlp(z_BSE, self.mlp_norm).add_(y_BSE).add_(x_BSE)


class MtpLayer(Layer):
    """A layer that predicts one token further: it joins the hidden state with the embedding of the next token, passes
    both through a layer like the last one, and returns the normed hidden state that the head reads (arXiv:2412.19437
    §2.2).

    The embedding comes first, and the hidden state is the one that the head of the depth before reads, as in
    DeepSeek-V3's weights and in Megatron-LM. `local_linears` is an attribute so that deferred weight gradients can
    replace it.
    """

    local_linears = staticmethod(local_linears)

    def __init__(self, spec: ModelSpec, layer: int, router_state: RouterState | None = None) -> None:
        super().__init__(spec, layer, router_state)
        self.embed_norm, self.hidden_norm = make_norm(spec), make_norm(spec)
        self.eh_proj = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=False)
        self.norm = make_norm(spec)

    def forward(self, x_BSD: Tensor, embedded_BSD: Tensor, *constants: Any) -> Tensor:  # type: ignore[override]
        """Return the hidden states (B, S, D) of the depth after `x_BSD`; `constants` as `Layer.forward` takes them."""
        joined = torch.cat((self.embed_norm(embedded_BSD), self.hidden_norm(x_BSD)), -1)
        return self.norm(super().forward(self.local_linears(joined, self.eh_proj)[0], *constants))


def run_layers(layers: Sequence[Layer], x_BSD: Tensor, constants: Iterable[tuple[Any, ...]]) -> Tensor:
    """Return the hidden states after these layers; `constants` are what each takes beside hidden states."""
    for layer, shared in zip(layers, constants, strict=True):
        x_BSD = layer(x_BSD, *shared)
    return x_BSD


def _rounded(value: float) -> dict[torch.dtype, float]:
    """Return a value as each dtype has it."""
    return {dtype: float(torch.tensor(value, dtype=dtype, device="cpu")) for dtype in DTYPES.values()}


class Decoder(nn.Module):
    """The given layers of a model, with the embedding if `first` and the output head if `last`.

    Without `has_vocab`, embedding and head are left out: the decoder takes hidden states, and returns them (after the
    norm if `last`). Between stages of a model with `residual: ladder` hidden states are (B, S, 2 D): the residual
    stream, and the output of the last MLP; with `parallel_sublayers` they are (B, S, k D), a stream of each sub-layer.

    Parameters have the names, shapes and order of `muster.spec.model.stage_parameter_shapes`. A tied head uses
    `embed.weight`; a last stage that is not the first holds a copy of its own under that name. The module may be built
    on the meta device. Its values are PyTorch's defaults until `muster.model.init.init_stage` sets them. Tensor
    parallelism replaces `embed_tokens` (tokens and weight (V, D) to hidden states), `project_logits` (hidden states
    and weight (V, D) to logits), `run_layers`, `ladder`, `streams` and `join_streams` (streams and the conjunction to
    hidden states).
    """

    embed_tokens = staticmethod(F.embedding)
    project_logits = staticmethod(F.linear)
    run_layers = staticmethod(run_layers)
    ladder = Ladder()
    streams = Streams()
    join_streams = staticmethod(project_out)

    def __init__(self, spec: ModelSpec, layers: range, first: bool, last: bool, has_vocab: bool = True) -> None:
        super().__init__()
        self.first = first and has_vocab
        self.has_vocab = has_vocab
        self.position_state = PositionState(spec)
        self.router_state = RouterState()
        self.dropout_state = DropoutState(spec)
        self.begins_model = first
        self._num_layers = spec.num_layers
        self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size) if self.first else None
        learned = first and spec.position == "learned"
        self.positions = nn.Embedding(spec.max_positions or 0, spec.hidden_size) if learned else None
        plugin = plugin_model(spec)
        self.is_ladder = spec.residual == "ladder"
        self.has_streams = spec.parallel_sublayers > 1
        self.sublayers = spec.parallel_sublayers
        """Sub-layers of each layer on this device, which tensor parallelism divides."""
        kind = LadderLayer if self.is_ladder else KrakenLayer if self.sublayers > 1 else Layer
        make = partial(kind, router_state=self.router_state) if plugin is None else partial(make_plugin_layer, plugin)
        self.layers = nn.ModuleDict({str(layer): make(spec, layer) for layer in layers})
        self.position_state.knows_attention = plugin is None
        self.has_plugin_layers = plugin is not None
        """True if the layers are a plugin's, of which nothing is known but the arguments and the result of
        `Layer.forward`."""
        self._embedding_scale = _rounded(spec.hidden_size**0.5) if spec.scale_embeddings else None
        self.reduce_hidden: Callable[[Tensor, int], Tensor] | None = None
        """Function of the hidden states that the head reads, and of their depth (0: of the model itself), whose result
        `forward` returns in place of logits."""
        self.further_tokens: Sequence[FurtherTokens] = ()
        """Tokens that the layers for multi-token prediction embed, by depth, in the next passes; none: these layers
        take no part. With them `forward` stacks what `reduce_hidden` returns for each depth."""
        self.logit_softcap = spec.logit_softcap
        self.caps_logits = True
        """False: `forward` returns logits without their soft cap, for a loss that caps them itself."""
        has_conjunction = last and spec.parallel_sublayers > 1
        width = spec.hidden_size * spec.parallel_sublayers
        self.conjunction = nn.Linear(width, spec.hidden_size, bias=spec.out_bias) if has_conjunction else None
        self.norm = make_norm(spec) if last else None
        self.mtp = nn.ModuleList(MtpLayer(spec, layer, self.router_state) for layer in spec.last_layers(last))
        self.head = None
        if not has_vocab:
            return
        if last and not spec.tied_embeddings:
            self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if last and not first and spec.embeds_on_last_stage:
            self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, S) int64 if first, else hidden (B, S, D), to logits (B, S, V) if last, else hidden (B, S,
        D)."""
        x_BSD = self._through_layers(x)
        if self.norm is None:
            return x_BSD
        x_BSD = self.norm(x_BSD)
        if self.reduce_hidden is None:
            return self.logits(x_BSD)
        reduced = [self.reduce_hidden(x_BSD, 0)]
        if not self.further_tokens:
            return reduced[0]
        for depth, (layer, further) in enumerate(zip(self.mtp, self.further_tokens, strict=True), start=1):
            embedded_BSD = self.embed_tokens(further.tokens_BS, self.embed.weight)  # type: ignore[union-attr]
            embedded_BSD = self._scaled(embedded_BSD)
            self.router_state.counted_BS = further.counted_BS
            (constants,) = self._constants(x_BSD, {self._num_layers + depth - 1: cast(Layer, layer)})
            x_BSD = layer(x_BSD, embedded_BSD, *constants)
            reduced.append(self.reduce_hidden(x_BSD, depth))
        return torch.stack(reduced)

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
        if self.begins_model:
            x_BSD = self._scaled(x_BSD)
        if self.positions is not None:
            x_BSD = x_BSD + self.position_state.learned_rows(self.positions.weight, x_BSD)
        if self.dropout_state.is_active and self.begins_model:
            x_BSD = self.dropout_state.drop_embeddings(x_BSD, self.position_state.positions_in_sample(x_BSD))
        layers = {int(index): cast(Layer, layer) for index, layer in self.layers.items()}
        constants = self._constants(x_BSD, layers)
        if self.is_ladder:
            return self._through_ladder(list(layers.values()), x_BSD, constants)
        if self.has_streams and self.begins_model:
            x_BSD = self.streams.begin(x_BSD, self.sublayers)
        x_BSD = self.run_layers(list(layers.values()), x_BSD, constants)
        return x_BSD if self.conjunction is None else self.join_streams(x_BSD, self.conjunction)

    def _through_ladder(self, layers: Sequence[Layer], x: Tensor, constants: Iterable[tuple[Any, ...]]) -> Tensor:
        state = self.ladder.begin(x) if self.begins_model else self.ladder.from_boundary(x)
        for layer, shared in zip(layers, constants, strict=True):
            state = layer(state, *shared)
        return self.ladder.at_boundary(state) if self.norm is None else self.ladder.end(state)

    def _scaled(self, embedded_BSD: Tensor) -> Tensor:
        scale = self._embedding_scale
        return embedded_BSD if scale is None else embedded_BSD * scale[embedded_BSD.dtype]

    def _constants(self, x_BSD: Tensor, layers: Mapping[int, Layer]) -> Iterator[tuple[Any, ...]]:
        """Yield what the forward of each of these layers takes beside hidden states like `x_BSD`."""
        state = self.position_state
        # A plugin's layers know no dropout.
        positions: tuple[Tensor, ...] = ()
        if self.dropout_state.is_active:
            positions = state.positions_in_sample(x_BSD), state.whole_positions_in_sample(x_BSD)
        angles: dict[bool, tuple[Tensor | None, Tensor | None]] = {}
        for index, layer in layers.items():
            window = getattr(getattr(layer, "attn", None), "window", None)
            kind = state.has_own_angles(window)
            if kind not in angles:
                angles[kind] = state.rotary_cos_sin(x_BSD, window)
            dropout = (self.dropout_state.of_layer(index, *positions),) if positions else ()
            yield *angles[kind], state.mask(window, x_BSD), state.documents, *dropout

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
        """Return the decoder layers in order, those for multi-token prediction last: the unit of sharding, recompute
        and compilation."""
        return cast(list[Layer], [*self.layers.values(), *self.mtp])
