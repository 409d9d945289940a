"""Expert parallelism: each rank has some of a layer's experts, and tokens travel to them and back.

The model knows of it at one seam, `MoeMlp.dispatch`, which gets a rank's tokens and their experts. A dispatcher is one
class of an `ExpertAxis` and a row of `muster.spec.expert_kinds`; what it sends stands in `muster.cost.expert_traffic`,
from which costs and counts of bytes are made.
"""

from importlib import import_module

from torch import nn

from muster.model.experts import Dispatch, MoeMlp
from muster.parallel.axis import ExpertAxis
from muster.spec.expert_kinds import DISPATCHERS, ExpertDispatch


def apply_expert_parallel(module: nn.Module, axis: ExpertAxis | None, dispatch: ExpertDispatch) -> None:
    """Leave a stage on the meta device this rank's experts alone, and let its tokens go to those of all ranks; without
    an axis it has all of them."""
    if axis is None:
        return
    file, name = DISPATCHERS[dispatch.kind].implementation.split(":")
    dispatcher: Dispatch = getattr(import_module(f"muster.parallel.{file}"), name)(axis, dispatch)
    for part in module.modules():
        if isinstance(part, MoeMlp):
            part.dispatch = dispatcher  # type: ignore[method-assign]
            for linear in part.experts.children():
                for name, stacked in list(linear.named_parameters()):
                    shape = (len(stacked) // axis.size, *stacked.shape[1:])
                    setattr(linear, name, nn.Parameter(stacked.new_empty(shape), stacked.requires_grad))
