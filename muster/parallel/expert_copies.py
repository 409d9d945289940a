"""Redundant experts at work: copies of chosen experts travel before a layer's experts compute, and gradients back.

A dispatcher of any kind takes rows to places; with copies, a rank has as many places more (`with_copies`). Their
matrices travel beside the work of the rank's own experts: a sparse all-gather, to whose adjoint, a sparse
reduce-scatter of the gradients, the backward comes through `StartExchange`, `FinishExchange` and the selection of rows
(Hecate, arXiv:2502.02581). Suffixes: P ranks, E experts, e experts of this rank, R pairs, r rows, D hidden width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from muster.model.experts import ComputeRows, Dispatch, Experts
from muster.model.grouped_matmul import Segments, StackedMatrices
from muster.model.routing import Routing
from muster.parallel.axis import ExpertAxis
from muster.parallel.expert_exchange import FinishExchange, Flight, StartExchange
from muster.spec.redundant_experts import ExpertCopies, copy_experts, rows_from


def with_copies(dispatch: Dispatch, axis: ExpertAxis, most: int) -> Dispatch:
    """Return the dispatcher for up to `most` copies of experts on each rank, chosen anew for every micro-batch of every
    layer by the rows that its experts get."""

    def dispatch_with_copies(experts: ComputeRows, x_BSD: Tensor, routing: Routing) -> Tensor:
        assert isinstance(experts, Experts)
        num_experts = routing.num_experts
        counts_F = torch.zeros(num_experts + 1, dtype=torch.int64, device=routing.expert.device)
        counts_F.scatter_add_(0, routing.expert.flatten(), torch.ones_like(routing.expert.flatten()))
        counts_PE = axis.all_gather(counts_F[:-1].view(1, -1))
        found = _copies(counts_PE, most)
        if not found.width:
            return dispatch(experts, x_BSD, routing)
        copied = CopiedExperts(experts, axis, found)
        return dispatch(copied, x_BSD, _to_places(routing, counts_PE, found, axis.index))

    return dispatch_with_copies


def _copies(counts_PE: Tensor, most: int) -> ExpertCopies:
    """Choose copies by the rows of all ranks; fake tensors, which have no values, get all that there may be: as many of
    the rank before as it has, or as there may be."""
    ranks, num_experts = counts_PE.shape
    if not isinstance(counts_PE, FakeTensor):
        return copy_experts(counts_PE.sum(0).tolist(), ranks, most)
    each = num_experts // ranks
    copies = tuple(tuple((rank - 1) % ranks * each + place % each for place in range(most)) for rank in range(ranks))
    return ExpertCopies(copies, {}, (1,) * ranks)


def _to_places(routing: Routing, counts_PE: Tensor, found: ExpertCopies, index: int) -> Routing:
    """Return the routing to places, of which each rank has one for every expert of its own, and those of copies behind
    them. Of an expert with copies, the first tokens go to its home, later ones to others."""
    ranks, num_experts = counts_PE.shape
    each = num_experts // ranks
    places_each = each + found.width
    expert_R = routing.expert.flatten()
    device = expert_R.device
    homes = [expert // each * places_each + expert % each for expert in range(num_experts)]
    place_of = torch.tensor([*homes, ranks * places_each], device=device)  # dropped pairs lie behind the last place
    place_R = place_of[expert_R]
    for expert, computed in found.rows.items():
        sent = rows_from(index, counts_PE[:, expert].tolist(), computed)
        pairs_r = (expert_R == expert).nonzero().flatten()
        places = {
            rank: homes[expert]
            if rank == expert // each
            else rank * places_each + each + found.copies[rank].index(expert)
            for rank in sent
        }
        counts = torch.tensor([*sent.values()], dtype=torch.int64, device=device)
        made_r = torch.tensor([places[rank] for rank in sent], dtype=torch.int64, device=device)
        place_R[pairs_r] = made_r.repeat_interleave(counts, output_size=len(pairs_r))
    return routing._replace(expert=place_R.view_as(routing.expert), num_experts=ranks * places_each)


class CopiedExperts:
    """This rank's experts and its copies of others', as one row of places."""

    def __init__(self, experts: Experts, axis: ExpertAxis, found: ExpertCopies) -> None:
        self._experts, self._axis = experts, axis
        ranks = range(axis.size)
        each = len(experts.up.weight)
        by_rank = [found.sent_by(rank, each) for rank in ranks]
        sent = by_rank[axis.index]
        self._rows = [one for own in sent for one in own]
        self._sent = [len(own) for own in sent]
        self._received = [len(by_rank[rank][axis.index]) for rank in ranks]
        # Copies arrive in the order of their homes; those of one home keep the order of the places.
        arriving = sorted(found.copies[axis.index], key=lambda expert: expert // each)
        self._order = [arriving.index(expert) for expert in found.copies[axis.index]]

    def __call__(self, x_rD: Tensor, segments: Segments) -> Tensor:
        """Compute rows that are sorted by place."""
        return self._experts(x_rD, segments, self._compute)

    def _compute(self, experts: Experts, x_rD: Tensor, segments: Segments) -> Tensor:
        """Let copies travel while the rank's own experts compute, and then compute."""
        linears = experts.linears
        departed = [
            (self._depart(linear.weight), None if linear.bias is None else self._depart(linear.bias))
            for linear in linears
        ]
        each = len(experts.up.weight)
        own_r, copied_r = segments.part(0, each), segments.part(each, each + len(self._order))
        own_rD, copied_rD = x_rD.split([own_r.num_rows, copied_r.num_rows])
        own_rD = experts.compute(own_rD, own_r, linears)
        copies = [
            StackedMatrices(self._arrive(*weight), None if bias is None else self._arrive(*bias), linear.adds_bias)
            for linear, (weight, bias) in zip(linears, departed, strict=True)
        ]
        return torch.cat([own_rD, experts.compute(copied_rD, copied_r, copies)])

    def _depart(self, stacked: Tensor) -> tuple[Flight, Tensor]:
        flight = Flight(self._axis, self._sent, self._received)
        rows = torch.tensor(self._rows, dtype=torch.int64, device=stacked.device)
        return flight, StartExchange.apply(flight, stacked.index_select(0, rows))  # type: ignore[return-value]

    def _arrive(self, flight: Flight, travelling: Tensor) -> Tensor:
        arrived: Tensor = FinishExchange.apply(flight, travelling)  # type: ignore[assignment]
        return arrived if _is_sorted(self._order) else arrived[self._order]


def _is_sorted(order: Sequence[int]) -> bool:
    return all(place == index for index, place in enumerate(order))
