"""Several documents in one sequence, each of which sees itself only."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Documents:
    """How the sequences of a micro-batch are made up of documents."""

    positions_BS: Tensor
    """Each token's place in its document."""
    lengths: tuple[int, ...]
    """Of all documents, sequence after sequence; those of a sequence add up to S."""

    @staticmethod
    def from_positions(positions_BS: Tensor, device: torch.device) -> "Documents | None":
        """From positions in host memory, where each document begins with 0; None where each sequence is one
        document."""
        begins = torch.nn.functional.pad((positions_BS == 0).flatten(), (0, 1), value=True).nonzero().flatten()
        lengths = tuple(begins.diff().tolist())
        if len(lengths) == len(positions_BS):
            return None
        return Documents(positions_BS.to(device), lengths)


def per_document_attention(
    attention: Callable[..., Tensor],
    documents: Documents,
    qkv_BHSd: tuple[Tensor, ...],
    mask_SS: Tensor | None,
    window: int | None,
) -> Tensor:
    """`attend` for each document alone: (B, H, S, d).

    A mask of blocks would need B · S² numbers and hide most of what is computed; the kernels for whole sequences, one
    document after another, compute Σ length² scores and keep none. One split and one cat, since the derivative of
    each single slice would be a whole tensor of zeros.
    """
    batch, _, length, _ = qkv_BHSd[0].shape
    parts = [x.transpose(1, 2).flatten(0, 1).split(documents.lengths) for x in qkv_BHSd]
    outs = []
    for each in zip(*parts, strict=True):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in each)
        size = q.shape[2]
        hidden = mask_SS is not None and window is not None and size > window
        out = attention(q, k, v, mask_SS[:size, :size] if hidden and mask_SS is not None else None, window)
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs).unflatten(0, (batch, length)).transpose(1, 2)
