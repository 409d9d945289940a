"""Dropout (arXiv:1207.0580) whose masks are counted, not carried: every plan drops the same elements.

An element is dropped by a hash of (seed, global sample, layer, place in the layer, head, position, index in the
hidden state), not by a generator's next number. So ranks that hold the same positions drop the same, ranks that hold
others draw nothing in vain, and a backward, or a forward that recompute repeats, computes the mask again instead of
saving it. A quarter of an output of the generator (`muster.model.split_mix`) decides on one element, so rates are
multiples of 2^-16.

Suffixes of tensors: B sequences, S positions, N rows, W elements of a row, C counters, D hidden width.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muster.model.chunk_sizes import chunk_elements
from muster.model.host_copies import to_device
from muster.model.split_mix import counted, key_of
from muster.spec.model import ModelSpec

_LANES, _LANE_VALUES = 4, 1 << 16
_DROPOUT = 0x64726F706F757400
"""Purpose of the draws, apart from those of other purposes with the same seed."""
EMBEDDING, ATTENTION, AFTER_ATTENTION, AFTER_MLP, BEFORE_ADAPTERS = range(5)
"""Places in which dropout is applied; the first is the model's, the others are each layer's. From the last one on each
of `muster.spec.adapters.TARGETS` has a place."""


def sample_keys(seed: int, samples: Iterable[int], device: torch.device) -> Tensor:
    """Return the key of each global sample (B), int64, from which all of its masks follow."""
    of_run = key_of(seed, _DROPOUT)
    return to_device(counted(of_run, torch.tensor(list(samples), dtype=torch.int64)), device)


def keep_mask(row_keys_N: Tensor, start: int, width: int, rate: float) -> Tensor:
    """Return True for elements that stay: those of columns start … start + width of each row, (N, W)."""
    lane = start % _LANES
    first, count = start // _LANES, -(-(lane + width) // _LANES)
    counters_C = torch.arange(first, first + count, device=row_keys_N.device)
    kept_NW = torch.empty(len(row_keys_N), width, dtype=torch.bool, device=row_keys_N.device)
    rows = max(1, chunk_elements("dropout", row_keys_N.device.type) // count)
    for row in range(0, len(row_keys_N), rows):
        drawn_NW = counted(row_keys_N[row : row + rows, None], counters_C).view(torch.int16)
        torch.ge(
            drawn_NW[:, lane : lane + width], _num_dropped(rate) - _LANE_VALUES // 2, out=kept_NW[row : row + rows]
        )
    return kept_NW


def _num_dropped(rate: float) -> int:
    """Return how many of the values of a lane stand for a dropped element."""
    return round(rate * _LANE_VALUES)


def kept_scale(rate: float) -> float:
    """Return the factor of elements that stay, which keeps the sum's expectation."""
    return _LANE_VALUES / (_LANE_VALUES - _num_dropped(rate))


@dataclass(frozen=True, eq=False)
class LayerDropout:
    """Dropout of one layer in one pass."""

    hidden: float
    """Rate of the outputs of attention and MLP."""
    attention: float
    """Rate of attention's probabilities."""
    keys_B: Tensor
    """Key of each sample in this layer."""
    positions_S: Tensor
    """Position of each hidden state in its sample."""
    whole_positions_S: Tensor
    """The same of all hidden states that tensor-parallel ranks share the positions of, one rank's after another's."""


class DropoutState:
    """Dropout of a decoder: none, unless `keys_B` are those of the next pass's samples."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.keys_B: Tensor | None = None
        """Keys of the samples of the next pass (`sample_keys`); None: drop nothing, as evaluation and generation."""

    @property
    def is_used(self) -> bool:
        """True if training drops elements."""
        return self._spec.has_dropout

    @property
    def is_active(self) -> bool:
        """True if the next pass drops elements."""
        return self.keys_B is not None and self.is_used

    def of_layer(self, layer: int, positions_S: Tensor, whole_positions_S: Tensor) -> LayerDropout:
        """Return a layer's dropout in this pass."""
        assert self.keys_B is not None
        keys_B = counted(self.keys_B, layer + 1)
        rates = self._spec.hidden_dropout, self._spec.attention_dropout
        return LayerDropout(*rates, keys_B, positions_S, whole_positions_S)

    def drop_embeddings(self, x_BSD: Tensor, positions_S: Tensor) -> Tensor:
        """Return embeddings after dropout, (B, S, D)."""
        if not self._spec.embedding_dropout:
            return x_BSD
        assert self.keys_B is not None
        keys_B = counted(self.keys_B, 0)
        return _Drop.apply(x_BSD.clone(), keys_B, positions_S, EMBEDDING, self._spec.embedding_dropout)  # type: ignore[return-value]


def drop_hidden(x_BSD: Tensor, dropout: LayerDropout | None, place: int) -> Tensor:
    """Return a layer's hidden states after dropout, which may replace their elements; autograd saves nothing."""
    if dropout is None or not dropout.hidden:
        return x_BSD
    return _Drop.apply(x_BSD, dropout.keys_B, dropout.positions_S, place, dropout.hidden)  # type: ignore[return-value]


