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
from muster.model.kernels import wide
from muster.model.loss import IGNORED, LossSums
from muster.parallel.axis import Pending, PipeAxis, all_gather
from muster.parallel.feed import Feed

# ----------------------------------------------------------------------------------------------------------------------
# The mathematics. N positions, V words of this rank, D hidden width, R ranks


class Scores(NamedTuple):
    """What one rank finds of its words."""

    p_NV: Tensor
    """Softmax over its own words."""
    sums_3N: Tensor
    """The largest logit, the sum of the exponentials of the logits less that one, and the label's logit where it is the
    rank's (else 0)."""
    pulls_2ND: Tensor | None
    """The softmax times the head, and the head's row of the label where it is the rank's (else 0); None where no
    gradients are wanted."""


def own_rows(ids_N: Tensor, first_word: int, num_words: int) -> tuple[Tensor, Tensor]:
    """Rows of the ids in a rank's part of a table, and which of the ids lie there; the others get row 0."""
    row_N = ids_N - first_word
    mine_N = (row_N >= 0) & (row_N < num_words)
    return row_N.where(mine_N, 0), mine_N


def look_up(ids_N: Tensor, weight_VD: Tensor, first_word: int) -> Tensor:
    """Rows of the rank's words, and zeros for other words: (N, D)."""
    row_N, mine_N = own_rows(ids_N, first_word, len(weight_VD))
    return F.embedding(row_N, weight_VD) * mine_N.unsqueeze(1)


def score(h_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, first_word: int, trains: bool = True) -> Scores:
    """What can be found before other ranks' words are known; `trains`: for gradients too."""
    x_NV = F.linear(h_ND, weight_VD).to(wide(h_ND.dtype))
    row_N, mine_N = own_rows(labels_N, first_word, len(weight_VD))
    most_N = x_NV.amax(1)
    label_N = x_NV.gather(1, row_N.unsqueeze(1)).squeeze(1) * mine_N
    p_NV = (x_NV - most_N.unsqueeze(1)).exp_()
    sum_N = p_NV.sum(1)
    p_NV /= sum_N.unsqueeze(1)
    pulls_2ND = None
    if trains:
        pulls_2ND = torch.stack((p_NV.to(h_ND.dtype) @ weight_VD, look_up(labels_N, weight_VD, first_word)))
    return Scores(p_NV, torch.stack((most_N, sum_N, label_N)), pulls_2ND)


class Verdict(NamedTuple):
    """What all ranks' sums say."""

    losses: LossSums
    factor_RN: Tensor
    """By rank, of its softmax in the gradient of its logits."""
    counts_N: Tensor
    """What a label counts in the step's loss: minus the factor of the label in that gradient."""


def judge(sums_R3N: Tensor, labels_N: Tensor, z_coefficient: float = 0.0, weight: float = 1.0) -> Verdict:
    """The sums of the losses, and how to scale what each rank found if they are multiplied by `weight`.

    d(−log p[label]) / d logits = p − onehot(label), and d(log Z) / d logits = p.
    """
    most_RN, sum_RN, label_RN = sums_R3N.unbind(1)
    most_N = most_RN.amax(0)
    scaled_RN = sum_RN * (most_RN - most_N).exp()
    total_N = scaled_RN.sum(0)
    log_z_N = total_N.log() + most_N
    counts_N = (labels_N != IGNORED).to(total_N.dtype)
    loss = ((log_z_N - label_RN.sum(0)) * counts_N).sum()
    z_loss = z_coefficient * (log_z_N.square() * counts_N).sum()
    counted_N = counts_N * weight
    factor_N = (1 + 2 * z_coefficient * log_z_N) / total_N * counted_N
    return Verdict(LossSums(loss + z_loss, loss, z_loss), scaled_RN * factor_N, counted_N)


def hidden_gradient(pulls_R2ND: Tensor, verdict: Verdict) -> Tensor:
    """The gradient of the hidden state from what all ranks found: (N, D)."""
    dtype = verdict.factor_RN.dtype
    pulled_ND = (pulls_R2ND[:, 0].to(dtype) * verdict.factor_RN.unsqueeze(2)).sum(0)
    return (pulled_ND - pulls_R2ND[:, 1].sum(0).to(dtype) * verdict.counts_N.unsqueeze(1)).to(pulls_R2ND.dtype)


