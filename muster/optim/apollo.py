"""APOLLO: learning rates of channels, or of a whole matrix, from Adam on a random projection of its gradient (H. Zhu et
al., arXiv:2412.05270, algorithm 1; github:zhuhanqing/APOLLO, apollo_torch/apollo.py).

The update is the gradient itself, scaled as much as Adam scales the projection R: for each channel (a row or a column,
along the longer side) by ‖Adam(R)‖ / ‖R‖, or in APOLLO-Mini, with rank 1, by that ratio of the whole matrix. An update
may be at most 1.01 times as large as the one before (the norm-growth limiter of arXiv:2410.01623). The projection is
drawn anew from a name and a number every `update_proj_gap` steps, so that nothing of it is stored.
"""

import torch
from torch import Tensor

from muster.model.init import keyed_generator
from muster.optim.owned_matrices import OwnedMatrixOptimizer

MAX_GROWTH = 1.01
TINY = 1e-8


class Apollo(OwnedMatrixOptimizer):
    """APOLLO over one rank's local tensors, with a scale for each channel."""

    scales_channels = True

    def matrix_update(self, name: str, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        on_right = gradient.shape[0] >= gradient.shape[1]
        projection = random_projection(name, step // self.config.update_proj_gap, state["exp_avg"], gradient)
        low_rank = gradient @ projection.mT if on_right else projection @ gradient
        direction = self.adam_direction(low_rank, state["exp_avg"], state["exp_avg_sq"], step)
        if self.scales_channels:
            dim = 1 if on_right else 0
            ratio = direction.norm(dim=dim, keepdim=True) / (low_rank.norm(dim=dim, keepdim=True) + TINY)
        else:
            ratio = direction.norm() / (low_rank.norm() + TINY)
        update = gradient * ratio
        return self._limited(update, state["update_norm"]).mul_(self.config.scale**0.5)

    @staticmethod
    def _limited(update: Tensor, norm_before: Tensor) -> Tensor:
        """Return an update that has grown by MAX_GROWTH at most; its norm becomes the next one's `norm_before`."""
        norm = update.norm()
        factor = torch.where(
            norm_before[0] > 0, (norm / (norm_before[0] + TINY)).clamp(min=MAX_GROWTH) / MAX_GROWTH, 1.0
        ).to(norm.dtype)
        norm_before[0] = norm / factor
        return update / factor


class ApolloMini(Apollo):
    """APOLLO-Mini: one scale for each matrix."""

    scales_channels = False


def random_projection(name: str, number: int, low_rank: Tensor, gradient: Tensor) -> Tensor:
    """Return the matrix (rank, shorter side) of normal numbers of variance 1 / rank that projects a gradient."""
    rows, cols = gradient.shape
    rank, short = (low_rank.shape[1], cols) if rows >= cols else (low_rank.shape[0], rows)
    drawn = torch.empty(rank, short, dtype=torch.float32)
    drawn.normal_(0.0, rank**-0.5, generator=keyed_generator(0, f"apollo/{name}/{number}"))
    return drawn.to(gradient.dtype).to(gradient.device)
