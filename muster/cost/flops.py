"""Floating-point operations of a decoder."""

from collections.abc import Iterator
from math import prod

from muster.config.freezing import frozen_prefix, matches_pattern
from muster.layout.host_updates import layer_of
from muster.spec.model import ModelSpec, active_numel, layer_parameter_shapes, parameter_shapes
from muster.spec.plan import Plan
from muster.spec.plugin_model import plugin_model


def forward_flops_per_token(spec: ModelSpec, seq_len: int, causal: bool = False) -> int:
    """Return the matmul FLOPs of the forward for one token of a sequence of `seq_len`.

    2 per weight of a matmul: all weights except norms and the embedding's lookup; of the experts only a token's
    `top_k`; the head once more for each of `mtp_layers`. Attention takes 2 · seq_len · heads · (key width + value
    width) in each layer with softmax attention, linear attention 4 · heads · key width · value width to add to its
    state and to read it (the gated delta rule reads it twice). Following PaLM (arXiv:2204.02311, appendix B) and
    Megatron-LM (arXiv:2104.04473, appendix) the causal mask is not discounted; with `causal`, only the scores count
    that the mask and a sliding window leave, about half, as FlashAttention-2 counts (arXiv:2307.08691 §4.1). A plugin's
    layers count by the matmuls of a traced forward.

    Example: 7 · 10⁹ weights at a short sequence need about 14 GFLOPs per token forward, 42 with the backward.
    """
    if (own := plugin_model(spec)) is not None:
        head = 2 * spec.vocab_size * spec.hidden_size
        return head + spec.num_layers * own.layer_trace(spec, seq_len, 1, "bf16").flops // seq_len
    matrices = sum(numel for _, numel in _multiplied_matrices(spec))
    return 2 * matrices + _score_flops(spec, seq_len, causal) + _state_flops(spec)


def _multiplied_matrices(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Yield the name of each matrix that a token is multiplied by, and the elements that are used for one, the head's
    once more for each of `mtp_layers`."""
    looked_up = ("embed.weight", "positions.weight")
    for name, shape in parameter_shapes(spec):
        if len(shape) > 1 and name not in looked_up and not name.endswith(".bias"):
            yield name, active_numel(spec, name, shape)
    head = "embed.weight" if spec.tied_embeddings else "head.weight"
    yield from [(head, spec.vocab_size * spec.hidden_size)] * (spec.tied_embeddings + spec.mtp_layers)


def _score_flops(spec: ModelSpec, seq_len: int, causal: bool, first_layer: int = 0) -> int:
    mla = spec.mla
    widths = 2 * spec.head_dim if mla is None else mla.nope_head_dim + mla.rope_head_dim + mla.v_head_dim
    layers = [layer for layer in range(first_layer, spec.num_layers) if not spec.has_linear_attention(layer)]
    if causal:
        # Position i sees i + 1 positions, at most its window: half the sum over the sequence per position.
        windows = [min(spec.attention_window(layer) or seq_len, seq_len) for layer in layers]
        windows += [seq_len] * spec.mtp_layers
        seen = sum(window * (2 * seq_len - window + 1) for window in windows)
        return 2 * spec.num_heads * widths * seen // (2 * seq_len)
    return 2 * seq_len * spec.num_heads * widths * (len(layers) + spec.mtp_layers)


def _state_flops(spec: ModelSpec, first_layer: int = 0) -> int:
    if (linear := spec.linear_attention) is None:
        return 0
    layers = [layer for layer in linear.layers if layer >= first_layer]
    return len(layers) * linear.state_numel * (6 if linear.kind == "gated_deltanet" else 4)


def train_flops_per_token(
    spec: ModelSpec, seq_len: int, causal: bool = False, has_backward: bool = True, freeze: tuple[str, ...] = ()
) -> int:
    """Return the FLOPs of forward and backward for one token: each matmul of the forward has two in the backward; a
    step without backward has two forwards.

    With parameters that patterns `freeze`, a matrix has 2 FLOPs an element in the backward for the gradient of its
    input, and 2 for its own where it is trained; scores and states have twice those of the forward. Layers below the
    lowest that has a trained parameter have no backward where the embedding is frozen, too; that layer counts whole. So
    LoRA, whose matrices are small, trains at about 4 FLOPs per weight, not 6.

    Recomputed work (activation recompute, flash attention's backward) doesn't count: these are MFU's model FLOPs.
    """
    forward = forward_flops_per_token(spec, seq_len, causal)
    if not has_backward:
        return 2 * forward
    if not freeze:
        return 3 * forward
    first = max(0, frozen_prefix(freeze, spec))
    if plugin_model(spec) is not None:
        return forward + _plugin_backward_flops(spec, forward, freeze, first)
    has_head_input = first < spec.num_layers or not matches_pattern(freeze, "norm.weight")
    backward = 2 * (_score_flops(spec, seq_len, causal, first) + _state_flops(spec, first))
    for name, numel in _multiplied_matrices(spec):
        layer = layer_of(name)
        has_input = has_head_input if layer is None else layer >= first
        backward += 2 * numel * (has_input + (not matches_pattern(freeze, name)))
    return forward + backward


def plan_flops_per_token(
    plan: Plan,
    spec: ModelSpec,
    seq_len: int,
    causal: bool = False,
    has_backward: bool = True,
    freeze: tuple[str, ...] = (),
) -> int:
    """Return `train_flops_per_token` under a plan, without the layers that a mean micro-batch skips."""
    own = seq_len, causal, has_backward, freeze
    whole = train_flops_per_token(spec, *own)
    if not plan.paths or spec.num_layers == 1:
        return whole
    skipped = sum(
        len(plan.layers(stage, spec.num_layers)) for path in plan.paths for stage in {*range(plan.num_stages)} - {*path}
    )
    layer = whole - train_flops_per_token(spec.model_copy(update={"num_layers": spec.num_layers - 1}), *own)
    return whole - layer * skipped // len(plan.paths)


def _plugin_backward_flops(spec: ModelSpec, forward: int, freeze: tuple[str, ...], first: int) -> int:
    """Return the FLOPs of the backward of a plugin's layers from the `first` with a backward on: each has its forward's
    for the gradients of inputs, and those of weights by the share of its matrices that are trained."""
    head = 2 * spec.vocab_size * spec.hidden_size
    each = (forward - head) // spec.num_layers
    trained = not matches_pattern(freeze, "embed.weight" if spec.tied_embeddings else "head.weight")
    total = head * (1 + trained)
    for layer in range(first, spec.num_layers):
        sizes = [(name, prod(shape)) for name, shape in layer_parameter_shapes(spec, layer) if len(shape) > 1]
        kept = sum(size for name, size in sizes if not matches_pattern(freeze, name))
        total += each + each * kept // max(1, sum(size for _, size in sizes))
    return total
