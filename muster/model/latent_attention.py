"""Multi-head latent attention (MLA): keys and values of all heads come from one narrow vector per position.

Queries too may come from such a vector. A part of each key turns with the position; it is made apart, once for all
heads, since a rotation between the latent vector and the heads would depend on the position (arXiv:2405.04434 §2.1).

Suffixes of tensors: B sequences, S positions, D hidden width, H heads, L latent width, d width of a query and a key, e
width of a value, r rotary width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.model.attention import Attention
from muster.model.kernels import rotate_neighbours
from muster.model.norms import RmsNorm
from muster.model.projections import project_in
from muster.spec.model import ModelSpec


def enter_latents(*latents_BSL: Tensor) -> tuple[Tensor, ...]:
    """Return latent vectors as each head reads them; tensor parallelism replaces this function."""
    return latents_BSL


class LatentAttention(Attention):
    """Attention whose queries, keys and values are projected down and, after a norm, up to all heads.

    Beside those of `Attention` two functions are attributes so that they can be replaced: `local_linears`, linear
    layers of what is on this rank alone, by deferred weight gradients; `enter_latents`, where the latent vectors meet
    the heads, by tensor parallelism. Ranks project down the positions that they have, and each projects up for its own
    heads.

    Values are padded with zeros to the width of keys, since fused kernels on CPUs, and those for blocks and documents,
    take one width; the score doesn't see them, and `join_heads` cuts them off.
    """

    local_linears = staticmethod(project_in)
    enter_latents = staticmethod(enter_latents)

    def _make_projections(self, spec: ModelSpec) -> None:
        mla = spec.mla
        assert mla is not None
        self.mla = mla
        scaling = 1.0 if spec.rope_scaling is None else spec.rope_scaling.score_scaling
        self.scale = mla.qk_head_dim**-0.5 * scaling
        q_width, kv_width = spec.num_heads * mla.qk_head_dim, spec.num_heads * (mla.nope_head_dim + mla.v_head_dim)
        width, offset = spec.hidden_size, float(spec.norm_unit_offset)
        self.q_down = None
        if mla.q_lora_rank is None:
            self.q = nn.Linear(width, q_width, bias=False)
        else:
            self.q_down = nn.Linear(width, mla.q_lora_rank, bias=False)
            self.q_down_norm = RmsNorm(mla.q_lora_rank, spec.norm_eps, offset)
            self.q_up = nn.Linear(mla.q_lora_rank, q_width, bias=False)
        self.kv_down = nn.Linear(width, mla.kv_lora_rank + mla.rope_head_dim, bias=False)
        self.kv_down_norm = RmsNorm(mla.kv_lora_rank, spec.norm_eps, offset)
        self.kv_up = nn.Linear(mla.kv_lora_rank, kv_width, bias=False)
        self.o = nn.Linear(spec.num_heads * mla.v_head_dim, width, bias=False)

    def queries_keys_values(
        self, x_BSD: Tensor, norm: nn.Module | None, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return queries, keys and values (B, S, H, d), the values padded."""
        assert cos is not None, "latent attention has rotary positions"
        assert sin is not None
        q, kv, k_BSr = self._queries_and_latents(x_BSD, norm)
        q_BSHd = rotate_neighbours(q.unflatten(-1, (-1, self.head_dim)), cos, sin)
        k_BS1r = rotate_neighbours(k_BSr.unsqueeze(2), cos, sin)
        mla = self.mla
        nope, values = kv.unflatten(-1, (q_BSHd.shape[2], -1)).split((mla.nope_head_dim, mla.v_head_dim), -1)
        k_BSHd = torch.cat((nope, k_BS1r.expand(*nope.shape[:3], -1)), -1)
        return q_BSHd, k_BSHd, F.pad(values, (0, mla.qk_head_dim - mla.v_head_dim))

    def _queries_and_latents(self, x_BSD: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's heads of queries, and of keys without rotary elements beside values, not yet split into
        heads; and the keys' rotary elements (B, S, r), before they turn."""
        first, latent = self._enter(norm, x_BSD)
        latent, k_BSr = latent.split((self.mla.kv_lora_rank, self.mla.rope_head_dim), -1)
        latent = self.kv_down_norm(latent)
        if self.q_down is None:
            q = first
            latent, k_BSr = self.enter_latents(latent, k_BSr)
        else:
            q_latent, latent, k_BSr = self.enter_latents(self.q_down_norm(first), latent, k_BSr)
            (q,) = self.local_linears(q_latent, self.q_up)
        (kv,) = self.local_linears(latent, self.kv_up)
        return q, kv, k_BSr

    def _enter(self, norm: nn.Module | None, x_BSD: Tensor) -> tuple[Tensor, ...]:
        """Return the results of the linear layers that read the hidden state: queries or their latent vector, and that
        of keys and values with the rotary elements."""
        return self._read(x_BSD) if norm is None else self.recomputable(norm, (x_BSD,), self._read)

    def _read(self, x_BSD: Tensor) -> tuple[Tensor, ...]:
        if self.q_down is not None:
            return self.local_linears(x_BSD, self.q_down, self.kv_down)
        return *self.project_in(x_BSD, self.q), *self.local_linears(x_BSD, self.kv_down)

    @property
    def num_local_heads(self) -> int:
        """Heads on this rank."""
        return self.o.weight.shape[1] // self.mla.v_head_dim

    def join_heads(self, out_BSHd: Tensor) -> Tensor:
        """Return the outputs of all heads without the padding: (B, S, heads · e)."""
        return out_BSHd[..., : self.mla.v_head_dim].flatten(2)
