"""Low-rank layers: linear layers that are products of two narrow ones (Greenformers, arXiv:2109.06762)."""

import torch.nn.functional as F
from torch import Tensor, nn

from muster.spec.adapters import TARGETS
from muster.spec.low_rank import LowRankSpec


class LowRankLinear(nn.Linear):
    """Linear layer B (A x), whose matrices are `low_rank_A.weight` (r, in) and `low_rank_B.weight` (out, r)."""

    def __init__(self, plain: nn.Linear, rank: int) -> None:
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None)
        del self.weight
        self.low_rank_A = nn.Linear(plain.in_features, rank, bias=False)
        self.low_rank_B = nn.Linear(rank, plain.out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.low_rank_A(input), self.low_rank_B.weight, self.bias)


def first_matrix(linear: nn.Linear) -> Tensor:
    """Return the matrix that a linear layer multiplies its input by: A of a low-rank one."""
    return linear.low_rank_A.weight if isinstance(linear, LowRankLinear) else linear.weight


def last_matrix(linear: nn.Linear) -> Tensor:
    """Return the matrix that makes a linear layer's output: B of a low-rank one."""
    return linear.low_rank_B.weight if isinstance(linear, LowRankLinear) else linear.weight


def make_low_rank(layer: nn.Module, low_rank: LowRankSpec) -> None:
    """Replace linear layers of a decoder layer by products."""
    for part in list(layer.children()):
        for name, plain in list(part.named_children()):
            if name not in TARGETS or not isinstance(plain, nn.Linear):
                continue
            if (rank := low_rank.rank_of(name, (plain.out_features, plain.in_features))) is not None:
                setattr(part, name, LowRankLinear(plain, rank))
