"""Dispatch of tokens that every rank has: each takes the rows of its own experts."""

import torch
from torch import Tensor

from muster.model.experts import ComputeRows, compute_here
from muster.model.routing import Routing
from muster.parallel.axis import ExpertAxis
from muster.spec.expert_kinds import ExpertDispatch


class Slicing:
    """Ranks of a tensor-parallel group, which have the same tokens, each compute those of their own experts; where the
    hidden state leaves the layer, it is summed over the ranks as that of an MLP is (PPMoE, arXiv:2304.11414 §3.2)."""

    def __init__(self, axis: ExpertAxis, dispatch: ExpertDispatch) -> None:
        self.axis = axis

    def __call__(self, experts: ComputeRows, x_BSD: Tensor, routing: Routing) -> Tensor:
        return compute_here(experts, x_BSD, local_pairs(routing, self.axis))


def local_pairs(routing: Routing, axis: ExpertAxis) -> Routing:
    """Return the pairs with this rank's experts, numbered from 0; all others count as dropped."""
    count = routing.num_experts // axis.size
    expert = routing.expert.flatten() - axis.index * count
    is_other_R = (expert < 0) | (expert >= count)
    token_R = routing.token_R
    if token_R is None:
        tokens, k = routing.expert.shape
        token_R = torch.arange(tokens, device=expert.device).repeat_interleave(k)
    pairs = len(expert)
    own = expert.masked_fill(is_other_R, count)
    return Routing(routing.weight.flatten(), own, count, token_R, is_other_R.sum(), pairs - pairs // axis.size)
