"""The model: the shape of a decoder, and the names and shapes of its parameters."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from muster.spec.adapters import AdapterSpec, with_adapters
from muster.spec.base import Fraction, Frozen
from muster.spec.four_bit import check_four_bits
from muster.spec.low_rank import LowRankSpec, with_low_rank
from muster.spec.model_components import (
    DECAY_RANK,
    Activation,
    LinearAttentionSpec,
    MlaSpec,
    MoeSpec,
    NormPlacement,
    RopeScaling,
)
from muster.spec.plugin_model import plugin_model
from muster.spec.residual_streams import check_other_stream, check_sublayers

DROPOUT_RATES = ("hidden_dropout", "attention_dropout", "embedding_dropout")
"""Fields of a ModelSpec that matter in training alone."""
NamedShapes = Iterator[tuple[str, tuple[int, ...]]]


class ModelSpec(Frozen):
    """A decoder. The defaults are Llama's: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

    `num_kv_heads` and `head_dim` default to `num_heads` and `hidden_size // num_heads`; with latent attention
    `head_dim` is the width of a query and a key.
    """

    if TYPE_CHECKING:

        def __hash__(self) -> int: ...

    name: str = "custom"
    """Name shown to people."""
    architecture: str | None = None
    """Model that a plugin registers, whose layers these are; None: the decoder that the other fields describe."""
    vocab_size: PositiveInt
    """Rows of the embedding and of the head."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_layers: PositiveInt
    """Blocks of attention and MLP."""
    num_heads: PositiveInt
    """Query heads in each layer."""
    num_kv_heads: PositiveInt = 0  # type: ignore[assignment]  # filled in below
    """Key/value heads in each layer; left out, as many as query heads."""
    head_dim: PositiveInt = 0  # type: ignore[assignment]
    """Width of a head; left out, hidden_size / num_heads, or with `mla` that of a query and a key."""
    intermediate_size: PositiveInt
    """Inner width of the MLP; in models with experts, of the layers without them."""
    norm: Literal["rms", "layer"] = "rms"
    """Kind of norm: RMSNorm, or LayerNorm with a bias."""
    norm_eps: PositiveFloat = 1e-5
    """Term added to the mean square under the root."""
    norm_unit_offset: bool = False
    """RMSNorms multiply by 1 + weight, and their weights begin at 0 (Gemma)."""
    norm_placement: NormPlacement = "pre"
    """Norms of attention and of the MLP: of the input (pre), of the output before it is added to the residual (post,
    OLMo 2; arXiv:2501.00656 §3.2), or both."""
    position: Literal["rope", "learned", "none"] = "rope"
    """Kind of positions. learned: a vector for each of `max_positions` positions, added to the token's embedding."""
    max_positions: PositiveInt | None = None
    """Positions of the longest sequence; required by learned positions, informative for others."""
    nope_layers: tuple[NonNegativeInt, ...] = ()
    """Layers without rotary positions, counted from 0 (SmolLM3, Llama 4; arXiv:2501.18795)."""
    rotary_dim: PositiveInt | None = None
    """Elements of each head that rotary positions turn, its first ones; None: all (GPT-NeoX, arXiv:2204.06745
    §2.1.1)."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary wavelengths."""
    window_rope_theta: PositiveFloat | None = None
    """Base in layers with a `sliding_window`, which `rope_scaling` leaves alone; None: they are like the others
    (Gemma 3; arXiv:2503.19786 §2)."""
    rope_scaling: RopeScaling | None = None
    """Rotary scaling for longer sequences."""
    parallel_residual: bool = False
    """Attention and MLP both read the layer's input, and are added to it together (GPT-NeoX, arXiv:2204.06745
    §2.1.2)."""
    residual: Literal["standard", "ladder"] = "standard"
    """Residual stream that attention and MLP read. standard: with the outputs of all before them. ladder: without the
    output of the one right before, whose tensor-parallel all-reduce travels meanwhile (Ladder Residual,
    arXiv:2501.06589)."""
    parallel_sublayers: PositiveInt = 1
    """Sub-layers side by side in each layer (Kraken, arXiv:2408.07802): each has a residual stream, an equal part of
    heads and MLP, and reads, before its MLP, the sum of all streams. 1: an ordinary layer."""
    activation: Activation = "silu"
    """Activation function of the MLP."""
    gated: bool = True
    """Gated MLP: activation(gate) · up; otherwise activation(up)."""
    swiglu_limit: PositiveFloat | None = None
    """Bound of the values of gate and up, which makes their product gate · sigmoid(swiglu_alpha · gate) · (up + 1)
    (gpt-oss, arXiv:2508.10925 §2.1); None: there is none."""
    swiglu_alpha: PositiveFloat = 1.702
    """Factor of the gate in that sigmoid."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    out_bias: bool = False
    """Bias on the output projection of attention."""
    mlp_bias: bool = False
    """Biases on the MLP's projections."""
    qk_norm: bool = False
    """RMSNorm of queries and keys, before rotary positions (Qwen3)."""
    qk_norm_width: Literal["head", "projection"] = "head"
    """Elements that such a norm is over: those of each head, or of all heads together (OLMo 2)."""
    query_pre_attn_scalar: PositiveFloat | None = None
    """Attention scores are divided by its root; None: by that of head_dim (Gemma 2)."""
    attention_softcap: PositiveFloat | None = None
    """Bound c of attention scores x: c · tanh(x / c) (Gemma 2; arXiv:2408.00118 §2)."""
    logit_softcap: PositiveFloat | None = None
    """Bound of the output head's logits, of the same form."""
    attention_sinks: bool = False
    """Trained logit per head that takes part in the softmax and contributes no value (gpt-oss; arXiv:2508.10925
    §2.2)."""
    sliding_window: PositiveInt | None = None
    """Positions that a position attends to, itself the last of them; None: all before it."""
    window_layers: tuple[NonNegativeInt, ...] | None = None
    """Layers with that window, counted from 0; None: all."""
    scale_embeddings: bool = False
    """Embeddings are multiplied by √hidden_size (Gemma; arXiv:1706.03762 §3.4)."""
    tied_embeddings: bool = False
    """Head and embedding share one weight."""
    moe: MoeSpec | None = None
    """Experts instead of the MLP."""
    mla: MlaSpec | None = None
    """Latent attention."""
    linear_attention: LinearAttentionSpec | None = None
    """Linear attention (a recurrence) in some layers."""
    mtp_layers: NonNegativeInt = 0
    """Multi-token-prediction layers after the last, each of which predicts one token further, with the model's
    embedding and head (arXiv:2412.19437 §2.2)."""
    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    """Weight of the mean of these layers' losses beside the main one (λ in that section: 0.3, later 0.1)."""
    hidden_dropout: Fraction = 0.0
    """Dropout rate, in training, of the outputs of attention and MLP before they are added to the residual
    (arXiv:1207.0580). Every plan drops the same elements: a mask follows from the seed, the sample and the position."""
    attention_dropout: Fraction = 0.0
    """Dropout rate, in training, of attention's probabilities. It has no fused kernel: attention is computed piece by
    piece, several times as slowly."""
    embedding_dropout: Fraction = 0.0
    """Dropout rate, in training, of the embeddings, with learned positions added."""
    adapter: AdapterSpec | None = None
    """Adapters beside linear layers; a run file gives them as its section `adapter`."""
    low_rank: LowRankSpec | None = None
    """Linear layers that are products of two narrow ones (Greenformers, arXiv:2109.06762)."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights (GPT-2, and most decoders since)."""
    scaled_residual: bool = True
    """Initial weights of projections into the residual stream are divided by √(2 · num_layers) (GPT-2, section 2.3), or
    by √(2 · num_layers · parallel_sublayers)."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("num_heads"):
            data = {"num_kv_heads": data["num_heads"], **data}
            # Validation names the key of what isn't a number.
            with suppress(AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
                if (mla := data.get("mla")) is not None:
                    mla = mla if isinstance(mla, dict) else mla.model_dump()
                    data = {"head_dim": int(mla["nope_head_dim"]) + int(mla["rope_head_dim"]), **data}
                data = {"head_dim": int(data["hidden_size"]) // int(data["num_heads"]), **data}
        return data

    @model_validator(mode="after")
    def _check(self) -> "ModelSpec":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, but rotary positions rotate pairs of elements")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or self.rotary_dim > self.head_dim):
            raise ValueError(f"rotary_dim {self.rotary_dim} must be even, and at most head_dim {self.head_dim}")
        if self.rotary_dim is not None and (self.position != "rope" or self.mla is not None):
            raise ValueError(
                "rotary_dim is a part of an ordinary head with rotary positions, but position or mla is another"
            )
        if self.mla is not None:
            _check_latent_attention(self, self.mla)
        if self.swiglu_limit is not None and (self.activation, self.gated) != ("silu", True):
            kind = f"activation {self.activation}, gated {self.gated}"
            raise ValueError(f"swiglu_limit bounds a gated MLP with activation silu, got {kind}")
        if self.norm_unit_offset and (self.norm != "rms" or self.qk_norm_width != "head"):
            raise ValueError(
                "norm_unit_offset is for RMSNorms of hidden states and heads: norm rms, qk_norm_width head"
            )
        if self.moe is not None and self.moe.shortcut and (self.parallel_residual or self.norm_placement != "pre"):
            raise ValueError("moe.shortcut needs norm_placement pre, and attention and MLP one after the other")
        if self.parallel_residual and self.norm_placement != "pre":
            raise ValueError(f"parallel_residual needs norm_placement pre, got {self.norm_placement}")
        if self.residual == "ladder":
            check_other_stream(self)
        if self.parallel_sublayers > 1:
            check_sublayers(self)
        if self.position == "learned" and self.max_positions is None:
            raise ValueError("learned positions need max_positions, the length of the longest sequence")
        if self.rope_scaling is not None and self.position != "rope":
            raise ValueError(f"rope_scaling is for rotary positions, but position is {self.position}")
        if self.nope_layers and self.position != "rope":
            raise ValueError(f"nope_layers lists the layers without rotary positions, but position is {self.position}")
        if self.window_layers is not None and self.sliding_window is None:
            raise ValueError("window_layers lists the layers with a sliding_window, but there is none")
        if self.window_rope_theta is not None and (self.sliding_window is None or self.position != "rope"):
            raise ValueError(
                "window_rope_theta is for layers with a sliding_window and rotary positions; there are none"
            )
        if self.architecture is not None and self.has_dropout:
            raise ValueError(
                f"dropout is for the layers that Muster knows, but architecture is {self.architecture}: its own layers"
                " may drop elements themselves; leave the rates out"
            )
        if self.qk_norm_width != "head" and not self.qk_norm:
            raise ValueError(f"qk_norm_width is {self.qk_norm_width}, but the model has no qk_norm")
        if self.adapter is not None:
            _check_adapter(self, self.adapter)
        if self.low_rank is not None:
            _check_low_rank(self, self.low_rank)
        if self.linear_attention is not None and max(self.linear_attention.layers, default=0) >= self.num_layers:
            raise ValueError(
                f"linear_attention.layers names layer {max(self.linear_attention.layers)}, but the last of num_layers"
                f" {self.num_layers} is {self.num_layers - 1}"
            )
        return self

    @property
    def has_dropout(self) -> bool:
        """True if training drops elements."""
        of_adapter = 0.0 if self.adapter is None else self.adapter.lora_dropout
        return bool(of_adapter) or any(getattr(self, rate) for rate in DROPOUT_RATES)

    @property
    def has_pre_norms(self) -> bool:
        """True if attention and MLP begin with a norm."""
        return self.norm_placement != "post"

    @property
    def has_post_norms(self) -> bool:
        """True if attention and MLP end with a norm."""
        return self.norm_placement != "pre"

    @property
    def other_stream(self) -> str | None:
        """Words for how layers read or write the residual stream where they do so otherwise than in order."""
        if self.residual != "standard":
            return f"residual {self.residual}"
        return f"parallel_sublayers {self.parallel_sublayers}" if self.parallel_sublayers > 1 else None

    def boundary_size(self, tp: int) -> int:
        """Return the elements of a position that a rank of one pipeline stage passes to the next: the residual stream,
        and in a ladder the output of the last MLP, which isn't a part of it yet; or the streams of its sub-layers."""
        return self.hidden_size * (2 if self.residual == "ladder" else self.local_sublayers(tp))

    def local_sublayers(self, tp: int) -> int:
        """Return the sub-layers of each layer that one of `tp` tensor-parallel ranks has."""
        return max(1, self.parallel_sublayers // tp)

    @property
    def rotary_width(self) -> int:
        """Elements of each head that rotary positions turn."""
        return self.rotary_dim or (self.head_dim if self.mla is None else self.mla.rope_head_dim)

    @property
    def low_rank_ranks(self) -> dict[str, int]:
        """Ranks of a decoder layer's linear layers that are products, by name (q, …, down)."""
        if self.low_rank is None:
            return {}
        q, kv, hidden = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.hidden_size
        shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
        shapes |= {name: (self.intermediate_size, hidden) for name in ("gate", "up", "down") if self._has_mlp(name)}
        ranks = {name: self.low_rank.rank_of(name, shape) for name, shape in shapes.items()}
        return {name: rank for name, rank in ranks.items() if rank is not None}

    def _has_mlp(self, name: str) -> bool:
        return self.moe is None and (name != "gate" or self.gated)

    def attention_window(self, layer: int) -> int | None:
        """Return the positions that each position of this layer attends to; None: all before it."""
        return self.sliding_window if self.window_layers is None or layer in self.window_layers else None

    def last_layers(self, is_last_stage: bool = True) -> range:
        """Return the numbers of the `mtp_layers`, which are counted on from the last layer."""
        return range(self.num_layers, self.num_layers + self.mtp_layers * is_last_stage)

    @property
    def embeds_on_last_stage(self) -> bool:
        """True if a last stage that isn't the first has a copy of the embedding: a tied head, or for `mtp_layers`."""
        return self.tied_embeddings or self.mtp_layers > 0

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers with experts, `mtp_layers` among them."""
        return tuple(layer for layer in range(self.last_layers().stop) if self.has_experts(layer))

    def has_experts(self, layer: int) -> bool:
        """Return True if this layer's MLP is a choice of experts; `mtp_layers` are like the last layer."""
        if self.moe is None:
            return False
        behind = min(layer, self.num_layers - 1) - self.moe.dense_layers
        return behind >= 0 and (behind + 1) % self.moe.every == 0

    def has_shortcut(self, layer: int) -> bool:
        """Return True if this layer's routed experts read its input, and not what attention adds to it."""
        return self.moe is not None and self.moe.shortcut and self.has_experts(layer)

    def has_linear_attention(self, layer: int) -> bool:
        """Return True if this layer's attention is linear."""
        return self.linear_attention is not None and layer in self.linear_attention.layers

    def has_linear_attention_parameter(self, name: str) -> bool:
        """Return True if a parameter is of a layer's linear attention."""
        parts = name.split(".")
        in_attention = self.linear_attention is not None and parts[0] == "layers" and parts[2] == "attn"
        return in_attention and self.has_linear_attention(int(parts[1]))

    @property
    def num_parameters(self) -> int:
        """All trained parameters; a tied embedding counts once."""
        return sum(prod(shape) for _, shape in parameter_shapes(self))

    @property
    def num_active_parameters(self) -> int:
        """Parameters used for one token: `top_k` of the experts and everything else, the embedding included, without
        `mtp_layers`."""
        main = self.model_copy(update={"mtp_layers": 0})
        return sum(active_numel(self, name, shape) for name, shape in parameter_shapes(main))


def _check_latent_attention(spec: ModelSpec, mla: MlaSpec) -> None:
    if spec.head_dim != mla.qk_head_dim or spec.num_kv_heads != spec.num_heads:
        raise ValueError(
            f"latent attention has as many key/value heads as query heads, of nope_head_dim + rope_head_dim"
            f" {mla.qk_head_dim} elements, got num_kv_heads {spec.num_kv_heads} of {spec.num_heads} and head_dim"
            f" {spec.head_dim}: leave num_kv_heads and head_dim out"
        )
    wrong = [
        field
        for field in ("qkv_bias", "out_bias", "qk_norm", "query_pre_attn_scalar", "attention_sinks")
        if getattr(spec, field)
    ]
    wrong += [] if spec.position == "rope" else [f"position {spec.position}"]
    wrong += ["nope_layers"] if spec.nope_layers else []
    if wrong:
        raise ValueError(f"latent attention (mla) is without {wrong[0]}: leave it out")


def _check_targets(spec: ModelSpec, section: str, what: str, targets: Sequence[str]) -> None:
    """Raise ValueError where a section of the model names linear layers for which `what` isn't known."""
    attention, mlp = [name for name in targets if name in "qkvo"], ("gate", "up", "down")
    others = [name for name in targets if name in mlp]
    if spec.architecture is not None:
        raise ValueError(f"{section} is for the layers that Muster knows, but architecture is {spec.architecture}")
    if attention and (spec.mla is not None or spec.linear_attention is not None):
        kind = "latent (mla)" if spec.mla is not None else "linear (linear_attention)"
        raise ValueError(f"{section}.target_modules names {attention[0]}, but {what} of {kind} attention aren't known")
    if others and spec.moe is not None:
        raise ValueError(
            f"{section}.target_modules names {others[0]}, but {what} of experts (moe) aren't known:"
            " leave gate, up and down out"
        )
    if spec.mtp_layers:
        raise ValueError(f"{what} of a model with mtp_layers aren't known: leave mtp_layers out")


def _check_low_rank(spec: ModelSpec, low_rank: LowRankSpec) -> None:
    _check_targets(spec, "low_rank", "low-rank layers", low_rank.target_modules)
    if spec.adapter is not None:
        raise ValueError("adapters of a model with low_rank aren't known: leave low_rank out, or the adapter")
    if not spec.low_rank_ranks:
        names = ", ".join(low_rank.target_modules)
        raise ValueError(f"rank {low_rank.rank} of low_rank makes none of {names} smaller: expected a lower one")


def _check_adapter(spec: ModelSpec, adapter: AdapterSpec) -> None:
    _check_targets(spec, "adapter", "adapters", adapter.target_modules)
    if "gate" in adapter.target_modules and not spec.gated:
        raise ValueError("adapter.target_modules names gate, but the MLP of this model has none (gated false)")
    layer = list(_layer(spec, 0, "")) if spec.num_layers else []
    if adapter.load_in_4bit:
        check_four_bits(spec, layer)
    for name, shape in layer:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module.rpartition(".")[2] in adapter.target_modules and adapter.width > min(shape):
            times = f" times adapter.parts {adapter.parts}" if adapter.parts > 1 else ""
            most = max(1, min(shape) // adapter.parts)
            raise ValueError(
                f"adapter.r {adapter.r}{times} is more than the shorter side of {module.rpartition('.')[2]}, a matrix"
                f" of {shape[0]} x {shape[1]}, whose rank is {min(shape)} at most: take adapter.r {most} or less"
            )


def active_numel(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> int:
    """Return the elements of a parameter that are used for one token."""
    if spec.moe is None or ".experts." not in name:
        return prod(shape)
    return prod(shape) // spec.moe.num_experts * spec.moe.top_k


# ----------------------------------------------------------------------------------------------------------------------
# Names and shapes


def layer_parameter_shapes(spec: ModelSpec, layer: int) -> NamedShapes:
    """Yield name and shape of each parameter of one decoder layer, in the order of use.

    A matrix is (output width, input width). The experts of a layer are stacked in one tensor (experts, output, input)
    each. Layers from `num_layers` on are `mtp_layers`.
    """
    if layer < spec.num_layers:
        shapes = _layer(spec, layer, layer_prefix(spec, layer))
        shapes = shapes if spec.low_rank is None else with_low_rank(spec.low_rank, shapes)
        yield from shapes if spec.adapter is None else with_adapters(spec.adapter, shapes)
    else:
        yield from _mtp(spec, layer)


def layer_prefix(spec: ModelSpec, layer: int) -> str:
    """Return the beginning of the names of a layer's parameters."""
    return f"layers.{layer}." if layer < spec.num_layers else f"mtp.{layer - spec.num_layers}."


def stage_parameter_shapes(spec: ModelSpec, layers: range, first: bool, last: bool) -> NamedShapes:
    """Yield name and shape of each parameter of a stage.

    The embedding is called `embed.weight` wherever it is: on the first stage, and again on the last one where that has
    a tied head or `mtp_layers`.
    """
    if first:
        yield "embed.weight", (spec.vocab_size, spec.hidden_size)
        if spec.position == "learned":
            assert spec.max_positions is not None
            yield "positions.weight", (spec.max_positions, spec.hidden_size)
    for layer in layers:
        yield from layer_parameter_shapes(spec, layer)
    if last:
        if spec.parallel_sublayers > 1:
            width = spec.hidden_size * spec.parallel_sublayers
            yield from _linear("conjunction", spec.out_bias, spec.hidden_size, width)
        yield from _norm(spec, "norm")
        for layer in spec.last_layers():
            yield from _mtp(spec, layer)
        if not spec.tied_embeddings:
            yield "head.weight", (spec.vocab_size, spec.hidden_size)
        if spec.embeds_on_last_stage and not first:
            yield "embed.weight", (spec.vocab_size, spec.hidden_size)


def parameter_shapes(spec: ModelSpec) -> NamedShapes:
    """Yield name and shape of each parameter of the complete, one-process model."""
    return stage_parameter_shapes(spec, range(spec.num_layers), first=True, last=True)


def _layer(spec: ModelSpec, layer: int, prefix: str) -> NamedShapes:
    if (plugin := plugin_model(spec)) is not None:
        yield from ((prefix + name, shape) for name, shape in plugin.parameter_shapes(spec))
        return
    streams = spec.parallel_sublayers
    if spec.has_pre_norms:
        yield from _norm(spec, prefix + "attn_norm", streams)
    if spec.has_linear_attention(layer):
        yield from _linear_attention(spec, prefix + "attn.")
    elif spec.mla is not None:
        yield from _latent_attention(spec, spec.mla, prefix + "attn.")
    else:
        yield from _attention(spec, prefix + "attn.")
    if spec.has_post_norms:
        yield from _norm(spec, prefix + "attn_post_norm")
    if spec.has_pre_norms:
        yield from _norm(spec, prefix + "mlp_norm", streams)
    if spec.has_shortcut(layer):
        yield from _norm(spec, prefix + "shortcut_norm")
    if spec.has_experts(layer):
        yield from _experts(spec, prefix + "mlp.")
    else:
        yield from _mlp(spec, prefix + "mlp.", spec.intermediate_size)
    if spec.has_post_norms:
        yield from _norm(spec, prefix + "mlp_post_norm")


def _mtp(spec: ModelSpec, layer: int) -> NamedShapes:
    """Yield the parameters of a multi-token-prediction layer: it joins the hidden state and the next token's embedding,
    then is a layer like the last one."""
    prefix = layer_prefix(spec, layer)
    yield from _layer(spec, layer, prefix)
    yield from _norm(spec, prefix + "embed_norm")
    yield from _norm(spec, prefix + "hidden_norm")
    yield prefix + "eh_proj.weight", (spec.hidden_size, 2 * spec.hidden_size)
    yield from _norm(spec, prefix + "norm")


def _norm(spec: ModelSpec, name: str, streams: int = 1) -> NamedShapes:
    """Yield the parameters of a norm, of all streams side by side."""
    yield name + ".weight", (spec.hidden_size * streams,)
    if spec.norm == "layer":
        yield name + ".bias", (spec.hidden_size * streams,)


def _linear(name: str, bias: bool, *shape: int, streams: int = 1) -> NamedShapes:
    """Yield the parameters of a linear layer, with a bias for each stream that it writes to."""
    yield name + ".weight", shape
    if bias:
        yield name + ".bias", (*shape[:-2], shape[-2] * streams)


def _attention(spec: ModelSpec, prefix: str) -> NamedShapes:
    q_width = spec.num_heads * spec.head_dim
    kv_width = spec.num_kv_heads * spec.head_dim
    if spec.attention_sinks:
        yield prefix + "sinks", (spec.num_heads,)
    for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
        yield from _linear(prefix + name, spec.qkv_bias, width, spec.hidden_size)
    if spec.qk_norm:
        per_head = spec.qk_norm_width == "head"
        yield prefix + "q_norm.weight", (spec.head_dim if per_head else q_width,)
        yield prefix + "k_norm.weight", (spec.head_dim if per_head else kv_width,)
    yield from _linear(prefix + "o", spec.out_bias, spec.hidden_size, q_width, streams=spec.parallel_sublayers)


def _latent_attention(spec: ModelSpec, mla: MlaSpec, prefix: str) -> NamedShapes:
    """Yield the parameters of latent attention. Queries and key/value pairs are projected down to a narrow vector and
    up again; the last `rope_head_dim` rows of `kv_down` make the rotary part of the keys."""
    q_width = spec.num_heads * (mla.nope_head_dim + mla.rope_head_dim)
    if spec.attention_sinks:
        yield prefix + "sinks", (spec.num_heads,)
    if mla.q_lora_rank is None:
        yield prefix + "q.weight", (q_width, spec.hidden_size)
    else:
        yield prefix + "q_down.weight", (mla.q_lora_rank, spec.hidden_size)
        yield prefix + "q_down_norm.weight", (mla.q_lora_rank,)
        yield prefix + "q_up.weight", (q_width, mla.q_lora_rank)
    yield prefix + "kv_down.weight", (mla.kv_lora_rank + mla.rope_head_dim, spec.hidden_size)
    yield prefix + "kv_down_norm.weight", (mla.kv_lora_rank,)
    yield prefix + "kv_up.weight", (spec.num_heads * (mla.nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    yield prefix + "o.weight", (spec.hidden_size, spec.num_heads * mla.v_head_dim)


def _linear_attention(spec: ModelSpec, prefix: str) -> NamedShapes:
    """Yield the parameters of linear attention: queries, keys, values and an output gate; a norm over each head's
    output. A decay for each head or, through two narrow matrices, for each element of the keys (arXiv:2312.06635 §4.4);
    or those of the gated delta rule."""
    linear = spec.linear_attention
    assert linear is not None
    widths = {"q": linear.k_width, "k": linear.k_width, "v": linear.v_width, "gate": linear.v_width}
    for name, width in widths.items():
        yield f"{prefix}{name}.weight", (width, spec.hidden_size)
    if linear.kind == "simple_gla":
        yield from _linear(prefix + "decay", True, linear.decay_width, spec.hidden_size)
    elif linear.kind == "gla":
        yield prefix + "decay_down.weight", (DECAY_RANK, spec.hidden_size)
        yield from _linear(prefix + "decay", True, linear.decay_width, DECAY_RANK)
    elif linear.kind == "gated_deltanet":
        yield from _delta_rule(spec, linear, prefix)
    yield prefix + "out_norm.weight", (linear.value_head_dim,)
    yield prefix + "o.weight", (spec.hidden_size, linear.v_width)


def _delta_rule(spec: ModelSpec, linear: LinearAttentionSpec, prefix: str) -> NamedShapes:
    """Yield the parameters of the gated delta rule: per value head a step width (b) and a decay (a, decay, step); a
    short convolution over queries, keys and values (arXiv:2412.06464)."""
    for name in ("b", "a"):
        yield f"{prefix}{name}.weight", (linear.num_value_heads, spec.hidden_size)
    yield prefix + "conv.weight", (2 * linear.k_width + linear.v_width, linear.conv_size)
    yield prefix + "decay", (linear.num_value_heads,)
    yield prefix + "step", (linear.num_value_heads,)


def _mlp(spec: ModelSpec, prefix: str, inner: int, *experts: int) -> NamedShapes:
    for name in ("gate", "up") if spec.gated else ("up",):
        yield from _linear(prefix + name, spec.mlp_bias, *experts, inner, spec.hidden_size)
    shape = *experts, spec.hidden_size, inner
    yield from _linear(prefix + "down", spec.mlp_bias, *shape, streams=spec.parallel_sublayers)


def _experts(spec: ModelSpec, prefix: str) -> NamedShapes:
    moe = spec.moe
    assert moe is not None
    yield from _linear(
        prefix + "router", moe.router_bias and not moe.has_expert_bias, moe.router_rows, spec.hidden_size
    )
    if moe.has_expert_bias:
        yield prefix + "router.expert_bias", (moe.num_experts,)
    yield from _mlp(spec, prefix + "experts.", moe.expert_size, moe.num_experts)
    if moe.shared_size:
        yield from _mlp(spec, prefix + "shared.", moe.shared_size)
    if moe.shared_gate:
        yield prefix + "shared_gate.weight", (1, spec.hidden_size)
