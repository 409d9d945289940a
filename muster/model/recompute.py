"""Activation recompute: tensors that a layer's backward needs and its forward doesn't save.

full: only the layer's input is saved; the backward runs the layer's forward again. elementwise: results of matmuls and
attention are saved; the outputs of the norms and of the gated linear unit, one pass over memory each, are computed
again (selective recomputation: arXiv:2205.05198 §5, whose large tensors, the attention scores, flash attention never
writes).
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from muster.model.decoder import LadderLayer, Layer
from muster.model.experts import MoeMlp
from muster.model.ladder import LadderState
from muster.model.routing import RouterState
from muster.spec.layer_strategy import Recompute


def apply_recompute(layer: Layer, recompute: Recompute) -> None:
    """Let a layer's passes save what `recompute` asks for."""
    if recompute == "elementwise":
        for part in layer.modules():
            if hasattr(part, "recomputable"):
                part.recomputable = recomputed  # type: ignore[assignment]
    if recompute == "full":
        router = layer.mlp.router if isinstance(layer.mlp, MoeMlp) else None
        forward = partial(_checkpointed, layer.forward, None if router is None else router.state)
        if isinstance(layer, LadderLayer):
            forward = partial(_checkpointed_ladder, layer, layer.forward)
        layer.forward = forward  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Tensor], state: RouterState | None, x_BSD: Tensor, *shared: Any) -> Tensor:
    """Run `forward`, of which autograd saves `x_BSD` alone, and embeddings that follow it: all layers share the other
    arguments. Nothing in it is random. A router reads from its state the positions that count in this pass, then and
    again."""
    counted_BS = None if state is None else state.counted_BS
    is_embedded = bool(shared) and isinstance(shared[0], Tensor) and shared[0].requires_grad
    inputs, shared = (x_BSD, *shared[:is_embedded]), shared[is_embedded:]

    def run(*inputs: Tensor) -> Tensor:
        if state is not None:
            state.counted_BS = counted_BS
        return forward(*inputs, *shared)

    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


def _checkpointed_ladder(
    layer: LadderLayer, forward: Callable[..., LadderState], state: LadderState, *shared: Any
) -> LadderState:
    """Run `forward`, of which autograd saves the stream and the pending output alone."""

    def run(x_BSD: Tensor, pending_BSD: Tensor | None) -> LadderState:
        return forward(state._replace(x_BSD=x_BSD, pending_BSD=pending_BSD), *shared)

    return checkpoint(
        run,
        state.x_BSD,
        state.pending_BSD,
        use_reentrant=False,
        preserve_rng_state=False,
        determinism_check="none",
        context_fn=lambda: (nullcontext(), layer.ladder.repeating()),
    )


def recomputed(make: Callable[..., Tensor], inputs: tuple[Tensor, ...], consume: Callable[..., Any], *args: Any) -> Any:
    """Return consume(make(*inputs), *args), where autograd doesn't save the result of `make`: the backward computes it
    again.

    `make` must save `inputs` for its own backward; otherwise they would be saved here as well.
    """
    made = make(*inputs)
    recipe = _RecomputedTensor(made, partial(make, *(x.detach() for x in inputs)))
    with torch.autograd.graph.saved_tensors_hooks(recipe.pack, recipe.unpack):
        return consume(made, *args)


class _RecomputedTensor:
    """Placeholder for a saved tensor: computed at its first use in the backward, dropped after its last."""

    def __init__(self, made: Tensor, make: Callable[[], Tensor]) -> None:
        self._location, self._numel, self._make = _memory_location(made), made.numel(), make
        self._uses = 0
        self._value: Tensor | None = None

    def pack(self, tensor: Tensor) -> Tensor | torch.Size:
        """Return only the shape of the tensor or of a view of all of it; any other tensor unchanged."""
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
        value = self._value
        self._uses -= 1
        if self._uses == 0:
            self._value = None
        return value.view(packed)


def _memory_location(tensor: Tensor) -> tuple[Any, Any]:
    """Return a tensor's memory location: its storage, which fake tensors have too, and its offset in it."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()
