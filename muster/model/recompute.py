"""Recompute: what a layer's backward needs but its forward doesn't keep.

full: only the layer's input is kept, and the backward runs the layer's forward again until all that it needs is there.
selective: kept is what costs a matrix product or attention; the outputs of the norms and the product of the gated
linear unit, a pass over memory each, are made again (selective recomputation: arXiv:2205.05198 §5, whose costly bytes,
the attention scores, flash attention never writes).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from muster.model.decoder import Layer
from muster.spec.plan import Recompute


def apply_recompute(layer: Layer, recompute: Recompute) -> None:
    """Makes a layer's passes keep what `recompute` says."""
    if recompute == "elementwise":
        layer.attn.recomputable = layer.mlp.recomputable = recomputed  # type: ignore[assignment]
    if recompute == "full":
        layer.forward = partial(_checkpointed, layer.forward)  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Tensor], x_BSD: Tensor, *shared: Any) -> Tensor:
    """`forward`, of which autograd keeps `x_BSD` alone: all layers share the rest. Nothing in it is random."""

    def run(x_BSD: Tensor) -> Tensor:
        return forward(x_BSD, *shared)

    return checkpoint(run, x_BSD, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


def recomputed(make: Callable[..., Tensor], inputs: tuple[Tensor, ...], consume: Callable[..., Any], *args: Any) -> Any:
    """`consume(make(*inputs), *args)`, where autograd keeps no result of `make`: the backward makes it again.

    `make` must keep `inputs` for its own backward, or they would be kept here.
    """
    made = make(*inputs)
    recipe = _RecomputedTensor(made, partial(make, *(x.detach() for x in inputs)))
    with torch.autograd.graph.saved_tensors_hooks(recipe.pack, recipe.unpack):
        return consume(made, *args)


class _RecomputedTensor:
    """Stands for a tensor among those that autograd saves; made at its first use, dropped at its last."""

    def __init__(self, made: Tensor, make: Callable[[], Tensor]) -> None:
        self._location, self._numel, self._make = _memory_location(made), made.numel(), make
        self._uses = 0
        self._value: Tensor | None = None

    def pack(self, tensor: Tensor) -> Tensor | torch.Size:
        """The shape alone of the tensor or of a view of all of it; any other tensor as it is."""
        if _memory_location(tensor) != self._location or tensor.numel() != self._numel:
            return tensor
        self._uses += 1
        return tensor.shape

    def unpack(self, packed: Tensor | torch.Size) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._value is None:
            with torch.no_grad():
                self._value = self._make()
        made, self._uses = self._value, self._uses - 1
        if self._uses == 0:
            self._value = None
        return made.view(packed)


def _memory_location(tensor: Tensor) -> tuple[Any, Any]:
    """Where a tensor lies: its storage, which fake tensors have too, and where in it the tensor begins."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()
