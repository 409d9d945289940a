"""The example of two sequence dimensions: gradients of one process, and what travels."""

from typing import Any

import torch
import torch.distributed as dist

from examples.video_switch import Sharding, VideoTransformer
from muster.parallel.axis import ContextAxis
from tests.ranks import run_ranks

FRAMES, PATCHES, WIDTH = 5, 6, 16
"""Of which two ranks divide the second alone."""


class CountedAxis(ContextAxis):
    """Counts what it is given."""

    sent: list[int] = []

    def all_to_all(self, x: torch.Tensor) -> Any:
        self.sent.append(x.numel())
        return super().all_to_all(x)


def on_rank(rank: int, world_size: int, store: dist.Store, payload: Any) -> dict[str, Any]:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = VideoTransformer(WIDTH, heads=2, pairs=2).double()
    video, target = torch.randn(2, 3, FRAMES, PATCHES, WIDTH, dtype=torch.float64)
    model.loss(video, target, Sharding(FRAMES, PATCHES)).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    axis = CountedAxis(dist.distributed_c10d._get_default_group(), world_size, rank)
    model.loss(video, target, Sharding(FRAMES, PATCHES, axis)).backward()
    error = 0.0
    for parameter, whole in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        error = max(error, float((parameter.grad - whole).abs().max()))
    dist.destroy_process_group()
    return {"error": error, "sent": axis.sent}


def test_switches_keep_gradients_and_are_all_that_travels() -> None:
    for found in run_ranks(2, "tests.test_video_switch:on_rank", {}):
        assert found["error"] < 1e-12
        assert found["sent"] == [3 * (FRAMES + 1) * PATCHES * WIDTH // 2] * (2 * 2 * 2)
