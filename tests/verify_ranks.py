"""Ranks in the tests of `verify`: run the steps of several plans, some with a bug planted."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from muster.model.decoder import Decoder
from muster.model.loss import LossSums
from muster.model.sliced_attention import KeptKeys
from muster.parallel import stage, tensor_parallel
from muster.parallel.stage import DecoderStage
from muster.train.trainer import Trainer
from muster.train.verify.rank import verify_rank


def run_cases(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> None:
    """Each case in its folder, one after the other."""
    for case in payload["cases"]:
        with BUGS[case["bug"]](), frozen_parameters() if case["frozen"] else nullcontext():
            verify_rank(Path(case["folder"]), dist.PrefixStore(case["folder"], store), rank, world_size)


@contextmanager
def _after(owner: type, method: str, change: Callable[..., None]) -> Iterator[None]:
    """Calls `change` with the method's own arguments after each call."""
    original = getattr(owner, method)

    def faulty(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        change(self, *arguments)

    with patch.object(owner, method, faulty):
        yield


def frozen_parameters() -> AbstractContextManager:
    """The embedding, the first layer's matrices and all norms stay as they are."""

    def freeze(self: Decoder, *_: Any) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not re.search(r"embed|layers\.0\.|norm", name))

    return _after(Decoder, "__init__", freeze)


def padding_in_the_loss() -> AbstractContextManager:
    right = stage.loss_sums

    def counted(logits: Tensor, labels: Tensor, *rest: Any, **options: Any) -> LossSums:
        return right(logits, labels.clamp(min=0), *rest, **options)

    return patch.object(stage, "loss_sums", counted)


def dropped_layer() -> AbstractContextManager:
    def drop(self: DecoderStage, *_: Any) -> None:
        if self.index == 1:
            del self.module.layers[str(self.layers.start)]

    return _after(DecoderStage, "__init__", drop)


def qkv_permuted() -> AbstractContextManager:
    right = tensor_parallel.column_parallel_linear

    def permuted(*arguments: Any) -> tuple[Tensor, ...]:
        q, *others = right(*arguments)
        return (q, *reversed(others))

    return patch.object(tensor_parallel, "column_parallel_linear", permuted)


def wrong_divisor() -> AbstractContextManager:
    right = FSDPModule.set_gradient_divide_factor
    return patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: right(self, 2 * factor))


def unsynchronised_norms() -> AbstractContextManager:
    return patch.object(DecoderStage, "all_reduce_replicated_grads", lambda self: None)


def untied_gradients() -> AbstractContextManager:
    return patch.object(Trainer, "_reduce_tied_gradients", lambda self, action: None)


@contextmanager
def stale_tied_weight() -> Iterator[None]:
    """The last stage's copy of the embedding never changes."""
    right = Trainer._update_parameters

    def faulty(self: Trainer, action: Any) -> None:
        last = self.stages.get(self.plan.num_stages - 1)
        if last is not None:
            last.parameters["embed.weight"].grad = None
        right(self, action)

    with patch.object(Trainer, "_update_parameters", faulty):
        yield


def gradients_pile_up() -> AbstractContextManager:
    """Add the gradients of one step to the next."""
    return patch.object(DecoderStage, "zero_grad", lambda self: None)


def dropped_key_gradients() -> AbstractContextManager:
    """What a later slice adds to the gradients of a sequence's keys and values is lost."""
    return patch.object(KeptKeys, "gradients", lambda self: torch.zeros_like(self.kv_2BKSd))


BUGS: dict[str | None, Callable[[], AbstractContextManager]] = {
    None: nullcontext,
    **{
        bug.__name__: bug
        for bug in (
            padding_in_the_loss,
            dropped_layer,
            qkv_permuted,
            wrong_divisor,
            unsynchronised_norms,
            untied_gradients,
            stale_tied_weight,
            gradients_pile_up,
            dropped_key_gradients,
        )
    },
}
