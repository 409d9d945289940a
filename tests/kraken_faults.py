"""Faults of sub-layers side by side over tensor-parallel ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from muster.model.kraken import add_to_streams, sum_of_streams
from muster.parallel import kraken
from tests.ladder_faults import late_sums


@contextmanager
def missing_wait() -> Iterator[None]:
    """Attention's output is added to the sum of streams before that has arrived."""
    with late_sums(), patch.object(kraken, "_wait", lambda started: None):
        yield


@contextmanager
def missing_gradient_wait() -> Iterator[None]:
    """The gradient of the sum of streams is taken before those of other ranks have been added."""

    def faulty(ctx: Any, *grads: Tensor) -> Any:
        return None, None, grads[0].repeat(1, 1, ctx.count), None

    with late_sums(), patch.object(kraken._StartSum, "backward", staticmethod(faulty)):
        yield


def _adds(times: int) -> Callable[[], Any]:
    @contextmanager
    def fault() -> Iterator[None]:
        with patch.object(kraken, "add_to_streams", lambda y_BSE, x_BSD: add_to_streams(y_BSE, times * x_BSD)):
            yield

    return fault


@contextmanager
def lost_first_streams() -> Iterator[None]:
    """The embeddings' gradient is that of a rank's own streams."""

    def faulty(ctx: Any, *grads: Tensor) -> Any:
        return None, sum_of_streams(grads[0], ctx.width), None

    with patch.object(kraken._BeginStreams, "backward", staticmethod(faulty)):
        yield


KRAKEN_FAULTS: dict[str, Callable[[], Any]] = {
    "missing wait for streams": missing_wait,
    "missing wait for gradients": missing_gradient_wait,
    "sum of streams twice": _adds(2),
    "sum of streams lost": _adds(0),
    "lost first streams": lost_first_streams,
}