class _Drop(torch.autograd.Function):
    """Drops in place; the backward computes the mask again."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, keys_B: Tensor, positions_S: Tensor, place: int, rate: float) -> Tensor:
        ctx.keys_B, ctx.positions_S, ctx.place, ctx.rate = keys_B, positions_S, place, rate
        ctx.mark_dirty(x_BSD)
        return _drop_(x_BSD, keys_B, positions_S, place, rate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        # The residual's gradient is the same tensor.
        grad_BSD = grads[0].clone(memory_format=torch.contiguous_format)
        return _drop_(grad_BSD, ctx.keys_B, ctx.positions_S, ctx.place, ctx.rate), None, None, None, None


def _drop_(x_BSD: Tensor, keys_B: Tensor, positions_S: Tensor, place: int, rate: float) -> Tensor:
    row_keys_BS = counted(counted(keys_B, place).unsqueeze(1), positions_S)
    kept_NW = keep_mask(row_keys_BS.flatten(), 0, x_BSD.shape[-1], rate)
    x_BSD.masked_fill_(kept_NW.view(x_BSD.shape).logical_not_(), 0)
    return x_BSD.mul_(kept_scale(rate))


class InputDropout:
    """Dropout of the input of one linear layer in one pass, in pieces of rows, so that no second copy of it is held."""

    def __init__(self, dropout: LayerDropout, place: int, rate: float) -> None:
        self._keys_B, self._positions_S = dropout.keys_B, dropout.whole_positions_S
        self._place, self._rate = place, rate

    def _row_keys(self, rows: slice) -> Tensor:
        """Return the keys of these rows, sample by sample; all of them would take memory from forward to backward."""
        row_N = torch.arange(rows.start, rows.stop, device=self._keys_B.device)
        count = len(self._positions_S)
        return counted(counted(self._keys_B, self._place)[row_N // count], self._positions_S[row_N % count])

    def pieces(self, count: int, width: int) -> Iterator[slice]:
        """Yield the rows of an input (count, width) in pieces that dropout draws at once."""
        rows = max(1, _LANES * chunk_elements("dropout", self._keys_B.device.type) // width)
        return (slice(row, min(row + rows, count)) for row in range(0, count, rows))

    def dropped_(self, x_NI: Tensor, rows: slice, first: int) -> Tensor:
        """Drop elements of x in place, which are these rows of the input and its columns from `first` on."""
        kept_NI = keep_mask(self._row_keys(rows), first, x_NI.shape[1], self._rate)
        return x_NI.masked_fill_(kept_NI.logical_not_(), 0).mul_(kept_scale(self._rate))

    def linear(self, x: Tensor, weight_OI: Tensor, first: int = 0) -> Tensor:
        """Apply a linear layer to x (…, I) after dropout."""
        x_NI = x.flatten(0, -2)
        y_NO = x.new_empty(len(x_NI), len(weight_OI))
        for rows in self.pieces(*x_NI.shape):
            torch.mm(self.dropped_(x_NI[rows].clone(), rows, first), weight_OI.t(), out=y_NO[rows])
        return y_NO.view(*x.shape[:-1], len(weight_OI))

    def add_input_grad_(self, grad_x: Tensor, grad: Tensor, weight_OI: Tensor, first: int = 0) -> None:
        """Add the gradient of x, of that of the linear layer's output, to `grad_x`."""
        grad_NI, grad_NO = grad_x.view(-1, grad_x.shape[-1]), grad.flatten(0, -2)
        for rows in self.pieces(*grad_NI.shape):
            grad_NI[rows] += self.dropped_(grad_NO[rows] @ weight_OI, rows, first)

    def weight_grad(self, x_NI: Tensor, grad_NO: Tensor, first: int = 0) -> Tensor:
        """Return the gradient of the linear layer's weight (O, I)."""
        grad_OI = x_NI.new_zeros(grad_NO.shape[1], x_NI.shape[1])
        for rows in self.pieces(*x_NI.shape):
            grad_OI.addmm_(grad_NO[rows].t(), self.dropped_(x_NI[rows].clone(), rows, first))
        return grad_OI


class ScoreDropout:
    """Dropout of attention's probabilities: those of the heads from `first_head` on of each sample, (B, H, S, S)."""

    def __init__(self, dropout: LayerDropout, first_head: int) -> None:
        self.rate, self._keys_B, self._first_head = dropout.attention, dropout.keys_B, first_head

    def kept(self, heads: int, rows: slice, keys: slice) -> Tensor:
        """Return True for probabilities that stay: of the queries of `rows` to the keys of `keys`, (B, H, R, T)."""
        device = self._keys_B.device
        head_H = torch.arange(self._first_head, self._first_head + heads, device=device)
        row_R = torch.arange(rows.start, rows.stop, device=device)
        keys_BH = counted(counted(self._keys_B, ATTENTION).unsqueeze(1), head_H)
        row_keys_BHR = counted(keys_BH.unsqueeze(2), row_R)
        kept_NW = keep_mask(row_keys_BHR.flatten(), keys.start, keys.stop - keys.start, self.rate)
        return kept_NW.view(*row_keys_BHR.shape, -1)

    @property
    def scale(self) -> float:
        """Factor of probabilities that stay."""
        return kept_scale(self.rate)
