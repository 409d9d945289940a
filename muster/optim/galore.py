"""GaLore: Adam in a subspace of a matrix's gradient, which singular vectors span (J. Zhao et al., arXiv:2403.03507,
algorithm 2; github:jiaweizzhao/GaLore, galore_torch/galore_projector.py).

Every `update_proj_gap` steps the `rank` first singular vectors of the gradient, of its shorter side, become the
projector P. Adam's moments are of the projected gradient R = P G (or G Pᵀ), its update is projected back and multiplied
by `scale`. Moments aren't reset where the subspace changes. Singular vectors have no sign: each is turned so that its
largest element is positive, since moments outlive a projector.
"""

import torch
from torch import Tensor

from muster.optim.owned_matrices import OwnedMatrixOptimizer


class GaLore(OwnedMatrixOptimizer):
    """GaLore over one rank's local tensors."""

    def matrix_update(self, name: str, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        projector, on_right = state["projector"], gradient.shape[0] >= gradient.shape[1]
        if step % self.config.update_proj_gap == 0:
            projector.copy_(singular_vectors(gradient, min(projector.shape), on_right))
        low_rank = gradient @ projector.mT if on_right else projector.mT @ gradient
        low_rank = self.preconditioned(low_rank, state, step)
        update = self.adam_direction(low_rank, state["exp_avg"], state["exp_avg_sq"], step)
        return (update @ projector if on_right else projector @ update).mul_(self.config.scale)

    def preconditioned(self, low_rank: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        """Return what Adam is given for the projected gradient."""
        return low_rank


def singular_vectors(matrix: Tensor, rank: int, on_right: bool) -> Tensor:
    """Return the first right singular vectors as rows, or the first left ones as columns."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    vectors = right[:rank] if on_right else left[:, :rank].mT
    largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    vectors = vectors * torch.where(largest < 0, -1.0, 1.0).to(vectors.dtype)
    return vectors if on_right else vectors.mT
