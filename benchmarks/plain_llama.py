"""A Llama-style decoder as one would write it by hand in plain PyTorch: what Muster's step is compared with."""

import zlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.spec.model import ModelSpec


class Attention(nn.Module):
    """Grouped-query causal self-attention with rotary positions."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.grouped = spec.num_kv_heads != spec.num_heads
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q = nn.Linear(spec.hidden_size, q_width, bias=False)
        self.k = nn.Linear(spec.hidden_size, kv_width, bias=False)
        self.v = nn.Linear(spec.hidden_size, kv_width, bias=False)
        self.o = nn.Linear(q_width, spec.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        batch, seq, _ = x_BSD.shape
        q, k, v = (
            project(x_BSD).view(batch, seq, -1, self.head_dim).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos_SH, sin_SH), rotate(k, cos_SH, sin_SH)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o(mixed.transpose(1, 2).reshape(batch, seq, -1))


class SwiGLU(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class Block(nn.Module):
    """One decoder layer: attention, then SwiGLU, each on a normalised residual stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
        self.attn = Attention(spec)
        self.mlp_norm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = SwiGLU(spec)

    def forward(self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), cos_SH, sin_SH)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class PlainLlama(nn.Module):
    """The whole model; the forward pass returns the mean loss over all tokens."""

    def __init__(self, spec: ModelSpec, seq_len: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.norm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
        self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        cos, sin = rotary_table(spec.head_dim, seq_len, spec.rope_theta)
        self.register_buffer("cos_SH", cos, persistent=False)
        self.register_buffer("sin_SH", sin, persistent=False)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        x_BSD = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, self.cos_SH, self.sin_SH)
        logits_BSV = self.head(self.norm(x_BSD))
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


def rotary_table(head_dim: int, seq_len: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine by (position, head dimension), the halves alike."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(seq_len), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x_BHSD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Turns each pair (i, i + head_dim / 2) by its position's angle."""
    first, second = x_BHSD.chunk(2, dim=-1)
    return x_BHSD * cos_SH + torch.cat((-second, first), dim=-1) * sin_SH


def draw(name: str, shape: tuple[int, ...]) -> Tensor:
    """Initial values of the parameter `name`, the same for whoever asks: ones for a norm, N(0, 0.02²) for a matrix."""
    if len(shape) == 1:
        return torch.ones(shape)
    return torch.empty(shape).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def init_weights(model: nn.Module, common_name: Callable[[str], str] = str) -> None:
    """Draws every parameter by the name that `common_name` gives it, so that all contestants start alike."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(common_name(name), tuple(parameter.shape)))
