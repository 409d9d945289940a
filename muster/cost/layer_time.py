"""How long a decoder layer's passes take on one rank, and those of embedding and head."""

from muster.cost.attention_time import latent_attention, linear_attention, plain_attention
from muster.cost.collectives import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s
from muster.cost.kernels import matmul_s, stream_s
from muster.cost.layer_parts import LayerPasses, LayerSetting, Part, around, enter, leave
from muster.cost.own_layer import own_layer_passes
from muster.cost.spent import Spent
from muster.spec.own_model import own_model

PERMUTED = 0.5
"""Share of the streaming rate at which rows are gathered into another order (B200, github:MooreThreads/SimuMax
configs/system/b200_bf16_ceperm.json)."""


def layer_passes(at: LayerSetting, layer: int) -> LayerPasses:
    """The passes of one layer."""
    if (own := own_model(at.model)) is not None:
        return own_layer_passes(own, at)
    model, attention = at.model, Part()
    if model.has_linear_attention(layer):
        linear_attention(at, attention)
    elif model.mla is not None:
        latent_attention(at, attention)
    else:
        plain_attention(at, attention, model.window(layer))
    mlp = Part()
    if model.has_experts(layer):
        _experts(at, mlp)
    else:
        _mlp(at, mlp, model.intermediate_size)
    around(at, attention)
    around(at, mlp)
    if model.has_experts(layer):
        _exchange(at, attention, mlp)
    forward = attention.forward + mlp.forward
    return LayerPasses(
        forward, attention.inputs + mlp.inputs, attention.weights + mlp.weights, _again(at, attention, mlp)
    )


def _mlp(at: LayerSetting, part: Part, inner: float) -> None:
    enter(at, part, 1 + at.model.gated)
    _mlp_products(at, part, at.tokens, inner / at.tp.size)
    leave(at, part)


def _mlp_products(at: LayerSetting, part: Part, tokens: float, inner: float, experts: float = 1) -> None:
    """Up (and gate), activation, down."""
    gated = at.model.gated
    part.linear(at, tokens, (1 + gated) * inner, at.model.hidden_size, experts)
    numbers = tokens * inner * at.act
    forward, backward = (3, 5) if gated else (2, 3)
    extra = 1.0 if at.software.fused else 5 / 3
    part.stream(at, forward * extra * numbers, backward * extra * numbers, 1 if at.software.fused else 2)
    part.linear(at, tokens, at.model.hidden_size, inner, experts)


def _experts(at: LayerSetting, part: Part) -> None:
    """Router, dispatch, grouped products over the experts held here, combine (arXiv:2101.03961 §2); tokens are taken to
    be spread evenly over experts. Each rank gives the tokens of its own part of the sequence."""
    model, moe = at.model, at.model.moe
    assert moe is not None
    own = at.norm_tokens if at.strategy.sp else at.tokens / at.tp.size
    sent = own * moe.top_k
    hidden = model.hidden_size * at.act
    part.stream(at, 2 * own * moe.num_experts * 4 + own * hidden, 3 * own * moe.num_experts * 4, 6)
    permuted = 4 * sent * hidden / PERMUTED
    part.stream(at, permuted, permuted, 4)
    if at.etp > 1:
        for spent in (part.forward, part.inputs):
            gathered = sent * hidden * at.etp
            spent.wait("tp", all_gather_s(at.tp, gathered) + reduce_scatter_s(at.tp, gathered))
    _mlp_products(at, part, sent * at.etp, moe.expert_size / at.etp, moe.num_experts / at.ep.size)
    if moe.shared_size:
        _mlp(at, part, moe.shared_size)


