"""Components that some decoders have: scaled rotary positions, experts, latent and linear attention."""

from math import ceil, log
from typing import Annotated, Literal

from pydantic import AllowInfNan, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from muster.spec.base import Frozen

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""`gelu_tanh` is GPT-2's approximation of GELU (arXiv:1606.08415 §2)."""
NormPlacement = Literal["pre", "post", "both"]


class RopeScaling(Frozen):
    """Rotary scaling of a model that was trained further on longer sequences than at first.

    linear: all angles divided by `factor` (arXiv:2306.15595). llama3: only those of long wavelengths, compared with
    `original_positions` (Llama 3.1). yarn: by the number of turns of a pair within `original_positions`, with cos and
    sin multiplied by `attention_scaling` (arXiv:2309.00071 §3).
    """

    kind: Literal["linear", "llama3", "yarn"]
    """Scaling method."""
    factor: PositiveFloat
    """Ratio of the longer sequences' length to the original one."""
    original_positions: PositiveInt | None = None
    """Positions of the sequences that the model was first trained on; required by llama3 and yarn."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths longer than original_positions / this are divided in full."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths shorter than original_positions / this stay unchanged."""
    beta_fast: PositiveFloat = 32.0
    """yarn: pairs that turn more often than this stay unchanged."""
    beta_slow: PositiveFloat = 1.0
    """yarn: pairs that turn less often than this are divided in full."""
    truncate: bool = True
    """yarn: the pairs at which the ramp begins and ends are rounded to integers."""
    attention_factor: PositiveFloat | None = None
    """yarn: factor of cos and sin, instead of the one that follows from `factor`."""
    mscale: PositiveFloat | None = None
    """yarn, DeepSeek's form: factor of the rotary elements."""
    mscale_all_dim: PositiveFloat | None = None
    """yarn, DeepSeek's form: factor of all attention scores."""

    @model_validator(mode="after")
    def _check(self) -> "RopeScaling":
        if self.kind != "linear" and self.original_positions is None:
            raise ValueError(f"rope_scaling {self.kind} needs original_positions, the length of its first training")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope_scaling.low_freq_factor {self.low_freq_factor} must be smaller than"
                f" high_freq_factor {self.high_freq_factor}"
            )
        return self

    @property
    def attention_scaling(self) -> float:
        """Factor of cos and sin: for yarn 0.1 · ln(factor) + 1 (arXiv:2309.00071 §3.4), unless given; for the others
        1."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._mscale(1.0)
        return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)

    @property
    def score_scaling(self) -> float:
        """Factor of the scores of latent attention in DeepSeek's form of yarn: the square of what queries and keys
        would each be multiplied by (`mscale_all_dim`); else 1."""
        return 1.0 if self.mscale_all_dim is None else self._mscale(self.mscale_all_dim) ** 2

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * log(self.factor) + 1 if self.factor > 1 else 1.0


class MoeSpec(Frozen):
    """Mixture of experts in the place of the MLP (arXiv:2101.03961; shared experts: arXiv:2401.06066)."""

    num_experts: PositiveInt
    """Experts of each layer that has some."""
    top_k: PositiveInt
    """Experts per token."""
    expert_size: PositiveInt
    """Inner width of one expert."""
    shared_size: NonNegativeInt = 0
    """Inner width of the shared experts, all together, which every token passes through in addition."""
    shared_gate: bool = False
    """The shared experts' output is multiplied by a sigmoid gate of its own projection (Qwen2-MoE)."""
    shortcut: bool = False
    """Routed experts read the input of the layer, by a norm of their own, and shared experts what attention adds to it:
    tokens travel to experts and back beside attention and shared experts (ScMoE, arXiv:2404.05019)."""
    dense_layers: NonNegativeInt = 0
    """First layers, which have an ordinary MLP."""
    every: PositiveInt = 1
    """Interval of layers with experts after the dense ones: the last of each so many has experts."""
    router: Literal["softmax", "sigmoid", "expert_choice", "bi_level"] = "softmax"
    """Function that makes scores of the router's logits, of which each token takes the highest. expert_choice: each
    expert takes the positions of a sequence that score highest for it by a softmax, as many as its capacity, later ones
    too (arXiv:2202.09368). bi_level: a softmax over the groups times one over the places in a group, which all groups
    share (SMILE, arXiv:2212.05191)."""
    router_bias: bool = False
    """One bias per expert, added to its logit (softmax), or to its score when experts are chosen (sigmoid;
    arXiv:2412.19437 §2.1.2); the latter is moved after each step, so that the load becomes even."""
    router_bias_update_rate: NonNegativeFloat = 0.001
    """Distance by which the bias of a sigmoid router moves in a step, up for experts with less than the mean load, down
    for others (arXiv:2408.15664 §3.1)."""
    capacity_factor: Annotated[PositiveFloat, AllowInfNan(False)] | None = None
    """Capacity of an expert in each sequence, relative to its even share of the positions times top_k: pairs of later
    positions are dropped (arXiv:2006.16668 §2.2). None: every expert takes all (dropless), or its even share
    (expert_choice)."""
    norm_top_k: bool = True
    """The weights of the chosen experts are scaled to sum to 1."""
    route_scale: PositiveFloat = 1.0
    """Final factor of those weights."""
    num_groups: PositiveInt = 1
    """Groups of experts, of which `top_groups` are chosen first (arXiv:2412.19437 §2.1.2)."""
    top_groups: PositiveInt = 1
    """Groups that a token's experts are chosen from."""
    aux_loss_coef: NonNegativeFloat = 0.001
    """Coefficient of the load-balancing loss of each layer (arXiv:2101.03961 §2.2); 0: none."""
    aux_loss_scope: Literal["sequence", "micro_batch"] = "sequence"
    """Tokens that the load-balancing loss balances together. sequence: those of each sequence, which any plan keeps
    together (arXiv:2412.19437 §2.1.2). micro_batch: those of a micro-batch on one rank, so that the loss changes with
    the plan."""
    router_z_loss_coef: NonNegativeFloat = 0.0
    """Coefficient of the square of the log-sum-exp of each token's router logits (arXiv:2202.08906 §2.2)."""

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
        if self.shortcut and not self.shared_size:
            raise ValueError("moe.shortcut lets tokens travel beside shared experts, but moe.shared_size is 0")
        if self.router == "expert_choice" and (self.router_bias or self.num_groups > 1):
            raise ValueError("moe.router expert_choice has no router_bias and no num_groups, which tokens choose by")
        if self.router == "bi_level" and not 1 < self.num_groups < self.num_experts:
            raise ValueError(
                f"moe.router bi_level chooses a group and an expert in it, but moe.num_groups is {self.num_groups}:"
                f" choose a divisor of moe.num_experts {self.num_experts} other than 1 and {self.num_experts}"
            )
        return self

    @property
    def router_rows(self) -> int:
        """Logits that the router makes of a token: one for each expert, or for each group and each place in a group."""
        if self.router == "bi_level":
            return self.num_groups + self.num_experts // self.num_groups
        return self.num_experts

    @property
    def has_expert_bias(self) -> bool:
        """True where a bias balances the load: it takes part in the choice alone and is moved after each step."""
        return self.router == "sigmoid" and self.router_bias

    def capacity(self, positions: int) -> int:
        """Return the most positions of a sequence that an expert takes: its even share times the capacity factor
        (arXiv:2006.16668 §2.2)."""
        return min(positions, ceil((self.capacity_factor or 1.0) * positions * self.top_k / self.num_experts))

    def pairs_per_sequence(self, positions: int) -> int:
        """Return the pairs of a token and an expert in so many positions of a sequence, before any are dropped."""
        if self.router == "expert_choice":
            return self.num_experts * self.capacity(positions)
        return positions * self.top_k

    @property
    def needs_whole_sequences(self) -> bool:
        """True where the choice of a position's experts depends on others of its sequence: capacity."""
        return self.capacity_factor is not None or self.router == "expert_choice"


