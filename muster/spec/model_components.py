"""The parts of a decoder that some families have: scaled rotary positions, experts, latent and linear attention."""

from math import log
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from muster.spec.base import Frozen

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""`gelu_tanh` is GPT-2's approximation of GELU (arXiv:1606.08415 §2)."""


class RopeScaling(Frozen):
    """Rotary angles of a model that was trained further on longer sequences than it began with.

    linear: all angles divided by `factor` (arXiv:2306.15595). llama3: those of long waves only, by the wave's length
    in `original_positions` (Llama 3.1). yarn: by how often a pair turns in `original_positions`, with cos and sin
    multiplied by `turn_factor` (arXiv:2309.00071 §3).
    """

    kind: Literal["linear", "llama3", "yarn"]
    """Which angles change."""
    factor: PositiveFloat
    """By how much longer sequences are."""
    original_positions: PositiveInt | None = None
    """Positions of the sequences that the model was trained on first; llama3 and yarn need it."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: waves longer than original_positions / this are divided whole."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: waves shorter than original_positions / this are left as they are."""
    beta_fast: PositiveFloat = 32.0
    """yarn: pairs that turn more often than this are left as they are."""
    beta_slow: PositiveFloat = 1.0
    """yarn: pairs that turn less often than this are divided whole."""
    truncate: bool = True
    """yarn: the pairs at which that begins and ends are rounded to whole ones."""
    attention_factor: PositiveFloat | None = None
    """yarn: what cos and sin are multiplied by, where it is not to follow from the others."""
    mscale: PositiveFloat | None = None
    """yarn, DeepSeek's form: of the turned numbers."""
    mscale_all_dim: PositiveFloat | None = None
    """yarn, DeepSeek's form: of all scores of attention."""

    @model_validator(mode="after")
    def _check(self) -> "RopeScaling":
        if self.kind != "linear" and self.original_positions is None:
            raise ValueError(f"rope_scaling {self.kind} needs original_positions, the length it was trained on first")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope_scaling.low_freq_factor {self.low_freq_factor} must be smaller than"
                f" high_freq_factor {self.high_freq_factor}"
            )
        return self

    @property
    def attention_scaling(self) -> float:
        """What cos and sin are multiplied by: for yarn 0.1 · ln(factor) + 1 (arXiv:2309.00071 §3.4), unless it says
        otherwise; for the others 1."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._mscale(1.0)
        return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * log(self.factor) + 1 if self.factor > 1 else 1.0


class MoeSpec(Frozen):
    """Layers whose MLP is a choice of experts (arXiv:2101.03961; shared experts: arXiv:2401.06066)."""

    num_experts: PositiveInt
    """Of each layer that has experts."""
    top_k: PositiveInt
    """Experts that a token goes through."""
    expert_size: PositiveInt
    """Inner width of one expert."""
    shared_size: NonNegativeInt = 0
    """Inner width of what every token goes through besides, all shared experts together."""
    shared_gate: bool = False
    """The shared part is multiplied by a sigmoid of a product of its own (Qwen2-MoE)."""
    dense_layers: NonNegativeInt = 0
    """Layers at the beginning that have an ordinary MLP."""
    every: PositiveInt = 1
    """Of the layers after those, the last of each so many has experts."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits."""
    router_bias: bool = False
    """A number for each expert, added to its logit (softmax) or to its score where experts are chosen (sigmoid;
    arXiv:2412.19437 §2.1.2)."""
    norm_top_k: bool = True
    """The weights of the chosen experts are scaled to add up to 1."""
    route_scale: PositiveFloat = 1.0
    """What those weights are multiplied by in the end."""
    num_groups: PositiveInt = 1
    """Experts are chosen from `top_groups` of so many groups (arXiv:2412.19437 §2.1.2)."""
    top_groups: PositiveInt = 1
    """Of those, so many."""

    @model_validator(mode="after")
    def _check(self) -> "MoeSpec":
        if self.top_k > self.num_experts:
            raise ValueError(f"moe.top_k {self.top_k} is more than moe.num_experts {self.num_experts}")
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ValueError(
                f"moe.num_groups {self.num_groups} must divide moe.num_experts {self.num_experts}"
                f" and be at least moe.top_groups {self.top_groups}"
            )
        if self.shared_gate and not self.shared_size:
            raise ValueError("moe.shared_gate is for shared experts, but moe.shared_size is 0")
        return self


class MlaSpec(Frozen):
    """Multi-head latent attention: keys and values come from one narrow vector per position (arXiv:2405.04434 §2.1)."""

    q_lora_rank: PositiveInt | None = None
    """Width of the vector that queries come from; None: they come from the hidden state."""
    kv_lora_rank: PositiveInt
    """Width of what keys and values are made from."""
    nope_head_dim: PositiveInt
    """Numbers of a query and a key that know nothing of the position."""
    rope_head_dim: PositiveInt
    """Numbers that are turned by the position; all heads share the key's."""
    v_head_dim: PositiveInt
    """Numbers of a value."""


class LinearAttentionSpec(Frozen):
    """Layers whose attention is a recurrence over a state per head: the gated delta rule (arXiv:2412.06464)."""

    layers: tuple[NonNegativeInt, ...]
    """Which layers, counted from 0; all others have the model's ordinary attention."""
    num_key_heads: PositiveInt
    """Of queries and keys."""
    num_value_heads: PositiveInt
    """Of values."""
    key_head_dim: PositiveInt
    """Numbers of a key."""
    value_head_dim: PositiveInt
    """Numbers of a value."""
    conv_size: PositiveInt = 4
    """Positions that the convolution before the recurrence sees."""