def _exchange(at: LayerSetting, attention: Part, mlp: Part) -> None:
    """Tokens go to their experts' ranks and come back, and so do their gradients: after the products that make them,
    or beside the passes of another micro-batch (arXiv:2412.19437 §3.2.1)."""
    moe, software = at.model.moe, at.software
    assert moe is not None
    own = at.norm_tokens if at.strategy.sp else at.tokens / at.tp.size
    # Experts of a group lie on one node; a token crosses the network once for each node (§3.2.2).
    reached = min(moe.top_groups, at.ep.domains) if moe.num_groups > 1 else min(moe.top_k, at.ep.domains)
    crossing = min(1.0, reached / moe.top_k) if software.node_copies else 1.0
    exchange_s = 2 * all_to_all_s(at.ep, own * moe.top_k * at.model.hidden_size * at.act, crossing)
    backward_s = sum(one.compute_s for part in (attention, mlp) for one in (part.inputs, part.weights))
    passes = ((mlp.forward, attention.forward.compute_s + mlp.forward.compute_s), (mlp.inputs, backward_s))
    for spent, compute_s in passes:
        if software.overlap_experts:
            spent.beside("ep", exchange_s, compute_s)
        else:
            spent.wait("ep", exchange_s)


def _again(at: LayerSetting, attention: Part, mlp: Part) -> Spent:
    """What the backward computes again (`muster.spec.plan.Recompute`)."""
    match at.strategy.recompute:
        case "full":
            whole = attention.forward + mlp.forward
            return whole + mlp.last * -1 if at.software.stops_recompute else whole
        case "attention":
            return attention.core
        case "selective":
            latent = attention.latent if at.software.compact else Spent()
            return attention.cheap + mlp.cheap + latent
        case "alternate":
            return attention.cheap + mlp.cheap + (attention.products + mlp.products) * 0.5
        case _:
            return Spent()


def head_passes(at: LayerSetting, words: float) -> LayerPasses:
    """The last norm, the product with `words` rows of the head on this rank, and the loss over their logits.

    The loss in one kernel reads the logits and writes their gradient; operation by operation it makes float32 copies of
    both (Megatron-LM's `vocab_parallel_cross_entropy`: cast, largest, difference, exponential, sum, quotient, and one
    pass backward with the cast).
    """
    part, hidden = Part(), at.model.hidden_size
    numbers = at.norm_tokens * hidden * at.act
    part.stream(at, 2 * numbers, 3 * numbers, 1)
    enter(at, part)
    wide, tokens = at.wide, at.tokens
    part.forward.add(matmul_s(at.device, tokens, words, hidden, wide))
    part.inputs.add(matmul_s(at.device, tokens, hidden, words, wide))
    part.weights.add(matmul_s(at.device, words, hidden, tokens, wide, out_bytes=2 * at.software.gradient_bytes))
    composed = at.software.whole_logits or not at.software.fused_loss
    scored = tokens * words
    if at.software.whole_logits:
        scored *= at.tp.size
        _gather_logits(at, part, scored)
    elif at.tp.size > 1:
        part.forward.wait("tp", 3 * all_reduce_s(at.tp, 4 * tokens))
    forward, backward = (30, 14) if composed else (at.act, 2 * at.act)
    part.forward.add(stream_s(at.device, forward * scored), 8 if composed else 2)
    part.inputs.add(stream_s(at.device, backward * scored), 4 if composed else 1)
    return LayerPasses(part.forward, part.inputs, part.weights, Spent())


def _gather_logits(at: LayerSetting, part: Part, numbers: float) -> None:
    """Tensor-parallel ranks each get the logits of all words: gathered into a list, which is copied out of the buffer
    and then put together; backward each takes its own columns (github:Aleph-Alpha/scaling core/nn/linear/utils.py)."""
    if at.tp.size == 1:
        return
    part.forward.wait("tp", all_gather_s(at.tp, numbers * at.act))
    part.forward.add(stream_s(at.device, 4 * numbers * at.act, 2), 2)
    part.inputs.add(stream_s(at.device, 2 * numbers * at.act / at.tp.size), 1)


def embedding_passes(at: LayerSetting) -> LayerPasses:
    """Looking words up reads and writes the hidden state; its backward adds rows up in the gradient. Tensor-parallel
    ranks each know some of the words, and add up."""
    part, numbers = Part(), at.tokens * at.model.hidden_size
    part.forward.add(stream_s(at.device, 2 * numbers * at.act))
    part.weights.add(stream_s(at.device, numbers * (at.act + 2 * at.software.gradient_bytes)), 3)
    leave(at, part)
    return LayerPasses(part.forward, part.inputs, part.weights, Spent())