class MlaSpec(Frozen):
    """Multi-head latent attention: keys and values come from one narrow vector per position (arXiv:2405.04434 §2.1)."""

    q_lora_rank: PositiveInt | None = None
    """Width of the latent vector that queries come from; None: they come from the hidden state."""
    kv_lora_rank: PositiveInt
    """Width of the latent vector that keys and values come from."""
    nope_head_dim: PositiveInt
    """Elements of a query and a key without rotary positions."""
    rope_head_dim: PositiveInt
    """Rotary elements of a query and a key; all heads share the key's."""
    v_head_dim: PositiveInt
    """Elements of a value."""

    @model_validator(mode="after")
    def _check(self) -> "MlaSpec":
        if self.rope_head_dim % 2:
            raise ValueError(f"mla.rope_head_dim {self.rope_head_dim} is odd, but rotary positions rotate pairs")
        if self.v_head_dim > self.qk_head_dim:
            raise ValueError(
                f"mla.v_head_dim {self.v_head_dim} is more than the {self.qk_head_dim} elements of a key"
                " (nope_head_dim + rope_head_dim), to whose width attention pads values"
            )
        return self

    @property
    def qk_head_dim(self) -> int:
        """Elements of a query and a key."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def latent_width(self) -> int:
        """Elements per position from which queries, keys and values of all heads are made: the latent vectors, and the
        keys' rotary elements."""
        return (self.q_lora_rank or 0) + self.kv_lora_rank + self.rope_head_dim


