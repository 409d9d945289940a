"""Tokens and labels of layers for multi-token prediction: those of the model itself, some positions further on.

Suffixes: B sequences, S positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from muster.model.loss import IGNORE_INDEX


class FurtherTokens(NamedTuple):
    """Data of one depth of multi-token prediction, each (B, S)."""

    tokens_BS: Tensor
    labels_BS: Tensor
    counted_BS: Tensor
    """True at positions that have a further token; routers count no others."""


def shift_further(
    tokens_BS: Tensor,
    labels_BS: Tensor,
    depth: int,
    positions_BS: Tensor | None = None,
    counted_BS: Tensor | None = None,
) -> FurtherTokens:
    """Return what a layer of this depth (from 1) embeds and predicts at each position of whole sequences.

    At position i it reads token i + depth and predicts the label of that position, as if the sequence ended with its
    document (arXiv:2412.19437 §2.2, equations 21 and 24): where position i + depth is of another document, or beyond
    the sequence, the token is 0 and the label doesn't count. `positions_BS` are positions in documents; None: each
    sequence is one. `counted_BS` is False for padding; None: there is none.
    """
    shifted = FurtherTokens(
        torch.zeros_like(tokens_BS),
        torch.full_like(labels_BS, IGNORE_INDEX),
        torch.zeros_like(tokens_BS, dtype=torch.bool),
    )
    if depth >= tokens_BS.shape[1]:
        return shifted
    has_Bs = torch.ones_like(tokens_BS[:, depth:], dtype=torch.bool)
    if counted_BS is not None:
        has_Bs &= counted_BS[:, depth:]
    if positions_BS is not None:
        has_Bs &= positions_BS[:, depth:] == positions_BS[:, :-depth] + depth
    shifted.tokens_BS[:, :-depth] = tokens_BS[:, depth:].where(has_Bs, 0)
    shifted.labels_BS[:, :-depth] = labels_BS[:, depth:].where(has_Bs, IGNORE_INDEX)
    shifted.counted_BS[:, :-depth] = has_Bs
    return shifted
