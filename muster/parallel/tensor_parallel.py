"""Tensor parallelism: a layer's weights sharded over neighbouring ranks, with collectives around plain modules.

A column-parallel weight (q, k, v, gate, up, head) is sharded by rows of the (out, in) matrix, a row-parallel one (o,
down) by columns, the embedding by vocabulary entries; a bias goes with its weight's rows and is whole where columns are
sharded. Communication happens in two places: where the hidden state enters a column-parallel linear layer, and where
the partial sums of a row-parallel one leave. With sequence parallelism the hidden state between them is sharded along
the sequence, and the two places all-gather and reduce-scatter it instead (Megatron-LM, arXiv:1909.08053 §3,
arXiv:2205.05198 §4.2.2).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from muster.model.adapters import LoraLinear
from muster.model.attention import Attention
from muster.model.decoder import Decoder, KrakenLayer, LadderLayer, MtpLayer
from muster.model.dropout import InputDropout
from muster.model.experts import Experts, MoeMlp
from muster.model.four_bit import FourBitWeight, dense
from muster.model.grouped_matmul import grouped_linears
from muster.model.kernels import accumulation_dtype, soft_cap_, soft_cap_slope_
from muster.model.latent_attention import LatentAttention
from muster.model.linear_attention import LinearAttention
from muster.model.loss import LossSums, softmax_gradient_
from muster.model.low_rank import LowRankLinear, first_matrix
from muster.model.plugin_layer import PROJECT_IN, PROJECT_OUT
from muster.parallel.axis import PendingTensor, TensorAxis
from muster.parallel.domino import DominoLayers
from muster.parallel.kraken import ParallelStreams, sublayer_linear, sublayer_linears
from muster.parallel.ladder import ParallelLadder
from muster.parallel.symmetric_memory import all_gather_linears, row_backward, row_forward
from muster.parallel.vocab_loss import exp_and_sums, local_rows, whole_vocab_loss
from muster.parallel.weight_grad_store import WeightGradStore

# ----------------------------------------------------------------------------------------------------------------------
# Entry and exit of the hidden state


class _ParallelLinears(torch.autograd.Function):
    """Several linear layers of one hidden state; column-parallel ones if there is an axis.

    `count` weights come first, then their biases (None for a missing one). In the backward the hidden state's gradient
    is communicated while the weights' and biases' gradients are computed or deferred.
    """

    @staticmethod
    def forward(
        ctx: Any, axis: TensorAxis | None, weight_grads: WeightGradStore, x: Tensor, count: int, *parameters: Any
    ) -> tuple[Tensor, ...]:
        # Keep the weights themselves: hooks on saved tensors (recompute has some) would return copies, and a deferred
        # gradient would be added to a copy's `.grad`.
        ctx.axis = axis
        ctx.weight_grads = weight_grads
        ctx.weights = parameters[:count]
        ctx.biases = parameters[count:]
        ctx.save_for_backward(x)
        return linears_forward(axis, x, ctx.weights, ctx.biases)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors

        def param_grads(index: int, x_NI: Tensor, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None]:
            return ctx.weight_grads.compute_or_defer(ctx.weights[index], ctx.biases[index], x_NI, grad_NO)

        grad_x, made = linears_backward(ctx.axis, x, ctx.weights, grads, param_grads)
        return None, None, grad_x, None, *(weight for weight, _ in made), *(bias for _, bias in made)


class _AdaptedLinears(torch.autograd.Function):
    """`_ParallelLinears` whose last weights, A of adapters, read the hidden state after dropout, by `drops`; `first` is
    the index, in the whole model, of its first column."""

    @staticmethod
    def forward(
        ctx: Any,
        axis: TensorAxis | None,
        weight_grads: WeightGradStore,
        drops: Sequence[InputDropout],
        first: int,
        x: Tensor,
        count: int,
        *parameters: Any,
    ) -> tuple[Tensor, ...]:
        ctx.axis, ctx.weight_grads, ctx.drops, ctx.first = axis, weight_grads, drops, first
        ctx.weights, ctx.biases = parameters[:count], parameters[count:]  # see `_ParallelLinears`
        ctx.save_for_backward(x)
        plain = count - len(drops)
        whole = axis.all_gather(x).wait() if axis and axis.sequence_parallel else x
        outputs = linears_forward(None, whole, ctx.weights[:plain], ctx.biases[:plain])
        dropped = zip(drops, ctx.weights[plain:], strict=True)
        return *outputs, *(drop.linear(whole, weight, first) for drop, weight in dropped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        axis, plain = ctx.axis, len(grads) - len(ctx.drops)

        def param_grads(index: int, x_NI: Tensor, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None]:
            if index < plain:
                return ctx.weight_grads.compute_or_defer(ctx.weights[index], ctx.biases[index], x_NI, grad_NO)
            return ctx.drops[index - plain].weight_grad(x_NI, grad_NO, ctx.first), None

        def add_dropped_(grad_x: Tensor) -> None:
            for drop, grad, weight in zip(ctx.drops, grads[plain:], ctx.weights[plain:], strict=True):
                drop.add_input_grad_(grad_x, grad, weight, ctx.first)

        grad_x, made = linears_backward(axis, x, ctx.weights, grads, param_grads, plain, add_dropped_)
        return None, None, None, None, grad_x, None, *(weight for weight, _ in made), *(bias for _, bias in made)


ParamGrads = tuple[Tensor | None, Tensor | None]
"""Gradients of a linear layer's weight and bias; None for one that is deferred, frozen or missing."""


