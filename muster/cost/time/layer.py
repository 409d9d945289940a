"""Times of a decoder layer's passes on one rank, and of embedding and head."""

from dataclasses import replace

from muster.cost.time.attention import add_latent_attention, add_linear_attention, add_self_attention
from muster.cost.time.batch_slices import passes_of_slices
from muster.cost.time.collectives import all_gather_s, all_reduce_s
from muster.cost.time.expert_parallel import add_expert_exchange, add_experts
from muster.cost.time.host_time import add_host_time, with_host_time
from muster.cost.time.kernels import matmul_s, stream_s
from muster.cost.time.kraken import add_conjunction, add_first_streams, add_sum_of_streams, passes_of_sublayers
from muster.cost.time.ladder import passes_of_ladder
from muster.cost.time.mlp import add_mlp
from muster.cost.time.pass_cost import PassCost
from muster.cost.time.plugin_layer import plugin_layer_passes
from muster.cost.time.sublayer import (
    LayerContext,
    LayerPasses,
    SublayerCost,
    add_dropout,
    add_exposed_tp,
    add_norm_and_residual,
    add_tp_entry,
    add_tp_exit,
    norm_bytes,
)
from muster.cost.time.tp_pairs import tp_turns
from muster.spec.plugin_model import plugin_model

CAPPED_LOGIT_BYTES = 68
"""Bytes per logit of a soft cap and its derivative: a float32 copy, three operations each, and their product with the
gradient."""
LOGIT_BYTES = {False: (28, 4), True: (50, 4)}
"""Bytes per logit, in bf16, of a loss that keeps its gradient, forward and backward: cast, log-softmax, exponential and
product (`muster.model.loss`); with the vocabulary over tensor-parallel ranks, maximum, cast, difference, exponential,
sum, two products and cast (`muster.parallel.tensor_parallel`)."""
TILED_LOGIT_BYTES = {False: 14, True: 50}
"""Bytes per logit, in bf16, of the forward of a tile's loss, which makes no gradient but over tensor-parallel ranks."""


def layer_passes(at: LayerContext, layer: int) -> LayerPasses:
    """Return the costs of the passes of one layer."""
    if (own := plugin_model(at.model)) is not None:
        return plugin_layer_passes(own, at)
    if at.strategy.tp_overlap == "domino" and at.tp.size > 1:
        sliced = at.one_slice
        attention, mlp = _sublayers(sliced, layer)
        return passes_of_slices(at, layer, attention, mlp, _recompute_cost(sliced, attention, mlp))
    attention, mlp = _sublayers(at, layer)
    if at.model.residual == "ladder" and at.tp.size > 1:
        return passes_of_ladder(attention, mlp, _recompute_cost(at, attention, mlp))
    if at.model.parallel_sublayers > 1:
        return passes_of_sublayers(at, attention, mlp, _recompute_cost(at, attention, mlp), layer)
    return LayerPasses(
        attention.forward + mlp.forward,
        attention.input_grads + mlp.input_grads,
        attention.weight_grads + mlp.weight_grads,
        again := _recompute_cost(at, attention, mlp),
        tp_turns(at, (attention, mlp), again) if at.has_tp_pairs else mlp.turns,
    )


def _sublayers(at: LayerContext, layer: int) -> tuple[SublayerCost, SublayerCost]:
    """Return the costs of a layer's attention, and of its MLP or experts."""
    model, attention = at.model, SublayerCost()
    if model.has_linear_attention(layer):
        add_linear_attention(at, attention)
    elif model.mla is not None:
        add_latent_attention(at, attention)
    else:
        add_self_attention(at, attention, model.attention_window(layer))
    mlp = SublayerCost()
    if model.has_experts(layer):
        add_experts(at, mlp)
    else:
        add_mlp(at.tile, mlp, model.intermediate_size)
    add_norm_and_residual(at, attention)
    add_norm_and_residual(at.tile, mlp)
    if model.has_shortcut(layer):  # the norm that routed experts read, and the sum with shared ones
        add_norm_and_residual(at, mlp)
    if model.parallel_sublayers > 1:
        add_sum_of_streams(at, mlp)
    mlp.repeat_for_tiles(at, (2 + model.gated) * model.intermediate_size * model.hidden_size / at.tp.size)
    add_host_time(at, attention, mlp, model.has_experts(layer))
    if model.has_experts(layer):
        add_expert_exchange(at, attention, mlp)
    return attention, mlp


