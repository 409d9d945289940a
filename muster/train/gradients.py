"""Gradients of one rank before a step: their norm, sums over replicas, tied copies."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.parallel.axis import PendingTensor
from muster.parallel.stage import DecoderStage


def sum_of_squares(stage: DecoderStage) -> Tensor:
    """Return the sum of squares of this rank's gradients, each divided by the number of ranks that hold the same.

    A float64 scalar on the gradients' device, which the host doesn't wait for.
    """
    by_copies: dict[int, list[Tensor]] = {}
    if on_disk := stage.param_offload.gradient_norms():
        left = with_gradients(stage, without=on_disk)
        held = {name: torch.linalg.vector_norm(local.grad) for name, local in left} | on_disk
        for name in stage.parameters:  # in the order of other plans, whose sums then have the same bits
            if name in held:
                by_copies.setdefault(stage.layouts[name].num_copies, []).append(held[name])
        norms = {copies: torch.linalg.vector_norm(torch.stack(own)).double() for copies, own in by_copies.items()}
    else:
        for name, local in with_gradients(stage):
            by_copies.setdefault(stage.layouts[name].num_copies, []).append(local.grad)
        norms = {copies: torch.nn.utils.get_total_norm(grads).double() for copies, grads in by_copies.items()}
    return sum((norm * norm / copies for copies, norm in norms.items()), start=torch.zeros((), dtype=torch.float64))


def layer_grad_norm(stages: Iterable[DecoderStage]) -> float:
    """Return the norm of the gradients of the layers of stages that this rank holds whole; 0 without any. Embedding,
    head and last norm are no layers."""
    grads = [local.grad for stage in stages for name, local in with_gradients(stage) if name.startswith("layers.")]
    return torch.nn.utils.get_total_norm(grads).item()


def with_gradients(stage: DecoderStage, without: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that have a gradient in memory, by name, `without` some; their `.grad` is a tensor."""
    for name, local in stage.parameters.items():
        if name not in without and local.grad is not None and local.grad.numel():
            yield name, local


def add_replica_gradients(stage: DecoderStage, pair: dist.ProcessGroup) -> PendingTensor | None:
    """Start to sum a stage's gradients with those of the same layers in the other replica, on the other rank of `pair`;
    both end with the same bits. None without gradients."""
    stage.attach_local_gradients()
    gradients = [local.grad for _, local in with_gradients(stage)]
    if not gradients:
        return None
    sums = [gradient.contiguous() for gradient in gradients]  # the gradient itself where it is contiguous
    works = [dist.all_reduce(total, group=pair, async_op=True) for total in sums]

    def take_sums() -> Tensor:
        for gradient, total in zip(gradients, sums, strict=True):
            if total is not gradient:
                gradient.copy_(total)
        return sums[-1]

    return PendingTensor(works, take_sums)


def find_tied_copies(stages: Iterable[DecoderStage], parameters: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return (tied weight of a last stage, the same weight of a first stage on this rank), of which the optimizer has
    one."""
    return [
        (copy, parameters[name])
        for stage in stages
        for name, copy in stage.parameters.items()
        if name in parameters and copy is not parameters[name]
    ]
