"""Norms of hidden states and heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.model.kernels import rms_norm
from muster.spec.model import ModelSpec


class RmsNorm(nn.Module):
    """Root-mean-square norm with a weight (D), to which `offset` is added."""

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps = eps
        self.offset = offset

    def forward(self, x_BSD: Tensor) -> Tensor:
        return rms_norm(x_BSD, self.weight, self.eps, self.offset)


class LayerNorm(nn.Module):
    """Layer norm with weight (D) and bias (D): mean 0 and variance 1 over the last dimension (arXiv:1607.06450)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        return F.layer_norm(x_BSD, (x_BSD.shape[-1],), self.weight, self.bias, self.eps)


Norm = RmsNorm | LayerNorm


def make_norm(spec: ModelSpec) -> Norm:
    """Build a norm of the hidden state, of the model's kind."""
    if spec.norm == "layer":
        return LayerNorm(spec.hidden_size, spec.norm_eps)
    return RmsNorm(spec.hidden_size, spec.norm_eps, float(spec.norm_unit_offset))


def make_norms(spec: ModelSpec) -> tuple[Norm | None, Norm | None]:
    """Build the norms of a sublayer's input and of its output, where the model has them."""
    return make_norm(spec) if spec.has_pre_norms else None, make_norm(spec) if spec.has_post_norms else None
