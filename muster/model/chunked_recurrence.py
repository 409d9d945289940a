"""Linear attention in chunks: the recurrence S_t = diag(α_t) S_{t−1} + k_t vᵀ_t, o_t = Sᵀ_t q_t as matmuls.

Within a chunk the outputs are those of attention without a softmax, whose scores decay with the distance; between
chunks one state (key width × value width) per head hands on all positions before (arXiv:2312.06635 §4.2, §4.3). With
b_t = log(α_1 ⋯ α_t), counted from the chunk's beginning, q_t is multiplied by exp(b_t) and k_s by exp(−b_s), so that a
score decays by exp(b_t − b_s). Each sequence may consist of documents: a state begins anew with every one.

States and sums are of the accumulation dtype. Suffixes of tensors: B sequences, H heads, S positions, N chunks, C
positions of a chunk, d key width, e value width; an a stands for d where each element of a key has a decay, for 1 where
a head has one.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from muster.model.kernels import accumulation_dtype
from muster.spec.model_components import DECAYED_CHUNK, PLAIN_CHUNK

LOG_DECAY_DIVISOR = 16
"""Divisor of the logarithm of a decay, which keeps it near 1 (arXiv:2312.06635 §4.4)."""


@dataclass(frozen=True)
class Operands:
    """A segment of consecutive positions."""

    q_BHSd: Tensor
    k_BHSd: Tensor
    v_BHSe: Tensor
    logits_BHSa: Tensor | None
    """Logits of the decays; None: states don't decay."""
    begins_BS: Tensor | None
    """True where a document begins; None: nowhere."""


