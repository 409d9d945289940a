"""Expert parallelism: each rank has some of a layer's experts, and tokens travel to them and back.

The model knows of it at one seam, `MoeMlp.dispatch`, which gets a rank's tokens and their experts. A dispatcher is one
class of an `ExpertAxis` and a row of `muster.spec.expert_kinds`; what it sends stands in `muster.cost.expert_traffic`,
from which costs and counts of bytes are made.
"""

from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor, nn

from muster.model.experts import ComputeRows, Dispatch, MoeMlp, StartedDispatch, start_dispatch
from muster.model.routing import Routing
from muster.parallel.axis import ExpertAxis
from muster.parallel.expert_copies import with_copies
from muster.spec.expert_kinds import DISPATCHERS, ExpertDispatch


def apply_expert_parallel(
    module: nn.Module,
    axis: ExpertAxis | None,
    dispatch: ExpertDispatch,
    order_of: Callable[[str], Sequence[int]] = lambda name: (),
) -> None:
    """Leave a stage on the meta device this rank's experts alone, and let its tokens go to those of all ranks; without
    an axis it has all of them. `order_of` a layer's module: its experts by place (`muster.layout.expert_placement`)."""
    if axis is None:
        return
    file, name = DISPATCHERS[dispatch.kind].implementation.split(":")
    dispatcher: Dispatch = getattr(import_module(f"muster.parallel.{file}"), name)(axis, dispatch)
    if dispatch.redundant:
        dispatcher = with_copies(dispatcher, axis, dispatch.redundant)
    for layer, part in module.named_modules():
        if isinstance(part, MoeMlp):
            order = order_of(layer)
            part.dispatch = to_places(dispatcher, order) if order else dispatcher  # type: ignore[method-assign]
            for linear in part.experts.children():
                for name, stacked in list(linear.named_parameters()):
                    shape = (len(stacked) // axis.size, *stacked.shape[1:])
                    setattr(linear, name, nn.Parameter(stacked.new_empty(shape), stacked.requires_grad))


def place_experts(module: nn.Module, order_of: Callable[[str], Sequence[int]]) -> None:
    """Let the tokens of a stage that is in use go to experts in other places."""
    for layer, part in module.named_modules():
        if isinstance(part, MoeMlp):
            dispatch = part.dispatch.unplaced if isinstance(part.dispatch, _PlacedDispatch) else part.dispatch
            order = order_of(layer)
            part.dispatch = to_places(dispatch, order) if order else dispatch  # type: ignore[method-assign]


def to_places(dispatch: Dispatch, order: Sequence[int]) -> Dispatch:
    """Return the dispatcher for experts that lie in another order: it is given places in their stead."""
    return _PlacedDispatch(dispatch, order)


class _PlacedDispatch:
    def __init__(self, dispatch: Dispatch, order: Sequence[int]) -> None:
        self.unplaced = dispatch
        # Dropped pairs, with the number behind the last expert, keep it.
        self._place_of = [*sorted(range(len(order)), key=order.__getitem__), len(order)]
        self._by_device: dict[torch.device, Tensor] = {}

    def __call__(self, experts: ComputeRows, x_BSD: Tensor, routing: Routing) -> Tensor:
        return self.unplaced(experts, x_BSD, self._in_places(routing))

    def start(self, experts: ComputeRows, x_BSD: Tensor, routing: Routing) -> StartedDispatch:
        """Let tokens set out."""
        return start_dispatch(self.unplaced, experts, x_BSD, self._in_places(routing))

    def _in_places(self, routing: Routing) -> Routing:
        device = routing.expert.device
        if device not in self._by_device:
            self._by_device[device] = torch.tensor(self._place_of, device=device)
        return routing._replace(expert=self._by_device[device][routing.expert])
