"""Attention sinks: a trained logit of each query head that takes part in the softmax (gpt-oss, arXiv:2508.10925 §2.2).

A sink is one more key, whose value is zero. With the log-sum-exp L of a query's scores and its head's sink s, that of
both is L' = log(e^L + e^s), and the output is multiplied by e^(L − L') = sigmoid(L − s). The backward of attention in
blocks needs the complete output and log-sum-exp, whichever keys made them (arXiv:2205.14135 §B.4); so its kernels stay
as they are. A sink has the gradient of a score of probability p = e^(s − L') and value 0: −p · grad · out.

Suffixes of tensors: B sequences, H query heads, S positions, d head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_PARTS = 8
"""Parts of the heads whose products of gradient and output are in memory one after another."""


def add_sinks_(out_BHSd: Tensor, lse_BHS: Tensor, sinks_H: Tensor | None) -> None:
    """Add each head's sink to the output and the log-sum-exp of all its queries, in place; None: there are none."""
    if sinks_H is None:
        return
    change_BHS = F.logsigmoid(lse_BHS - sinks_H.to(lse_BHS.dtype).view(1, -1, 1))
    lse_BHS.sub_(change_BHS)
    out_BHSd.mul_(change_BHS.exp_().unsqueeze(-1))


def sink_gradients(grad_BHSd: Tensor, out_BHSd: Tensor, lse_BHS: Tensor, sinks_H: Tensor | None) -> Tensor | None:
    """Return the gradients of the sinks (H) from those of the output, and from output and log-sum-exp with them."""
    if sinks_H is None:
        return None
    heads, wide_H = max(1, len(sinks_H) // _PARTS), sinks_H.to(lse_BHS.dtype)
    parts = zip(*(x.split(heads, dim=1) for x in (grad_BHSd, out_BHSd, lse_BHS)), wide_H.split(heads), strict=True)
    made = [
        ((grad.to(lse.dtype) * out).sum(-1) * (sinks.view(1, -1, 1) - lse).exp()).sum((0, 2))
        for grad, out, lse, sinks in parts
    ]
    return torch.cat(made).neg_().to(sinks_H.dtype)