def linears_forward(
    axis: TensorAxis | None, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Apply linear layers, column-parallel ones if there is an axis, to one hidden state."""
    if axis and axis.overlap != "none":
        linears = all_gather_linears if axis.overlap == "symmetric_memory" else _ring_linears
        return linears(axis, x, weights, biases)
    whole = axis.all_gather(x).wait() if axis and axis.sequence_parallel else x
    return tuple(_linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def linears_backward(
    axis: TensorAxis | None,
    x: Tensor,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    param_grads: Callable[[int, Tensor, Tensor], ParamGrads],
    plain: int | None = None,
    add_further_: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, list[ParamGrads]]:
    """Return the gradient of the hidden state, and each layer's `param_grads(index, x_NI, grad_NO)`, which is called
    while that gradient is summed over the ranks.

    `add_further_` adds what the layers behind the first `plain` ones have of the hidden state's gradient.
    """
    gathering = axis.all_gather(x) if axis and axis.sequence_parallel else None
    grad_x = grads[0] @ dense(weights[0], grads[0].dtype)
    for grad, weight in zip(grads[1:plain], weights[1:plain], strict=True):
        grad_x += grad @ dense(weight, grad.dtype)
    if add_further_ is not None:
        add_further_(grad_x)
    summing = PendingTensor([], lambda: grad_x)
    if axis is not None:
        summing = axis.reduce_scatter(grad_x) if axis.sequence_parallel else axis.all_reduce(grad_x)
    whole_NI = (gathering.wait() if gathering else x).flatten(0, -2)
    made = [param_grads(index, whole_NI, grad.flatten(0, -2)) for index, grad in enumerate(grads)]
    return summing.wait(), made


def _linear(x: Tensor, weight_OI: Tensor | FourBitWeight, bias_O: Tensor | None) -> Tensor:
    """Linear layer whose result is no view, as `F.linear` with a bias gives: the residual is added to it in place."""
    weight_OI = dense(weight_OI, x.dtype)
    if bias_O is None:
        return F.linear(x, weight_OI)
    y = x.new_empty(*x.shape[:-1], len(weight_OI))
    torch.addmm(bias_O, x.flatten(0, -2), weight_OI.t(), out=y.flatten(0, -2))
    return y


def _ring_linears(
    axis: TensorAxis, x_BsD: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Linear layers of the whole sequence, of which this rank has a shard; each shard is multiplied as it arrives."""
    size = x_BsD.shape[1]
    outputs = tuple(x_BsD.new_empty(len(x_BsD), axis.size * size, len(weight)) for weight in weights)
    for source, shard_BsD in axis.ring_all_gather(x_BsD):
        for output, weight, bias in zip(outputs, weights, biases, strict=True):
            _linear_of_shard(output, source, shard_BsD, weight.t(), bias)
    return outputs


def _linear_of_shard(
    output_BSO: Tensor, source: int, shard_BsD: Tensor, weight_DO: Tensor, bias_O: Tensor | None = None
) -> None:
    """Set the output positions of the rank with index `source`; they are contiguous for each sequence, so nothing is
    copied."""
    start = source * shard_BsD.shape[1]
    end = start + shard_BsD.shape[1]
    for output_SO, shard_sD in zip(output_BSO, shard_BsD, strict=True):
        if bias_O is None:
            torch.mm(shard_sD, weight_DO, out=output_SO[start:end])
        else:
            torch.addmm(bias_O, shard_sD, weight_DO, out=output_SO[start:end])


class _OverlappedRowParallelLinear(torch.autograd.Function):
    """Row-parallel linear layer whose output is reduce-scattered shard by shard: a partial sum travels while the next
    shard is multiplied. In the backward the shards of the gradient travel likewise."""

    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, weight_grads: WeightGradStore, x: Tensor, weight: Tensor) -> Tensor:
        ctx.axis = axis
        ctx.weight_grads = weight_grads
        ctx.weight = weight  # not through save_for_backward, as in `_ParallelLinears`
        ctx.save_for_backward(x)
        return overlapped_row_forward(axis, x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad_x, grad_BSD = overlapped_row_backward(ctx.axis, x, ctx.weight, grads[0])
        grad_weight, _ = ctx.weight_grads.compute_or_defer(ctx.weight, None, x.flatten(0, -2), grad_BSD.flatten(0, -2))
        return None, None, grad_x, grad_weight


def overlapped_row_forward(axis: TensorAxis, x: Tensor, weight: Tensor) -> Tensor:
    """Return this rank's shard of a row-parallel linear layer's output."""
    if axis.overlap == "symmetric_memory":
        return row_forward(axis, x, weight)
    shards = x.unflatten(1, (axis.size, -1))
    return axis.ring_reduce_scatter(lambda rank: F.linear(shards[:, rank], weight))


def overlapped_row_backward(axis: TensorAxis, x: Tensor, weight: Tensor, grad_BsD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of a row-parallel linear layer's input, and that of its whole output."""
    if axis.overlap == "symmetric_memory":
        return row_backward(axis, weight, grad_BsD)
    size = grad_BsD.shape[1]
    grad_BSD = grad_BsD.new_empty(len(x), axis.size * size, grad_BsD.shape[2])
    grad_x = x.new_empty(x.shape)
    for source, shard_BsD in axis.ring_all_gather(grad_BsD):
        grad_BSD.narrow(1, source * size, size).copy_(shard_BsD)
        _linear_of_shard(grad_x, source, shard_BsD, weight)
    return grad_x, grad_BSD


class _ReduceFromTensorParallelRegion(torch.autograd.Function):
    """Sum of all ranks' partial results: whole, or this rank's shard of the sequence."""

    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, x: Tensor) -> Tensor:
        ctx.axis = axis
        if axis.sequence_parallel:
            return axis.reduce_scatter(x).wait()
        return axis.all_reduce(x.contiguous().clone()).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        axis: TensorAxis = ctx.axis
        return None, axis.all_gather(grads[0]).wait() if axis.sequence_parallel else grads[0]


class _EnterTensorParallelRegion(torch.autograd.Function):
    """Hidden state of the whole sequence, whose gradient is the sum of the ranks': whole, or this rank's shard."""

    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, x: Tensor) -> Tensor:
        ctx.axis = axis
        return axis.all_gather(x).wait() if axis.sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        axis: TensorAxis = ctx.axis
        if axis.sequence_parallel:
            return None, axis.reduce_scatter(grads[0]).wait()
        return None, axis.all_reduce(grads[0].contiguous().clone()).wait()


