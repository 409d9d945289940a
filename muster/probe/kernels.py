"""Measurement of the kernels that a decoder's passes consist of, by shape."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from muster.model.attention import core_attention
from muster.model.dtypes import DTYPES
from muster.model.kernels import apply_rotary, gated_activation, rms_norm
from muster.model.loss import cross_entropy_sum
from muster.model.positions import rotary_tables
from muster.probe.grouped_matmuls import routing_passes, time_grouped_matmuls
from muster.probe.timer import KernelTimer
from muster.spec.machine_rates import KernelRates
from muster.spec.plan import Precision


@dataclass(frozen=True)
class KernelSizes:
    """Sizes at which kernels are timed."""

    widths: tuple[int, ...] = (32, 128, 256, 512, 1024, 2048)
    tokens: tuple[int, ...] = (16, 64, 256, 1024)
    positions: tuple[int, ...] = (32, 128, 256, 512, 1024)
    head_widths: tuple[int, ...] = (16, 32, 64, 128)
    elements: tuple[int, ...] = tuple(4**power for power in range(5, 12))
    """Elements of streaming kernels, the largest beyond any cache."""
    heads: int = 4
    """Heads of an attention; enough of them to keep the device busy."""
    norm_width: int = 256
    vocab_size: int = 1024
    expert_rows: tuple[int, ...] = (2, 16, 128)
    """Rows of each expert."""
    expert_widths: tuple[int, ...] = (64, 512)
    max_flops: float = 6e8
    """Largest matmul that is timed; larger ones run at the same rate."""
    pool_elements: int = 1 << 22
    """Elements of the data sets that are used in turn: more than the nearest cache holds."""


SIZES = {
    "cpu": KernelSizes(),
    "cuda": KernelSizes(
        widths=(128, 512, 1024, 2048, 4096, 8192, 16_384),
        tokens=(64, 256, 1024, 4096, 16_384),
        positions=(128, 512, 1024, 2048, 4096, 8192, 16_384),
        head_widths=(64, 128),
        elements=tuple(4**power for power in range(5, 15)),
        heads=32,
        norm_width=4096,
        vocab_size=32_768,
        expert_rows=(16, 256, 4096),
        expert_widths=(768, 4096),
        max_flops=1e13,
        pool_elements=1 << 26,
    ),
}
"""Sizes by device type: those of a GPU reach what fills it, the heads of real models, and beyond its L2 cache of up to
126 MB."""
QUICK = {
    "cpu": KernelSizes(
        (32, 256),
        (16, 256),
        (64, 256),
        (16, 64),
        (1024, 65_536, 1_048_576),
        expert_rows=(4, 64),
        expert_widths=(64, 256),
    ),
    "cuda": replace(
        SIZES["cuda"],
        widths=(1024, 4096),
        tokens=(1024, 8192),
        positions=(1024, 4096),
        head_widths=(128,),
        elements=(16_384, 1_048_576, 4**14),
        expert_rows=(64, 1024),
        expert_widths=(1024, 4096),
    ),
}
_MAX_COPIES = 16
_HEAD, _ROWS = 64, 256

Progress = Callable[[str], None]


def time_kernels(clock: KernelTimer, precision: Precision, sizes: KernelSizes, progress: Progress) -> KernelRates:
    """Time all kernels in one precision."""
    return _KernelBenchmark(clock, DTYPES[precision], sizes, progress).run()


class _KernelBenchmark:
    def __init__(self, clock: KernelTimer, dtype: torch.dtype, sizes: KernelSizes, progress: Progress) -> None:
        self.sizes = sizes
        self.clock = clock
        self.dtype = dtype
        self.device = clock.device
        self.progress = progress
        x = self._random(4, grad=True)
        gradient = torch.ones_like(x)
        self.engine_s = clock.time_steps([_passes(lambda: x.view(2, 2).view(4), gradient)] * 4)[1]
        """Seconds of the autograd engine in any backward, whatever its operations."""

    def run(self) -> KernelRates:
        matmuls = self._matmuls()
        attention = {"forward": [], "backward": []}
        for positions, width in product(self.sizes.positions, self.sizes.head_widths):
            forward_s, backward_s = self._attention(positions, width)
            attention["forward"].append((positions, width, forward_s))
            attention["backward"].append((positions, width, backward_s))
        self.progress("matmuls of experts")
        own = self.sizes.expert_rows, self.sizes.expert_widths, self._copies
        grouped = time_grouped_matmuls(self.clock, self.dtype, *own)
        self.progress("memory-bound kernels")
        curves: dict[str, list[tuple[int, float]]] = {}
        for name, make in self._elementwise():
            for elements in self.sizes.elements:
                times_s = self._forward_backward([make(elements) for _ in range(self._copies(3 * elements))])
                for direction, time_s in zip(("forward", "backward"), times_s, strict=False):
                    curves.setdefault(f"{name} {direction}", []).append((elements, time_s))
        for name, make in self._streaming():
            for elements in self.sizes.elements:
                calls = [make(elements) for _ in range(self._copies(2 * elements))]
                curves.setdefault(name, []).append((elements, self.clock.time(calls)))
        found = {"matmuls": matmuls, "attention": attention, "grouped_matmuls": grouped, "curves": curves}
        return KernelRates.model_validate(found)

    def _matmuls(self) -> dict[str, list[tuple[int, int, int, float]]]:
        found: dict[str, list[tuple[int, int, int, float]]] = {"forward": [], "input": [], "weight": []}
        for tokens in self.sizes.tokens:
            self.progress(f"matmuls of {tokens} tokens")
            for inner, outer in product(self.sizes.widths, self.sizes.widths):
                if 2 * tokens * inner * outer <= self.sizes.max_flops:
                    times_s = self._linear(tokens, inner, outer)
                    for kind, time_s in zip(found, times_s, strict=True):
                        found[kind].append((tokens, inner, outer, time_s))
        return found

    def _linear(self, tokens: int, inner: int, outer: int) -> tuple[float, float, float]:
        """Return the seconds of forward, input gradient, and weight gradient with accumulation, of a linear layer."""
        calls, inputs = [], []
        for _ in range(self._copies(tokens * (inner + outer) + 2 * inner * outer)):
            x, weight = self._random(tokens, inner, grad=True), self._random(outer, inner, grad=True)
            gradient = self._random(tokens, outer)
            weight.grad = torch.zeros_like(weight)
            calls.append(_passes(partial(F.linear, x, weight), gradient, x))
            inputs.append(partial(torch.matmul, gradient, weight.detach()))
        forward_s, backward_s, _ = self.clock.time_steps(calls)
        input_s = self.clock.time(inputs)
        return forward_s, input_s, max(0.2 * input_s, backward_s - self.engine_s - input_s)

    def _attention(self, positions: int, width: int) -> tuple[float, float]:
        """Return the seconds of attention's forward and backward for one head of one sequence."""
        heads = self.sizes.heads
        calls = []
        for _ in range(self._copies(4 * positions * width * heads)):
            q, k, v = (self._random(1, positions, heads, width, grad=True) for _ in range(3))
            make = partial(_attend, q, k, v)
            calls.append(_passes(make, self._random(1, heads, positions, width), q, k, v))
        forward_s, backward_s = self._forward_backward(calls)
        return forward_s / heads, backward_s / heads

    def _forward_backward(self, calls: list[tuple[Callable[[], object], ...]]) -> tuple[float, float]:
        forward_s, backward_s, _ = self.clock.time_steps(calls)
        return forward_s, max(1e-7, backward_s - self.engine_s)

    def _elementwise(self) -> Iterator[tuple[str, Callable[[int], tuple[Callable[[], object], ...]]]]:
        """Yield name → (elements → forward and backward) of kernels between matmuls."""

        norm_width, vocab_size = self.sizes.norm_width, self.sizes.vocab_size

        def norm(elements: int) -> tuple[Callable[[], object], ...]:
            width = min(norm_width, elements)
            x = self._random(elements // width, width, grad=True)
            weight = self._random(width, grad=True)
            return _passes(lambda: rms_norm(x, weight, 1e-5), torch.ones_like(x), x)

        def gated_unit(elements: int) -> tuple[Callable[[], object], ...]:
            gate, up = self._random(elements, grad=True), self._random(elements, grad=True)
            return _passes(lambda: gated_activation(gate, up), torch.ones_like(gate), gate, up)

        def rotated(elements: int) -> tuple[Callable[[], object], ...]:
            positions = max(4, elements // _HEAD // 4)
            x = self._random(1, positions, elements // positions // _HEAD, _HEAD, grad=True)
            cos, sin = rotary_tables(positions, _HEAD, 10_000.0, self.dtype, self.device)
            return _passes(lambda: apply_rotary(x, cos, sin), torch.ones_like(x), x)

        def loss(elements: int) -> tuple[Callable[[], object], ...]:
            logits = self._random(1, max(1, elements // vocab_size), vocab_size, grad=True)
            labels = torch.zeros(logits.shape[:2], dtype=torch.int64, device=self.device)
            return _passes(lambda: cross_entropy_sum(logits, labels), None, logits)

        def embedding(elements: int) -> tuple[Callable[[], object], ...]:
            width = min(norm_width, elements)
            table = self._random(elements // width, width, grad=True)
            table.grad = torch.zeros_like(table)
            tokens = torch.randint(len(table), (_ROWS,), device=self.device)
            return _passes(lambda: F.embedding(tokens, table), self._random(_ROWS, width))

        def routing(elements: int) -> tuple[Callable[[], object], ...]:
            make, gradient, x = routing_passes(elements, min(norm_width, elements), self.dtype, self.device)
            return _passes(make, gradient, x)

        kernels = {"norm": norm, "gated": gated_unit, "rotary": rotated, "loss": loss, "embedding": embedding}
        return iter((kernels | {"routing": routing}).items())

    def _streaming(self) -> Iterator[tuple[str, Callable[[int], Callable[[], object]]]]:
        """Yield name → (elements → call) of streaming kernels; those of the optimizer are in float32 whatever the
        precision."""

        def added(elements: int) -> Callable[[], object]:
            x, y = self._random(elements), self._random(elements)
            return lambda: x.add_(y)

        def copied(elements: int) -> Callable[[], object]:
            x, y = self._random(elements).float(), self._random(elements).float()
            return lambda: x.copy_(y)

        def stepped(elements: int) -> Callable[[], object]:
            x = self._random(elements).float()
            x.grad = torch.ones_like(x)
            optimizer = torch.optim.AdamW([x], fused=True)
            return optimizer.step

        def measured(elements: int) -> Callable[[], object]:
            x = [self._random(elements).float()]
            return lambda: float(torch.nn.utils.get_total_norm(x))

        def scaled(elements: int) -> Callable[[], object]:
            x = [self._random(elements).float()]
            return lambda: torch._foreach_mul_(x, 0.999)

        return iter(
            {"add": added, "copy": copied, "adamw": stepped, "gradient norm": measured, "scale": scaled}.items()
        )

    def _random(self, *shape: int, grad: bool = False) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device).requires_grad_(grad)

    def _copies(self, elements: int) -> int:
        """Return the number of data sets used in turn: together they exceed the nearest cache."""
        return min(_MAX_COPIES, max(2, self.sizes.pool_elements // elements))


def _attend(q_BSHd: Tensor, k_BSHd: Tensor, v_BSHd: Tensor) -> Tensor:
    return core_attention(q_BSHd.transpose(1, 2), k_BSHd.transpose(1, 2), v_BSHd.transpose(1, 2), None, None)


def _passes(
    make: Callable[[], Tensor], gradient: Tensor | None, *inputs: Tensor
) -> tuple[Callable[[], object], Callable[[], object], Callable[[], object]]:
    """Return forward, backward, and a reset for the next repetition."""
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs.append(make())

    def backward() -> None:
        torch.autograd.backward(outputs.pop(), gradient)

    def reset() -> None:
        for x in inputs:
            x.grad = None

    return forward, backward, reset
