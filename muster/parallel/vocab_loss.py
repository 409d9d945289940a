"""Cross-entropy and z-loss of logits whose vocabulary is sharded over ranks.

Both ways to shard it use this arithmetic: over tensor-parallel ranks (`muster.parallel.tensor_parallel`) and over
pipeline ranks (`muster.parallel.vocab_parallel`). No function here communicates; callers exchange the results.

Each rank has the logits x of V vocabulary entries. The log-sum-exp over the whole vocabulary needs three values per
position from each rank: the largest logit m, the sum s of exp(x − m), and the label's logit if the label is among the
rank's entries (else 0). With M the largest m of all ranks,

    log Z = M + log Σ s · exp(m − M),    −log p(label) = log Z − x(label).

Suffixes of tensors: N positions, V vocabulary entries of this rank, D hidden width, R ranks.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from muster.model.kernels import accumulation_dtype, soft_cap_, soft_cap_slope_
from muster.model.loss import IGNORE_INDEX, LossSums, masked_sums, softmax_gradient_, z_loss_factor


def local_rows(ids_N: Tensor, vocab_start: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the row of each id in a rank's shard of a table, and a mask of the ids that lie there (others: row 0).

    The shard has `num_rows` rows, of the ids from `vocab_start` on.
    """
    row_N = ids_N - vocab_start
    is_local_N = (row_N >= 0) & (row_N < num_rows)
    return row_N.where(is_local_N, 0), is_local_N


def embed_local_rows(ids_N: Tensor, weight_VD: Tensor, vocab_start: int) -> Tensor:
    """Look up ids in a rank's rows of a table; ids of other ranks get zeros. Returns (N, D)."""
    row_N, is_local_N = local_rows(ids_N, vocab_start, len(weight_VD))
    return F.embedding(row_N, weight_VD) * is_local_N.unsqueeze(1)