class Chunks:
    """The operands of a segment in chunks, and what its states are made of."""

    def __init__(self, of: Operands) -> None:
        length = of.q_BHSd.shape[2]
        self.size = min(length, PLAIN_CHUNK if of.logits_BHSa is None else DECAYED_CHUNK)
        self.length, self._padding = length, -length % self.size
        self.dtype = accumulation_dtype(of.q_BHSd.dtype)
        self.q = self.split(of.q_BHSd) * of.q_BHSd.shape[3] ** -0.5
        self.k, self.v = self.split(of.k_BHSd), self.split(of.v_BHSe)
        self.logits, self.log_decay_sum = None, None
        if of.logits_BHSa is not None:
            self.logits = self.split(of.logits_BHSa)
            log_decays = F.logsigmoid(self.logits).div_(LOG_DECAY_DIVISOR)
            if self._padding:  # behind the end nothing decays
                log_decays[:, :, -1, -self._padding :] = 0
            self.log_decay_sum = log_decays.cumsum_(3)
        causal_CC = torch.ones(self.size, self.size, dtype=torch.bool, device=self.q.device).tril()
        self.seen, self.from_before, self.to_end, self.unbroken = causal_CC, None, None, None
        if of.begins_BS is not None:
            count_BNC = F.pad(of.begins_BS, (0, self._padding)).unflatten(1, (-1, self.size)).cumsum(2)
            count = count_BNC.unsqueeze(1).unsqueeze(-1)
            self.seen = causal_CC & (count == count.mT)
            self.from_before = (count == 0).to(self.dtype)
            self.to_end = (count == count[:, :, :, -1:]).to(self.dtype)
            self.unbroken = self.from_before[:, :, :, -1:].mT

    def split(self, x_BHSd: Tensor) -> Tensor:
        """Return a tensor of the segment in chunks, (B, H, N, C, d), with zeros behind its end."""
        x_BHSd = x_BHSd.to(self.dtype)
        padded = F.pad(x_BHSd, (0, 0, 0, self._padding)) if self._padding else x_BHSd
        return padded.unflatten(2, (-1, self.size))

    def join(self, x_BHNCd: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor of chunks as one of the segment, (B, H, S, d), in memory with the heads of a position
        together."""
        x_BHSd = x_BHNCd.flatten(2, 3)[:, :, : self.length].to(dtype)
        return x_BHSd.transpose(1, 2).contiguous().transpose(1, 2)

    def decayed(self, x: Tensor) -> Tensor:
        """Return x_t · exp(b_t): what is left of the state before the chunk at each of its positions."""
        return x if self.log_decay_sum is None else x * self.log_decay_sum.exp()

    def grown(self, x: Tensor) -> Tensor:
        """Return x_s · exp(−b_s)."""
        return x if self.log_decay_sum is None else x * self.log_decay_sum.neg().exp_()

    def decayed_to_end(self, x: Tensor) -> Tensor:
        """Return x_s · exp(b_C − b_s), 0 where a document begins behind s: what is left at the chunk's end."""
        if self.log_decay_sum is not None:
            x = x * (self.log_decay_sum[:, :, :, -1:] - self.log_decay_sum).exp_()
        return x if self.to_end is None else x * self.to_end

    def reaching_back(self, x: Tensor) -> Tensor:
        """Return x_t · exp(b_t), 0 where a document has begun in the chunk, which hides what is before the chunk."""
        return self.decayed(x) if self.from_before is None else self.decayed(x) * self.from_before

    @cached_property
    def scores(self) -> Tensor:
        """Products of queries and keys within a chunk, with their decay, 0 where a query doesn't see a key."""
        return (self.decayed(self.q) @ self.grown(self.k).mT).mul_(self.seen)

    @cached_property
    def kept(self) -> Tensor:
        """Part of the state before a chunk that is left behind it, (B or 1, H or 1, N, a, 1)."""
        if self.log_decay_sum is None:
            shape = (1, 1, self.q.shape[2], 1, 1)
            left = torch.ones(shape, dtype=self.dtype, device=self.q.device)
        else:
            left = self.log_decay_sum[:, :, :, -1:].mT.exp()
        return left if self.unbroken is None else left * self.unbroken

    def kept_from_start(self) -> Tensor:
        """Return the part of the state before the segment that is left before each chunk, and behind the last."""
        ones = torch.ones_like(self.kept[:, :, :1])
        return torch.cat((ones, self.kept), 2).cumprod(2)

    def kept_to_end(self) -> Tensor:
        """Return the part of the state behind each chunk that is left behind the segment."""
        later = torch.cat((self.kept[:, :, 1:], torch.ones_like(self.kept[:, :, :1])), 2)
        return later.flip(2).cumprod(2).flip(2)

    def states(self) -> Tensor:
        """Return the state before each chunk and behind the last, (B, H, N + 1, d, e), where none is before the
        segment."""
        added = self.decayed_to_end(self.k).mT @ self.v
        states = added.new_zeros(*added.shape[:2], added.shape[2] + 1, *added.shape[3:])
        for n in range(added.shape[2]):
            torch.addcmul(added[:, :, n], self.kept[:, :, n], states[:, :, n], out=states[:, :, n + 1])
        return states

    def state_gradients(self, grad: Tensor) -> Tensor:
        """Return the gradient of the state before each chunk and behind the last, (B, H, N + 1, d, e), where the last
        has none; `grad` is that of the outputs."""
        added = self.reaching_back(self.q).mT @ grad
        grads = added.new_zeros(*added.shape[:2], added.shape[2] + 1, *added.shape[3:])
        for n in reversed(range(added.shape[2])):
            torch.addcmul(added[:, :, n], self.kept[:, :, n], grads[:, :, n + 1], out=grads[:, :, n])
        return grads

    def operand_gradients(self, grad: Tensor, states: Tensor, state_grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys, values and logits of decays, in chunks.

        `states` and `state_grads` are complete: with the state before the segment and the gradient of that behind it.
        """
        before, behind = states[:, :, :-1], state_grads[:, :, 1:]
        grad_v = self.scores.mT @ grad + self.decayed_to_end(self.k) @ behind
        grad_scores = (grad @ self.v.mT).mul_(self.seen)
        grad_q = self.decayed(grad_scores @ self.grown(self.k)) + self.reaching_back(grad @ before.mT)
        grad_k = self.grown(grad_scores.mT @ self.decayed(self.q)) + self.decayed_to_end(self.v @ behind.mT)
        grad_logits = None
        if self.logits is not None:
            # b_t multiplies q_t and divides k_t; at a chunk's end it multiplies the state (arXiv:2312.06635 §C).
            grad_sums = self.q * grad_q - self.k * grad_k
            grad_sums[:, :, :, -1] += (states[:, :, 1:] * behind).sum(-1)
            if self.logits.shape[-1] == 1:
                grad_sums = grad_sums.sum(-1, keepdim=True)
            # A decay is part of all sums from its position on.
            grad_decays = grad_sums.flip(3).cumsum(3).flip(3)
            grad_logits = grad_decays.mul_(torch.sigmoid(-self.logits)).div_(LOG_DECAY_DIVISOR)
        return grad_q * self.q_scale, grad_k, grad_v, grad_logits

    @property
    def q_scale(self) -> float:
        """Factor of queries: 1 / √d."""
        return self.q.shape[-1] ** -0.5


@torch.no_grad()
def read_segment(of: Operands, before_BHde: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, H, S, e) of a segment that follows a state, and the state behind it (B, H, d, e)."""
    chunks = Chunks(of)
    states = chunks.states()
    if before_BHde is not None:
        states += chunks.kept_from_start() * before_BHde.unsqueeze(2)
    out = chunks.scores @ chunks.v + chunks.reaching_back(chunks.q) @ states[:, :, :-1]
    return chunks.join(out, of.v_BHSe.dtype), states[:, :, -1]
