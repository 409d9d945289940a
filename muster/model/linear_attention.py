"""Linear attention as a layer's attention: a recurrence over a state per head in place of a softmax over all positions.

The state is as large for a million positions as for one, and work grows with the length alone. Without a decay it is
the sum of all products of keys and values (arXiv:2006.16236); with one for each head (arXiv:2405.21060) or for each
element of a key (gated linear attention, arXiv:2312.06635) it forgets. The output is normalised head by head and gated.

Suffixes of tensors as in `muster.model.chunked_recurrence`; D hidden width.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from muster.model.chunked_recurrence import Chunks, Operands
from muster.model.documents import Documents
from muster.model.dropout import LayerDropout
from muster.model.kernels import gated_activation
from muster.model.norms import RmsNorm
from muster.model.projections import project_in, project_normed, project_out, recomputable
from muster.spec.model import ModelSpec
from muster.spec.model_components import DECAY_RANK


class StateExchange(Protocol):
    """Exchange of states with ranks that have the positions before and after a segment."""

    def start_forward(self, state_BHde: Tensor, kept_BHa1: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Start to find the state before this rank's segment, given the one that the segment makes alone, and the part
        of the one before that it keeps. The returned function waits for it, and returns what the backward needs, too.
        """
        ...

    def start_backward(self, grad_BHde: Tensor, needed: Tensor) -> Callable[[], Tensor]:
        """Start to find the gradient of the state behind this rank's segment, given that of the one before it, as far
        as the segment alone makes it."""
        ...


class _ChunkedRecurrence(torch.autograd.Function):
    """Saves queries, keys, values, logits of decays, and the state before the segment where there is one; the backward
    makes the chunks and their states again."""

    @staticmethod
    def forward(
        ctx: Any,
        exchange: StateExchange | None,
        begins_BS: Tensor | None,
        q_BHSd: Tensor,
        k_BHSd: Tensor,
        v_BHSe: Tensor,
        logits_BHSa: Tensor | None,
    ) -> Tensor:
        chunks = Chunks(Operands(q_BHSd, k_BHSd, v_BHSe, logits_BHSa, begins_BS))
        states = chunks.states()
        kept = None if exchange is None else chunks.kept_from_start()
        arriving = (
            None if exchange is None or kept is None else exchange.start_forward(states[:, :, -1], kept[:, :, -1])
        )
        out = chunks.scores @ chunks.v
        back = chunks.reaching_back(chunks.q)
        out += back @ states[:, :, :-1]
        before, needed = None, None
        if arriving is not None and kept is not None:
            before, needed = arriving()
            out += back @ (kept[:, :, :-1] * before.unsqueeze(2))
        ctx.exchange, ctx.begins = exchange, begins_BS  # which all layers share
        ctx.save_for_backward(q_BHSd, k_BHSd, v_BHSe, logits_BHSa, before, needed)
        return chunks.join(out, v_BHSe.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, logits, before, needed = ctx.saved_tensors
        chunks = Chunks(Operands(q, k, v, logits, ctx.begins))
        grad = chunks.split(grads[0])
        state_grads = chunks.state_gradients(grad)
        arriving = None if ctx.exchange is None else ctx.exchange.start_backward(state_grads[:, :, 0], needed)
        states = chunks.states()
        if before is not None:
            states += chunks.kept_from_start() * before.unsqueeze(2)
        if arriving is not None:
            behind = arriving().unsqueeze(2)
            state_grads[:, :, 1:] += chunks.kept_to_end() * behind
        found = chunks.operand_gradients(grad, states, state_grads)
        own = (None if one is None else chunks.join(one, q.dtype) for one in found)
        return None, None, *own


def attend_linearly(
    attention: "LinearAttention", qkv: tuple[Tensor, ...], logits: Tensor | None, documents: Documents | None
) -> Tensor:
    """Return the outputs (B, H, S, e) of whole sequences, or of texts that a cache reads piece by piece; context
    parallelism and generation replace this function."""
    return chunked_recurrence(None, qkv, logits, documents)


def chunked_recurrence(
    exchange: StateExchange | None, qkv: tuple[Tensor, ...], logits: Tensor | None, documents: Documents | None
) -> Tensor:
    """Return the outputs (B, H, S, e) of segments, whose states `exchange` joins with those of other ranks."""
    begins_BS = None if documents is None else documents.begins_BS
    return _ChunkedRecurrence.apply(exchange, begins_BS, *qkv, logits)  # type: ignore[return-value]


class LinearAttention(nn.Module):
    """Linear attention with a norm and a gate of its output; the number of heads follows from the weights' widths.

    Five functions are attributes so that they can be replaced: those of `Attention`, of which `attend` gets the logits
    of the decays in place of a mask, and `local_linears`, linear layers of what is on this rank alone, by deferred
    weight gradients.
    """

    project_in = staticmethod(project_in)
    project_out = staticmethod(project_out)
    recomputable = staticmethod(recomputable)
    local_linears = staticmethod(project_in)
    attend: Callable[["LinearAttention", tuple[Tensor, ...], Tensor | None, Documents | None], Tensor] = staticmethod(
        attend_linearly
    )

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        linear = spec.linear_attention
        assert linear is not None
        self.key_head_dim, self.value_head_dim = linear.key_head_dim, linear.value_head_dim
        self.q = nn.Linear(spec.hidden_size, linear.k_width, bias=False)
        self.k = nn.Linear(spec.hidden_size, linear.k_width, bias=False)
        self.v = nn.Linear(spec.hidden_size, linear.v_width, bias=False)
        self.gate = nn.Linear(spec.hidden_size, linear.v_width, bias=False)
        self.decay_down: nn.Linear | None = None
        if linear.kind == "gla":
            self.decay_down = nn.Linear(spec.hidden_size, DECAY_RANK, bias=False)
        self.decay: nn.Linear | None = None
        if linear.decay_width:
            width = spec.hidden_size if self.decay_down is None else DECAY_RANK
            self.decay = nn.Linear(width, linear.decay_width)
        self.out_norm = RmsNorm(linear.value_head_dim, spec.norm_eps, float(spec.norm_unit_offset))
        self.o = nn.Linear(linear.v_width, spec.hidden_size, bias=False)

    def forward(
        self,
        x_BSD: Tensor,
        norm: nn.Module | None,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None = None,
        documents: Documents | None = None,
        dropout: LayerDropout | None = None,
    ) -> Tensor:
        """Return the attention's output (B, S, D), to be added to the residual; the order of positions is in the states
        alone, so that `cos`, `sin` and `mask` are left out, and there are no probabilities that `dropout` could
        drop."""
        decay = self.decay_down or self.decay
        linears = (self.q, self.k, self.v, self.gate, *([] if decay is None else [decay]))
        q, k, v, gate, *logits = project_normed(self, norm, x_BSD, *linears)
        if self.decay_down is not None and self.decay is not None:
            logits = self.local_linears(logits[0], self.decay)
        heads = q.shape[-1] // self.key_head_dim
        qkv = tuple(x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        decay_BHSa = logits[0].unflatten(-1, (heads, -1)).transpose(1, 2) if logits else None
        out_BSHe = self.attend(self, qkv, decay_BHSa, documents).transpose(1, 2)
        y = gated_activation(gate, self.out_norm(out_BSHe).flatten(2))
        return self.project_out(y, self.o)
