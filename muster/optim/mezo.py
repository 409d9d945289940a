"""MeZO (S. Malladi et al., Fine-Tuning Language Models with Just Forward Passes, arXiv:2305.17333, algorithm 1).

With L₊ and L₋ the losses at θ + ε z and θ − ε z, the slope of the loss along z is g = (L₊ − L₋) / 2 ε, and the step is
θ ← θ − η (g z + weight_decay · θ). z is drawn again from its counters (`muster.model.perturbation`), so that there is
neither a gradient nor a state.
"""

from collections.abc import Mapping

from torch import Tensor

from muster.config.optim_config import OptimConfig
from muster.layout.tensor_layout import TensorLayout
from muster.model.perturbation import Part, move_
from muster.optim.base import Optimizer, has_decay
from muster.parallel.world import World


class MeZO(Optimizer):
    """Step along the direction of `slope`, over one rank's local tensors."""

    def __init__(self, config: OptimConfig, params: Mapping[str, Tensor], layouts: Mapping[str, TensorLayout]) -> None:
        super().__init__(params)
        self.config, self._layouts = config, layouts

    @classmethod
    def build(
        cls,
        config: OptimConfig,
        params: Mapping[str, Tensor],
        layouts: Mapping[str, TensorLayout],
        world: World | None,
    ) -> "MeZO":
        return cls(config, params, layouts)

    def state(self) -> dict[str, tuple[str, Tensor]]:
        return {}

    def _update(self, lr: float) -> None:
        assert self.slope is not None, "a step needs the slope along its direction"
        direction, slope = self.slope
        for name, param in self.params.items():
            if self.config.weight_decay and has_decay(name, param):
                param.mul_(1 - lr * self.config.weight_decay)
            layout, first = self._layouts[name], 0
            for box in layout.boxes:
                rows = param[first : first + box.size[0]]
                move_(rows, direction, Part(name, layout.shape, box), -lr * slope)
                first += box.size[0]
