"""Work of each rank in the test of the vocabulary-parallel loss: its vocabulary entries' part of a loss, with
collectives."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.layout.tensor_layout import chunk_bounds
from muster.parallel.vocab_loss import (
    combine_stats,
    embed_local_rows,
    head_gradient,
    hidden_gradient,
    local_logit_stats,
)

POSITIONS, WIDTH = 23, 5


def errors(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[float]:
    """For each vocabulary, the largest error of the loss, the hidden state's and the weights' gradients, and the word
    vectors, relative to plain PyTorch's in float64."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return [_error(rank, world_size, words, payload["z_loss"], payload["fault"]) for words in payload["words"]]


def _error(rank: int, world_size: int, words: int, z_loss: float, fault: bool) -> float:
    generator = torch.Generator().manual_seed(words)
    h_ND = 4 * torch.randn(POSITIONS, WIDTH, dtype=torch.float64, generator=generator)
    weight_VD = 4 * torch.randn(words, WIDTH, dtype=torch.float64, generator=generator)
    labels_N = torch.randint(words, (POSITIONS,), generator=generator)
    vectors_ND = weight_VD[labels_N]
    labels_N[::4] = -100
    first, count = chunk_bounds(words, world_size, rank)
    own_VD = weight_VD[first : first + count]

    found_ND = embed_local_rows(labels_N.where(labels_N >= 0, 0), own_VD, first)
    dist.all_reduce(found_ND)
    scores = local_logit_stats(h_ND, own_VD, labels_N, first + fault)
    assert scores.partial_grads_2ND is not None
    sums_R3N = torch.empty(world_size, 3, POSITIONS, dtype=torch.float64)
    pulls_R2ND = torch.empty(world_size, 2, POSITIONS, WIDTH, dtype=torch.float64)
    dist.all_gather_into_tensor(sums_R3N.flatten(0, 1), scores.stats_3N)
    dist.all_gather(list(pulls_R2ND.unbind(0)), scores.partial_grads_2ND)
    verdict = combine_stats(sums_R3N, labels_N, z_loss, 1 / POSITIONS)
    own = head_gradient(scores.p_NV, h_ND, labels_N, first, verdict.softmax_factor_RN[rank], verdict.label_weight_N)

    h_ND.requires_grad_()
    weight_VD.requires_grad_()
    logits_NV = h_ND @ weight_VD.t()
    loss = torch.nn.functional.cross_entropy(logits_NV, labels_N, reduction="sum")
    loss = loss + z_loss * logits_NV.logsumexp(1)[labels_N >= 0].square().sum()
    (loss / POSITIONS).backward()
    assert h_ND.grad is not None
    assert weight_VD.grad is not None
    counted_N1 = (labels_N >= 0).unsqueeze(1)
    return max(
        _relative(verdict.losses.total, loss),
        _relative(hidden_gradient(pulls_R2ND, verdict), h_ND.grad),
        _relative(own, weight_VD.grad[first : first + count]),
        _relative(found_ND * counted_N1, vectors_ND * counted_N1),
    )


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())
