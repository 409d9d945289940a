"""Low-rank adapters of linear layers: LoRA (arXiv:2106.09685 §4.1), W x + scaling · B A x with W frozen; DoRA
(arXiv:2402.09353 §4), whose rows have trained lengths."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.spec.adapters import AdapterSpec


class LoraLinear(nn.Linear):
    """Linear layer with an adapter, whose matrices are `lora_A.weight` (r, in) and `lora_B.weight` (out, r); in DoRA
    `lora_magnitude_vector.weight` (out) has the lengths of rows."""

    def __init__(self, linear: nn.Linear, adapter: AdapterSpec) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.lora_A = nn.Linear(linear.in_features, adapter.r, bias=False)
        self.lora_B = nn.Linear(adapter.r, linear.out_features, bias=False)
        self.lora_magnitude_vector = Magnitudes(linear.out_features) if adapter.kind == "dora" else None
        self.scaling = adapter.scaling

    @property
    def inner_bias(self) -> Tensor | None:
        """Bias to add before the adapter's output: DoRA's comes after its scaling."""
        return self.bias if self.lora_magnitude_vector is None else None

    def forward(self, input: Tensor) -> Tensor:
        return self.combine(F.linear(input, self.weight, self.inner_bias), self.lora_B(self.lora_A(input)))

    def combine(self, y: Tensor, change: Tensor) -> Tensor:
        """Return the layer's output, of that of its weight and B A x; with row-parallel weights a part of the sum."""
        y = torch.add(y, change, alpha=self.scaling)
        if self.lora_magnitude_vector is None:
            return y
        y = y * (self.lora_magnitude_vector.weight / self.row_norms())
        return y if self.bias is None else y + self.bias

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """Return the length of each row of W + scaling · B A, a constant in the backward (arXiv:2402.09353 §4.3)."""
        return torch.addmm(self.weight, self.lora_B.weight, self.lora_A.weight, alpha=self.scaling).norm(dim=1)


class Magnitudes(nn.Module):
    """Trained lengths of a layer's rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows))


def add_adapters(layer: nn.Module, adapter: AdapterSpec) -> None:
    """Give the target modules of a decoder layer their adapters."""
    for part in list(layer.children()):
        for name, linear in list(part.named_children()):
            if name in adapter.target_modules and isinstance(linear, nn.Linear):
                setattr(part, name, LoraLinear(linear, adapter))
