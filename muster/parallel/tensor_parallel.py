"""Tensor parallelism: a layer's weights cut over neighbouring ranks, with collectives around plain modules.

Each column-parallel weight (q, k, v, gate, up, head) holds some rows, each row-parallel one (o, down) some columns, the
embedding some words; a bias goes with its rows, and is whole where columns are cut. Two places communicate: where the
hidden state enters a column-parallel product, and where the partial sums of a row-parallel one leave. With sequence
parallelism the hidden state between them is cut along the sequence, and the two places gather and scatter it instead
(Megatron-LM, arXiv:1909.08053 §3, arXiv:2205.05198 §4.2.2).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from muster.model.decoder import Decoder
from muster.model.kernels import accumulation_dtype
from muster.model.loss import LossSums, softmax_gradient_
from muster.model.plugin_layer import PROJECT_IN, PROJECT_OUT
from muster.parallel.axis import PendingTensor, TensorAxis
from muster.parallel.vocab_loss import exp_and_sums, local_rows, whole_vocab_loss
from muster.parallel.weight_grad_store import WeightGradStore

# ----------------------------------------------------------------------------------------------------------------------
# The two places


class _ParallelLinears(torch.autograd.Function):
    """Several products of one hidden state with weights, plus biases: column-parallel ones if there is an axis.

    `count` weights come first, then their biases, None where there is none. In the backward the gradient of the hidden
    state travels while the weights' and biases' gradients are computed, or kept for later.
    """

    @staticmethod
    def forward(
        ctx: Any, axis: TensorAxis | None, work: WeightGradStore, x: Tensor, count: int, *parameters: Any
    ) -> tuple[Tensor, ...]:
        # The weights themselves: hooks on saved tensors (recompute has some) would give back copies, and a gradient
        # that waits would be added to a copy's.
        ctx.axis, ctx.work, ctx.weights, ctx.biases = axis, work, parameters[:count], parameters[count:]
        ctx.save_for_backward(x)
        if axis and axis.async_tp:
            return _ring_linears(axis, x, ctx.weights, ctx.biases)
        whole = axis.all_gather(x).wait() if axis and axis.sequence_parallel else x
        return tuple(_linear(whole, weight, bias) for weight, bias in zip(ctx.weights, ctx.biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis: TensorAxis | None = ctx.axis
        (x,), weights = ctx.saved_tensors, ctx.weights
        gathering = axis.all_gather(x) if axis and axis.sequence_parallel else None
        grad_x = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_x += grad @ weight
        summing = PendingTensor([], lambda: grad_x)
        if axis is not None:
            summing = axis.reduce_scatter(grad_x) if axis.sequence_parallel else axis.all_reduce(grad_x)
        whole_NI = (gathering.wait() if gathering else x).flatten(0, -2)
        found = [
            ctx.work.compute_or_defer(weight, bias, whole_NI, grad.flatten(0, -2))
            for weight, bias, grad in zip(weights, ctx.biases, grads, strict=True)
        ]
        return None, None, summing.wait(), None, *(weight for weight, _ in found), *(bias for _, bias in found)


def _linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """A product that is no view, as `F.linear` with a bias gives: what adds to the residual is added to in place."""
    if bias_O is None:
        return F.linear(x, weight_OI)
    product = x.new_empty(*x.shape[:-1], len(weight_OI))
    torch.addmm(bias_O, x.flatten(0, -2), weight_OI.t(), out=product.flatten(0, -2))
    return product


def _ring_linears(
    axis: TensorAxis, x_BsD: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The products of the whole sequence, of which this rank has a part, each part multiplied as it comes."""
    size = x_BsD.shape[1]
    products = tuple(x_BsD.new_empty(len(x_BsD), axis.size * size, len(weight)) for weight in weights)
    for whose, part_BsD in axis.ring_all_gather(x_BsD):
        for product, weight, bias in zip(products, weights, biases, strict=True):
            _linear_of_part(product, whose, part_BsD, weight.t(), bias)
    return products


def _linear_of_part(
    product_BSO: Tensor, whose: int, part_BsD: Tensor, weight_DO: Tensor, bias_O: Tensor | None = None
) -> None:
    """Sets the positions of rank `whose` in the product; each sequence's lie together, so that nothing is copied."""
    first, end = whose * part_BsD.shape[1], (whose + 1) * part_BsD.shape[1]
    for product_SO, part_sD in zip(product_BSO, part_BsD, strict=True):
        if bias_O is None:
            torch.mm(part_sD, weight_DO, out=product_SO[first:end])
        else:
            torch.addmm(bias_O, part_sD, weight_DO, out=product_SO[first:end])


