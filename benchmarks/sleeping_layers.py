"""Layers whose compute sleeps, and a link on which a message takes a set time, for `benchmarks.overlap`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from muster.cost.time.pass_cost import OVERLAP_SLOWDOWN
from muster.model.decoder import Decoder, Layer
from muster.spec.model import ModelSpec

LAYERS, SEQUENCES, POSITIONS = 6, 4, 8
MODEL = ModelSpec(
    vocab_size=8, hidden_size=16, num_layers=LAYERS, num_heads=2, num_kv_heads=2, intermediate_size=16, gated=False
)
FORWARD_S, INPUT_S, WEIGHT_S = 0.025, 0.025, 0.0125
"""Seconds of a sublayer's compute for one sequence: of the forward, of the backward until the gradient of its input
sets out, and of the gradients of weights behind that."""


@dataclass
class Link:
    """A link over which messages travel one after another."""

    overlaps: bool = True
    """False: each message is waited for where it is sent."""
    takes_time: bool = True
    """False: messages arrive at once."""
    free_s: float = 0.0

    def send(self, seconds: float) -> "Arrival":
        """Send a message that takes so long once the link is free."""
        self.free_s = max(time.perf_counter(), self.free_s) + seconds * self.takes_time
        arrival = Arrival(self.free_s)
        if not self.overlaps:
            arrival.wait()
        return arrival


class Arrival(dist.Work):
    """End of a message."""

    def __init__(self, at_s: float) -> None:
        super().__init__()
        self._at_s = at_s

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._at_s

    def wait(self, timeout: object = None) -> bool:
        time.sleep(max(0.0, self._at_s - time.perf_counter()))
        return True


class Slept(torch.autograd.Function):
    """The same tensor after a while, by its sequences (B, …)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(seconds * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s * len(grads[0]))
        return grads[0], None, None


@dataclass(frozen=True)
class Case:
    """A mechanism at one ratio: seconds of compute and of messages, the run, which returns its seconds, and those that
    are predicted."""

    name: str
    compute_s: float
    messages_s: float
    run: Callable[[Link], float]
    predicted_s: float


def timed(action: Callable[[], object]) -> float:
    """Return the seconds of an action."""
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def sleep_in_layers(module: Decoder, forward_s: float, backward_s: float = INPUT_S) -> None:
    """Let attention and MLP of each layer take so many seconds a sequence in the forward, and in the backward."""
    for layer in module.blocks():
        attend, activate = layer.attn.attend, layer.mlp._activate  # type: ignore[union-attr]
        layer.attn.attend = lambda *args, own=attend: Slept.apply(own(*args), forward_s, backward_s)  # type: ignore[method-assign,union-attr,assignment]
        layer.mlp._activate = lambda *args, own=activate: Slept.apply(own(*args), forward_s, backward_s)  # type: ignore[union-attr]


@contextmanager
def sleeping_layers(forward_s: float) -> Iterator[None]:
    """Let each layer take so many seconds a sequence in its forward, and twice as many in its backward."""
    compute = Layer.forward

    def forward(self: Layer, x_BSD: Tensor, *constants: Any) -> Tensor:
        return compute(self, cast(Tensor, Slept.apply(x_BSD, forward_s, 2 * forward_s)), *constants)

    with patch.object(Layer, "forward", forward):
        yield


def without_slowdown(seconds: float, alone_s: float) -> float:
    """Return the predicted seconds of things that overlap where none of them is slower for it; `alone_s`: what they
    take one after another."""
    return (seconds - OVERLAP_SLOWDOWN * alone_s) / (1 - OVERLAP_SLOWDOWN)
