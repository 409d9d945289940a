"""Routers of experts: scores, the choice of each token's experts, and the losses that keep the load even.

Suffixes: N tokens, E experts, k experts per token, B sequences, S positions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.model.kernels import accumulation_dtype
from muster.spec.model_components import MoeSpec


class Routing(NamedTuple):
    """The chosen experts of each token."""

    weight_Nk: Tensor
    """Factor of each chosen expert's output, in the dtype of scores."""
    expert_Nk: Tensor


def _as_it_is(counts_BE: Tensor) -> Tensor:
    return counts_BE


class RouterState:
    """Weight and sums of the routers' losses, which all layers of a stage share.

    A layer adds its losses to the objective by a gradient that begins in the middle of the backward, so that no
    pipeline stage has to hand them on (Megatron-LM's `MoEAuxLossAutoScaler`). Sums are taken in the backward, which
    runs once however often recompute repeats a forward.
    """

    def __init__(self) -> None:
        self.loss_weight = 1.0
        """Derivative of the objective after the sums of the losses over tokens."""
        self.sums: Tensor | None = None
        """Load-balancing loss and router z-loss with their coefficients, summed over tokens: [2]."""
        self.sum_counts: Callable[[Tensor], Tensor] = _as_it_is
        """Sums each sequence's choices of each expert (B, E) over the ranks that have other positions of it. Scores
        needn't be summed: each rank adds the term of its own."""

    def add(self, losses: Tensor) -> None:
        """Add a layer's losses [2] of one micro-batch."""
        self.sums = losses.double() if self.sums is None else self.sums + losses

    def pop_sums(self) -> Tensor | None:
        """Return the sums since the last call, float64 [2]; None where there were no losses."""
        sums, self.sums = self.sums, None
        return sums


class _AddLosses(torch.autograd.Function):
    """The routing weights unchanged; the backward begins the gradient of the losses [2]."""

    @staticmethod
    def forward(ctx: Any, weight_Nk: Tensor, losses: Tensor, state: RouterState) -> Tensor:
        ctx.losses, ctx.state = losses.detach(), state
        return weight_Nk.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.state.add(ctx.losses)
        return grads[0], torch.full_like(ctx.losses, ctx.state.loss_weight), None


class Router(nn.Module):
    """Scores of the experts for each token, from one matrix (E, D); softmax or sigmoid as `MoeSpec.router` says.

    softmax: Mixtral, Qwen-MoE, and with k = 1 and unscaled weights Switch (arXiv:2101.03961 §2.1). sigmoid: DeepSeek-V3
    (arXiv:2412.19437 §2.1.2), whose bias takes part in the choice alone and has no gradient.
    """

    def __init__(self, moe: MoeSpec, hidden_size: int, state: RouterState) -> None:
        super().__init__()
        self.moe, self.state = moe, state
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)
        self.bias = nn.Parameter(torch.zeros(moe.num_experts)) if moe.router_bias else None
        if self.bias is not None and moe.router == "sigmoid":
            self.bias.requires_grad_(False)

    def forward(self, x_BSD: Tensor) -> Routing:
        """Choose the experts of hidden states (B, S, D)."""
        moe, dtype = self.moe, accumulation_dtype(x_BSD.dtype)
        is_sigmoid = moe.router == "sigmoid"
        logits_BSE = F.linear(x_BSD, self.weight, None if is_sigmoid else self.bias).to(dtype)
        scores_BSE = logits_BSE.sigmoid() if is_sigmoid else logits_BSE.softmax(-1)
        scores_NE = scores_BSE.flatten(0, 1)
        expert_Nk = self._choose(scores_NE.detach())
        weight_Nk = scores_NE.gather(1, expert_Nk)
        if moe.norm_top_k:
            weight_Nk = weight_Nk / (weight_Nk.sum(1, keepdim=True) + (1e-20 if is_sigmoid else 0))
        if moe.route_scale != 1:
            weight_Nk = weight_Nk * moe.route_scale
        if torch.is_grad_enabled() and (moe.aux_loss_coef or moe.router_z_loss_coef):
            weight_Nk = _AddLosses.apply(weight_Nk, self._losses(logits_BSE, scores_BSE, expert_Nk), self.state)
        return Routing(weight_Nk, expert_Nk)

    def _choose(self, scores_NE: Tensor) -> Tensor:
        """Return the experts with the highest scores, of the groups that have the best ones (N, k)."""
        moe = self.moe
        if moe.router == "sigmoid" and self.bias is not None:
            scores_NE = scores_NE + self.bias
        if moe.num_groups > 1:
            by_group_NGe = scores_NE.unflatten(1, (moe.num_groups, -1))
            # The two best of a group together with sigmoid scores (DeepSeek-V3), else the best one (DeepSeek-V2).
            counted = min(2, by_group_NGe.shape[-1]) if moe.router == "sigmoid" else 1
            group_NG = by_group_NGe.topk(counted, dim=-1).values.sum(-1)
            best_NG = group_NG.topk(moe.top_groups, dim=-1, sorted=False).indices
            open_NG = torch.zeros_like(group_NG, dtype=torch.bool).scatter_(1, best_NG, True)
            scores_NE = by_group_NGe.masked_fill(~open_NG.unsqueeze(-1), float("-inf")).flatten(1)
        return scores_NE.topk(moe.top_k, dim=-1, sorted=False).indices

    def _losses(self, logits_BSE: Tensor, scores_BSE: Tensor, expert_Nk: Tensor) -> Tensor:
        """Return the load-balancing loss and the z-loss with their coefficients, each summed over the tokens: [2].

        Balance of a set of T tokens: T · E · Σ_e f_e · P_e, where f_e is expert e's share of the T · k choices and P_e
        its mean score (arXiv:2101.03961 §2.2). The sets are sequences (DeepSeek-V3's, arXiv:2412.19437 §2.1.2), or the
        whole micro-batch. The z-loss is log² of the sum of the logits' exponentials (arXiv:2202.08906 §2.2).
        """
        moe, zero = self.moe, logits_BSE.new_zeros(())
        balance = z_loss = zero
        if moe.aux_loss_coef:
            if moe.router == "sigmoid":
                scores_BSE = scores_BSE / (scores_BSE.sum(-1, keepdim=True) + 1e-20)
            chosen_BSk = expert_Nk.view(*scores_BSE.shape[:2], -1)
            if moe.aux_loss_scope == "micro_batch":
                scores_BSE, chosen_BSk = scores_BSE.flatten(0, 1)[None], chosen_BSk.flatten(0, 1)[None]
            chosen_BC = chosen_BSk.flatten(1)
            counts_BE = torch.zeros(len(chosen_BC), moe.num_experts, dtype=zero.dtype, device=zero.device)
            counts_BE.scatter_add_(1, chosen_BC, torch.ones_like(chosen_BC, dtype=zero.dtype))
            counts_BE = self.state.sum_counts(counts_BE)
            share_BE = counts_BE / counts_BE.sum(1, keepdim=True)
            balance = moe.aux_loss_coef * moe.num_experts * (share_BE * scores_BSE.sum(1)).sum()
        if moe.router_z_loss_coef:
            z_loss = moe.router_z_loss_coef * logits_BSE.logsumexp(-1).square().sum()
        return torch.stack((balance, z_loss))
