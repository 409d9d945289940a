"""Queries that travel to the keys of other ranks in a backward, with all that their gradients take."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from muster.model.block_attention import BlockGradients, ScoreRule
from muster.parallel.axis import ContextAxis, PendingTensor


@dataclass(frozen=True)
class TravellingQueries:
    """Some rank's queries and the gradients of their outputs (2, B, H, s, d), and each query's log-sum-exp and delta
    (2, B, H, s) in the accumulation dtype."""

    q_and_grad_2BHsd: Tensor
    lse_and_delta_2BHs: Tensor

    @staticmethod
    def of(q_BHsd: Tensor, grad_BHsd: Tensor, out_BHsd: Tensor, lse_BHs: Tensor) -> "TravellingQueries":
        """Return this rank's own queries."""
        delta_BHs = (grad_BHsd.to(lse_BHs.dtype) * out_BHsd).sum(-1)
        return TravellingQueries(torch.stack((q_BHsd, grad_BHsd)), torch.stack((lse_BHs, delta_BHs)))

    def shift(self, axis: ContextAxis) -> "ArrivingQueries":
        """Start to send them to the next rank of a ring and to receive those of the rank before."""
        return ArrivingQueries(axis.ring_shift(self.q_and_grad_2BHsd), axis.ring_shift(self.lse_and_delta_2BHs))

    def gradients(self, rule: ScoreRule) -> BlockGradients:
        """Return their gradients, to which those of blocks are added.

        A block's backward needs of the output nothing but its product with the gradient, delta (arXiv:2205.14135 §B.4).
        So a multiple of the gradient with that product, which is no longer than the output, stands in for it.
        """
        q_BHsd, grad_BHsd = self.q_and_grad_2BHsd
        lse_BHs, delta_BHs = self.lse_and_delta_2BHs
        least = torch.finfo(lse_BHs.dtype).tiny
        largest_BHs1 = vector_norm(grad_BHsd, torch.inf, -1, keepdim=True, dtype=lse_BHs.dtype).clamp_(min=least)
        scaled_BHsd = grad_BHsd / largest_BHs1  # neither its squares nor those of small gradients leave the dtype
        squares_BHs1 = vector_norm(scaled_BHsd, 2, -1, keepdim=True).square_().clamp_(min=least)
        scaled_BHsd *= delta_BHs.unsqueeze(-1) / largest_BHs1 / squares_BHs1
        return BlockGradients(grad_BHsd, q_BHsd, scaled_BHsd.to(grad_BHsd.dtype), lse_BHs, rule)


@dataclass(frozen=True)
class ArrivingQueries:
    """Queries of another rank that are under way."""

    q_and_grad: PendingTensor
    lse_and_delta: PendingTensor

    def wait(self) -> TravellingQueries:
        """Wait until they are here."""
        return TravellingQueries(self.q_and_grad.wait(), self.lse_and_delta.wait())