LinearAttentionKind = Literal["gated_deltanet", "linear_attn", "simple_gla", "gla"]
"""Recurrence of linear attention, by the names of flash-linear-attention. linear_attn: states add up (arXiv:2006.16236
§3.3). simple_gla: they decay by a number for each head and position (arXiv:2405.21060 §3). gla: by a vector of the
key's width (arXiv:2312.06635 §4). gated_deltanet: a decay, and each key's old value is taken out first
(arXiv:2412.06464)."""
PLAIN_CHUNK, DECAYED_CHUNK = 64, 16
"""Positions that the runtime's linear attention computes as matmuls, without and with decay. With decay they are as
many as a decay's logarithm is divided by, so that its inverse over a chunk stays in float32's range up to logits of
−88."""
DECAY_RANK = 16
"""Inner width of the two matrices that make the decays of `gla` (arXiv:2312.06635 §4.4)."""


class LinearAttentionSpec(Frozen):
    """Layers whose attention is a recurrence over a state per head, without a softmax."""

    kind: LinearAttentionKind = "gated_deltanet"
    """Recurrence, by the names of flash-linear-attention: linear_attn without decay (arXiv:2006.16236), simple_gla with
    one for each head (arXiv:2405.21060), gla with one for each element of a key (arXiv:2312.06635), gated_deltanet the
    gated delta rule (arXiv:2412.06464), which the runtime lacks."""
    layers: tuple[NonNegativeInt, ...]
    """Layers with linear attention, counted from 0; all others have the model's ordinary attention."""
    num_key_heads: PositiveInt
    """Heads of queries and keys."""
    num_value_heads: PositiveInt
    """Heads of values."""
    key_head_dim: PositiveInt
    """Elements of a key."""
    value_head_dim: PositiveInt
    """Elements of a value."""
    conv_size: PositiveInt = 4
    """Positions covered by the convolution before the recurrence of gated_deltanet."""

    @model_validator(mode="after")
    def _check(self) -> "LinearAttentionSpec":
        if self.kind != "gated_deltanet" and self.num_key_heads != self.num_value_heads:
            raise ValueError(
                f"linear_attention.kind {self.kind} has as many heads of values as of keys, got"
                f" num_value_heads {self.num_value_heads} and num_key_heads {self.num_key_heads}"
            )
        return self

    @property
    def k_width(self) -> int:
        """Elements of all queries, or keys, of a position."""
        return self.num_key_heads * self.key_head_dim

    @property
    def v_width(self) -> int:
        """Elements of all values of a position."""
        return self.num_value_heads * self.value_head_dim

    @property
    def decay_width(self) -> int:
        """Elements of a position's decays; 0 without any."""
        return {"linear_attn": 0, "gla": self.k_width}.get(self.kind, self.num_value_heads)

    @property
    def chunk(self) -> int:
        """Positions that are computed as matmuls."""
        return DECAYED_CHUNK if self.decay_width else PLAIN_CHUNK

    @property
    def state_numel(self) -> int:
        """Elements of the state of all heads after one position."""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim
