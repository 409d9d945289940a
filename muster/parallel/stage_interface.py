"""Interface of a pipeline stage for the executor."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from muster.parallel.axis import PendingTensor
from muster.parallel.pending_reduction import PendingReduction
from muster.schedule.action import Kind, Lane


class Stage(Protocol):
    """A pipeline stage.

    Where sequences are cut into slices, `micro_batch` numbers the slices of all micro-batches (`Program.unit`).
    """

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        """Run the forward of one micro-batch and return the stage's output; the first stage reads its own input and
        gets None."""
        ...

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of the stage's input; the last stage starts from its own loss and gets None."""

    def backward_input(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Run the part of `backward` that yields the input's gradient, and leave the weights' gradients to
        `backward_weight`."""

    def backward_weight(self, micro_batch: int) -> None:
        """Compute the weight gradients that `backward_input` left."""

    def offload(self, micro_batch: int) -> Callable[[], None]:
        """Start to move a micro-batch's saved activations to the host; the returned function frees them on the
        device."""
        ...

    def reload(self, micro_batch: int) -> Callable[[], None]:
        """Start to copy them back; the returned function waits for the end."""
        ...

    def copy_layers(self, lane: Lane, kind: Kind, micro_batch: int) -> Callable[[], None]:
        """Start to copy what layers save over a lane, beside a pass, or note that some may leave later; the returned
        function waits for what leaves."""
        ...

    def load_params(self, backward: bool) -> Callable[[], None]:
        """Start to load the parameters that a pass gathers first, from host memory or disk; the returned function waits
        until the pass's gradients have left the device."""
        ...

    def receive_buffer(self, micro_batch: int) -> Tensor:
        """Allocate a buffer for one micro-batch's activation or its gradient, in the shape that neighbours send."""
        ...

    def unshard(self) -> None:
        """All-gather the parameters."""

    def reshard(self) -> None:
        """Drop the gathered parameters."""

    def reduce_gradients(self) -> PendingReduction | PendingTensor | None:
        """Start to reduce the gradients over the data-parallel ranks; None where that is over."""

    def all_reduce_replicated_grads(self) -> None:
        """All-reduce the gradients of weights that tensor-parallel ranks hold copies of."""