def head_gradient(
    p_NV: Tensor, h_ND: Tensor, labels_N: Tensor, first_word: int, factor_N: Tensor, counts_N: Tensor
) -> Tensor:
    """The gradient of the rank's part of the head: (V, D). Spoils `p_NV`."""
    row_N, mine_N = own_rows(labels_N, first_word, p_NV.shape[1])
    p_NV *= factor_N.unsqueeze(1)
    p_NV.scatter_add_(1, row_N.unsqueeze(1), (-counts_N * mine_N).unsqueeze(1))
    return p_NV.to(h_ND.dtype).t() @ h_ND


# ----------------------------------------------------------------------------------------------------------------------
# One rank's part


class Words:
    """This rank's words: their passes, and the collectives among the pipeline ranks, by micro-batch.

    `module` holds their rows under the names of the whole embedding and head; `ends` are the pipeline ranks of the
    first and the last stage; `hidden` makes memory for a hidden state. `finish_backward` takes up gradients.
    """

    def __init__(
        self,
        module: Decoder,
        axis: PipeAxis,
        ends: tuple[int, int],
        first_word: int,
        hidden: Callable[[int], Tensor],
        finish_backward: Callable[[], None],
    ) -> None:
        self.module, self.axis, self.first_word = module, axis, first_word
        self.first, self.last = ends
        self.feed: Feed | None = None
        self._losses: list[Tensor] = []
        self._empty, self._finish_backward = hidden, finish_backward
        self._vectors: dict[int, Tensor] = {}
        self._hidden_ND: dict[int, Tensor] = {}
        self._scores: dict[int, Scores] = {}
        self._verdicts: dict[int, Verdict] = {}
        self._gradients_ND: dict[int, Tensor] = {}
        self.passes: dict[str, Callable[[int], None]] = {
            "E": self._look_up,
            "S": self._score,
            "T": self._output_backward,
            "EW": self._input_backward,
        }
        self.meetings: dict[str, Callable[[int, Tensor | None], Pending]] = {
            "EC": self._add_up,
            "HC": lambda unit, y: self._hand_out(self.last, y, self._hidden_ND, unit),
            "SC": self._judge,
            "DC": lambda unit, d: self._hand_out(self.first, d, self._gradients_ND, unit),
        }
        """Begin a collective; its result is, on the rank of the stage that wants one, what that stage reads."""

    # ------------------------------------------------------------------------------------------------------------------
    # Passes

    @torch.no_grad()
    def _look_up(self, unit: int) -> None:
        assert self.feed is not None
        empty_BSD, weight = self._empty(unit), self._weight("embed")
        found_ND = look_up(self.feed.tokens_M[unit].flatten(), weight, self.first_word)
        self._vectors[unit] = found_ND.to(empty_BSD.dtype).view_as(empty_BSD)

    def _score(self, unit: int) -> None:
        trains = torch.is_grad_enabled()
        with torch.no_grad():
            h_ND = self._hidden_ND[unit]
            self._scores[unit] = score(h_ND, self._weight("head"), self._labels_N(unit), self.first_word, trains)

    @torch.no_grad()
    def _output_backward(self, unit: int) -> None:
        h_ND, scores, verdict = self._hidden_ND.pop(unit), self._scores.pop(unit), self._verdicts.pop(unit)
        own_N, labels_N = verdict.factor_RN[self.axis.index], self._labels_N(unit)
        grad_VD = head_gradient(scores.p_NV, h_ND, labels_N, self.first_word, own_N, verdict.counts_N)
        weight = self._weight("head")
        weight.grad = grad_VD if weight.grad is None else weight.grad.add_(grad_VD)
        self._finish_backward()

    @torch.no_grad()
    def _input_backward(self, unit: int) -> None:
        assert self.feed is not None
        weight, grad_ND = self._weight("embed"), self._gradients_ND.pop(unit)
        row_N, mine_N = own_rows(self.feed.tokens_M[unit].flatten(), self.first_word, len(weight))
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, row_N, grad_ND * mine_N.unsqueeze(1))
        self._finish_backward()

    # ------------------------------------------------------------------------------------------------------------------
    # Collectives

    def _add_up(self, unit: int, _: Tensor | None) -> Pending:
        vectors_BSD, group = self._vectors.pop(unit), self.axis.group
        work = dist.reduce(vectors_BSD, self.axis.ranks[self.first], group=group, async_op=True)
        return Pending([work], lambda: vectors_BSD)

    def _hand_out(self, source: int, tensor_BSD: Tensor | None, to: dict[int, Tensor], unit: int) -> Pending:
        x_BSD = self._empty(unit) if tensor_BSD is None else tensor_BSD.contiguous()
        work = dist.broadcast(x_BSD, self.axis.ranks[source], group=self.axis.group, async_op=True)
        to[unit] = x_BSD.flatten(0, 1)
        return Pending([work], lambda: x_BSD)

    def _judge(self, unit: int, _: Tensor | None) -> Pending:
        scores, group, size = self._scores[unit], self.axis.group, len(self.axis.ranks)
        sums_R3N = scores.sums_3N.new_empty(size, *scores.sums_3N.shape)
        works = [all_gather(sums_R3N.flatten(0, 1), scores.sums_3N, group=group, async_op=True)]
        is_last, pulls_2ND, pulls_R2ND = self.axis.index == self.last, scores.pulls_2ND, None
        if pulls_2ND is not None:
            pulls_R2ND = pulls_2ND.new_empty(size, *pulls_2ND.shape) if is_last else None
            parts = None if pulls_R2ND is None else list(pulls_R2ND.unbind(0))
            works.append(dist.gather(pulls_2ND, parts, self.axis.ranks[self.last], group=group, async_op=True))
            self._scores[unit] = Scores(scores.p_NV, scores.sums_3N, None)

        def finish() -> Tensor:
            assert self.feed is not None
            weight = self.feed.loss_scale / self.feed.num_valid
            verdict = judge(sums_R3N, self._labels_N(unit), self.feed.z_coefficient, weight)
            if is_last:
                self._losses.append(torch.stack((verdict.losses.cross_entropy, verdict.losses.z_loss)))
            if pulls_2ND is None:
                del self._hidden_ND[unit], self._scores[unit]
                return sums_R3N
            self._verdicts[unit] = verdict
            return pulls_2ND if pulls_R2ND is None else hidden_gradient(pulls_R2ND, verdict).view_as(self._empty(unit))

        return Pending(works, finish)

    def kept_bytes(self, unit: int) -> int:
        """What is kept of a micro-batch for its T."""
        verdict = self._verdicts[unit]
        kept = (self._hidden_ND[unit], self._scores[unit].p_NV, verdict.factor_RN, verdict.counts_N)
        return sum(tensor.nbytes for tensor in kept)

    def take_losses(self) -> list[Tensor]:
        """Cross-entropy and z-loss of each micro-batch since the last call, on the last stage's rank."""
        losses, self._losses = self._losses, []
        return losses

    # ------------------------------------------------------------------------------------------------------------------

    def _labels_N(self, unit: int) -> Tensor:
        assert self.feed is not None
        return self.feed.labels_M[unit].flatten()

    def _weight(self, name: str) -> nn.Parameter:
        """The rows of the embedding or the head, which are the same where they are tied."""
        if isinstance(self.module, FSDPModule):
            self.module.unshard()
        part = self.module.head if name == "head" and self.module.head is not None else self.module.embed
        assert part is not None
        return part.weight  # type: ignore[return-value]


def give_words(module: Decoder, rows: int, width: int, tied: bool) -> None:
    """Gives a decoder without words, on the meta device, that many rows of the embedding and of the head."""
    module.embed = nn.Embedding(rows, width)
    if not tied:
        module.head = nn.Linear(width, rows, bias=False)