def _recompute_cost(at: LayerContext, attention: SublayerCost, mlp: SublayerCost) -> PassCost:
    """Return the cost of the forward operators that the backward repeats (`muster.spec.plan.Recompute`).

    Tiles of an MLP are repeated whole, once; where a norm reads its output, full recompute repeats it before.
    """
    if at.sequence_tiles > 1:
        again = _recompute_cost(replace(at, sequence_tiles=1), attention, SublayerCost())
        twice = at.strategy.recompute == "full" and at.model.has_post_norms
        return again + mlp.forward * (1 + twice)
    match at.strategy.recompute:
        case "full":
            whole = attention.forward + mlp.forward
            # Chunks of asynchronous tensor parallelism are one with the last matmul, which saves its input behind them.
            in_chunks = at.tp.size > 1 and (at.framework.async_tp or at.strategy.tp_overlap == "async_tp")
            if not at.framework.early_stop_recompute or at.model.has_post_norms or in_chunks:
                return whole
            if mlp.exit_s:
                whole.exposed_s["tp"] -= mlp.exit_s
            is_repeated = at.framework.repeats_last_tp_matmul and at.tp.size > 1
            return whole if is_repeated else whole + mlp.last_matmul * -1
        case "core_attention":
            return with_host_time(at, attention.attention_core, "attention")
        case "elementwise":
            latent = attention.latent_up_projections if at.framework.fp8_activations else PassCost()
            again = with_host_time(at, attention.elementwise + latent, "attention")
            return again + with_host_time(at, mlp.elementwise)
        case "every_second_matmul":
            again = with_host_time(at, attention.elementwise + attention.matmuls * 0.5, "attention")
            return again + with_host_time(at, mlp.elementwise + mlp.matmuls * 0.5)
        case _:
            return PassCost()


def head_passes(at: LayerContext, vocab_rows: float) -> LayerPasses:
    """Return the costs of the last norm, the matmul with `vocab_rows` rows of the head, and the loss of their logits.

    A fused loss reads the logits and writes their gradient; unfused, it makes float32 copies of both (Megatron-LM's
    `vocab_parallel_cross_entropy`: cast, maximum, difference, exponential, sum, quotient, and one pass backward with
    the cast), or does so once and scales the gradient that it kept (`LOGIT_BYTES`).
    """
    norm = SublayerCost()
    numbers = at.norm_tokens * at.model.hidden_size * at.element_bytes
    norm.add_elementwise(at, 2 * numbers, 3 * numbers, 1)
    if at.model.parallel_sublayers > 1:
        add_conjunction(at, norm)
    part, again = _head_and_loss(at.tile, vocab_rows), PassCost()
    if at.sequence_tiles > 1:  # its loss makes the gradient when it is repeated
        again = part.forward * at.sequence_tiles
        part.forward = _head_and_loss(at.tile, vocab_rows, TILED_LOGIT_BYTES[at.tp.size > 1]).forward
        part.repeat_for_tiles(at, vocab_rows * at.model.hidden_size)
    return LayerPasses(
        norm.forward + part.forward,
        norm.input_grads + part.input_grads,
        norm.weight_grads + part.weight_grads,
        again,
        tp_turns(at, (part,), again),
    )


