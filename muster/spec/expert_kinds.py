"""The table of dispatchers: how tokens get to experts on other ranks, and their results back.

A new dispatcher is a row here, its calls in `muster.cost.expert_traffic`, and its file in `muster/parallel`.
"""

from dataclasses import dataclass
from math import ceil, isqrt
from typing import Literal, NamedTuple

EpDispatcher = Literal["all_to_all", "hierarchical", "all_gather", "slicing"]
"""Dispatch of tokens to experts. all_to_all: rows go to the ranks of their experts and back (arXiv:2006.16668).
hierarchical: they do so in two steps, within groups of neighbours and between these (Tutel's 2DH, arXiv:2206.03382
§4.3). all_gather: every rank gets all tokens, and their results are summed (MegaScale-MoE, arXiv:2505.11432 §3.2).
slicing: tensor-parallel ranks, which have the same tokens, each take the rows of their own experts (PPMoE,
arXiv:2304.11414)."""


DispatchDtype = Literal["none", "fp8", "int8"]
"""Numbers in which hidden states travel to experts; none: those that the layers compute in."""
ROW_SCALE_BYTES = 4
"""Bytes of the scale of a hidden state in 8 bits, which travels with it."""


@dataclass(frozen=True, slots=True)
class DispatcherKind:
    """One kind of dispatcher."""

    word: str
    """Letter behind the degree in a plan's name."""
    implementation: str
    """Class of `muster/parallel`, as `file:class`."""
    sends_centroids: bool = False
    """True if centroids of hidden states may travel in their place."""
    sends_chunks: bool = False
    """True if the tokens may travel in chunks, beside the products of others."""
    casts_rows: bool = False
    """True if hidden states may travel in 8 bits."""
    shares_tokens: bool = False
    """True if all its ranks have the same tokens: those of a tensor-parallel group."""


DISPATCHERS: dict[EpDispatcher, DispatcherKind] = {
    "all_to_all": DispatcherKind(
        "", "ep_all_to_all:AllToAll", sends_centroids=True, sends_chunks=True, casts_rows=True
    ),
    "hierarchical": DispatcherKind("h", "ep_hierarchical:HierarchicalAllToAll"),
    "all_gather": DispatcherKind("g", "ep_all_gather:AllGather"),
    "slicing": DispatcherKind("s", "ep_slicing:Slicing", shares_tokens=True),
}


class ExpertDispatch(NamedTuple):
    """Expert-parallel ranks of a stage and the way of tokens between them.

    Rank o · inner + i is the i-th of the o-th group of neighbours; ranks with the same i are a group of the second step
    of the hierarchical exchange.
    """

    kind: EpDispatcher = "all_to_all"
    size: int = 1
    inner: int = 1
    chunks: int = 1
    dtype: DispatchDtype = "none"
    redundant: int = 0
    """Copies of other ranks' experts that each rank may have."""
    lsh_rate: float = 0.0
    """Centroids that travel in place of hidden states, as a share of these; 0: none."""

    def sent_rows(self, rows: int, num_experts: int) -> int:
        """Return the rows that travel for so many hidden states."""
        return num_centroids(rows, num_experts, self.lsh_rate) if self.lsh_rate else rows

    @property
    def outer(self) -> int:
        """Groups of neighbours."""
        return self.size // self.inner


def num_centroids(rows: int, num_experts: int, rate: float) -> int:
    """Return the centroids of a rank's hidden states: their share, and one for each expert more, so that each that has
    rows has a centroid."""
    return min(rows, ceil(rate * rows) + num_experts)


def usual_inner_size(ep: int) -> int:
    """Return the ranks of each group of neighbours that make fewest messages, P / L + L: the smallest divisor of `ep`
    that is no less than its root."""
    return next(size for size in range(isqrt(max(0, ep - 1)) + 1, ep + 1) if ep % size == 0)
