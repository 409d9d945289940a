"""Vocabulary parallelism over the pipeline ranks: each holds some rows of the embedding and of the output head.

The loss takes two passes with one exchange between them (arXiv:2411.05288, algorithm 2). Pass S computes the logits of
the rank's vocabulary entries and from them the largest logit, the sum of exponentials, and the softmax times the head,
which is the rank's term of the hidden state's gradient but for a factor. The collective LOGIT_STATS gathers these terms
on the last stage's rank and the sums on all ranks. Pass T computes the gradient of the rank's rows of the head; nothing
waits for it, so a schedule places it where a rank would be idle. `muster.parallel.vocab_loss` has the formulas.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from muster.model.decoder import Decoder
from muster.model.kernels import soft_cap_slope_
from muster.parallel.axis import PendingTensor, PipelineAxis, all_gather_into_tensor
from muster.parallel.master_weights import master_weights
from muster.parallel.stage_inputs import StageInputs
from muster.parallel.vocab_loss import (
    CombinedLoss,
    LogitStats,
    combine_stats,
    embed_local_rows,
    head_gradient,
    hidden_gradient,
    local_logit_stats,
    local_rows,
)
from muster.schedule.action import Kind


class VocabShard:
    """This rank's vocabulary entries: their passes, and the collectives over the pipeline ranks, by micro-batch.

    `module` holds the rank's rows under the names of the whole embedding and head. `ends` are the pipeline ranks of the
    first and the last stage. `hidden_buffer(micro_batch)` allocates a hidden state. `finish_backward` hands gradients
    that no autograd backward made to FSDP.
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
        self.module = module
        self.axis = axis
        self.vocab_start = vocab_start
        self.first, self.last = ends
        self.inputs: StageInputs | None = None
        self._losses: list[Tensor] = []
        self._hidden_buffer = hidden_buffer
        self._finish_backward = finish_backward
        self._embeddings: dict[int, Tensor] = {}
        self._hidden_ND: dict[int, Tensor] = {}
        self._stats: dict[int, LogitStats] = {}
        self._combined: dict[int, CombinedLoss] = {}
        self._gradients_ND: dict[int, Tensor] = {}
        self.passes: dict[Kind, Callable[[int], None]] = {
            Kind.EMB_F: self._embed,
            Kind.S: self._compute_logit_stats,
            Kind.T: self._head_backward,
            Kind.EMB_W: self._embedding_backward,
        }
        """Compute passes by instruction kind; each takes the micro-batch."""
        self.collectives: dict[Kind, Callable[[int, Tensor | None], PendingTensor]] = {
            Kind.EMB_REDUCE: self._reduce_embeddings,
            Kind.HIDDEN_BCAST: lambda micro_batch, y: self._broadcast(self.last, y, self._hidden_ND, micro_batch),
            Kind.LOGIT_STATS: self._exchange_stats,
            Kind.EMB_GRAD_BCAST: lambda micro_batch, d: self._broadcast(self.first, d, self._gradients_ND, micro_batch),
        }
        """Functions by instruction kind that start a collective; each takes the micro-batch and the tensor that this
        rank contributes. The result matters on the rank of the stage that reads it: the first stage's input
        (EMB_REDUCE), or the gradient of the last stage's output (LOGIT_STATS)."""

    # ------------------------------------------------------------------------------------------------------------------
    # Passes

    @torch.no_grad()
    def _embed(self, micro_batch: int) -> None:
        empty_BSD = self._hidden_buffer(micro_batch)
        embeddings_ND = embed_local_rows(self._flat_tokens_N(micro_batch), self._weight("embed"), self.vocab_start)
        self._embeddings[micro_batch] = embeddings_ND.to(empty_BSD.dtype).view_as(empty_BSD)

    def _compute_logit_stats(self, micro_batch: int) -> None:
        with_gradients = torch.is_grad_enabled()
        with torch.no_grad():
            self._stats[micro_batch] = local_logit_stats(
                self._hidden_ND[micro_batch],
                self._weight("head"),
                self._flat_labels_N(micro_batch),
                self.vocab_start,
                with_gradients,
                self.module.logit_softcap,
            )

    def _head_backward(self, micro_batch: int) -> None:
        self._add_head_gradient(micro_batch)  # a call of its own, whose tensors are freed before the reduction
        self._finish_backward()

    @torch.no_grad()
    def _add_head_gradient(self, micro_batch: int) -> None:
        h_ND = self._hidden_ND.pop(micro_batch)
        stats = self._stats.pop(micro_batch)
        combined = self._combined.pop(micro_batch)
        softmax_factor_N = combined.softmax_factor_RN[self.axis.index]
        weight = self._weight("head")
        if not weight.requires_grad:
            return
        labels_N = self._flat_labels_N(micro_batch)
        label_weight_N = combined.label_weight_N
        if self.module.logit_softcap is not None:
            label_weight_N = label_weight_N * soft_cap_slope_(stats.stats_3N[2], self.module.logit_softcap)
        grad_VD = head_gradient(stats.p_NV, h_ND, labels_N, self.vocab_start, softmax_factor_N, label_weight_N)
        weight.grad = grad_VD if weight.grad is None else weight.grad.add_(grad_VD)

    @torch.no_grad()
    def _embedding_backward(self, micro_batch: int) -> None:
        weight = self._weight("embed")
        grad_ND = self._gradients_ND.pop(micro_batch)
        if not weight.requires_grad:
            return
        row_N, is_local_N = local_rows(self._flat_tokens_N(micro_batch), self.vocab_start, len(weight))
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, row_N, grad_ND * is_local_N.unsqueeze(1))
        self._finish_backward()

    # ------------------------------------------------------------------------------------------------------------------
    # Collectives

    def _reduce_embeddings(self, micro_batch: int, _: Tensor | None) -> PendingTensor:
        embeddings_BSD = self._embeddings.pop(micro_batch)
        first_rank = self.axis.ranks[self.first]
        work = dist.reduce(embeddings_BSD, first_rank, group=self.axis.group, async_op=True)
        return PendingTensor([work], lambda: embeddings_BSD)

    def _broadcast(
        self, source: int, tensor_BSD: Tensor | None, target: dict[int, Tensor], micro_batch: int
    ) -> PendingTensor:
        x_BSD = self._hidden_buffer(micro_batch) if tensor_BSD is None else tensor_BSD.contiguous()
        work = dist.broadcast(x_BSD, self.axis.ranks[source], group=self.axis.group, async_op=True)
        target[micro_batch] = x_BSD.flatten(0, 1)
        return PendingTensor([work], lambda: x_BSD)

    def _exchange_stats(self, micro_batch: int, _: Tensor | None) -> PendingTensor:
        stats = self._stats[micro_batch]
        group = self.axis.group
        size = len(self.axis.ranks)
        is_last = self.axis.index == self.last
        stats_R3N = stats.stats_3N.new_empty(size, *stats.stats_3N.shape)
        works = [all_gather_into_tensor(stats_R3N.flatten(0, 1), stats.stats_3N, group=group, async_op=True)]
        partial_grads_2ND = stats.partial_grads_2ND
        partial_grads_R2ND = None
        if partial_grads_2ND is not None:
            if is_last:
                partial_grads_R2ND = partial_grads_2ND.new_empty(size, *partial_grads_2ND.shape)
            parts = None if partial_grads_R2ND is None else list(partial_grads_R2ND.unbind(0))
            works.append(dist.gather(partial_grads_2ND, parts, self.axis.ranks[self.last], group=group, async_op=True))
            self._stats[micro_batch] = LogitStats(stats.p_NV, stats.stats_3N, None)

        def finish() -> Tensor:
            assert self.inputs is not None
            weight = self.inputs.loss_scale / self.inputs.num_valid
            labels_N = self._flat_labels_N(micro_batch)
            combined = combine_stats(stats_R3N, labels_N, self.inputs.z_loss_coefficient, weight)
            if is_last:
                self._losses.append(torch.stack((combined.losses.cross_entropy, combined.losses.z_loss)))
            if partial_grads_2ND is None:
                del self._hidden_ND[micro_batch], self._stats[micro_batch]
                return stats_R3N
            self._combined[micro_batch] = combined
            if partial_grads_R2ND is None:
                return partial_grads_2ND
            return hidden_gradient(partial_grads_R2ND, combined).view_as(self._hidden_buffer(micro_batch))

        return PendingTensor(works, finish)

    def saved_bytes(self, micro_batch: int) -> int:
        """Return the bytes that a micro-batch keeps for its pass T."""
        combined = self._combined[micro_batch]
        saved = (
            self._hidden_ND[micro_batch],
            self._stats[micro_batch].p_NV,
            combined.softmax_factor_RN,
            combined.label_weight_N,
        )
        return sum(tensor.nbytes for tensor in saved)

    def pop_losses(self) -> list[Tensor]:
        """Return the cross-entropy and z-loss of each micro-batch since the last call; [] except on the last stage's
        rank."""
        losses = self._losses
        self._losses = []
        return losses

    # ------------------------------------------------------------------------------------------------------------------

    def _flat_tokens_N(self, micro_batch: int) -> Tensor:
        assert self.inputs is not None
        return self.inputs.tokens_M[micro_batch].flatten()

    def _flat_labels_N(self, micro_batch: int) -> Tensor:
        assert self.inputs is not None
        return self.inputs.labels_M[micro_batch].flatten()

    def _weight(self, name: str) -> nn.Parameter:
        """Return the rows of the embedding or the head; they are the same parameter if embeddings are tied."""
        if (masters := master_weights(self.module)) is not None:
            masters.refresh()
        if isinstance(self.module, FSDPModule):
            self.module.unshard()
        part = self.module.head if name == "head" and self.module.head is not None else self.module.embed
        assert part is not None
        return part.weight  # type: ignore[return-value]


def add_vocab_shard(module: Decoder, rows: int, width: int, tied: bool) -> None:
    """Add `rows` rows of the embedding and of the head to a decoder on the meta device that has no vocabulary."""
    module.embed = nn.Embedding(rows, width)
    if not tied:
        module.head = nn.Linear(width, rows, bias=False)
