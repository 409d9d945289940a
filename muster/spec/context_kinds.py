"""The table of kinds of context parallelism: how attention gets the keys and values that other ranks hold.

A new kind is a row here, its transfers and buffers in `muster.cost.context_traffic`, and its file in `muster/parallel`.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

CpCommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p", "burst", "token_ring", "rsa", "lasp2", "zeco"]
"""Communication of context-parallel attention. p2p: blocks of keys and values travel around a ring
(arXiv:2310.01889). all_gather: every rank gathers all keys and values. a2a: the ranks exchange positions for heads, so
that each computes whole sequences of some heads (Ulysses, arXiv:2309.14509). a2a+p2p: neighbours exchange heads, and
rings join their groups (USP, arXiv:2405.07719). burst: as p2p, but in the backward queries and the gradients of outputs
travel instead (BurstAttention, arXiv:2403.09347). token_ring: queries travel around a ring, and their outputs and
gradients the other way (TokenRing, arXiv:2412.20501). rsa: keys, and after a softmax of whole rows values, travel
around a ring (arXiv:2105.13120). lasp2: layers with linear attention gather the states of all
ranks, others keys and values (LASP-2H, arXiv:2502.07563). zeco: states go from rank to rank in blocks (ZeCO,
arXiv:2507.01004)."""
CP_COMM_TYPES: tuple[CpCommType, ...] = get_args(CpCommType)


@dataclass(frozen=True, slots=True)
class ContextKind:
    """One kind of context parallelism."""

    word: str
    """Letter behind the degree in a plan's name."""
    attention: str
    """Class of `muster/parallel` that attends, as `file:class`."""
    exchanges_heads: bool = False
    """True if ranks exchange positions for heads before attention: all of them, or groups."""
    has_windows: bool = True
    """True if attention may have a sliding window."""
    sends_back: bool = False
    """True if results travel against its ring."""
    has_double_ring: bool = False
    """True if its ring may have inner ones, of `cp_window_size` ranks."""
    has_groups: bool = False
    """True if groups of `cp_ulysses_degree` neighbours do."""
    saves_scores: bool = False
    """True if the probabilities of all positions of the sequence are in memory from forward to backward."""
    states: str | None = None
    """Class of `muster/parallel` that exchanges the states of linear attention, as `file:class`. Each rank then keeps
    consecutive positions, since states are handed on in order; None: an early and a late run of them."""


CONTEXT_KINDS: dict[CpCommType, ContextKind] = {
    "p2p": ContextKind("", "cp_ring:RingAttention", has_double_ring=True),
    "all_gather": ContextKind("a", "cp_all_gather:AllGatherAttention"),
    "a2a": ContextKind("u", "cp_ulysses:UlyssesAttention", exchanges_heads=True),
    "a2a+p2p": ContextKind(
        "u", "cp_ulysses:UlyssesRingAttention", exchanges_heads=True, has_double_ring=True, has_groups=True
    ),
    "burst": ContextKind("b", "cp_burst:BurstAttention", has_windows=False),
    "token_ring": ContextKind("t", "cp_token_ring:TokenRingAttention", sends_back=True),
    "rsa": ContextKind("s", "cp_rsa:RingSelfAttention", saves_scores=True),
    "lasp2": ContextKind("l", "cp_all_gather:AllGatherAttention", states="cp_states:GatheredStates"),
    "zeco": ContextKind("z", "cp_all_gather:AllGatherAttention", states="cp_states:ScannedStates"),
}


class ContextRanks(NamedTuple):
    """Context-parallel ranks of a stage and the way in which their attention communicates.

    Rank r · ulysses + u is the u-th of the r-th group, whose members exchange heads; the ranks with the same u are a
    ring. With ulysses 1 all ranks are one ring, with ulysses = size there is none.
    """

    kind: CpCommType = "p2p"
    size: int = 1
    ulysses: int = 1
    window: int = 1
    """Ranks of each inner ring of a double ring, neighbours in the ring; 1: a single ring."""

    @property
    def ring(self) -> int:
        """Ranks that hold different positions of the same heads while attention is computed."""
        return self.size // self.ulysses

    @property
    def is_contiguous(self) -> bool:
        """True if each rank keeps consecutive positions."""
        return CONTEXT_KINDS[self.kind].states is not None

    @property
    def has_second_ring(self) -> bool:
        """True if a second ring of the same ranks is used at the same time."""
        return self.size > 1 and (self.window > 1 or CONTEXT_KINDS[self.kind].sends_back)


def context_ranks(kind: CpCommType, cp: int, ulysses_degree: int, window: int) -> ContextRanks:
    """Return the ranks of a stage with `cp` of them."""
    return ContextRanks(kind, cp, cp if kind == "a2a" else min(cp, ulysses_degree), window)
