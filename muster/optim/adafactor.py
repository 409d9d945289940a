"""Adafactor: second moments of a matrix as the product of those of its rows and of its columns (N. Shazeer and M.
Stern, arXiv:1804.04235, algorithm 4).

Without momentum, relative step sizes and scaling by the parameter's size: the learning rate is the run's. The decay of
the moments in step t is 1 − t^(−0.8) (§7.2), and an update's root mean square is cut down to 1 (§6).
"""

from torch import Tensor

from muster.optim.owned_matrices import OwnedMatrixOptimizer

DECAY_EXPONENT = -0.8
EPS = 1e-30
CLIP_RMS = 1.0


class Adafactor(OwnedMatrixOptimizer):
    """Adafactor over one rank's local tensors."""

    def matrix_update(self, name: str, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        row, col = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
        square = gradient.square().add_(EPS)
        share = (step + 1) ** DECAY_EXPONENT
        row.lerp_(square.mean(1), share)
        col.lerp_(square.mean(0), share)
        update = gradient * (row / row.mean()).rsqrt().unsqueeze(1) * col.rsqrt()
        rms = update.square().mean().sqrt()
        return update.div_((rms / CLIP_RMS).clamp(min=1.0))