def _head_and_loss(at: LayerContext, vocab_rows: float, forward_bytes: int | None = None) -> SublayerCost:
    """Return the cost of the head and the loss; `forward_bytes`: bytes per logit of the loss's forward, where they are
    others."""
    part, hidden = SublayerCost(), at.model.hidden_size
    add_tp_entry(at, part)
    wide, tokens = at.high_precision, at.tokens
    part.forward.add(matmul_s(at.device, tokens, vocab_rows, hidden, wide))
    part.input_grads.add(matmul_s(at.device, tokens, hidden, vocab_rows, wide))
    part.weight_grads.add(matmul_s(at.device, vocab_rows, hidden, tokens, wide, out_bytes=2 * at.framework.grad_bytes))
    composed = at.framework.gathered_logits or not at.framework.fused_loss
    scored = tokens * vocab_rows
    if at.framework.gathered_logits:
        scored *= at.tp.size
        _add_logit_gather(at, part, scored)
    elif at.tp.size > 1:
        joint = at.framework.loss_keeps_gradient  # the sum and the label's logit travel together
        for numbers in (1, 2) if joint else (1, 1, 1):
            add_exposed_tp(part, all_reduce_s(at.tp, 4 * numbers * tokens), 0.0)
    if composed:
        forward, backward = LOGIT_BYTES[at.tp.size > 1] if at.framework.loss_keeps_gradient else (30, 14)
    else:
        forward, backward = at.element_bytes, 2 * at.element_bytes
    part.forward.add(stream_s(at.device, (forward_bytes or forward) * scored), 8 if composed else 2)
    part.input_grads.add(stream_s(at.device, backward * scored), 4 if composed else 1)
    if at.model.logit_softcap is not None:  # the cap and its derivative, in the pass that computes the gradient
        part.forward.add(stream_s(at.device, CAPPED_LOGIT_BYTES * scored, 8), 8)
    return part


def _add_logit_gather(at: LayerContext, part: SublayerCost, numbers: float) -> None:
    """Add an all-gather of the logits of the whole vocabulary to every tensor-parallel rank.

    They are gathered into a list of tensors, copied out of the buffer and concatenated; in the backward each rank takes
    its own columns (github:Aleph-Alpha/scaling core/nn/linear/utils.py).
    """
    if at.tp.size == 1:
        return
    part.forward.add_exposed("tp", all_gather_s(at.tp, numbers * at.element_bytes))
    part.forward.add(stream_s(at.device, 4 * numbers * at.element_bytes, 2), 2)
    part.input_grads.add(stream_s(at.device, 2 * numbers * at.element_bytes / at.tp.size), 1)


def further_token_passes(at: LayerContext) -> LayerPasses:
    """Return the costs of what a layer for multi-token prediction does before it is a layer like others: it embeds the
    next tokens, norms embeddings and hidden states side by side, and projects both to the hidden width
    (arXiv:2412.19437 §2.2).

    The projection is whole on every tensor-parallel rank, over the positions that its norms see.
    """
    part, hidden, tokens = SublayerCost(), at.model.hidden_size, at.norm_tokens
    forward, backward = norm_bytes(at, at.model.norm)
    joined = 2 * tokens * hidden * at.element_bytes
    part.add_elementwise(at, 2 * (tokens * hidden * forward + joined), 2 * (tokens * hidden * backward + joined), 3)
    part.add_linear(at, tokens, hidden, 2 * hidden)
    embedding = embedding_passes(at)
    made = part.forward + embedding.forward
    again = made if at.strategy.recompute == "full" else PassCost()
    return LayerPasses(
        made, part.input_grads + embedding.input_grads, part.weight_grads + embedding.weight_grads, again
    )


def embedding_passes(at: LayerContext) -> LayerPasses:
    """Return the costs of the embedding: a read and a write of the hidden state, and a sum of rows in the backward.

    Tensor-parallel ranks each hold a part of the vocabulary, and all-reduce.
    """
    part, numbers = SublayerCost(), at.tokens * at.model.hidden_size
    part.forward.add(stream_s(at.device, 2 * numbers * at.element_bytes))
    part.weight_grads.add(stream_s(at.device, numbers * (at.element_bytes + 2 * at.framework.grad_bytes)), 3)
    add_tp_exit(at, part)
    add_dropout(at, part, at.norm_tokens * at.model.hidden_size, at.model.embedding_dropout)
    if at.model.parallel_sublayers > 1:
        add_first_streams(at, part)
    turns = tp_turns(at, (part,), PassCost())
    return LayerPasses(part.forward, part.input_grads, part.weight_grads, PassCost(), turns)
