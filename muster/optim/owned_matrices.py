"""Optimizers that update each matrix of the decoder layers as a whole, with a state that only the matrix's owner holds.

The parts of a gradient travel to one of the ranks that share the matrix, and the parts of the update travel back; so an
update is that of one process, however the matrix is cut, and the state is stored once in a data-parallel replica. All
other parameters (embedding, head, vectors) are AdamW's.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import update_state, whole_matrix_shapes
from muster.layout.tensor_layout import Box, TensorLayout
from muster.model.dtypes import DTYPES
from muster.optim.adamw import AdamW
from muster.optim.base import Optimizer
from muster.optim.distributed_matrices import assign_matrices, box_views
from muster.optim.peer_exchange import PeerGroup
from muster.parallel.world import World

STATE_DTYPES = DTYPES | {"uint8": torch.uint8}


class OwnedMatrixOptimizer(Optimizer):
    """Whole-matrix optimizer over one rank's local tensors; a subclass says what the update of a matrix is."""

    def __init__(
        self,
        config: OptimConfig,
        params: Mapping[str, Tensor],
        layouts: Mapping[str, TensorLayout],
        world: World | None,
    ) -> None:
        super().__init__(params)
        self.config = config
        peers = PeerGroup.from_world(world)
        matrices = whole_matrix_shapes(config, {name: layout.shape for name, layout in layouts.items()})
        self._layouts = {name: layouts[name] for name in matrices}
        self._adamw = AdamW(config, {name: param for name, param in params.items() if name not in self._layouts})
        kinds = [(param.dtype, param.device) for param in params.values()]
        # A rank that holds no parameters may own matrices, too: it learns their dtype from the others.
        found = peers.all_gather_object(kinds[0][0] if kinds else None)
        self._dtype = next((dtype for dtype in found if dtype), torch.float32)
        device = kinds[0][1] if kinds else peers.device
        boxes = {name: one.boxes for name, one in self._layouts.items()}
        self._batches = assign_matrices(dict(matrices), boxes, peers, self._dtype, device)
        self._states = {
            name: {
                one.name: torch.zeros(
                    one.owned_shape(shape, config),
                    dtype=self._dtype if one.dtype is None else STATE_DTYPES[one.dtype],
                    device=device,
                )
                for one in update_state(config, name, shape)
                if one.owned_shape is not None
            }
            for batch in self._batches
            for name, shape in batch.owned_shapes.items()
        }
        """State of each matrix that this rank owns, by name."""
        self._replica = 0 if world is None else world.at.dp_replicate
        self._pipeline_replicas = 1 if world is None else world.plan.pipeline_replicas

    @classmethod
    def build(
        cls,
        config: OptimConfig,
        params: Mapping[str, Tensor],
        layouts: Mapping[str, TensorLayout],
        world: World | None,
    ) -> "OwnedMatrixOptimizer":
        return cls(config, params, layouts, world)

    def state(self) -> dict[str, tuple[str, Tensor]]:
        return self._adamw.state() | {
            f"{name}.{kind}": (name, tensor) for name, kinds in self._states.items() for kind, tensor in kinds.items()
        }

    def state_layouts(self) -> dict[str, TensorLayout]:
        found = {}
        for name, kinds in self._states.items():
            layout = self._layouts[name]
            # Of replicas, which hold the same, the first writes.
            is_first = self._replica == 0 and layout.copy_index < layout.num_copies // self._pipeline_replicas
            for kind, tensor in kinds.items():
                shape = tuple(tensor.shape)
                whole = Box((0,) * len(shape), shape)
                found[f"{name}.{kind}"] = TensorLayout(name, shape, (whole,), copy_index=0 if is_first else 1)
        return found

    def _update(self, lr: float) -> None:
        self._adamw.step_count, self._adamw.starts = self.step_count, self.starts
        self._adamw.step(lr)
        for batch in self._batches:
            parts = {
                name: box_views(self._gradient(name), self._layouts[name].boxes)
                for name in batch.names
                if name in self.params
            }
            wholes = batch.gather(parts)
            updates = batch.scatter(
                {
                    name: self.matrix_update(name, gradient, self._states[name], self.steps_of(name))
                    for name, gradient in wholes.items()
                }
            )
            for name in parts:
                self.params[name].mul_(1 - lr * self.config.weight_decay)
                views = box_views(self.params[name], self._layouts[name].boxes)
                for view, update in zip(views, updates[name], strict=True):
                    view.add_(update, alpha=-lr)

    def _gradient(self, name: str) -> Tensor:
        """Return the gradient of this rank's part; a missing one counts as zero."""
        param = self.params[name]
        return torch.zeros_like(param) if param.grad is None else param.grad.contiguous()

    @abstractmethod
    def matrix_update(self, name: str, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        """Return what is subtracted of a matrix, divided by the learning rate, and change its state; `step` steps came
        before."""

    def adam_direction(self, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> Tensor:
        """Return Adam's update of a gradient, whose moments are changed in place (arXiv:1412.6980, algorithm 1)."""
        beta1, beta2 = self.config.beta1, self.config.beta2
        exp_avg.lerp_(gradient, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (exp_avg_sq / (1 - beta2 ** (step + 1))).sqrt_().add_(self.config.eps)
        return (exp_avg / (1 - beta1 ** (step + 1))).div_(root)