class _SplitPositions(torch.autograd.Function):
    """This rank's part of the positions of a hidden state that all ranks have; the backward gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, x_BSD: Tensor) -> Tensor:
        ctx.axis = axis
        return x_BSD.unflatten(1, (axis.size, -1))[:, axis.index].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, ctx.axis.all_gather(grads[0]).wait()


class _GatherPositions(torch.autograd.Function):
    """Hidden state of all positions, of which each rank has a part; every rank has the same gradient of it."""

    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, x_BsD: Tensor) -> Tensor:
        ctx.axis = axis
        y_BSD = axis.all_gather(x_BsD).wait()
        return y_BSD.clone() if y_BSD._is_view() else y_BSD  # no view, since the residual is added to it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0].unflatten(1, (ctx.axis.size, -1))[:, ctx.axis.index].contiguous()


def column_parallel_linear(
    axis: TensorAxis | None, weight_grads: WeightGradStore, x: Tensor, *linears: nn.Linear
) -> tuple[Tensor, ...]:
    """Apply column-parallel linear layers to one hidden state: each rank gets the outputs of its weights' rows.

    A of an adapter is one more matrix of that hidden state, which every rank has whole, so that it needs no
    communication of its own; B has rows like the weight's. So have the factors of a low-rank layer.
    """
    adapted = [(index, linear) for index, linear in enumerate(linears) if isinstance(linear, LoraLinear)]
    weights = (*map(first_matrix, linears), *(linear.lora_A.weight for _, linear in adapted))
    biases = (*map(_first_bias, linears), *(None for _ in adapted))
    made: tuple[Tensor, ...]
    if drops := [linear.dropout for _, linear in adapted if linear.dropout is not None]:
        made = _AdaptedLinears.apply(axis, weight_grads, drops, 0, x, len(weights), *weights, *biases)  # type: ignore[assignment]
    else:
        made = _ParallelLinears.apply(axis, weight_grads, x, len(weights), *weights, *biases)  # type: ignore[assignment]
    outputs = list(made[: len(linears)])
    for (index, linear), inner in zip(adapted, made[len(linears) :], strict=True):
        outputs[index] = _add_adapter(weight_grads, outputs[index], inner, linear)
    for index, linear in enumerate(linears):
        if isinstance(linear, LowRankLinear):
            outputs[index] = _multiply_by_b(weight_grads, outputs[index], linear, linear.bias)
    return tuple(outputs)


def _first_bias(linear: nn.Linear) -> Tensor | None:
    """Return the bias that belongs to the matrix which a linear layer multiplies its input by."""
    return None if isinstance(linear, LowRankLinear) else getattr(linear, "inner_bias", linear.bias)


def _multiply_by_b(
    weight_grads: WeightGradStore, inner_BSr: Tensor, linear: LowRankLinear, bias: Tensor | None
) -> Tensor:
    """Return a low-rank layer's output, of A x."""
    return _ParallelLinears.apply(None, weight_grads, inner_BSr, 1, linear.low_rank_B.weight, bias)[0]  # type: ignore[index]


