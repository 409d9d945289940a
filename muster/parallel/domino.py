"""Domino: two slices of a micro-batch's sequences take turns in a stage's layers, so that the tensor-parallel
collectives of one travel beside the other's compute (arXiv:2409.15241 §3.2).

Sequences meet nowhere in a layer, so that each slice is a pass of its own, with a graph of its own. A slice hands over
where it would wait for a collective (`TensorAxis.turns`), in the forward, in the backward and in what the backward
recomputes. A layer's parameters are gathered for both: the leading slice gathers those that aren't there yet, the
trailing one, which is always behind, calls the layer as a module, so that `fully_shard` drops or reduces after it.

Suffixes: B sequences, S positions, D hidden width.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from muster.layout.batch_slices import batch_slices
from muster.model.decoder import Layer, run_layers
from muster.model.documents import Documents
from muster.model.dropout import LayerDropout
from muster.parallel.turns import Turns

Constants = Sequence[tuple[Any, ...]]
"""Arguments of each layer's forward beside hidden states."""


class DominoLayers:
    """`run_layers` in two slices of the sequences; a single sequence passes whole."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __call__(self, layers: Sequence[Layer], x_BSD: Tensor, constants: Sequence[tuple[Any, ...]]) -> Tensor:
        if len(x_BSD) == 1:
            return run_layers(layers, x_BSD, constants)
        anchor = torch.empty(0, requires_grad=True)  # lets the graph have a node where hidden states need no gradient
        trains = torch.is_grad_enabled()
        return _TwoSlices.apply(self._turns, layers, list(constants), trains, x_BSD, anchor)  # type: ignore[return-value]


class _TwoSlices(torch.autograd.Function):
    """Layers of two slices in turns. The backward runs the backwards of both graphs in turns, and adds to the
    gradients of parameters as it goes."""

    @staticmethod
    def forward(
        ctx: Any, turns: Turns, layers: Sequence[Layer], constants: Constants, trains: bool, x_BSD: Tensor, _: Tensor
    ) -> Tensor:
        ctx.turns, ctx.rows = turns, [slice(own.start, own.stop) for own in batch_slices(len(x_BSD))]
        ctx.inputs = [x_BSD[rows].detach().requires_grad_(ctx.needs_input_grad[4]) for rows in ctx.rows]

        def run(index: int, enter: Callable[[Layer, Tensor, tuple[Any, ...]], Tensor]) -> Tensor:
            rows, y_BSD = ctx.rows[index], ctx.inputs[index]
            with torch.set_grad_enabled(trains):
                for layer, shared in zip(layers, _of_sequences(constants, rows, len(x_BSD)), strict=True):
                    y_BSD = enter(layer, y_BSD, shared)
            return y_BSD

        made = turns.run(lambda: run(0, _lead), lambda: run(1, _follow))
        ctx.ends = [get_gradient_edge(y_BSD) if y_BSD.requires_grad else None for y_BSD in made]
        joined_BSD = torch.cat([y_BSD.detach() for y_BSD in made])
        if ctx.ends[0] is None:
            ctx.mark_non_differentiable(joined_BSD)
        return joined_BSD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None, Tensor | None, None]:
        ends: list[GradientEdge] = ctx.ends

        def run(index: int) -> None:
            # Devices share one thread of autograd, which would wait for itself: each backward stays in its own.
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(ends[index], grads[0][ctx.rows[index]])

        ctx.turns.run(lambda: run(0), lambda: run(1))
        ctx.ends = None
        gradients = [x_BSD.grad for x_BSD in ctx.inputs]
        grad_BSD = None if gradients[0] is None else torch.cat(gradients)  # type: ignore[arg-type]
        return None, None, None, None, grad_BSD, None


def _lead(layer: Layer, x_BSD: Tensor, shared: tuple[Any, ...]) -> Tensor:
    """Run a layer of the leading slice, whose parameters it gathers, in the backward too."""
    if not isinstance(layer, FSDPModule):
        return layer(x_BSD, *shared)
    layer.unshard()
    y_BSD: Tensor = layer.forward(x_BSD, *shared)  # type: ignore[attr-defined]
    if y_BSD.requires_grad:
        y_BSD.register_hook(lambda _: layer.unshard())
    return y_BSD


def _follow(layer: Layer, x_BSD: Tensor, shared: tuple[Any, ...]) -> Tensor:
    return layer(x_BSD, *shared)


def _of_sequences(constants: Constants, rows: slice, count: int) -> Constants:
    """Return the layers' constants for some of `count` sequences, each one once."""
    made: dict[int, Any] = {}

    def part(one: Any) -> Any:
        if id(one) not in made:
            made[id(one)] = _part_of(one, rows, count)
        return made[id(one)]

    return [tuple(map(part, shared)) for shared in constants]


def _part_of(one: Any, rows: slice, count: int) -> Any:
    if isinstance(one, Documents):
        return one.of_sequences(rows)
    if isinstance(one, LayerDropout):
        return replace(one, keys_B=one.keys_B[rows])
    has_sequences = isinstance(one, Tensor) and one.ndim == 4 and len(one) == count  # angles in documents
    return one[rows] if has_sequences else one
