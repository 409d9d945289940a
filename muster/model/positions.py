"""Functions of positions alone: rotary angles, attention windows, rows of learned positions."""

import math

import torch
from torch import Tensor

from muster.model.documents import Documents
from muster.model.kernels import accumulation_dtype
from muster.model.varlen_attention import has_varlen_attention
from muster.spec.model import ModelSpec
from muster.spec.model_components import RopeScaling


def rotary_tables(
    seq_len: int,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device,
    scaling: RopeScaling | None = None,
    positions_S: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every angle, each (S, 1, head_dim); the two halves of the last dimension are equal.

    They are of the first `seq_len` positions, or of those given.

    Pair i at position t is rotated by t · theta^(−2i / head_dim) (RoFormer, arXiv:2104.09864 §3.2.2), or by the scaled
    angle under `scaling`, computed in float32 at least.
    """
    exponents_P = torch.arange(0, head_dim, 2, dtype=accumulation_dtype(dtype), device=device) / head_dim
    if positions_S is None:
        positions_S = torch.arange(seq_len, device=device)
    positions_S = positions_S.to(accumulation_dtype(dtype))
    per_position_P, factor = theta**-exponents_P, 1.0
    if scaling is not None:
        per_position_P, factor = scaled_frequencies(per_position_P, theta, scaling), scaling.attention_scaling
    angles_SP = torch.outer(positions_S, per_position_P)
    angles_S1D = torch.cat((angles_SP, angles_SP), dim=-1).unsqueeze(1)
    return (angles_S1D.cos() * factor).to(dtype), (angles_S1D.sin() * factor).to(dtype)


def scaled_frequencies(angle_P: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Return the angle per position of each pair under `scaling`; `RopeScaling` gives the sources."""
    if scaling.kind == "linear":
        return angle_P / scaling.factor
    assert scaling.original_positions is not None
    if scaling.kind == "llama3":
        turns_P = scaling.original_positions * angle_P / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept_P = ((turns_P - low) / (high - low)).clamp(0, 1)
    else:
        kept_P = 1 - _yarn_ramp(angle_P, theta, scaling, scaling.original_positions)
    return angle_P * (kept_P + (1 - kept_P) / scaling.factor)


def _yarn_ramp(angle_P: Tensor, theta: float, scaling: RopeScaling, positions: int) -> Tensor:
    """Return 0 for pairs that rotate more often than beta_fast in `positions`, 1 for those that rotate less often than
    beta_slow, and values linear in the pair's index between (YaRN, arXiv:2309.00071 §3.2)."""

    def pair(turns: float) -> float:
        return len(angle_P) * math.log(positions / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(angle_P) - 1)
    index_P = torch.arange(len(angle_P), dtype=angle_P.dtype, device=angle_P.device)
    return ((index_P - first) / max(last - first, 1e-3)).clamp(0, 1)


def window_mask(seq_len: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the term added to scores (S, S) of windowed attention: 0 where a position sees itself and the `window − 1`
    before it, −∞ elsewhere."""
    at_S = torch.arange(seq_len, device=device)
    behind_SS = at_S.unsqueeze(1) - at_S
    seen_SS = (behind_SS >= 0) & (behind_SS < window)
    return torch.zeros(seq_len, seq_len, dtype=dtype, device=device).masked_fill_(~seen_SS, -math.inf)


class PositionState:
    """Positions of a decoder's hidden states in their sequences, and the constants of them that all layers share.

    The constants are made at their first use, and again for a longer sequence, another dtype or another device. They
    are no buffers of a module: nothing to save, to shard, or to lose when a module leaves the meta device.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.seq_len: int | None = None
        """Positions of a whole sequence; None: hidden states have all of them."""
        self.sequence_shard = 0
        """Index of this rank's shard of the sequence."""
        self.offset = 0
        """Position of the sequence's first hidden state."""
        self.positions_S: Tensor | None = None
        """Positions, in their sequence, of this rank's hidden states before `sequence_shard` cuts them; None: all,
        in order."""
        self.whole_length: int | None = None
        """Positions of the sequence that `positions_S` are of."""
        self.table_length: int | None = None
        """Positions that tables of angles are made for where `offset` varies; None: as many as are read."""
        self.makes_masks = True
        """False where attention itself hides what a window doesn't reach."""
        self.knows_attention = False
        """True if attention is Muster's own, which needs no mask where it has a kernel for windows."""
        self.starts_B: Tensor | None = None
        """Index of each sequence's position 0; None: 0 in all of them."""
        self.documents: Documents | None = None
        """Documents of the next pass's sequences; None: each is one document."""
        self._cos_sin: dict[bool, tuple[Tensor, Tensor]] = {}
        self._own_cos_sin: dict[bool, tuple[Tensor, Tensor, Tensor]] = {}
        """Positions of this rank alone, with their cos and sin: those of a long sequence take much memory."""
        self._masks: dict[int, Tensor] = {}

    def rotary_cos_sin(self, x_BSD: Tensor, window: int | None = None) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return cos and sin of all S positions, in layers with this window, in the dtype and on the device of `x_BSD`.

        Each is (S, 1, rotary_dim), or (B, S, 1, rotary_dim) for sequences of several documents; None for a model
        without rotary positions.
        """
        spec = self._spec
        if spec.position != "rope":
            return None, None
        is_local = self.has_own_angles(window)
        if self.positions_S is not None and self.documents is None:
            return self._own_angles(self.positions_S, x_BSD, is_local)
        end, kind = self.offset + (self.whole_length or self._length(x_BSD)), (x_BSD.dtype, x_BSD.device)
        tables = self._cos_sin.get(is_local)
        if tables is None or len(tables[0]) < end or (tables[0].dtype, tables[0].device) != kind:
            # Generation would need a new table for each token.
            size = self.table_length or (end if self.offset == 0 else 2 * end)
            self._cos_sin[is_local] = tables = self._tables(size, x_BSD, is_local)
        if self.documents is not None:
            return tables[0][self.documents.positions_BS], tables[1][self.documents.positions_BS]
        return tables[0][self.offset : end], tables[1][self.offset : end]

    def _own_angles(self, positions_S: Tensor, x_BSD: Tensor, is_local: bool) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the positions that this rank keeps of a sequence."""
        known = self._own_cos_sin.get(is_local)
        if known is None or known[0] is not positions_S or known[1].dtype != x_BSD.dtype:
            tables = self._tables(len(positions_S), x_BSD, is_local, positions_S)
            self._own_cos_sin[is_local] = known = positions_S, *tables
        return known[1], known[2]

    def _tables(
        self, size: int, x_BSD: Tensor, is_local: bool, positions_S: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        spec = self._spec
        theta, scaling = spec.rope_theta, spec.rope_scaling
        if is_local and spec.window_rope_theta is not None:
            theta, scaling = spec.window_rope_theta, None
        kind = x_BSD.dtype, x_BSD.device
        return rotary_tables(size, spec.rotary_width, theta, *kind, scaling, positions_S)

    def has_own_angles(self, window: int | None) -> bool:
        """Return True if layers with this window turn by other angles than layers without one."""
        return window is not None and self._spec.window_rope_theta is not None

    def mask(self, window: int | None, x_BSD: Tensor) -> Tensor | None:
        """Return the `window_mask` of whole sequences; None if it would hide nothing, or attention needs none."""
        length = self.whole_length or self._length(x_BSD)
        if window is None or length <= window or not self.makes_masks:
            return None
        spec = self._spec
        is_piecewise = spec.attention_softcap is not None or spec.attention_sinks
        if self.knows_attention and (is_piecewise or has_varlen_attention(x_BSD, spec.head_dim)):
            return None
        mask, kind = self._masks.get(window), (x_BSD.dtype, x_BSD.device)
        if mask is None or len(mask) < length or (mask.dtype, mask.device) != kind:
            self._masks[window] = mask = window_mask(length, window, *kind)
        return mask if len(mask) == length else mask[:length, :length]

    def positions_in_sample(self, x_BSD: Tensor) -> Tensor:
        """Return the position of each hidden state in its sample, whatever its document: (S)."""
        count = x_BSD.shape[1]
        begin = self.offset + self.sequence_shard * count
        if self.positions_S is not None:
            return self.positions_S[begin : begin + count]
        return torch.arange(begin, begin + count, device=x_BSD.device)

    def whole_positions_in_sample(self, x_BSD: Tensor) -> Tensor:
        """Return the same of all hidden states whose positions tensor-parallel ranks share, one's after another's."""
        begin, end = self.offset, self.offset + self._length(x_BSD)
        if self.positions_S is not None:
            return self.positions_S[begin:end]
        return torch.arange(begin, end, device=x_BSD.device)

    def learned_rows(self, weight_PD: Tensor, x_BSD: Tensor) -> Tensor:
        """Return the rows of a table of learned positions (P, D) for the hidden states: (S, D) or (B, S, D)."""
        count = x_BSD.shape[1]
        shard = self.sequence_shard * count
        begin = self.offset + shard
        if self.documents is not None:
            return weight_PD[self.documents.positions_BS[:, shard : shard + count]]
        if self.positions_S is not None:
            return weight_PD[self.positions_S[begin : begin + count]]
        if self.starts_B is None:
            return weight_PD[begin : begin + count]
        at_S = torch.arange(begin, begin + count, device=x_BSD.device)
        return weight_PD[(at_S - self.starts_B.unsqueeze(1)).clamp(min=0)]

    def shared_constants(self) -> list[Tensor]:
        """Return the constants that autograd saves for a backward and that all micro-batches share."""
        return [*self._masks.values(), *([] if self.positions_S is None else [self.positions_S])]

    def tables(self) -> list[Tensor]:
        """Return the angles and masks that passes read, which sequences of another length may replace."""
        return [*(table for pair in self._cos_sin.values() for table in pair), *self._masks.values()]

    def _length(self, x_BSD: Tensor) -> int:
        return self.seq_len or x_BSD.shape[1]
