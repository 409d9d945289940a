"""Serial emulation of pipelines whose micro-batches skip stages: which layers each one passes through, one by one."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from muster.model.decoder import Layer
from muster.spec.plan import Plan

RunLayers = Callable[[Sequence[Layer], Tensor, Iterable[tuple[Any, ...]]], Tensor]


class SerialPaths:
    """Paths of the micro-batches of a step, which one process runs one after another.

    The gradients of a stage's layers are averaged over the valid labels of the micro-batches that passed through it.
    """

    def __init__(self, plan: Plan, num_layers: int) -> None:
        self._paths = plan.paths
        self._layers = [plan.layers(stage, num_layers) for stage in range(plan.num_stages)]
        self._num_valid = 0
        self._seen: Counter[int] = Counter()

    def enter(self, micro_batch: int, num_valid: int) -> RunLayers:
        """Count a micro-batch, by its number among those of all data-parallel ranks, with its valid labels; return the
        function that takes its hidden states through the layers of its path."""
        path = self._paths[micro_batch % len(self._paths)]  # each rank numbers its own from 0
        self._num_valid += num_valid
        self._seen.update(dict.fromkeys(path, num_valid))

        def run_layers(layers: Sequence[Layer], x_BSD: Tensor, constants: Iterable[tuple[Any, ...]]) -> Tensor:
            shared = list(constants)
            for stage in path:
                for layer in self._layers[stage]:
                    x_BSD = layers[layer](x_BSD, *shared[layer])
            return x_BSD

        return run_layers

    def average(self, parameters: Mapping[str, Tensor]) -> None:
        """Weight the gradients of a step, which were divided by all of its valid labels, and begin the next step."""
        for stage, layers in enumerate(self._layers):
            for layer in layers if self._seen[stage] else ():
                for name, parameter in parameters.items():
                    if name.startswith(f"layers.{layer}.") and parameter.grad is not None:
                        parameter.grad *= self._num_valid / self._seen[stage]
        self._num_valid = 0
        self._seen.clear()
