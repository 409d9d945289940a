"""Sub-layers side by side (Kraken; R. Prabhakar et al., arXiv:2408.07802 §3): each layer is k narrow ones.

Sub-layer i has a residual stream sᵢ, norms, heads and a part of the MLP of its own. With t = Σⱼ sⱼ it computes

    aᵢ = attentionᵢ(norm(sᵢ)),    sᵢ' = sᵢ + aᵢ + mlpᵢ(norm(aᵢ + t)),

so that t, the only thing that all sub-layers make together, isn't needed before attention is done. In the first layer
all streams are the embeddings, and t is these. Behind the last layer a linear layer, the conjunction, makes one hidden
state of all streams.

Suffixes: B sequences, S positions, D width of a stream, E = k · D streams side by side, N rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.model.kernels import rms_norm
from muster.model.norms import LayerNorm, RmsNorm
from muster.spec.adapters import ROW_PARALLEL, TARGETS


class StreamNorm(nn.Module):
    """Norm of each stream, with a weight, and of a LayerNorm a bias, for all side by side (E)."""

    def __init__(self, norm: RmsNorm | LayerNorm, streams: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().repeat(streams))
        self.bias = nn.Parameter(norm.bias.detach().repeat(streams)) if isinstance(norm, LayerNorm) else None
        self.eps = norm.eps
        self.offset = 0.0 if isinstance(norm, LayerNorm) else norm.offset
        self.width = len(norm.weight)

    def forward(self, x_BSE: Tensor) -> Tensor:
        streams = x_BSE.split(self.width, -1)
        weights = self.weight.split(self.width)
        biases: Sequence[Any] = (None,) * len(weights) if self.bias is None else self.bias.split(self.width)
        normed = [self._norm(*one) for one in zip(streams, weights, biases, strict=True)]
        return normed[0] if len(normed) == 1 else torch.cat(normed, -1)

    def _norm(self, x_BSD: Tensor, weight_D: Tensor, bias_D: Tensor | None) -> Tensor:
        if bias_D is None:
            return rms_norm(x_BSD, weight_D, self.eps, self.offset)
        return F.layer_norm(x_BSD, (self.width,), weight_D, bias_D, self.eps)


class SublayerLinear(nn.Linear):
    """Linear layers of sub-layers side by side, each of which reads its own part of the input.

    Those that read streams have their rows in `weight` one after another, those that write to streams their columns.
    """

    def __init__(self, plain: nn.Linear, sublayers: int, writes_streams: bool) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        if plain.bias is not None:
            self.bias = nn.Parameter(torch.empty(plain.out_features * (sublayers if writes_streams else 1)))
        inputs, outputs = plain.in_features, plain.out_features
        self.widths = (inputs // sublayers, outputs) if writes_streams else (inputs, outputs // sublayers)
        """Input and output width of one sub-layer."""

    def forward(self, input: Tensor) -> Tensor:
        inputs = input.split(self.widths[0], -1)
        parts = [F.linear(x, weight) for x, weight in zip(inputs, self.matrices(self.weight), strict=True)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return y if self.bias is None else y + self.bias

    def matrices(self, weight: Tensor) -> Sequence[Tensor]:
        """Return the matrix of each sub-layer, out of the weight or something of its shape."""
        inputs, outputs = self.widths
        return weight.split(outputs, 0) if weight.shape[1] == inputs else weight.split(inputs, 1)


def make_sublayers(layer: nn.Module, sublayers: int) -> None:
    """Replace norms and linear layers of a decoder layer by those of sub-layers side by side."""
    for name, part in list(layer.named_children()):
        if isinstance(part, RmsNorm | LayerNorm):
            setattr(layer, name, StreamNorm(part, sublayers))
        for own, plain in list(part.named_children()):
            if own in TARGETS and isinstance(plain, nn.Linear):
                setattr(part, own, SublayerLinear(plain, sublayers, writes_streams=own in ROW_PARALLEL))


def add_to_streams(y_BSE: Tensor, x_BSD: Tensor) -> Tensor:
    """Return all streams (B, S, E), to each of which the same is added."""
    return (y_BSE.unflatten(-1, (-1, x_BSD.shape[-1])) + x_BSD.unsqueeze(-2)).flatten(-2)


def sum_of_streams(x_BSE: Tensor, width: int) -> Tensor:
    """Return the sum of streams (B, S, D), in memory of its own."""
    return x_BSE.unflatten(-1, (-1, width)).sum(-2)


class Streams:
    """Sum of all streams on one device, and their beginning; tensor parallelism replaces it by one whose sums travel
    beside attention."""

    def begin(self, x_BSD: Tensor, count: int) -> Tensor:
        """Return as many streams (B, S, E) that all begin as the embeddings."""
        return x_BSD.repeat(1, 1, count)

    def start_sum(self, x_BSE: Tensor, width: int) -> Any:
        """Start to sum all streams."""
        return sum_of_streams(x_BSE, width)

    def add_sum(self, y_BSE: Tensor, started: Any) -> Tensor:
        """Return what is added up of each attention's output and that sum (B, S, E)."""
        return add_to_streams(y_BSE, started)
