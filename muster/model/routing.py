"""Routers of experts: scores, the choice of experts, their capacity, and what keeps the load even.

Suffixes: N tokens, E experts, F = E + 1, k experts per token, B sequences, S positions, C capacity, R pairs of a token
and an expert.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.model.kernels import accumulation_dtype
from muster.spec.model_components import MoeSpec


class Routing(NamedTuple):
    """The chosen pairs of tokens and experts: k of each token (N, k), or a list of any pairs (R)."""

    weight: Tensor
    """Factor of each expert's output, in the dtype of scores."""
    expert: Tensor
    """Expert of each pair; `num_experts` where the pair is dropped."""
    num_experts: int
    token_R: Tensor | None = None
    """Token of each pair of a list."""
    num_dropped: Tensor | None = None
    """Number of dropped pairs; None where none can be."""
    expected_dropped: int = 0
    """Dropped pairs under fake tensors, which have no values."""


def _as_it_is(counts_BE: Tensor) -> Tensor:
    return counts_BE


class RouterState:
    """Weight and sums of the routers' losses, which all layers of a stage share.

    A layer adds its losses to the objective by a gradient that begins in the middle of the backward, so that no
    pipeline stage has to hand them on (Megatron-LM's `MoEAuxLossAutoScaler`). Sums are taken in the backward, which
    runs once however often recompute repeats a forward.
    """

    def __init__(self) -> None:
        self.loss_weight: float | Tensor = 1.0
        """Derivative of the objective after the sums of the losses over tokens."""
        self.sums: Tensor | None = None
        """Load-balancing loss and router z-loss with their coefficients, summed over tokens: [2]."""
        self.counted_BS: Tensor | None = None
        """Positions of the next pass that losses and load count, 1 or 0 (B, S): not those of padding, nor those without
        a further token to predict; None: all."""
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


