"""Rotary positions: the angles by which the pairs of numbers of a head are turned (RoFormer, arXiv:2104.09864)."""

import torch
from torch import Tensor

from muster.model.kernels import wide


def rotary_tables(
    seq_len: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, each (S, 1, head_dim); the two halves of the last dimension are alike.

    Pair i at position t is turned by t · theta^(−2i / head_dim) (section 3.2.2), computed in float32 at least.
    """
    exponents_P = torch.arange(0, head_dim, 2, dtype=wide(dtype), device=device) / head_dim
    positions_S = torch.arange(seq_len, dtype=wide(dtype), device=device)
    angles_SP = torch.outer(positions_S, theta**-exponents_P)
    angles_S1D = torch.cat((angles_SP, angles_SP), dim=-1).unsqueeze(1)
    return angles_S1D.cos().to(dtype), angles_S1D.sin().to(dtype)


class RotaryTables:
    """Tables made at their first use, and again when a longer sequence, another dtype or another device comes.

    They are no buffers of a module: nothing to save, to shard, or to lose when a module leaves the meta device.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self.seq_len: int | None = None
        """Positions of a sequence, where hidden states hold a part of it only."""
        self.first = 0
        """The position of the first hidden state."""
        self._tables: tuple[Tensor, Tensor] | None = None

    def for_hidden(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for all S positions in the dtype and on the device of `x_BSD`, each (S, 1, head_dim)."""
        end, kind = self.first + (self.seq_len or x_BSD.shape[1]), (x_BSD.dtype, x_BSD.device)
        tables = self._tables
        if tables is None or len(tables[0]) < end or (tables[0].dtype, tables[0].device) != kind:
            size = end if self.first == 0 else 2 * end  # a text that grows would need a new table for each token
            self._tables = tables = rotary_tables(size, self.head_dim, self.theta, *kind)
        return tables[0][self.first : end], tables[1][self.first : end]
