"""Device memory of a rank that generates text: weights, a window of layers, the cache, and one layer's work."""

from math import ceil
from typing import NamedTuple

from muster.cost.precision_bytes import compute_bytes
from muster.layout.host_updates import layer_of
from muster.layout.mesh import MeshCoordinates
from muster.layout.tensor_layout import TensorLayout, stage_layouts
from muster.spec.four_bit import part_bytes
from muster.spec.layer_strategy import Tier
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan

WINDOW_ALIGNMENT = 64
"""Bytes of which the place of a tensor in the buffer of a window's layer is a multiple, as of PyTorch's own tensors."""


class GenerationMemory(NamedTuple):
    """Bytes on a rank's device, and in its host's memory."""

    weights: int
    """Parameters that are always on the device."""
    window: int
    """Buffers of the layers that come and go."""
    cache: int
    """Keys and values, or states, of all layers."""
    work: int
    """Most bytes beside these, in the forward of the prompts."""
    host: int
    """Parameters in host memory."""
    disk: int
    """Parameters on disk."""

    @property
    def device(self) -> int:
        """Bytes on the device at most."""
        return self.weights + self.window + self.cache + self.work


def away_layers(spec: ModelSpec, plan: Plan) -> dict[int, Tier]:
    """Return the layers whose parameters wait for their turn, each with their place."""
    return {layer: tier for layer in range(spec.num_layers) if (tier := plan.param_tier(layer)) != "none"}


def generation_memory(
    spec: ModelSpec, plan: Plan, texts: int, prompt_positions: int, positions: int, window: int
) -> GenerationMemory:
    """Return the memory of the fullest rank for `texts` texts, whose longest prompt has `prompt_positions` tokens, and
    which have `positions` at most; `window` layers are on the device at once of those away from it."""
    layouts = stage_layouts(spec, plan, 0, MeshCoordinates(0, 0, 0, 0, 0))
    size = compute_bytes(plan.precision)

    def bytes_of(layout: TensorLayout) -> int:
        return layout.numel * (part_bytes(layout.name) or size)

    away = away_layers(spec, plan)
    padded: dict[int, int] = dict.fromkeys(away, 0)
    num_bytes: dict[Tier, int] = {"none": 0, "host": 0, "disk": 0}
    for layout in layouts:
        layer = layer_of(layout.name)
        tier: Tier = "none" if layer is None else away.get(layer, "none")
        num_bytes[tier] += bytes_of(layout)
        if layer in padded:
            padded[layer] += ceil(bytes_of(layout) / WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT
    buffers = min(window, len(away)) * max(padded.values(), default=0)
    cache = texts * sum(_cached_bytes(spec, plan, layer, positions) for layer in range(spec.num_layers))
    tokens = texts * prompt_positions
    shared = tokens * (prompt_positions + 2 * spec.rotary_width * 4)  # mask of visible keys; sines and cosines
    work = shared + max(_attention_work(spec, plan, tokens), _mlp_work(spec, plan, tokens))
    if spec.other_stream is not None:
        # The output of the sub-layer before, and its sum with the stream; or the sum of streams and attention's output,
        # and of each further stream of the rank that, and what an ordinary layer has of its one.
        work += (5 * spec.local_sublayers(plan.tp) - 3) * tokens * spec.hidden_size * size
    logits = texts * spec.vocab_size * (size + (size < 4) * 4 + (plan.tp > 1) * size)
    hidden = tokens * spec.hidden_size * size
    work = max(work, logits + hidden)
    return GenerationMemory(num_bytes["none"], buffers, cache, work, num_bytes["host"], num_bytes["disk"])


def _cached_bytes(spec: ModelSpec, plan: Plan, layer: int, positions: int) -> int:
    """Return the bytes that the cache has of one text in one layer."""
    size, tp = compute_bytes(plan.precision), plan.tp
    if spec.has_linear_attention(layer):
        linear = spec.linear_attention
        assert linear is not None
        return linear.state_numel // tp * 4
    if spec.mla is not None:  # keys and values of all heads, values as wide as keys
        return 2 * spec.num_heads // tp * spec.mla.qk_head_dim * positions * size
    return 2 * max(1, spec.num_kv_heads // tp) * spec.head_dim * positions * size


def _attention_work(spec: ModelSpec, plan: Plan, tokens: int) -> int:
    """Return the bytes of the hidden state, and of queries, keys and values before and after rotary positions."""
    queries = max(1, spec.num_heads // plan.tp) * spec.head_dim
    keys = max(1, spec.num_kv_heads // plan.tp) * spec.head_dim
    if spec.mla is not None:
        queries = keys = spec.num_heads // plan.tp * spec.mla.qk_head_dim
    return tokens * (spec.hidden_size + 2 * (queries + 2 * keys)) * compute_bytes(plan.precision)


def _mlp_work(spec: ModelSpec, plan: Plan, tokens: int) -> int:
    """Return the bytes of the layer's input, the sum with attention, its norm and the output, and of gate, up and their
    product; of experts also the rows that go to them and come back."""
    inner, rows = spec.intermediate_size / plan.tp, 0
    if (moe := spec.moe) is not None:
        inner, rows = max(inner, moe.top_k * moe.expert_size + moe.shared_size), 2 * moe.top_k
    return ceil(tokens * ((4 + rows) * spec.hidden_size + (2 + spec.gated) * inner)) * compute_bytes(plan.precision)
