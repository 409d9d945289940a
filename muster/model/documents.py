"""Document mask: several documents in one sequence, each of which attends to itself only."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from muster.model.host_copies import to_device


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents that the sequences of a micro-batch consist of."""

    positions_BS: Tensor
    """Position of each token in its document."""
    lengths: tuple[int, ...]
    """Lengths of all documents, sequence after sequence; those of one sequence add up to S."""
    starts: Tensor
    """First position of each document among those of all sequences, and the end of the last: int32."""
    num_shards: int | None = None
    """Parts into which each document is cut by itself, of which these are one; `lengths` and `starts` are of whole
    documents. None: documents are whole, or cut with their sequence."""

    @cached_property
    def begins_BS(self) -> Tensor:
        """True where a document begins."""
        return self.positions_BS == 0

    def of_sequences(self, rows: slice) -> "Documents":
        """Return the documents of some sequences, which must be whole in them."""
        length = self.positions_BS.shape[1]
        ends = [0, *accumulate(self.lengths)]
        first, last = ends.index(rows.start * length), ends.index(rows.stop * length)
        starts = self.starts[first : last + 1] - self.starts[first]
        return replace(self, positions_BS=self.positions_BS[rows], lengths=self.lengths[first:last], starts=starts)

    @staticmethod
    def from_positions(positions_BS: Tensor, device: torch.device) -> "Documents | None":
        """Build from positions in host memory, where each document begins with 0; None if each sequence is one
        document."""
        begins = torch.nn.functional.pad((positions_BS == 0).flatten(), (0, 1), value=True).nonzero().flatten()
        lengths = tuple(begins.diff().tolist())
        if len(lengths) == len(positions_BS):
            return None
        return Documents(to_device(positions_BS, device), lengths, to_device(begins.to(torch.int32), device))


def per_document_attention(
    attention: Callable[..., Tensor],
    documents: Documents,
    qkv_BHSd: tuple[Tensor, ...],
    mask_SS: Tensor | None,
    window: int | None,
) -> Tensor:
    """Apply `attention`, which knows whole sequences alone, to one document after another: (B, H, S, d).

    A block-diagonal mask would need B · S² elements and hide most of the computed scores. One split and one cat serve
    all documents, since the gradient of each separate slice would be a whole tensor of zeros.
    """
    batch, _, length, _ = qkv_BHSd[0].shape
    parts = [x.transpose(1, 2).flatten(0, 1).split(documents.lengths) for x in qkv_BHSd]
    outs = []
    for document in zip(*parts, strict=True):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in document)
        size = q.shape[2]
        hidden = mask_SS is not None and window is not None and size > window
        out = attention(q, k, v, mask_SS[:size, :size] if hidden and mask_SS is not None else None, window)
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs).unflatten(0, (batch, length)).transpose(1, 2)