class _RingRowParallelLinear(torch.autograd.Function):
    """The product with a row-parallel weight, summed over the ranks and scattered, part by part: a partial sum travels
    while the next part is multiplied. So do, in the backward, the parts of the gradient."""

    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, work: WeightGradStore, x: Tensor, weight: Tensor) -> Tensor:
        ctx.axis, ctx.work, ctx.weight = axis, work, weight  # as in `_Products`
        ctx.save_for_backward(x)
        parts = x.unflatten(1, (axis.size, -1))
        return axis.ring_reduce_scatter(lambda rank: F.linear(parts[:, rank], weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis, (grad_BsD,), (x,), weight = ctx.axis, grads, ctx.saved_tensors, ctx.weight
        size = grad_BsD.shape[1]
        whole, grad_x = grad_BsD.new_empty(len(x), axis.size * size, grad_BsD.shape[2]), x.new_empty(x.shape)
        for whose, part in axis.ring_all_gather(grad_BsD):
            whole.narrow(1, whose * size, size).copy_(part)
            _linear_of_part(grad_x, whose, part, weight)
        return None, None, grad_x, ctx.work.compute_or_defer(weight, None, x.flatten(0, -2), whole.flatten(0, -2))[0]


class _ReduceFromTensorParallelRegion(torch.autograd.Function):
    """The sum of all ranks' partial results: whole, or this rank's part of the sequence."""

    @staticmethod
    def forward(ctx: Any, axis: TensorAxis, x: Tensor) -> Tensor:
        ctx.axis = axis
        return (
            axis.reduce_scatter(x).wait() if axis.sequence_parallel else axis.all_reduce(x.contiguous().clone()).wait()
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        axis: TensorAxis = ctx.axis
        return None, axis.all_gather(grads[0]).wait() if axis.sequence_parallel else grads[0]


def column_parallel_linear(
    axis: TensorAxis | None, weight_grads: WeightGradStore, x: Tensor, *linears: nn.Linear
) -> tuple[Tensor, ...]:
    """The products of a hidden state with column-parallel layers: each rank gets the columns of its weights."""
    parameters = (*(linear.weight for linear in linears), *(linear.bias for linear in linears))
    return _ParallelLinears.apply(axis, weight_grads, x, len(linears), *parameters)  # type: ignore[return-value]


def row_parallel_linear(axis: TensorAxis | None, weight_grads: WeightGradStore, x: Tensor, linear: nn.Linear) -> Tensor:
    """The product with a row-parallel layer, summed over the ranks. The bias, of which every rank has all, is added
    once, to the sum."""
    if axis is None:
        return _ParallelLinears.apply(None, weight_grads, x, 1, linear.weight, linear.bias)[0]  # type: ignore[index]
    if axis.async_tp:
        y: Tensor = _RingRowParallelLinear.apply(axis, weight_grads, x, linear.weight)  # type: ignore[assignment]
    else:
        y = _ReduceFromTensorParallelRegion.apply(
            axis, *_ParallelLinears.apply(None, weight_grads, x, 1, linear.weight, None)
        )  # type: ignore[misc]
    return y if linear.bias is None else y.add_(linear.bias)


def vocab_parallel_logits(
    axis: TensorAxis | None, weight_grads: WeightGradStore, x: Tensor, weight_VD: Tensor
) -> Tensor:
    """The product with a column-parallel weight."""
    return _ParallelLinears.apply(axis, weight_grads, x, 1, weight_VD, None)[0]  # type: ignore[index]


def vocab_parallel_embedding(axis: TensorAxis, vocab_start: int, tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
    """Word vectors, where each rank knows the words from `first_row` on."""
    row_BS = tokens_BS - vocab_start
    mine_BS = (row_BS >= 0) & (row_BS < len(weight_VD))
    x_BSD = F.embedding(row_BS.where(mine_BS, 0), weight_VD) * mine_BS.unsqueeze(-1)
    return _ReduceFromTensorParallelRegion.apply(axis, x_BSD)  # type: ignore[return-value]


# ----------------------------------------------------------------------------------------------------------------------
# The loss, without gathering the logits


class _VocabParallelLoss(torch.autograd.Function):
    """Saves the gradient of the logits, scaled in the backward; see `muster.model.loss`."""

    @staticmethod
    def forward(
        ctx: Any, axis: TensorAxis, vocab_start: int, logits_NV: Tensor, labels_N: Tensor, z_loss_coefficient: float
    ) -> LossSums:
        x_NV = logits_NV.to(accumulation_dtype(logits_NV.dtype))
        row_N, is_local_N = local_rows(labels_N, vocab_start, x_NV.shape[1])
        max_N = axis.all_reduce(x_NV.amax(1), dist.ReduceOp.MAX).wait()
        exp_NV, sum_N, label_N = exp_and_sums(x_NV, max_N, row_N, is_local_N)
        sum_N, label_N = axis.all_reduce(torch.stack((sum_N, label_N))).wait()
        whole = whole_vocab_loss(max_N, sum_N, label_N, labels_N, z_loss_coefficient)
        grad_NV = softmax_gradient_(exp_NV, whole.factor_N, row_N, is_local_N.to(exp_NV.dtype))
        ctx.save_for_backward(grad_NV.mul_(whole.valid_N.unsqueeze(1)).to(logits_NV.dtype))
        ctx.mark_non_differentiable(whole.losses.cross_entropy, whole.losses.z_loss)
        return whole.losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, None, None]:
        (grad_NV,) = ctx.saved_tensors
        return None, None, grad_NV.mul_(grads[0]), None, None


def vocab_parallel_loss(
    axis: TensorAxis, vocab_start: int, logits_BSV: Tensor, labels_BS: Tensor, z_coefficient: float = 0.0
) -> LossSums:
    """As `muster.model.loss.loss_sums`, of logits of which each rank has the words from `first_row` on."""
    logits_NV, labels_N = logits_BSV.flatten(0, 1), labels_BS.flatten()
    return LossSums(*_VocabParallelLoss.apply(axis, vocab_start, logits_NV, labels_N, z_coefficient))  # type: ignore[misc]


# ----------------------------------------------------------------------------------------------------------------------
# Around a decoder


def apply_parallel_linears(module: Decoder, axis: TensorAxis | None, weight_grads: WeightGradStore) -> None:
    """Gives a decoder products whose weight gradients can wait, with collectives around them if there is an axis;
    its parameters already have this rank's shapes."""
    linears = dict.fromkeys(PROJECT_IN, partial(column_parallel_linear, axis, weight_grads))
    linears |= dict.fromkeys(PROJECT_OUT, partial(row_parallel_linear, axis, weight_grads))
    for part in module.modules():
        for name, linear in linears.items():
            if hasattr(part, name):
                setattr(part, name, linear)
    module.project_logits = partial(vocab_parallel_logits, axis, weight_grads)  # type: ignore[assignment]


def apply_vocab_parallel_embedding(module: Decoder, axis: TensorAxis, vocab_start: int, seq_len: int) -> None:
    """Lets a decoder look up words of which each rank knows those from `first_row` on."""
    module.position_state.seq_len, module.position_state.sequence_shard = (
        seq_len,
        axis.index if axis.sequence_parallel else 0,
    )
    module.embed_tokens = partial(vocab_parallel_embedding, axis, vocab_start)  # type: ignore[assignment]


# ----------------------------------------------------------------------------------------------------------------------
# Copies


def all_reduce_replicated_grads(
    axis: TensorAxis, parameters: Mapping[str, Tensor], replicas: Mapping[str, int]
) -> None:
    """Replaces the gradient of each named parameter by the sum over the ranks that hold the same copy.

    One all-reduce for all: every group of ranks adds at a place of its own.
    """
    gradients = [(parameters[name].grad, count) for name, count in replicas.items()]
    held = [(gradient, count) for gradient, count in gradients if gradient is not None and gradient.numel()]
    if not held:
        return
    sizes = [gradient.numel() * (axis.size // count) for gradient, count in held]
    places = held[0][0].new_zeros(sum(sizes)).split(sizes)
    own = [
        place.view(axis.size // count, -1)[axis.index // count] for place, (_, count) in zip(places, held, strict=True)
    ]
    for part, (gradient, _) in zip(own, held, strict=True):
        part.copy_(gradient.flatten())
    whole = own[0]._base
    assert whole is not None
    axis.all_reduce(whole).wait()
    for part, (gradient, _) in zip(own, held, strict=True):
        gradient.copy_(part.view_as(gradient))