def exp_and_sums(logits_NV: Tensor, max_N: Tensor, row_N: Tensor, is_local_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(x − max), its sum over the rank's entries, and the label's logit where that is the rank's, else 0.

    `row_N` and `is_local_N` are the labels' `local_rows`; shapes (N, V), (N), (N), in the accumulation dtype. A wider
    copy of the logits lives in here only, as it would be the largest tensor of the loss.
    """
    label_N = logits_NV.gather(1, row_N.unsqueeze(1)).squeeze(1).to(max_N.dtype) * is_local_N
    exp_NV = (logits_NV.to(max_N.dtype) - max_N.unsqueeze(1)).exp_()
    return exp_NV, exp_NV.sum(1), label_N


class WholeVocabLoss(NamedTuple):
    """Loss over the whole vocabulary, and the factors of its gradient."""

    losses: LossSums
    factor_N: Tensor
    """Factor of exp(x − max) in the gradient of the logits of a position that counts."""
    valid_N: Tensor
    """1 where a label counts, 0 where it is ignored."""


def whole_vocab_loss(
    max_N: Tensor,
    sum_N: Tensor,
    label_N: Tensor,
    labels_N: Tensor,
    z_loss_coefficient: float,
    shift_N: Tensor | None = None,
) -> WholeVocabLoss:
    """Return the loss from values of the whole vocabulary: the maximum, the sum of exp(x − max), the label's logit.

    `shift_N` is subtracted from the logits before log Z − x(label) is taken; None: nothing is.
    """
    log_sum_N = sum_N.log()
    log_z_N = log_sum_N + max_N
    shifted_log_z_N = log_z_N if shift_N is None else log_sum_N + (max_N - shift_N)
    shifted_label_N = label_N if shift_N is None else label_N - shift_N
    valid_N = (labels_N != IGNORE_INDEX).to(sum_N.dtype)
    cross_entropy, z_loss = masked_sums(shifted_log_z_N - shifted_label_N, log_z_N, valid_N, z_loss_coefficient)
    losses = LossSums(cross_entropy + z_loss, cross_entropy, z_loss)
    return WholeVocabLoss(losses, z_loss_factor(log_z_N, z_loss_coefficient) / sum_N, valid_N)


# ----------------------------------------------------------------------------------------------------------------------
# Forward and backward with one exchange between them (vocabulary parallelism over pipeline ranks)


class LogitStats(NamedTuple):
    """Results of one rank's logits, before other ranks' are known."""

    p_NV: Tensor
    """Softmax over the rank's own vocabulary entries; with soft caps and gradients, times the derivative of the cap."""
    stats_3N: Tensor
    """The largest logit, the sum of exp(logit − largest), and the label's logit where that is the rank's (else 0)."""
    partial_grads_2ND: Tensor | None
    """The softmax times the head's rows, and the label's row of the head where that is the rank's (else 0): the rank's
    terms of the hidden state's gradient, before scaling. None without gradients."""


def local_logit_stats(
    h_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    vocab_start: int,
    with_gradients: bool = True,
    softcap: float | None = None,
) -> LogitStats:
    """Compute a rank's logits from the hidden state and its rows of the head, and everything that they give alone."""
    x_NV = F.linear(h_ND, weight_VD).to(accumulation_dtype(h_ND.dtype))
    if softcap is not None:
        soft_cap_(x_NV, softcap)
    max_N = x_NV.amax(1)
    p_NV, sum_N, label_N = exp_and_sums(x_NV, max_N, *local_rows(labels_N, vocab_start, len(weight_VD)))
    p_NV /= sum_N.unsqueeze(1)
    partial_grads_2ND = None
    if with_gradients:
        label_rows_ND = embed_local_rows(labels_N, weight_VD, vocab_start)
        if softcap is not None:
            p_NV *= soft_cap_slope_(x_NV, softcap)
            label_rows_ND *= soft_cap_slope_(label_N.clone(), softcap).unsqueeze(1).to(label_rows_ND.dtype)
        partial_grads_2ND = torch.stack((p_NV.to(h_ND.dtype) @ weight_VD, label_rows_ND))
    return LogitStats(p_NV, torch.stack((max_N, sum_N, label_N)), partial_grads_2ND)


class CombinedLoss(NamedTuple):
    """Loss from all ranks' statistics, and the factors of its gradient."""

    losses: LossSums
    softmax_factor_RN: Tensor
    """Factor of each rank's own softmax in the gradient of its logits."""
    label_weight_N: Tensor
    """Weight of a label in the step's loss: minus the factor of the label's one-hot vector in that gradient."""


def combine_stats(
    stats_R3N: Tensor, labels_N: Tensor, z_loss_coefficient: float = 0.0, weight: float | Tensor = 1.0
) -> CombinedLoss:
    """Combine all ranks' `LogitStats.stats_3N`; the factors are those of the gradient of the loss times `weight`."""
    max_RN, sum_RN, label_RN = stats_R3N.unbind(1)
    max_N = max_RN.amax(0)
    scaled_RN = sum_RN * (max_RN - max_N).exp()
    whole = whole_vocab_loss(max_N, scaled_RN.sum(0), label_RN.sum(0), labels_N, z_loss_coefficient)
    label_weight_N = whole.valid_N * weight
    return CombinedLoss(whole.losses, scaled_RN * (whole.factor_N * label_weight_N), label_weight_N)


def hidden_gradient(partial_grads_R2ND: Tensor, combined: CombinedLoss) -> Tensor:
    """Return the gradient of the hidden state from all ranks' `LogitStats.partial_grads_2ND`: (N, D).

    Rank by rank, so that wider copies of their terms are in memory one at a time.
    """
    dtype = combined.softmax_factor_RN.dtype
    gradient_ND = partial_grads_R2ND[:, 1].sum(0).to(dtype).mul_(-combined.label_weight_N.unsqueeze(1))
    for partial_ND, factor_N in zip(partial_grads_R2ND[:, 0], combined.softmax_factor_RN, strict=True):
        gradient_ND += partial_ND.to(dtype).mul_(factor_N.unsqueeze(1))
    return gradient_ND.to(partial_grads_R2ND.dtype)


def head_gradient(
    p_NV: Tensor, h_ND: Tensor, labels_N: Tensor, vocab_start: int, softmax_factor_N: Tensor, label_weight_N: Tensor
) -> Tensor:
    """Return the gradient of the rank's rows of the head: (V, D). Overwrites `p_NV`."""
    row_N, is_local_N = local_rows(labels_N, vocab_start, p_NV.shape[1])
    grad_NV = softmax_gradient_(p_NV, softmax_factor_N, row_N, label_weight_N * is_local_N)
    return grad_NV.to(h_ND.dtype).t() @ h_ND
