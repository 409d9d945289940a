"""Shard of a global tensor that one rank holds in memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from muster.layout.tensor_layout import Box, TensorLayout


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Part of one stored tensor that this rank holds.

    `name` is that of the checkpoint (`model/layers.0.attn.q.weight`, `optim/layers.0.attn.q.weight.exp_avg`). `tensor`
    is local and has the size of the layout's only box; for several boxes it is contiguous and holds them in order.
    """

    name: str
    layout: TensorLayout
    tensor: Tensor

    def box_views(self) -> Iterator[tuple[Box, Tensor]]:
        """Yield each box and the view of `tensor` that holds it. Raises ValueError if the sizes don't agree."""
        local, boxes = self.tensor.detach(), self.layout.boxes
        if local.numel() != self.layout.numel or (len(boxes) == 1 and tuple(local.shape) != boxes[0].size):
            sizes = [list(box.size) for box in boxes]
            raise ValueError(f"{self.name}: the local tensor has shape {list(local.shape)}, its layout boxes {sizes}")
        if len(boxes) == 1:
            yield boxes[0], local
            return
        start = 0
        for box in boxes:
            yield box, local.view(-1)[start : start + box.numel].view(box.size)
            start += box.numel


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype in torch, such as `float32` or `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")