class _CountInBackward(torch.autograd.Function):
    """The routing weights unchanged; the backward begins the gradient of the losses [2] and counts the load (F)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, losses: Tensor | None, load_F: Tensor, router: "Router") -> Tensor:
        ctx.losses, ctx.load_F, ctx.router = None if losses is None else losses.detach(), load_F, router
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        ctx.router.add_load(ctx.load_F)
        if ctx.losses is None:
            return grads[0], None, None, None
        state = ctx.router.state
        state.add(ctx.losses)
        return grads[0], torch.full_like(ctx.losses, state.loss_weight), None, None


class Router(nn.Module):
    """Scores of the experts for each token, from one matrix (E, D), and a choice by `MoeSpec.router`.

    softmax: Mixtral, Qwen-MoE, and with k = 1 and unscaled weights Switch (arXiv:2101.03961 §2.1). sigmoid: DeepSeek-V3
    (arXiv:2412.19437 §2.1.2), whose `expert_bias` takes part in the choice alone and has no gradient. expert_choice:
    each expert takes the tokens that score highest for it (arXiv:2202.09368 §3.2). bi_level: an expert's score is that
    of its group times that of its place in the group (SMILE, arXiv:2212.05191), so its logit is their logits' sum.
    """

    def __init__(self, moe: MoeSpec, hidden_size: int, state: RouterState) -> None:
        super().__init__()
        self.moe, self.state = moe, state
        self.weight = nn.Parameter(torch.empty(moe.router_rows, hidden_size))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)
        self.bias = nn.Parameter(torch.zeros(moe.router_rows)) if moe.router_bias and not moe.has_expert_bias else None
        self.expert_bias: nn.Parameter | None = None
        if moe.has_expert_bias:
            self.expert_bias = nn.Parameter(torch.zeros(moe.num_experts), requires_grad=False)
        self._load_F: Tensor | None = None

    def forward(self, x_BSD: Tensor) -> Routing:
        """Choose the experts of hidden states (B, S, D)."""
        moe, dtype = self.moe, accumulation_dtype(x_BSD.dtype)
        is_sigmoid = moe.router == "sigmoid"
        logits_BSE = F.linear(x_BSD, self.weight, self.bias).to(dtype)
        if moe.router == "bi_level":
            group_BSG, place_BSe = logits_BSE.split([moe.num_groups, moe.router_rows - moe.num_groups], -1)
            logits_BSE = (group_BSG.unsqueeze(-1) + place_BSe.unsqueeze(-2)).flatten(-2)
        scores_BSE = logits_BSE.sigmoid() if is_sigmoid else logits_BSE.softmax(-1)
        if moe.router == "expert_choice":
            routing, chosen_BSk = self._choose_tokens(scores_BSE), None
        else:
            scores_NE = scores_BSE.flatten(0, 1)
            expert_Nk = self._choose(scores_NE.detach())
            weight_Nk = scores_NE.gather(1, expert_Nk)
            if moe.norm_top_k:
                weight_Nk = weight_Nk / (weight_Nk.sum(1, keepdim=True) + (1e-20 if is_sigmoid else 0))
            if moe.route_scale != 1:
                weight_Nk = weight_Nk * moe.route_scale
            chosen_BSk = expert_Nk.view(*x_BSD.shape[:2], -1)
            routing = self._within_capacity(weight_Nk, chosen_BSk)
        if not torch.is_grad_enabled():
            return routing
        losses = None
        if moe.aux_loss_coef or moe.router_z_loss_coef:
            losses = self._losses(logits_BSE, scores_BSE, chosen_BSk)
        load_F = self._load_of(routing, chosen_BSk)
        return routing._replace(weight=_CountInBackward.apply(routing.weight, losses, load_F, self))

    def _choose(self, scores_NE: Tensor) -> Tensor:
        """Return the experts with the highest scores, of the groups that have the best ones (N, k)."""
        moe = self.moe
        if self.expert_bias is not None:
            scores_NE = scores_NE + self.expert_bias
        if moe.num_groups > 1:
            by_group_NGe = scores_NE.unflatten(1, (moe.num_groups, -1))
            # The two best of a group together with sigmoid scores (DeepSeek-V3), else the best one (DeepSeek-V2).
            counted = min(2, by_group_NGe.shape[-1]) if moe.router == "sigmoid" else 1
            group_NG = by_group_NGe.topk(counted, dim=-1).values.sum(-1)
            best_NG = group_NG.topk(moe.top_groups, dim=-1, sorted=False).indices
            open_NG = torch.zeros_like(group_NG, dtype=torch.bool).scatter_(1, best_NG, True)
            scores_NE = by_group_NGe.masked_fill(~open_NG.unsqueeze(-1), float("-inf")).flatten(1)
        return scores_NE.topk(moe.top_k, dim=-1, sorted=False).indices

    # ------------------------------------------------------------------------------------------------------------------
    # Capacity

    def _choose_tokens(self, scores_BSE: Tensor) -> Routing:
        """Let each expert take the positions of each sequence that score highest for it."""
        sequences, positions, experts = scores_BSE.shape
        capacity = self.moe.capacity(positions)
        weight_BEC, position_BEC = scores_BSE.transpose(1, 2).topk(capacity, dim=-1, sorted=False)
        device = scores_BSE.device
        first_B11 = torch.arange(sequences, device=device).view(-1, 1, 1) * positions
        expert_1E1 = torch.arange(experts, device=device).view(1, -1, 1)
        expert_R = expert_1E1.expand_as(position_BEC).flatten()
        return Routing(weight_BEC.flatten(), expert_R, experts, (position_BEC + first_B11).flatten())

    def _within_capacity(self, weight_Nk: Tensor, chosen_BSk: Tensor) -> Routing:
        """Drop what exceeds an expert's capacity in a sequence: later positions, so that none depends on a later one
        or on another sequence."""
        moe, expert_Nk = self.moe, chosen_BSk.flatten(0, 1)
        if moe.capacity_factor is None:
            return Routing(weight_Nk, expert_Nk, moe.num_experts)
        place_BR = _place_among_equals(chosen_BSk.flatten(1), moe.num_experts)
        is_dropped_R = (place_BR >= self.moe.capacity(chosen_BSk.shape[1])).flatten()
        expert_R = expert_Nk.flatten().masked_fill(is_dropped_R, moe.num_experts)
        token_R = torch.arange(len(expert_Nk), device=expert_R.device).repeat_interleave(moe.top_k)
        counted_BS = self.state.counted_BS
        counted = 1 if counted_BS is None else counted_BS.flatten().long().repeat_interleave(moe.top_k)
        return Routing(weight_Nk.flatten(), expert_R, moe.num_experts, token_R, (is_dropped_R * counted).sum())

    # ------------------------------------------------------------------------------------------------------------------
    # Load

    def _load_of(self, routing: Routing, chosen_BSk: Tensor | None) -> Tensor:
        """Return the choices of each expert, dropped ones included, and the number of those (F)."""
        expert = routing.expert if chosen_BSk is None else chosen_BSk
        counted_BS, counts = self.state.counted_BS, torch.ones_like(expert)
        if counted_BS is not None and chosen_BSk is not None:
            counts = counts * counted_BS.unsqueeze(-1).long()
        load_F = torch.zeros(self.moe.num_experts + 1, dtype=torch.int64, device=expert.device)
        load_F.scatter_add_(0, expert.flatten(), counts.flatten())
        if routing.num_dropped is not None:
            load_F[-1] = routing.num_dropped
        return load_F

    def add_load(self, load_F: Tensor) -> None:
        """Add the load of one micro-batch."""
        self._load_F = load_F if self._load_F is None else self._load_F + load_F

    def pop_load(self) -> Tensor | None:
        """Return the choices of each expert since the last call and the number of dropped ones, int64 (F); None where
        there was no backward."""
        load_F, self._load_F = self._load_F, None
        return load_F

    def _losses(self, logits_BSE: Tensor, scores_BSE: Tensor, chosen_BSk: Tensor | None) -> Tensor:
        """Return the load-balancing loss and the z-loss with their coefficients, each summed over the tokens: [2].

        Balance of a set of T tokens: T · E · Σ_e f_e · P_e, where f_e is expert e's share of the T · k choices and P_e
        its mean score (arXiv:2101.03961 §2.2). The sets are sequences (DeepSeek-V3's, arXiv:2412.19437 §2.1.2), or the
        whole micro-batch, each without positions that don't count. Where experts choose, the load is even, and there is
        no such loss. The z-loss is log² of the sum of the logits' exponentials (arXiv:2202.08906 §2.2).
        """
        moe, zero = self.moe, logits_BSE.new_zeros(())
        counted_BS1 = None if self.state.counted_BS is None else self.state.counted_BS.to(zero.dtype).unsqueeze(-1)
        balance = z_loss = zero
        if moe.aux_loss_coef and chosen_BSk is not None:
            if moe.router == "sigmoid":
                scores_BSE = scores_BSE / (scores_BSE.sum(-1, keepdim=True) + 1e-20)
            counts_BSk = torch.ones_like(chosen_BSk, dtype=zero.dtype)
            if counted_BS1 is not None:
                scores_BSE, counts_BSk = scores_BSE * counted_BS1, counts_BSk * counted_BS1
            if moe.aux_loss_scope == "micro_batch":
                scores_BSE, chosen_BSk = scores_BSE.flatten(0, 1)[None], chosen_BSk.flatten(0, 1)[None]
                counts_BSk = counts_BSk.flatten(0, 1)[None]
            chosen_BC = chosen_BSk.flatten(1)
            counts_BE = torch.zeros(len(chosen_BC), moe.num_experts, dtype=zero.dtype, device=zero.device)
            counts_BE.scatter_add_(1, chosen_BC, counts_BSk.flatten(1))
            counts_BE = self.state.sum_counts(counts_BE)
            share_BE = counts_BE / counts_BE.sum(1, keepdim=True).clamp(min=1)
            balance = moe.aux_loss_coef * _imbalance(moe, share_BE, scores_BSE.sum(1))
        if moe.router_z_loss_coef:
            log_z2_BS = logits_BSE.logsumexp(-1).square()
            log_z2_BS = log_z2_BS if counted_BS1 is None else log_z2_BS * counted_BS1.squeeze(-1)
            z_loss = moe.router_z_loss_coef * log_z2_BS.sum()
        return torch.stack((balance, z_loss))


def _imbalance(moe: MoeSpec, share_BE: Tensor, scores_BE: Tensor) -> Tensor:
    """Return E · Σ_e share_e · score_e; where the router has two levels, that of the groups and that of the places in
    them together (arXiv:2212.05191)."""
    if moe.router != "bi_level":
        return moe.num_experts * (share_BE * scores_BE).sum()
    share_BGe, scores_BGe = (values.unflatten(1, (moe.num_groups, -1)) for values in (share_BE, scores_BE))
    sums = [(share_BGe.sum(level), scores_BGe.sum(level)) for level in (2, 1)]
    return torch.stack([share.shape[1] * (share * score).sum() for share, score in sums]).sum()


def _place_among_equals(expert_BR: Tensor, num_experts: int) -> Tensor:
    """Return how many earlier pairs of the same sequence have the same expert (B, R)."""
    order_BR = expert_BR.argsort(dim=1, stable=True)
    counts_BE = torch.zeros(len(expert_BR), num_experts, dtype=torch.int64, device=expert_BR.device)
    counts_BE.scatter_add_(1, expert_BR, torch.ones_like(expert_BR))
    first_BE = counts_BE.cumsum(1) - counts_BE
    sorted_BR = torch.arange(expert_BR.shape[1], device=expert_BR.device) - first_BE.gather(
        1, expert_BR.gather(1, order_BR)
    )
    return torch.empty_like(order_BR).scatter_(1, order_BR, sorted_BR)


@torch.no_grad()
def update_expert_bias(bias_e: Tensor, load_E: Tensor, rows: slice, rate: float) -> None:
    """Raise in place the bias of experts that got fewer tokens than the mean, and lower that of others, by `rate`
    (arXiv:2408.15664 §3.1). `load_E` counts the whole step on all ranks; `bias_e` are its `rows` of the bias."""
    load_E = load_E.to(bias_e.device, torch.float64)
    bias_e += (rate * torch.sign(load_E.mean() - load_E))[rows].to(bias_e.dtype)