def _add_adapter(weight_grads: WeightGradStore, y: Tensor, inner_BSr: Tensor, linear: LoraLinear) -> Tensor:
    """Return a linear layer's output with that of its adapter, of which `inner_BSr` is A x."""
    change = _ParallelLinears.apply(None, weight_grads, inner_BSr, 1, linear.lora_B.weight, None)[0]  # type: ignore[index]
    return linear.combine(y, change)


def row_parallel_linear(axis: TensorAxis | None, weight_grads: WeightGradStore, x: Tensor, linear: nn.Linear) -> Tensor:
    """Apply a row-parallel linear layer and sum over the ranks; the bias, whole on every rank, is added once, to the
    sum. Partial results of columns of A, of an adapter or a low-rank layer, are multiplied by B before."""
    if isinstance(linear, LoraLinear):
        bias = linear.inner_bias if axis is None else None
        weights = linear.weight, linear.lora_A.weight
        if linear.dropout is None:
            y, inner = _ParallelLinears.apply(None, weight_grads, x, 2, *weights, bias, None)  # type: ignore[misc]
        else:
            first = 0 if axis is None else axis.index * x.shape[-1]
            drops = [linear.dropout]
            y, inner = _AdaptedLinears.apply(None, weight_grads, drops, first, x, 2, *weights, bias, None)  # type: ignore[misc]
        y = _add_adapter(weight_grads, y, inner, linear)
        if axis is None:
            return y
        y = _ReduceFromTensorParallelRegion.apply(axis, y)  # type: ignore[assignment]
        return y if linear.bias is None else y.add_(linear.bias)
    if isinstance(linear, LowRankLinear):
        (inner,) = _ParallelLinears.apply(None, weight_grads, x, 1, linear.low_rank_A.weight, None)  # type: ignore[misc]
        y = _multiply_by_b(weight_grads, inner, linear, linear.bias if axis is None else None)
        if axis is None:
            return y
        y = _ReduceFromTensorParallelRegion.apply(axis, y)  # type: ignore[assignment]
        return y if linear.bias is None else y.add_(linear.bias)
    if axis is None:
        return _ParallelLinears.apply(None, weight_grads, x, 1, linear.weight, linear.bias)[0]  # type: ignore[index]
    if axis.overlap != "none":
        y: Tensor = _OverlappedRowParallelLinear.apply(axis, weight_grads, x, linear.weight)  # type: ignore[assignment]
    else:
        y = _ReduceFromTensorParallelRegion.apply(
            axis, *_ParallelLinears.apply(None, weight_grads, x, 1, linear.weight, None)
        )  # type: ignore[misc]
    return y if linear.bias is None else y.add_(linear.bias)


