"""Bugs, sown on purpose, in gathers and reductions for units of passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from muster.parallel.stage import DecoderStage


@contextmanager
def missing_reduction() -> Iterator[None]:
    """The gradients of the first stage stay unreduced."""
    reduce = DecoderStage.reduce_gradients
    with patch.object(DecoderStage, "reduce_gradients", lambda self: None if self.index == 0 else reduce(self)):
        yield


@contextmanager
def early_drop() -> Iterator[None]:
    """A stage is dropped behind every forward, so that PyTorch gathers it again in the next pass."""
    forward = DecoderStage.forward

    def faulty(self: DecoderStage, micro_batch: int, x: Tensor | None) -> Tensor:
        y = forward(self, micro_batch, x)
        self.reshard()
        return y

    with patch.object(DecoderStage, "forward", faulty):
        yield


@contextmanager
def other_stage_gathered() -> Iterator[None]:
    """UNSHARD gathers the first stage of a rank, whichever it is for; PyTorch gathers the right one in its first
    pass."""
    unshard, stages = DecoderStage.unshard, list[DecoderStage]()

    def faulty(self: DecoderStage) -> None:
        stages.append(self)
        unshard(stages[0])

    with patch.object(DecoderStage, "unshard", faulty):
        yield


UNIT_FAULTS = {
    "missing reduction": missing_reduction,
    "early drop": early_drop,
    "other stage gathered": other_stage_gathered,
}
"""Bugs by the name that a case gives."""
