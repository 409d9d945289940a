"""Context parallelism of linear attention: ranks keep consecutive positions and exchange states in place of positions.

Each rank makes the state of its own positions alone, and the part of an earlier state that is left behind them. The
state before its first position follows from those of the ranks before: S = Σ_j (Π_{j<i} kept_i) S_j. In the backward
the gradient of the state behind its last position follows likewise from the ranks behind. However long the sequence is,
one state per sequence and head travels, while attention would send keys and values of all positions.

`GatheredStates` (LASP-2, arXiv:2502.07563 §3.2) gathers the states of all ranks, each of which adds up those before its
own, while scores within chunks are computed. `ScannedStates` (ZeCO's All-Scan, arXiv:2507.01004 §3) hands one state on
from rank to rank, in blocks of the key's width, so that a rank sends the first block on while the next arrives: fewer
bytes, more hops.

Suffixes of tensors as in `muster.model.chunked_recurrence`; R ranks.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from muster.cost.context_traffic import num_state_blocks
from muster.parallel.axis import ContextAxis, PendingTensor


class GatheredStates:
    """States by one all-gather, and their gradients by another."""

    def __init__(self, axis: ContextAxis) -> None:
        self._axis = axis

    def start_forward(self, state_BHde: Tensor, kept_BHa1: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Gather all ranks' states, each beside the part that its rank keeps of an earlier one."""
        kept_BHd1 = kept_BHa1.expand(*state_BHde.shape[:3], 1)
        arriving = self._axis.all_gather(torch.cat((state_BHde, kept_BHd1), dim=3))

        def wait() -> tuple[Tensor, Tensor]:
            states_RBHde, kept_RBHd1 = arriving.wait().split((state_BHde.shape[3], 1), dim=4)
            earlier = range(self._axis.index)
            return _handed_on(states_RBHde, kept_RBHd1, earlier), kept_RBHd1.clone()

        return wait

    def start_backward(self, grad_BHde: Tensor, kept_RBHd1: Tensor) -> Callable[[], Tensor]:
        """Gather the gradients of all ranks' states."""
        arriving = self._axis.all_gather(grad_BHde)
        later = range(self._axis.size - 1, self._axis.index, -1)
        return lambda: _handed_on(arriving.wait(), kept_RBHd1, later)


def _handed_on(states_RBHde: Tensor, kept_RBHd1: Tensor, ranks: Sequence[int]) -> Tensor:
    """Return the state behind some ranks in order, each of which keeps a part of the one that it gets, and adds its
    own."""
    state_BHde = torch.zeros_like(states_RBHde[0])
    for rank in ranks:
        state_BHde = torch.addcmul(states_RBHde[rank], kept_RBHd1[rank], state_BHde)
    return state_BHde


class ScannedStates:
    """States from rank to rank, and their gradients the other way, in blocks of the keys' width."""

    def __init__(self, axis: ContextAxis) -> None:
        self._axis = axis

    def start_forward(self, state_BHde: Tensor, kept_BHa1: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Start to receive the state before this rank's segment; hand on the one behind it as its blocks arrive."""
        kept_BHd1 = kept_BHa1.expand(*state_BHde.shape[:3], 1).contiguous()
        finish = self._start(state_BHde, kept_BHd1, hops=1)
        return lambda: (finish(), kept_BHd1.clone())

    def start_backward(self, grad_BHde: Tensor, kept_BHd1: Tensor) -> Callable[[], Tensor]:
        """Likewise the gradient of the state behind this rank's segment, towards the ranks before."""
        return self._start(grad_BHde, kept_BHd1, hops=-1)

    def _start(self, own_BHde: Tensor, kept_BHd1: Tensor, hops: int) -> Callable[[], Tensor]:
        blocks = [block.contiguous() for block in own_BHde.chunk(num_state_blocks(own_BHde.shape[2]), dim=2)]
        kept = kept_BHd1.chunk(len(blocks), dim=2)
        is_first, is_last = (not 0 <= self._axis.index + way < self._axis.size for way in (-hops, hops))
        arriving = [] if is_first else [self._axis.receive(block, hops) for block in blocks]
        sent: list[PendingTensor] = []
        if is_first and not is_last:
            sent = [self._axis.send_on(block, hops) for block in blocks]

        def finish() -> Tensor:
            before = []
            for pending, block, left in zip(arriving, blocks, kept, strict=False):
                before.append(pending.wait())
                if not is_last:
                    sent.append(self._axis.send_on(torch.addcmul(block, left, before[-1]), hops))
            for one in sent:
                one.wait()
            return torch.cat(before, dim=2) if before else torch.zeros_like(own_BHde)

        return finish
