"""Low-rank adapters of linear layers: LoRA (arXiv:2106.09685 §4.1), W x + scaling · B A x with W frozen; DoRA
(arXiv:2402.09353 §4), whose rows have trained lengths; HD-PiSSA (arXiv:2505.18777), whose adapters leave the forward
as it is."""

from typing import Any

import torch
from torch import Tensor, nn

from muster.model.dropout import BEFORE_ADAPTERS, InputDropout, LayerDropout
from muster.model.four_bit import FourBitLinear, dense, hold_in_four_bits, linear
from muster.spec.adapters import TARGETS, AdapterSpec


class LoraLinear(nn.Linear):
    """Linear layer with an adapter, whose matrices are `lora_A.weight` (r, in) and `lora_B.weight` (out, r); in DoRA
    `lora_magnitude_vector.weight` (out) has the lengths of rows."""

    def __init__(self, plain: nn.Linear, adapter: AdapterSpec, place: int) -> None:
        """Take the place of `plain`; `place` is that of its input's dropout in the decoder layer."""
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None)
        if adapter.load_in_4bit:
            hold_in_four_bits(self)
        self.lora_A = nn.Linear(plain.in_features, adapter.r, bias=False)
        self.lora_B = nn.Linear(adapter.r, plain.out_features, bias=False)
        self.lora_magnitude_vector = Magnitudes(plain.out_features) if adapter.kind == "dora" else None
        self.scaling = adapter.scaling
        self.dropout_rate, self.place = adapter.lora_dropout, place
        self.dropout: InputDropout | None = None
        """Dropout of the input of A in the pass under way; None: drop nothing."""

    def enter_pass(self, dropout: LayerDropout | None) -> None:
        """Begin a pass of the decoder layer, with its dropout."""
        self.dropout = None if dropout is None else InputDropout(dropout, self.place, self.dropout_rate)

    @property
    def inner_bias(self) -> Tensor | None:
        """Bias to add before the adapter's output: DoRA's comes after its scaling."""
        return self.bias if self.lora_magnitude_vector is None else None

    def forward(self, input: Tensor) -> Tensor:
        y = linear(input, self.weight, self.inner_bias)
        if self.dropout is None:
            return self.combine(y, self.lora_B(self.lora_A(input)))
        inner: Tensor = _DroppedLinear.apply(input, self.lora_A.weight, self.dropout)  # type: ignore[assignment]
        return self.combine(y, self.lora_B(inner))

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
        a, b = self.lora_A.weight, self.lora_B.weight
        return torch.addmm(dense(self.weight, b.dtype), b, a, alpha=self.scaling).norm(dim=1)


class _DroppedLinear(torch.autograd.Function):
    """Linear layer of an input after dropout, whose masks the backward computes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dropout: InputDropout) -> Tensor:
        ctx.dropout = dropout
        ctx.save_for_backward(x, weight)
        return dropout.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad_x = torch.zeros_like(x, memory_format=torch.contiguous_format)
        ctx.dropout.add_input_grad_(grad_x, grads[0], weight)
        return grad_x, ctx.dropout.weight_grad(x.flatten(0, -2), grads[0].flatten(0, -2)), None


class HdPissaLinear(nn.Linear):
    """Linear layer W x whose adapters only collect gradients: those that a product scaling · B A of W's own singular
    vectors would have, of which pass number `part` is given its own r rows of A and columns of B."""

    def __init__(self, linear: nn.Linear, adapter: AdapterSpec) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.lora_A = nn.Linear(linear.in_features, adapter.width, bias=False)
        self.lora_B = nn.Linear(adapter.width, linear.out_features, bias=False)
        self.scaling, self.r = adapter.scaling, adapter.r
        self.part = 0
        """Part of the batch that the next pass is of."""

    def forward(self, input: Tensor) -> Tensor:
        own = slice(self.part * self.r, (self.part + 1) * self.r)
        return _HdPissaProduct.apply(
            input, self.weight, self.bias, self.lora_A.weight, self.lora_B.weight, own, self.scaling
        )  # type: ignore[return-value]


class _HdPissaProduct(torch.autograd.Function):
    """W x, whose backward also makes the gradients of one part of the adapters; those of the others are zero.

    With the gradient G of W, that of A is scaling · Bᵀ G, and that of B scaling · G Aᵀ: the published code gets them by
    adding 10⁻¹⁶ · B A x to the output, which 16-bit numbers can't hold.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, own: slice, scaling: float
    ) -> Tensor:
        ctx.weights = weight, a, b  # not through save_for_backward, which would keep gathered parameters
        ctx.own, ctx.scaling = own, scaling
        ctx.save_for_backward(x)
        y = x.new_empty(*x.shape[:-1], len(weight))
        if bias is None:
            torch.mm(x.flatten(0, -2), weight.t(), out=y.flatten(0, -2))
        else:
            torch.addmm(bias, x.flatten(0, -2), weight.t(), out=y.flatten(0, -2))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, a, b = ctx.weights
        own, scaling = ctx.own, ctx.scaling
        grad_x = grads[0] @ weight if ctx.needs_input_grad[0] else None
        x_NI, grad_NO = x.flatten(0, -2), grads[0].flatten(0, -2) * scaling
        grad_a, grad_b = torch.zeros_like(a), torch.zeros_like(b)
        grad_a[own] = (grad_NO @ b[:, own]).t() @ x_NI
        grad_b[:, own] = grad_NO.t() @ (x_NI @ a[own].t())
        return grad_x, None, None, grad_a, grad_b, None, None


class Magnitudes(nn.Module):
    """Trained lengths of a layer's rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows))


def add_adapters(layer: nn.Module, adapter: AdapterSpec) -> None:
    """Give the target modules of a decoder layer their adapters, and hold linear layers in 4 bits where it says so."""
    for part in list(layer.children()):
        for name, plain in list(part.named_children()):
            if name not in TARGETS or not isinstance(plain, nn.Linear):
                continue
            if name in adapter.target_modules:
                place = BEFORE_ADAPTERS + TARGETS.index(name)
                is_pissa = adapter.changes_weights
                setattr(part, name, HdPissaLinear(plain, adapter) if is_pissa else LoraLinear(plain, adapter, place))
            elif adapter.load_in_4bit:
                setattr(part, name, FourBitLinear(plain))
