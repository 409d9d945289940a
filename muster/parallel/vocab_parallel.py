"""A vocabulary spread over all pipeline ranks: each has some rows of the embedding and of the head.

Scoring is in two passes with one exchange between them (arXiv:2411.05288, algorithm 2). S computes the logits of the
rank's words, and from them their largest, the sum of their exponentials, and their softmax times the head: the rank's
part of the hidden state's gradient, which only wants scaling. SC brings that to the last stage's rank,
and the sums to all. T computes the gradient of the rank's part of the head, when there is time.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from muster.model.decoder import Decoder
from muster.model.kernels import accumulation_dtype
from muster.model.loss import IGNORE_INDEX, LossSums
from muster.parallel.axis import PendingTensor, PipelineAxis, all_gather_into_tensor
from muster.parallel.stage_inputs import StageInputs

# ----------------------------------------------------------------------------------------------------------------------
# The mathematics. N positions, V words of this rank, D hidden width, R ranks


class LogitStats(NamedTuple):
    """What one rank finds of its words."""

    p_NV: Tensor
    """Softmax over its own words."""
    stats_3N: Tensor
    """The largest logit, the sum of the exponentials of the logits less that one, and the label's logit where it is the
    rank's (else 0)."""
    partial_grads_2ND: Tensor | None
    """The softmax times the head, and the head's row of the label where it is the rank's (else 0); None where no
    gradients are wanted."""


