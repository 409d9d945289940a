"""A loss: cross-entropy with label smoothing (arXiv:1512.00567)."""

import torch.nn.functional as F
from torch import Tensor

import muster


@muster.register_loss("smoothed")
def smoothed(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV.float(), labels_N, reduction="sum", label_smoothing=0.1)
