"""Tiles: the positions of a micro-batch pass the MLP, or head and loss, one part after another.

What such a part computes lives until the next one begins; the backward computes it again, so that a micro-batch holds
the MLP's inner tensors and the logits of one tile, whatever its length (ALST's TiledMLP and tiled loss,
arXiv:2506.13996 §3.1).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from muster.model.decoder import Layer
from muster.spec.plan import split_evenly


def apply_tiles(layer: Layer, num_tiles: int) -> None:
    """Let a layer's MLP, with its norm, compute `num_tiles` parts of the positions one after another.

    Recompute within the MLP ends: a tile is computed again as a whole.
    """
    layer.mlp.__dict__.pop("recomputable", None)
    layer.mlp.forward = partial(_tiled_mlp, layer.mlp, layer.mlp.forward, num_tiles)  # type: ignore[method-assign]


def _tiled_mlp(
    mlp: nn.Module, forward: Callable[..., Tensor], num_tiles: int, x_BSD: Tensor, norm: nn.Module | None
) -> Tensor:
    def run(x_nD: Tensor, _: int) -> Tensor:
        return forward(x_nD.unsqueeze(0), norm).squeeze(0)

    parameters = [*mlp.parameters(), *(() if norm is None else norm.parameters())]
    return compute_in_tiles(run, x_BSD, num_tiles, parameters)


def compute_in_tiles(
    run: Callable[[Tensor, int], Tensor], x_BSD: Tensor, num_tiles: int, parameters: Sequence[nn.Parameter]
) -> Tensor:
    """Return what `run` makes of all positions: (B, S, …), or (tiles, …) where it makes one row of each tile.

    `run` gets a tile (n, D) and its index, and returns as many rows as the tile has, or one row. `parameters` are those
    that it reads. Only x is saved, before anything is computed: recompute of the whole layer stops there.
    """
    saved = _SavedInput.apply(torch.empty(0, device=x_BSD.device, requires_grad=True), x_BSD)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return _Tiles.apply(run, num_tiles, saved.grad_fn, x_BSD, *trained)  # type: ignore[union-attr, return-value]


class _SavedInput(torch.autograd.Function):
    """Saves a tensor on a node of its own, which the tiles' backward reads and which no gradient reaches."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class _Tiles(torch.autograd.Function):
    """Function of the rows of a tensor, computed tile by tile in the forward and once more in the backward."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor, int], Tensor], num_tiles: int, saved: Any, x_BSD: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.run, ctx.num_tiles, ctx.saved, ctx.parameters = run, num_tiles, saved, parameters
        x_ND, whole = x_BSD.flatten(0, 1), None
        for index, rows in enumerate(tile_rows(len(x_ND), num_tiles)):
            y = run(x_ND[rows], index)
            if whole is None:
                ctx.rows_are_kept = len(y) == rows.stop
                whole = y.new_empty((*(x_BSD.shape[:2] if ctx.rows_are_kept else (num_tiles,)), *y.shape[1:]))
            made = whole.flatten(0, 1)[rows] if ctx.rows_are_kept else whole[index]
            made.copy_(y if ctx.rows_are_kept else y[0])
        assert whole is not None, "there are no positions"
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_BSD,) = ctx.saved.saved_tensors
        ctx.saved = None  # this node lives until the whole backward ends, and would keep x
        x_ND, grad = x_BSD.flatten(0, 1), grads[0].flatten(0, 1) if ctx.rows_are_kept else grads[0]
        grad_x_BSD = torch.empty_like(x_BSD)
        grad_x_ND = grad_x_BSD.view(x_ND.shape)
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        for index, rows in enumerate(tile_rows(len(x_ND), ctx.num_tiles)):
            x_nD = x_ND[rows].detach().requires_grad_()
            # Hooks around the backward, which count what a forward saves, don't see what lives for a tile alone.
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
                y = ctx.run(x_nD, index)
            own = grad[rows] if ctx.rows_are_kept else grad[index : index + 1]
            grad_x_nD, *made = torch.autograd.grad(y, (x_nD, *ctx.parameters), own)
            grad_x_ND[rows] = grad_x_nD
            sums = [new if total is None else total.add_(new) for total, new in zip(sums, made, strict=True)]
            del y, grad_x_nD, made  # before the next tile
        return None, None, None, grad_x_BSD, *sums


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def tile_rows(num_rows: int, num_tiles: int) -> Iterator[slice]:
    """Yield the rows of each tile, as even as possible."""
    start = 0
    for size in split_evenly(num_rows, num_tiles):
        yield slice(start, start + size)
        start += size