def vocab_parallel_logits(
    axis: TensorAxis | None, weight_grads: WeightGradStore, x: Tensor, weight_VD: Tensor
) -> Tensor:
    """Return this rank's logits from a hidden state and its rows of the output head."""
    return _ParallelLinears.apply(axis, weight_grads, x, 1, weight_VD, None)[0]  # type: ignore[index]


def vocab_parallel_embedding(axis: TensorAxis, vocab_start: int, tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
    """Embed tokens where each rank has the rows of the vocabulary entries from `vocab_start` on."""
    row_BS, is_local_BS = local_rows(tokens_BS, vocab_start, len(weight_VD))
    x_BSD = F.embedding(row_BS, weight_VD) * is_local_BS.unsqueeze(-1)
    return _ReduceFromTensorParallelRegion.apply(axis, x_BSD)  # type: ignore[return-value]


def enter_latents_parallel(axis: TensorAxis, *latents_BSL: Tensor) -> tuple[Tensor, ...]:
    """Return latent vectors of the whole sequence, of which each rank makes its heads; one collective for all of them.

    Ranks have made them alike or, under sequence parallelism, each those of its positions, which are fewer bytes than
    the hidden state.
    """
    joined: Tensor = _EnterTensorParallelRegion.apply(axis, torch.cat(latents_BSL, -1))  # type: ignore[assignment]
    return joined.split([x.shape[-1] for x in latents_BSL], -1)


# ----------------------------------------------------------------------------------------------------------------------
# The loss, without gathering the logits


class _VocabParallelLoss(torch.autograd.Function):
    """Saves the gradient of the logits, which the backward scales; see `muster.model.loss` and
    `muster.parallel.vocab_loss`."""

    @staticmethod
    def forward(
        ctx: Any,
        axis: TensorAxis,
        vocab_start: int,
        logits_NV: Tensor,
        labels_N: Tensor,
        z_loss_coefficient: float,
        softcap: float | None,
    ) -> LossSums:
        dtype = logits_NV.dtype
        if softcap is not None:
            logits_NV = soft_cap_(logits_NV.to(accumulation_dtype(dtype), copy=True), softcap)
        row_N, is_local_N = local_rows(labels_N, vocab_start, logits_NV.shape[1])
        max_N = logits_NV.amax(1).to(accumulation_dtype(logits_NV.dtype))
        max_N = axis.all_reduce(max_N, dist.ReduceOp.MAX).wait()
        exp_NV, sum_N, label_N = exp_and_sums(logits_NV, max_N, row_N, is_local_N)
        sum_N, label_N = axis.all_reduce(torch.stack((sum_N, label_N))).wait()
        whole = whole_vocab_loss(max_N, sum_N, label_N, labels_N, z_loss_coefficient, shift_N=max_N)
        grad_NV = softmax_gradient_(exp_NV, whole.factor_N, row_N, is_local_N.to(exp_NV.dtype))
        if softcap is not None:
            grad_NV *= soft_cap_slope_(logits_NV, softcap)
        del logits_NV  # a capped copy is as large as the gradient
        ctx.save_for_backward(grad_NV.mul_(whole.valid_N.unsqueeze(1)).to(dtype))
        ctx.mark_non_differentiable(whole.losses.cross_entropy, whole.losses.z_loss)
        return whole.losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, None, None, None]:
        (grad_NV,) = ctx.saved_tensors
        return None, None, grad_NV.mul_(grads[0]), None, None, None