def local_rows(ids_N: Tensor, vocab_start: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Rows of the ids in a rank's part of a table, and which of the ids lie there; the others get row 0."""
    row_N = ids_N - vocab_start
    mine_N = (row_N >= 0) & (row_N < num_rows)
    return row_N.where(mine_N, 0), mine_N


def embed_local_rows(ids_N: Tensor, weight_VD: Tensor, vocab_start: int) -> Tensor:
    """Rows of the rank's words, and zeros for other words: (N, D)."""
    row_N, mine_N = local_rows(ids_N, vocab_start, len(weight_VD))
    return F.embedding(row_N, weight_VD) * mine_N.unsqueeze(1)


def local_logit_stats(
    h_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, vocab_start: int, with_gradients: bool = True
) -> LogitStats:
    """What can be found before other ranks' words are known; `trains`: for gradients too."""
    x_NV = F.linear(h_ND, weight_VD).to(accumulation_dtype(h_ND.dtype))
    row_N, mine_N = local_rows(labels_N, vocab_start, len(weight_VD))
    most_N = x_NV.amax(1)
    label_N = x_NV.gather(1, row_N.unsqueeze(1)).squeeze(1) * mine_N
    p_NV = (x_NV - most_N.unsqueeze(1)).exp_()
    sum_N = p_NV.sum(1)
    p_NV /= sum_N.unsqueeze(1)
    pulls_2ND = None
    if with_gradients:
        pulls_2ND = torch.stack((p_NV.to(h_ND.dtype) @ weight_VD, embed_local_rows(labels_N, weight_VD, vocab_start)))
    return LogitStats(p_NV, torch.stack((most_N, sum_N, label_N)), pulls_2ND)


class CombinedLoss(NamedTuple):
    """What all ranks' sums say."""

    losses: LossSums
    softmax_factor_RN: Tensor
    """By rank, of its softmax in the gradient of its logits."""
    label_weight_N: Tensor
    """What a label counts in the step's loss: minus the factor of the label in that gradient."""


def combine_stats(stats_R3N: Tensor, labels_N: Tensor, z_coefficient: float = 0.0, weight: float = 1.0) -> CombinedLoss:
    """The sums of the losses, and how to scale what each rank found if they are multiplied by `weight`.

    d(−log p[label]) / d logits = p − onehot(label), and d(log Z) / d logits = p.
    """
    most_RN, sum_RN, label_RN = stats_R3N.unbind(1)
    most_N = most_RN.amax(0)
    scaled_RN = sum_RN * (most_RN - most_N).exp()
    total_N = scaled_RN.sum(0)
    log_z_N = total_N.log() + most_N
    counts_N = (labels_N != IGNORE_INDEX).to(total_N.dtype)
    loss = ((log_z_N - label_RN.sum(0)) * counts_N).sum()
    z_loss = z_coefficient * (log_z_N.square() * counts_N).sum()
    counted_N = counts_N * weight
    factor_N = (1 + 2 * z_coefficient * log_z_N) / total_N * counted_N
    return CombinedLoss(LossSums(loss + z_loss, loss, z_loss), scaled_RN * factor_N, counted_N)


def hidden_gradient(partial_grads_R2ND: Tensor, combined: CombinedLoss) -> Tensor:
    """The gradient of the hidden state from what all ranks found: (N, D)."""
    dtype = combined.softmax_factor_RN.dtype
    pulled_ND = (partial_grads_R2ND[:, 0].to(dtype) * combined.softmax_factor_RN.unsqueeze(2)).sum(0)
    return (pulled_ND - partial_grads_R2ND[:, 1].sum(0).to(dtype) * combined.label_weight_N.unsqueeze(1)).to(
        partial_grads_R2ND.dtype
    )


def head_gradient(
    p_NV: Tensor, h_ND: Tensor, labels_N: Tensor, vocab_start: int, softmax_factor_N: Tensor, label_weight_N: Tensor
) -> Tensor:
    """The gradient of the rank's part of the head: (V, D). Spoils `p_NV`."""
    row_N, mine_N = local_rows(labels_N, vocab_start, p_NV.shape[1])
    p_NV *= softmax_factor_N.unsqueeze(1)
    p_NV.scatter_add_(1, row_N.unsqueeze(1), (-label_weight_N * mine_N).unsqueeze(1))
    return p_NV.to(h_ND.dtype).t() @ h_ND


# ----------------------------------------------------------------------------------------------------------------------
# One rank's part


class VocabShard:
    """This rank's words: their passes, and the collectives among the pipeline ranks, by micro-batch.

    `module` holds their rows under the names of the whole embedding and head; `ends` are the pipeline ranks of the
    first and the last stage; `hidden` makes memory for a hidden state. `finish_backward` takes up gradients.
    """

    def __init__(
        self,
        module: Decoder,
        axis: PipelineAxis,
        ends: tuple[int, int],
        vocab_start: int,
        hidden_buffer: Callable[[int], Tensor],
        finish_backward: Callable[[], None],
    ) -> None:
        self.module, self.axis, self.vocab_start = module, axis, vocab_start
        self.first, self.last = ends
        self.inputs: StageInputs | None = None
        self._losses: list[Tensor] = []
        self._hidden_buffer, self._finish_backward = hidden_buffer, finish_backward
        self._embeddings: dict[int, Tensor] = {}
        self._hidden_ND: dict[int, Tensor] = {}
        self._stats: dict[int, LogitStats] = {}
        self._combined: dict[int, CombinedLoss] = {}
        self._gradients_ND: dict[int, Tensor] = {}
        self.passes: dict[str, Callable[[int], None]] = {
            "E": self._embed,
            "S": self._compute_logit_stats,
            "T": self._output_backward,
            "EW": self._input_backward,
        }
        self.collectives: dict[str, Callable[[int, Tensor | None], PendingTensor]] = {
            "EC": self._reduce_embeddings,
            "HC": lambda unit, y: self._broadcast(self.last, y, self._hidden_ND, unit),
            "SC": self._exchange_stats,
            "DC": lambda unit, d: self._broadcast(self.first, d, self._gradients_ND, unit),
        }
        """Begin a collective; its result is, on the rank of the stage that wants one, what that stage reads."""

    # ------------------------------------------------------------------------------------------------------------------
    # Passes

    @torch.no_grad()
    def _embed(self, unit: int) -> None:
        assert self.inputs is not None
        empty_BSD, weight = self._hidden_buffer(unit), self._weight("embed")
        found_ND = embed_local_rows(self.inputs.tokens_M[unit].flatten(), weight, self.vocab_start)
        self._embeddings[unit] = found_ND.to(empty_BSD.dtype).view_as(empty_BSD)

    def _compute_logit_stats(self, unit: int) -> None:
        trains = torch.is_grad_enabled()
        with torch.no_grad():
            h_ND = self._hidden_ND[unit]
            self._stats[unit] = local_logit_stats(
                h_ND, self._weight("head"), self._flat_labels_N(unit), self.vocab_start, trains
            )

    @torch.no_grad()
    def _output_backward(self, unit: int) -> None:
        h_ND, scores, verdict = self._hidden_ND.pop(unit), self._stats.pop(unit), self._combined.pop(unit)
        own_N, labels_N = verdict.softmax_factor_RN[self.axis.index], self._flat_labels_N(unit)
        grad_VD = head_gradient(scores.p_NV, h_ND, labels_N, self.vocab_start, own_N, verdict.label_weight_N)
        weight = self._weight("head")
        weight.grad = grad_VD if weight.grad is None else weight.grad.add_(grad_VD)
        self._finish_backward()

    @torch.no_grad()
    def _input_backward(self, unit: int) -> None:
        assert self.inputs is not None
        weight, grad_ND = self._weight("embed"), self._gradients_ND.pop(unit)
        row_N, mine_N = local_rows(self.inputs.tokens_M[unit].flatten(), self.vocab_start, len(weight))
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, row_N, grad_ND * mine_N.unsqueeze(1))
        self._finish_backward()

    # ------------------------------------------------------------------------------------------------------------------
    # Collectives

    def _reduce_embeddings(self, unit: int, _: Tensor | None) -> PendingTensor:
        vectors_BSD, group = self._embeddings.pop(unit), self.axis.group
        work = dist.reduce(vectors_BSD, self.axis.ranks[self.first], group=group, async_op=True)
        return PendingTensor([work], lambda: vectors_BSD)

    def _broadcast(self, source: int, tensor_BSD: Tensor | None, to: dict[int, Tensor], unit: int) -> PendingTensor:
        x_BSD = self._hidden_buffer(unit) if tensor_BSD is None else tensor_BSD.contiguous()
        work = dist.broadcast(x_BSD, self.axis.ranks[source], group=self.axis.group, async_op=True)
        to[unit] = x_BSD.flatten(0, 1)
        return PendingTensor([work], lambda: x_BSD)

    def _exchange_stats(self, unit: int, _: Tensor | None) -> PendingTensor:
        scores, group, size = self._stats[unit], self.axis.group, len(self.axis.ranks)
        sums_R3N = scores.stats_3N.new_empty(size, *scores.stats_3N.shape)
        works = [all_gather_into_tensor(sums_R3N.flatten(0, 1), scores.stats_3N, group=group, async_op=True)]
        is_last, pulls_2ND, pulls_R2ND = self.axis.index == self.last, scores.partial_grads_2ND, None
        if pulls_2ND is not None:
            pulls_R2ND = pulls_2ND.new_empty(size, *pulls_2ND.shape) if is_last else None
            parts = None if pulls_R2ND is None else list(pulls_R2ND.unbind(0))
            works.append(dist.gather(pulls_2ND, parts, self.axis.ranks[self.last], group=group, async_op=True))
            self._stats[unit] = LogitStats(scores.p_NV, scores.stats_3N, None)

        def finish() -> Tensor:
            assert self.inputs is not None
            weight = self.inputs.loss_scale / self.inputs.num_valid
            verdict = combine_stats(sums_R3N, self._flat_labels_N(unit), self.inputs.z_loss_coefficient, weight)
            if is_last:
                self._losses.append(torch.stack((verdict.losses.cross_entropy, verdict.losses.z_loss)))
            if pulls_2ND is None:
                del self._hidden_ND[unit], self._stats[unit]
                return sums_R3N
            self._combined[unit] = verdict
            return (
                pulls_2ND
                if pulls_R2ND is None
                else hidden_gradient(pulls_R2ND, verdict).view_as(self._hidden_buffer(unit))
            )

        return PendingTensor(works, finish)

    def saved_bytes(self, unit: int) -> int:
        """What is kept of a micro-batch for its T."""
        verdict = self._combined[unit]
        kept = (self._hidden_ND[unit], self._stats[unit].p_NV, verdict.softmax_factor_RN, verdict.label_weight_N)
        return sum(tensor.nbytes for tensor in kept)

    def pop_losses(self) -> list[Tensor]:
        """Cross-entropy and z-loss of each micro-batch since the last call, on the last stage's rank."""
        losses, self._losses = self._losses, []
        return losses

    # ------------------------------------------------------------------------------------------------------------------

    def _flat_labels_N(self, unit: int) -> Tensor:
        assert self.inputs is not None
        return self.inputs.labels_M[unit].flatten()

    def _weight(self, name: str) -> nn.Parameter:
        """The rows of the embedding or the head, which are the same where they are tied."""
        if isinstance(self.module, FSDPModule):
            self.module.unshard()
        part = self.module.head if name == "head" and self.module.head is not None else self.module.embed
        assert part is not None
        return part.weight  # type: ignore[return-value]


def add_vocab_shard(module: Decoder, rows: int, width: int, tied: bool) -> None:
    """Gives a decoder without words, on the meta device, that many rows of the embedding and of the head."""
    module.embed = nn.Embedding(rows, width)
    if not tied:
        module.head = nn.Linear(width, rows, bias=False)
