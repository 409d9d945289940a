"""Centroids of alike hidden states travel to experts in their place (LSH-MoE, NeurIPS 2024).

Rows of an expert are ordered by locality-sensitive hashes, and cut into as many runs as it has centroids, where these
differ most; the mean of a run travels. What the expert makes of it is moved to each row by the row's distance:
y = E(c) + (x − c). The numbers of centroids depend on the numbers of rows alone, and so do the bytes. The error of y is
at most (1 + L) · |x − c| where L bounds how much the expert stretches distances; none where each row is a centroid.
Gradients are those of what is computed.
Suffixes: R rows, E experts, K centroids, D hidden width, H hash functions, d directions of one.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from muster.spec.expert_kinds import num_centroids

HASHES = 6
"""Hash functions whose values order rows one after another."""
DIRECTIONS = 8
"""Directions that a hash function turns a row to; its value is the one, or the opposite of one, that is nearest
(cross-polytope)."""


@lru_cache(maxsize=8)
def _rotation(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random directions (D, H · d), the same on all ranks."""
    drawn = torch.randn(width, HASHES * DIRECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn.to(device, dtype)


def hash_rows(x_RD: Tensor) -> Tensor:
    """Return the values of the hash functions (R, H)."""
    turned = (x_RD @ _rotation(x_RD.shape[1], x_RD.dtype, x_RD.device)).unflatten(1, (HASHES, DIRECTIONS))
    return torch.cat([turned, -turned], 2).argmax(2)


def order_of_values(value_RH: Tensor) -> Tensor:
    """Return the order of rows by the first hash function, those with the same value by the second, and so on."""
    base_H = (2 * DIRECTIONS) ** torch.arange(HASHES - 1, -1, -1, device=value_RH.device)
    return (value_RH * base_H).sum(1).argsort(stable=True)


def share_centroids(counts_E: Tensor, rows: int, rate: float) -> Tensor:
    """Return the centroids of each expert (E): one where it has rows, and of the others a share by its further rows."""
    first_E = counts_E.clamp(max=1)
    further_E = counts_E - first_E
    left = num_centroids(rows, len(counts_E), rate) - first_E.sum()
    up_to_E = left * further_E.cumsum(0) // further_E.sum().clamp(min=1)
    return first_E + up_to_E.diff(prepend=up_to_E.new_zeros(1))


class _RunMeans(torch.autograd.Function):
    """Means of runs of rows; saves neither rows nor means, as `index_add` would."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, group_R: Tensor, size_K: Tensor) -> Tensor:
        ctx.save_for_backward(group_R, size_K)
        return x_RD.new_zeros(len(size_K), x_RD.shape[1]).index_add_(0, group_R, x_RD).div_(size_K.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        group_R, size_K = ctx.saved_tensors
        return (grads[0] / size_K.unsqueeze(1)).index_select(0, group_R), None, None


class LshRows:
    """Rows that are sorted by expert, and the centroids that travel for them."""

    def __init__(self, x_RD: Tensor, counts_E: Tensor, rate: float) -> None:
        rows, num_experts, device = len(x_RD), len(counts_E), x_RD.device
        total = num_centroids(rows, num_experts, rate)
        self._x_RD = x_RD
        with torch.no_grad():
            self.counts_E = share_centroids(counts_E, rows, rate)
            """Centroids of each expert."""
            expert_R = torch.arange(num_experts, device=device).repeat_interleave(counts_E, output_size=rows)
            value_RH = hash_rows(x_RD.detach())
            order_R = order_of_values(value_RH)
            order_R = order_R[expert_R[order_R].argsort(stable=True)]
            # A run begins at an expert's first row, and where most hash functions part a row from the one before.
            value_RH = value_RH[order_R]
            alike_R = (value_RH[1:] == value_RH[:-1]).cumprod(1).sum(1)
            alike_R = torch.cat([alike_R.new_zeros(min(1, rows)), alike_R])
            first_E = counts_E.cumsum(0) - counts_E
            place_R = torch.arange(rows, device=device) - first_E[expert_R]
            alike_R = alike_R.masked_fill(place_R == 0, -1)
            rank_R = torch.empty_like(order_R)
            by_break_R = alike_R.argsort(stable=True)
            by_break_R = by_break_R[expert_R[by_break_R].argsort(stable=True)]
            rank_R[by_break_R] = place_R
            begins_R = rank_R < self.counts_E[expert_R]
            self._group_R = torch.empty_like(order_R)
            self._group_R[order_R] = begins_R.cumsum(0) - 1
            size_K = x_RD.new_zeros(total).index_add_(0, self._group_R, x_RD.new_ones(rows))
        self.centroids_KD: Tensor = _RunMeans.apply(x_RD, self._group_R, size_K)  # type: ignore[assignment]

    def restore(self, y_KD: Tensor) -> Tensor:
        """Return the results of the rows (R, D) from those of their centroids."""
        x_RD, self._x_RD = self._x_RD, self._x_RD[:0]
        moved_KD, self.centroids_KD = y_KD - self.centroids_KD, self.centroids_KD[:0]
        return moved_KD.index_select(0, self._group_R).add_(x_RD)