def vocab_parallel_loss(
    axis: TensorAxis,
    vocab_start: int,
    logits_BSV: Tensor,
    labels_BS: Tensor,
    z_loss_coefficient: float = 0.0,
    softcap: float | None = None,
) -> LossSums:
    """Return the sums of `muster.model.loss.loss_sums` where each rank has the logits of the vocabulary entries from
    `vocab_start` on."""
    logits_NV = logits_BSV.flatten(0, 1)
    losses = _VocabParallelLoss.apply(axis, vocab_start, logits_NV, labels_BS.flatten(), z_loss_coefficient, softcap)
    return LossSums(*losses)  # type: ignore[misc]


# ----------------------------------------------------------------------------------------------------------------------
# Around a decoder


def apply_parallel_linears(
    module: Decoder, axis: TensorAxis | None, weight_grads: WeightGradStore, routes_own_tokens: bool = False
) -> None:
    """Replace a decoder's linear layers by ones whose weight gradients can be deferred, with collectives if there is an
    axis; its parameters already have this rank's shapes. With `routes_own_tokens` each rank sends a part of the
    positions to the experts, which are whole."""
    linears = dict.fromkeys(PROJECT_IN, partial(column_parallel_linear, axis, weight_grads))
    linears |= dict.fromkeys(PROJECT_OUT, partial(row_parallel_linear, axis, weight_grads))
    if module.is_ladder and axis is not None:  # whose own steps sum over the ranks
        ladder = ParallelLadder(axis)
        linears = dict.fromkeys(PROJECT_IN, partial(column_parallel_linear, None, weight_grads))
        linears |= dict.fromkeys(PROJECT_OUT, partial(ladder.row_parallel_linear, weight_grads))
        for part in module.modules():
            if isinstance(part, Decoder | LadderLayer):
                part.ladder = ladder
    if module.has_streams:
        linears = dict.fromkeys(PROJECT_IN, partial(sublayer_linears, weight_grads))
        linears |= dict.fromkeys(PROJECT_OUT, partial(sublayer_linear, weight_grads))
        module.join_streams = partial(row_parallel_linear, axis, weight_grads)  # type: ignore[assignment]
        if axis is not None:
            module.sublayers //= axis.size
            for part in module.modules():
                if isinstance(part, Decoder | KrakenLayer):
                    part.streams = ParallelStreams(axis)
    for part in module.modules():
        for name, linear in linears.items():
            if hasattr(part, name):
                setattr(part, name, linear)
        if isinstance(part, Attention) and axis is not None:
            part.first_head = axis.index * part.num_local_heads
        if isinstance(part, Experts):
            part.grouped_linears = partial(grouped_linears, weight_grad=weight_grads.compute_or_defer_grouped)  # type: ignore[method-assign]
        if isinstance(part, LatentAttention) and axis is not None:
            part.enter_latents = partial(enter_latents_parallel, axis)  # type: ignore[method-assign]
        if isinstance(part, MoeMlp | LinearAttention | LatentAttention | MtpLayer):
            part.local_linears = partial(column_parallel_linear, None, weight_grads)  # type: ignore[method-assign]
        if isinstance(part, MoeMlp) and axis is not None:
            _set_ends_of_experts(part, axis, routes_own_tokens)
    if axis is not None and routes_own_tokens:
        sum_before = module.router_state.sum_counts
        module.router_state.sum_counts = lambda counts_BE: axis.all_reduce(sum_before(counts_BE)).wait()
    module.project_logits = partial(vocab_parallel_logits, axis, weight_grads)  # type: ignore[assignment]
    if axis is not None and axis.has_slices:
        assert axis.turns is not None, "slices take turns"
        module.run_layers = DominoLayers(axis.turns)  # type: ignore[assignment]


