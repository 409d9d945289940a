"""Dispatch of tokens by an all-to-all in two steps.

Suffixes: o groups of neighbours, i ranks of each, E experts, e experts of this rank, r rows, D hidden width.
"""

from typing import Any

from torch import Tensor

from muster.model.expert_rows import ExpertRows
from muster.model.experts import ComputeRows
from muster.model.grouped_matmul import Segments, host_counts
from muster.model.routing import Routing
from muster.parallel.axis import ExpertAxis
from muster.parallel.expert_exchange import Exchange, Reorder, block_order
from muster.spec.expert_kinds import ExpertDispatch


class HierarchicalAllToAll:
    """Rows go first to the neighbour that has the place of their expert's rank among its own neighbours, and from there
    to that rank: with P ranks in groups of L a rank sends to L + P / L others, in longer messages, instead of to P
    (Tutel's 2DH, arXiv:2206.03382 §4.3). They come back the same way."""

    def __init__(self, axis: ExpertAxis, dispatch: ExpertDispatch) -> None:
        assert axis.inner is not None
        assert axis.outer is not None
        self.inner, self.outer = axis.inner, axis.outer

    def __call__(self, experts: ComputeRows, x_BSD: Tensor, routing: Routing) -> Tensor:
        rows, i, o = ExpertRows(routing), self.inner.size, self.outer.size
        y_rD: Any = rows.permute(x_BSD.flatten(0, 1))  # one name for all, so that none keeps what was read
        # Rows by the place and the group of their expert's rank: this rank's, then by neighbour that they come from.
        count = len(y_rD)
        here_oie = rows.counts_E.view(o, i, -1)
        sent_ioe = here_oie.transpose(0, 1).contiguous()
        near_ioe = self.inner.all_to_all(sent_ioe, [1] * i, [1] * i)
        near_sent, near_received = (host_counts(counts.sum((1, 2)), count) for counts in (sent_ioe, near_ioe))
        passed_oie = near_ioe.transpose(0, 1).contiguous()
        far_oie = self.outer.all_to_all(passed_oie, [1] * o, [1] * o)
        passed = sum(near_received)
        far_sent, far_received = (host_counts(counts.sum((1, 2)), passed) for counts in (passed_oie, far_oie))
        by_place = block_order(here_oie, (1, 0, 2), count)
        by_group = block_order(near_ioe, (1, 0, 2), passed)
        by_expert = block_order(far_oie, (2, 0, 1), sum(far_received))
        y_rD = Reorder.apply(y_rD, *by_place)
        y_rD = Exchange.apply(self.inner, y_rD, near_sent, near_received)
        y_rD = Reorder.apply(y_rD, *by_group)
        y_rD = Exchange.apply(self.outer, y_rD, far_sent, far_received)
        y_rD = Reorder.apply(y_rD, *by_expert)
        y_rD = experts(y_rD, Segments(far_oie.sum((0, 1)), sum(far_received)))
        y_rD = Reorder.apply(y_rD, *by_expert[::-1])
        y_rD = Exchange.apply(self.outer, y_rD, far_received, far_sent)
        y_rD = Reorder.apply(y_rD, *by_group[::-1])
        y_rD = Exchange.apply(self.inner, y_rD, near_received, near_sent)
        y_rD = Reorder.apply(y_rD, *by_place[::-1])
        return rows.combine(y_rD, x_BSD.shape)
