"""A video-like model with two sequence dimensions over several processes: dynamic sequence parallelism.

    python examples/video_switch.py --nproc 2

A video has frames (T) of patches (S). One kind of block attends within a frame, the other along time, patch by patch.
A process needs whole frames for the first, and whole tracks of a patch for the second, so that one all-to-all between
blocks, which makes shards of T of shards of S, is all that travels: no block communicates (Dynamic Sequence
Parallelism, arXiv:2403.10266). Ulysses would exchange queries, keys, values and outputs inside every attention whose
dimension is cut, four times as much. Lengths that the processes don't divide are padded; padded keys are hidden.

Suffixes of tensors: B videos, T frames, S patches, D hidden width, H heads, d head width; R processes.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn

from muster.parallel.axis import ContextAxis

FRAMES, PATCHES = 1, 2
"""Dimensions of a hidden state (B, T, S, D)."""


class _Switch(torch.autograd.Function):
    """Gather one dimension and cut the other, by one all-to-all; the backward is the switch back."""

    @staticmethod
    def forward(ctx: Any, axis: ContextAxis, x: Tensor, gathered: int, cut: int) -> Tensor:
        ctx.axis, ctx.gathered, ctx.cut = axis, gathered, cut
        sent = torch.stack(x.chunk(axis.size, dim=cut))
        return torch.cat(tuple(axis.all_to_all(sent).wait()), dim=gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        sent = torch.stack(grads[0].chunk(ctx.axis.size, dim=ctx.gathered))
        return None, torch.cat(tuple(ctx.axis.all_to_all(sent).wait()), dim=ctx.cut), None, None


@dataclass(frozen=True)
class Sharding:
    """Lengths of whole videos, and the processes that share them; None: this one has all."""

    frames: int
    patches: int
    axis: ContextAxis | None = None

    @property
    def ranks(self) -> int:
        return 1 if self.axis is None else self.axis.size

    def padded(self, dim: int) -> int:
        """Return the length of a dimension with padding, which the processes divide."""
        length = self.frames if dim == FRAMES else self.patches
        return -(-length // self.ranks) * self.ranks

    def switch(self, x: Tensor, whole: int) -> Tensor:
        """Return a hidden state whose dimension `whole` isn't cut, where the other one wasn't before."""
        other = FRAMES + PATCHES - whole
        return x if self.axis is None else _Switch.apply(self.axis, x, whole, other)  # type: ignore[return-value]

    def shard(self, x_BTSD: Tensor) -> Tensor:
        """Return this process's frames of whole videos, after both dimensions are padded."""
        missing = (self.padded(dim) - x_BTSD.shape[dim] for dim in (PATCHES, FRAMES))
        padding = [n for length in missing for n in (0, length)]
        padded = F.pad(x_BTSD, (0, 0, *padding))
        return padded if self.axis is None else padded.chunk(self.ranks, dim=FRAMES)[self.axis.index]


class Block(nn.Module):
    """Attention along one dimension, and an MLP."""

    def __init__(self, width: int, heads: int, dim: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTSD: Tensor, length: int) -> Tensor:
        """Return the next hidden state; `length`: positions along the block's dimension that aren't padding."""
        rows = x_BTSD if self.dim == PATCHES else x_BTSD.transpose(FRAMES, PATCHES)
        qkv = self.qkv(self.norm(rows)).unflatten(-1, (3, self.heads, -1)).movedim(3, 0).transpose(3, 4)
        seen = torch.arange(qkv.shape[4], device=x_BTSD.device) < length
        made = F.scaled_dot_product_attention(*qkv, attn_mask=seen.expand(qkv.shape[4], -1))
        made = self.out(made.transpose(2, 3).flatten(3))
        x_BTSD = x_BTSD + (made if self.dim == PATCHES else made.transpose(FRAMES, PATCHES))
        return x_BTSD + self.mlp(x_BTSD)


class VideoTransformer(nn.Module):
    """Pairs of blocks, one within frames and one along time."""

    def __init__(self, width: int, heads: int, pairs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, dim) for _ in range(pairs) for dim in (PATCHES, FRAMES))

    def forward(self, x_BTSD: Tensor, sharding: Sharding) -> Tensor:
        """Map this process's frames to their outputs: two switches for each pair of blocks."""
        whole = PATCHES
        for block in self.blocks:
            if block.dim != whole:
                whole = block.dim
                x_BTSD = sharding.switch(x_BTSD, whole)
            x_BTSD = block(x_BTSD, sharding.frames if whole == FRAMES else sharding.patches)
        return sharding.switch(x_BTSD, PATCHES)

    def loss(self, video_BTSD: Tensor, target_BTSD: Tensor, sharding: Sharding) -> Tensor:
        """Return this process's part of the mean squared error, of which padding has none."""
        error_BTSD = self(sharding.shard(video_BTSD), sharding) - sharding.shard(target_BTSD)
        return (error_BTSD * sharding.shard(torch.ones_like(video_BTSD))).square().sum() / video_BTSD.numel()


def train(rank: int, ranks: int, port: int, steps: int) -> None:
    """Train to make each frame from the others on one of several processes."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    group = dist.distributed_c10d._get_default_group()
    torch.manual_seed(0)
    sharding = Sharding(frames=7, patches=10, axis=ContextAxis(group, ranks, rank))
    model, video_BTSD = VideoTransformer(width=32, heads=4, pairs=2), torch.randn(2, 7, 10, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        loss = model.loss(video_BTSD, video_BTSD.roll(1, FRAMES), sharding)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach())
        if rank == 0:
            print(f"step {step}: loss {total:.4f}")
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(train, (args.nproc, store.port, args.steps), nprocs=args.nproc)


if __name__ == "__main__":
    main()
