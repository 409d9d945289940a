"""Tensor-parallel linear layers as operators, which `torch.compile` keeps whole within the graph of a block.

The functions of `tensor_parallel.py` start collectives and compute while these are under way, which a compiler can't
follow: it would end its graph at each of them. Here the same work, in the same order, is one operator that the graph
calls (a custom operator of `torch.library`), and another one its derivative. What lies between two of them is compiled
as one piece. A backward that is split isn't compiled, so that weight gradients are always computed at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.library import Library, infer_schema, register_autograd, register_fake

from muster.model.norms import RmsNorm
from muster.parallel.axis import TensorAxis
from muster.parallel.projection_norms import (
    normalize_sharded_projections,
    projection_norms_backward,
    projection_norms_forward,
)
from muster.parallel.tensor_parallel import (
    column_parallel_linear,
    linears_backward,
    linears_forward,
    overlapped_row_backward,
    overlapped_row_forward,
    row_parallel_linear,
)
from muster.parallel.turns import Turns

_LIBRARY = Library("muster", "FRAGMENT")
AxisArguments = tuple[str, int, int, bool, str]
"""An axis as arguments of an operator: name of its group, size, index, sequence parallelism, overlap."""


_TURNS: dict[str, Turns] = {}
"""Turns of the slices of a group's ranks, by the group's name, since an operator takes none."""

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
"""Functions of the operators, by name."""


def _operator(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as an operator. `torch.library.custom_op` would also check, in every call, that results are
    fresh memory, which takes longer than launching the work itself."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(f"{name}{infer_schema(function, mutates_args=())}")
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        IMPLEMENTATIONS[name] = function
        return getattr(torch.ops.muster, name).default

    return register


def traceable_seam(seam: Any) -> Callable[..., Any] | None:
    """Return what a compiler can follow in place of a function that tensor parallelism has put around plain modules;
    None for any other function."""
    if not isinstance(seam, partial) or not seam.args or not isinstance(axis := seam.args[0], TensorAxis):
        return None
    names = axis.group.group_name, axis.size, axis.index, axis.sequence_parallel, axis.overlap
    if axis.turns is not None:
        _TURNS[axis.group.group_name] = axis.turns
    if seam.func is column_parallel_linear:
        return partial(_column_parallel_linear, names)
    if seam.func is row_parallel_linear:
        return partial(_row_parallel_linear, names)
    if seam.func is normalize_sharded_projections:
        return partial(_normalize_sharded_projections, names, *seam.args[1:])
    return None


def _axis(*names: Any) -> TensorAxis:
    return TensorAxis(_resolve_process_group(names[0]), *names[1:], turns=_TURNS.get(names[0]))


def _positions(x: Tensor, names: tuple[Any, ...]) -> list[int]:
    """Return the shape of the whole sequences of which `x` (B, S or a shard of it, D) has some positions, without D."""
    return [x.shape[0], x.shape[1] * names[1] if names[3] else x.shape[1]]


# ----------------------------------------------------------------------------------------------------------------------
# Column-parallel linear layers


def _column_parallel_linear(names: AxisArguments, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    weights, biases = [one.weight for one in linears], [one.bias for one in linears if one.bias is not None]
    has_bias = [one.bias is not None for one in linears]
    return tuple(_column(x, weights, biases, has_bias, *names))


@_operator("column_parallel_linear")
def _column(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    group: str,
    size: int,
    index: int,
    sequence_parallel: bool,
    overlap: str,
) -> list[Tensor]:
    left = iter(biases)
    axis = _axis(group, size, index, sequence_parallel, overlap)
    return list(linears_forward(axis, x, weights, [next(left) if one else None for one in has_bias]))


@register_fake("muster::column_parallel_linear", lib=_LIBRARY)
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor], has_bias: list[bool], *names: Any) -> list[Tensor]:
    return [x.new_empty(*_positions(x, names), len(weight)) for weight in weights]


@_operator("column_parallel_linear_backward")
def _column_backward(
    x: Tensor,
    weights: list[Tensor],
    grads: list[Tensor],
    trains_weight: list[bool],
    trains_bias: list[bool],
    group: str,
    size: int,
    index: int,
    sequence_parallel: bool,
    overlap: str,
) -> list[Tensor]:
    """Return the gradients of the hidden state, of the weights and of the biases that are trained."""

    def param_grads(index: int, x_NI: Tensor, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        grad_weight = grad_NO.t() @ x_NI if trains_weight[index] else None
        return grad_weight, grad_NO.sum(0) if trains_bias[index] else None

    axis = _axis(group, size, index, sequence_parallel, overlap)
    grad_x, made = linears_backward(axis, x, weights, grads, param_grads)
    return [grad_x, *(one for kind in zip(*made, strict=True) for one in kind if one is not None)]


@register_fake("muster::column_parallel_linear_backward", lib=_LIBRARY)
def _(
    x: Tensor,
    weights: list[Tensor],
    grads: list[Tensor],
    trains_weight: list[bool],
    trains_bias: list[bool],
    *names: Any,
) -> list[Tensor]:
    of_weights = [torch.empty_like(weight) for weight, trains in zip(weights, trains_weight, strict=True) if trains]
    of_biases = [x.new_empty(len(weight)) for weight, trains in zip(weights, trains_bias, strict=True) if trains]
    return [x.new_empty(x.shape), *of_weights, *of_biases]


def _set_up_column(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weights, biases, has_bias, *ctx.names = inputs
    left = iter(biases)
    ctx.num_biases = len(biases)
    ctx.trains_weight = [one.requires_grad for one in weights]
    ctx.trains_bias = [one and next(left).requires_grad for one in has_bias]
    ctx.has_bias = has_bias
    ctx.save_for_backward(x, *weights)


def _differentiate_column(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    made = _column_backward(x, weights, grads, ctx.trains_weight, ctx.trains_bias, *ctx.names)
    left = iter(made[1:])
    of_weights = [next(left) if trains else None for trains in ctx.trains_weight]
    of_biases = [
        next(left) if trains else None for trains, has in zip(ctx.trains_bias, ctx.has_bias, strict=True) if has
    ]
    return made[0], of_weights, of_biases, None, None, None, None, None, None


register_autograd("muster::column_parallel_linear", _differentiate_column, setup_context=_set_up_column, lib=_LIBRARY)

# ----------------------------------------------------------------------------------------------------------------------
# Row-parallel linear layers


def _row_parallel_linear(names: AxisArguments, x: Tensor, linear: nn.Linear) -> Tensor:
    y = _row(x, linear.weight, *names)
    return y if linear.bias is None else y.add_(linear.bias)


@_operator("row_parallel_linear")
def _row(x: Tensor, weight: Tensor, group: str, size: int, index: int, sequence_parallel: bool, overlap: str) -> Tensor:
    axis = _axis(group, size, index, sequence_parallel, overlap)
    if overlap != "none":
        return overlapped_row_forward(axis, x, weight)
    (y,) = linears_forward(None, x, [weight], [None])
    return (axis.reduce_scatter(y) if sequence_parallel else axis.all_reduce(y)).wait()


@register_fake("muster::row_parallel_linear", lib=_LIBRARY)
def _(x: Tensor, weight: Tensor, *names: Any) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // (names[1] if names[3] else 1), len(weight))


@_operator("row_parallel_linear_backward")
def _row_backward(
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    trains: bool,
    group: str,
    size: int,
    index: int,
    sequence_parallel: bool,
    overlap: str,
) -> list[Tensor]:
    """Return the gradients of the input and, where it is trained, of the weight."""
    axis = _axis(group, size, index, sequence_parallel, overlap)
    if overlap != "none":
        grad_x, grad = overlapped_row_backward(axis, x, weight, grad)
    else:
        grad = axis.all_gather(grad).wait() if sequence_parallel else grad
        grad_x = grad @ weight
    return [grad_x, *([grad.flatten(0, -2).t() @ x.flatten(0, -2)] if trains else [])]


@register_fake("muster::row_parallel_linear_backward", lib=_LIBRARY)
def _(x: Tensor, weight: Tensor, grad: Tensor, trains: bool, *names: Any) -> list[Tensor]:
    return [x.new_empty(x.shape), *([torch.empty_like(weight)] if trains else [])]


def _set_up_row(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, *ctx.names = inputs
    ctx.trains = weight.requires_grad
    ctx.save_for_backward(x, weight)


def _differentiate_row(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    made = _row_backward(*ctx.saved_tensors, grad, ctx.trains, *ctx.names)
    return made[0], made[1] if ctx.trains else None, None, None, None, None, None


register_autograd("muster::row_parallel_linear", _differentiate_row, setup_context=_set_up_row, lib=_LIBRARY)

# ----------------------------------------------------------------------------------------------------------------------
# Norms over all heads


def _normalize_sharded_projections(
    names: AxisArguments,
    widths: tuple[int, int],
    kv_copies: int,
    q: Tensor,
    k: Tensor,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
) -> tuple[Tensor, Tensor]:
    normed_q, normed_k, *_ = _norms(q, k, q_norm.weight, k_norm.weight, list(widths), kv_copies, q_norm.eps, *names)
    return normed_q, normed_k


@_operator("projection_norms")
def _norms(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    widths: list[int],
    kv_copies: int,
    eps: float,
    group: str,
    size: int,
    index: int,
    sequence_parallel: bool,
    overlap: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    axis = _axis(group, size, index, sequence_parallel, overlap)
    q, k, *scales = projection_norms_forward(axis, widths, kv_copies, eps, q, k, q_weight, k_weight)
    return q, k, scales[0], scales[1]


@register_fake("muster::projection_norms", lib=_LIBRARY)
def _(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q_scale, k_scale = (
        x.new_empty(*x.shape[:-1], 1, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (q, k)
    )
    return q.new_empty(q.shape), k.new_empty(k.shape), q_scale, k_scale


@_operator("projection_norms_backward")
def _norms_backward(
    grads: list[Tensor],
    saved: list[Tensor],
    widths: list[int],
    kv_copies: int,
    group: str,
    size: int,
    index: int,
    sequence_parallel: bool,
    overlap: str,
) -> list[Tensor]:
    axis = _axis(group, size, index, sequence_parallel, overlap)
    return list(projection_norms_backward(axis, widths, kv_copies, grads, saved))


@register_fake("muster::projection_norms_backward", lib=_LIBRARY)
def _(grads: list[Tensor], saved: list[Tensor], *rest: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in saved[:4]]


def _set_up_norms(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, q_weight, k_weight, ctx.widths, ctx.kv_copies, _, *ctx.names = inputs
    ctx.save_for_backward(q, k, q_weight, k_weight, *output[2:])


def _differentiate_norms(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    made = _norms_backward(list(grads[:2]), list(ctx.saved_tensors), ctx.widths, ctx.kv_copies, *ctx.names)
    return (*made, *[None] * 8)


register_autograd("muster::projection_norms", _differentiate_norms, setup_context=_set_up_norms, lib=_LIBRARY)