def _set_ends_of_experts(part: MoeMlp, axis: TensorAxis, routes_own_tokens: bool) -> None:
    """Let the hidden state enter and leave a layer's experts as it does an MLP; or, where each rank routes its own
    tokens, shared experts alone: under sequence parallelism it lies in parts already, else it is cut and gathered."""
    enter = partial(_EnterTensorParallelRegion.apply, axis)
    leave = partial(_ReduceFromTensorParallelRegion.apply, axis)
    if not routes_own_tokens:
        part.enter, part.leave = enter, leave  # type: ignore[method-assign]
        return
    part.shared_ends = enter, leave  # type: ignore[assignment]
    if not axis.sequence_parallel:
        part.enter = partial(_SplitPositions.apply, axis)  # type: ignore[method-assign]
        part.leave = partial(_GatherPositions.apply, axis)  # type: ignore[method-assign]


def apply_vocab_parallel_embedding(module: Decoder, axis: TensorAxis, vocab_start: int, seq_len: int) -> None:
    """Let a decoder embed tokens where each rank has the rows of the vocabulary entries from `vocab_start` on."""
    module.position_state.seq_len = seq_len
    module.position_state.sequence_shard = axis.index if axis.sequence_parallel else 0
    module.embed_tokens = partial(vocab_parallel_embedding, axis, vocab_start)  # type: ignore[assignment]


# ----------------------------------------------------------------------------------------------------------------------
# Gradients of replicated parameters


def all_reduce_replicated_grads(
    axis: TensorAxis, parameters: Mapping[str, Tensor], replicas: Mapping[str, int], device: torch.device
) -> PendingTensor | None:
    """Start to replace the gradient of each named parameter by the sum over the ranks that hold the same copy; None
    without any. `device`: that of the ranks, on which gradients in host memory are summed, too.

    `replicas` maps a name to the number of neighbouring ranks with the same copy. One all-reduce serves all parameters
    and groups: each group of ranks sums in a slot of its own. With 4 ranks and a parameter that 2 hold, ranks 0 and 1
    add in slot 0, ranks 2 and 3 in slot 1.
    """
    gradients = [(parameters[name].grad, count) for name, count in replicas.items()]
    held = [(gradient, count) for gradient, count in gradients if gradient is not None and gradient.numel()]
    if not held:
        return None
    sizes = [gradient.numel() * (axis.size // count) for gradient, count in held]
    buffer = torch.zeros(sum(sizes), dtype=held[0][0].dtype, device=device)
    slots = [
        slot.view(axis.size // count, -1)[axis.index // count]
        for slot, (_, count) in zip(buffer.split(sizes), held, strict=True)
    ]
    for slot, (gradient, _) in zip(slots, held, strict=True):
        slot.copy_(gradient.flatten())

    summing = axis.all_reduce(buffer)

    def copy_back() -> Tensor:
        summing.wait()
        for slot, (gradient, _) in zip(slots, held, strict=True):
            gradient.copy_(slot.view_as(gradient))
        return buffer

    return PendingTensor(summing.works, copy_back)  # by its works it is seen to be over, without waiting
