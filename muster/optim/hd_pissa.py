"""HD-PiSSA: steps of adapters that are added to the weights beside them (arXiv:2505.18777; github:MuLabPKU/HD-PiSSA).

With the steps ΔA and ΔB that an optimizer would take of A and B, W changes by scaling · Σ over the parts of
((B − ΔB)(A − ΔA) − B A) = −scaling · Σ (ΔB A + B ΔA − ΔB ΔA), whose rank is at most 2 · r · parts; A and B stay as they
are. With the parts side by side in A and B the sum is one product.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from muster.config.optim_config import OptimConfig
from muster.layout.tensor_layout import TensorLayout
from muster.optim.base import Optimizer, WrappingOptimizer
from muster.optim.distributed_matrices import box_views
from muster.optim.peer_exchange import PeerGroup
from muster.parallel.world import World
from muster.spec.adapters import adapted_module, is_adapter


def without_decay(optim: OptimConfig) -> OptimConfig:
    """Return the section for steps of adapters that stay as they are, which have nothing to decay."""
    return optim.model_copy(update={"weight_decay": 0.0})


class WeightChangingOptimizer(WrappingOptimizer):
    """Optimizer that takes another one's steps of adapters, and changes the weights beside them instead.

    Every rank gets the whole A, B and their steps from its peers, one layer at a time, and changes its part of W. All
    ranks of the world must build it.
    """

    def __init__(
        self,
        inner: Optimizer,
        parameters: Mapping[str, Tensor],
        layouts: Mapping[str, TensorLayout],
        world: World | None,
        scaling: float,
    ) -> None:
        super().__init__(inner)
        self._scaling = scaling
        self._peers = PeerGroup.from_world(world)
        names = sorted(name for name in layouts if is_adapter(name))
        self._modules = sorted({adapted_module(name)[0] for name in names})
        self._shapes = {name: layouts[name].shape for name in names}
        self._boxes = self._peers.all_gather_object({name: layouts[name].boxes for name in names})
        """Boxes of the adapters' matrices on each member, by name."""
        self._own_boxes = {f"{module}.weight": layouts[f"{module}.weight"].boxes for module in self._modules}
        self._weights = {name: parameters[name] for name, boxes in self._own_boxes.items() if boxes}
        kinds = [(tensor.dtype, tensor.device) for tensor in parameters.values()]
        found = self._peers.all_gather_object(kinds[0][0] if kinds else None)
        self._dtype = next((dtype for dtype in found if dtype), torch.float32)

    def begin_state(self, parameters: Collection[str], average: bool = False) -> None:
        self.inner.begin_state(parameters, average)

    def state(self) -> dict[str, tuple[str, Tensor]]:
        return self.inner.state()

    def step(self, lr: float) -> None:
        with torch.no_grad():
            before = {name: param.clone() for name, param in self.params.items()}
            self.inner.step(lr)
            steps = {name: before[name] - param for name, param in self.params.items()}
            for name, param in self.params.items():
                param.copy_(before[name])
            for module in self._modules:
                self._change_weight(module, steps)

    def _change_weight(self, module: str, steps: Mapping[str, Tensor]) -> None:
        names = [f"{module}.lora_A.weight", f"{module}.lora_B.weight"]
        a, b = self._gather(names, self.params)
        step_a, step_b = self._gather(names, steps)
        if (weight := self._weights.get(f"{module}.weight")) is None:
            return
        boxes = self._own_boxes[f"{module}.weight"]
        for box, view in zip(boxes, box_views(weight, boxes), strict=True):
            rows, cols = box.slices
            view.addmm_(step_b[rows], (a - step_a)[:, cols], alpha=-self._scaling)
            view.addmm_(b[rows], step_a[:, cols], alpha=-self._scaling)

    def _gather(self, names: list[str], locals_: Mapping[str, Tensor]) -> list[Tensor]:
        """Return whole matrices of which each member holds parts."""
        empty = torch.empty(0, dtype=self._dtype, device=self._peers.device)
        own = torch.cat([empty, *(locals_[name].reshape(-1) for name in names if name in locals_)])
        sizes = [sum(box.numel for name in names for box in boxes[name]) for boxes in self._boxes]
        received = [torch.empty(size, dtype=self._dtype, device=self._peers.device) for size in sizes]
        self._peers.all_to_all([own] * len(received), received)
        wholes = [torch.empty(self._shapes[name], dtype=self._dtype, device=self._peers.device) for name in names]
        for boxes, flat in zip(self._boxes, received, strict=True):
            place = 0
            for name, whole in zip(names, wholes, strict=True):
                for box in boxes[name]:
                    whole[box.slices] = flat[place : place + box.numel].view(box.size)
                    place += box.numel
        return wholes
