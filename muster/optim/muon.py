"""Muon: orthogonalized momentum for the matrices of the decoder layers, AdamW for all other parameters.

K. Jordan et al., Muon: An optimizer for hidden layers in neural networks, https://kellerjordan.github.io/posts/muon/
"""

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor

from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import whole_matrix_precision, whole_matrix_shapes
from muster.config.optimizers import NEWTON_SCHULZ_STEPS
from muster.layout.tensor_layout import TensorLayout
from muster.model.dtypes import DTYPES
from muster.optim.adamw import AdamW
from muster.optim.base import Optimizer
from muster.optim.distributed_matrices import assign_matrices, box_views
from muster.optim.peer_exchange import PeerGroup
from muster.parallel.world import World

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the published quintic: steep at 0, so that five steps bring nearly all singular values to 0.7 …
1.2."""
EPS = 1e-7


class Muon(Optimizer):
    """Muon over one rank's local tensors.

    A matrix is orthogonalized as a whole, however it is sharded, so that plans change an update by rounding only. Its
    parts travel to one of the ranks that share it, and the parts of the result travel back; these ranks share the work
    about equally. Data-parallel replicas repeat the same work and get the same bits.
    """

    def __init__(
        self, config: OptimConfig, params: Mapping[str, Tensor], layouts: Mapping[str, TensorLayout], peers: PeerGroup
    ) -> None:
        super().__init__(params)
        self._config = config
        matrices = whole_matrix_shapes(config, {name: layout.shape for name, layout in layouts.items()})
        self._layouts = {name: layouts[name] for name in matrices}
        self._adamw = AdamW(config, {name: param for name, param in params.items() if name not in self._layouts})
        self._momentum = {name: torch.zeros_like(params[name]) for name in self._layouts if name in params}
        kinds = [(param.dtype, param.device) for param in params.values()]
        # A rank that holds no parameters may own matrices, too: it learns their dtype from the others.
        dtype = next(
            (found for found in peers.all_gather_object(kinds[0][0] if kinds else None) if found), torch.float32
        )
        precision = whole_matrix_precision(config)
        self._dtype = dtype if precision is None else DTYPES[precision]
        self._batches = assign_matrices(
            {name: one.shape for name, one in self._layouts.items()},
            {name: one.boxes for name, one in self._layouts.items()},
            peers,
            self._dtype,
            kinds[0][1] if kinds else peers.device,
        )

    @classmethod
    def build(
        cls,
        config: OptimConfig,
        params: Mapping[str, Tensor],
        layouts: Mapping[str, TensorLayout],
        world: World | None,
    ) -> "Muon":
        return cls(config, params, layouts, PeerGroup.from_world(world))

    def state(self) -> dict[str, tuple[str, Tensor]]:
        return self._adamw.state() | {f"{name}.momentum": (name, tensor) for name, tensor in self._momentum.items()}

    def _update(self, lr: float) -> None:
        self._adamw.step_count, self._adamw.starts = self.step_count, self.starts
        self._adamw.step(lr)
        matrix_lr = lr * self._config.muon_lr_ratio
        for batch in self._batches:
            parts = {name: self._update_direction(name) for name in batch.names if name in self._momentum}
            wholes = batch.gather(parts)
            updates = batch.scatter({name: orthogonalize(whole) for name, whole in wholes.items()})
            for name in parts:
                self._apply(name, updates[name], matrix_lr)

    def _update_direction(self, name: str) -> list[Tensor]:
        """Return the momentum with this step's gradient in it, by box. A missing gradient counts as zero."""
        momentum = self._momentum[name]
        beta = self._config.momentum
        grad = self.params[name].grad
        grad = torch.zeros_like(momentum) if grad is None else grad
        momentum.lerp_(grad, 1 - beta)
        direction = grad.lerp(momentum, beta) if self._config.nesterov else momentum
        return box_views(direction.to(self._dtype), self._layouts[name].boxes)

    def _apply(self, name: str, updates: list[Tensor], lr: float) -> None:
        layout = self._layouts[name]
        param = self.params[name]
        factor = lr * update_scale(self._config.muon_scale, *layout.shape)
        param.mul_(1 - lr * self._config.weight_decay)
        for view, update in zip(box_views(param, layout.boxes), updates, strict=True):
            view.add_(update, alpha=-factor)


def update_scale(kind: str, rows: int, cols: int) -> float:
    """Return the factor of an orthogonal update.

    match_rms gives it the root mean square of AdamW's updates, about 0.2 (J. Liu et al., Muon is Scalable for LLM
    Training, arXiv:2502.16982 §2.2); original is K. Jordan's.
    """
    return 0.2 * sqrt(max(rows, cols)) if kind == "match_rms" else sqrt(max(1.0, rows / cols))


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return nearly the closest (semi-)orthogonal matrix U Vᵀ of U S Vᵀ, by Newton–Schulz steps in the matrix's
    dtype."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
