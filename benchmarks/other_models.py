"""Model code of other trainers at the shapes of a `ModelSpec`, where it is installed: torchtitan's and nanochat's.

Each is a module whose forward takes tokens and labels (B, S) and returns the mean loss, as `PlainLlama`'s. Their steps
run in the plain loop of `benchmarks.gpu_step`: what is compared is a model's code and how it is compiled.
"""

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.spec.model import ModelSpec


class NotInstalledError(Exception):
    """Another trainer's code isn't there, or can't run on this device."""


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise NotInstalledError(f"{name.partition('.')[0]} can't be imported ({error})") from error


class TorchtitanLlama(nn.Module):
    """torchtitan's Llama 3 (0.3), attention by FlexAttention, each block compiled by itself."""

    def __init__(self, spec: ModelSpec, seq_len: int) -> None:
        super().__init__()
        if not torch.cuda.is_available():
            raise NotInstalledError("torchtitan's attention has no backward on a CPU")
        titan, common = _imported("torchtitan.models.llama3"), _imported("torchtitan.models.common")
        width = spec.hidden_size
        rope = common.ComplexRoPE.Config(dim=spec.head_dim, max_seq_len=seq_len, theta=spec.rope_theta, scaling="none")
        layers = titan._build_llama3_layers(
            n_layers=spec.num_layers,
            dim=width,
            n_heads=spec.num_heads,
            n_kv_heads=spec.num_kv_heads,
            hidden_dim=spec.intermediate_size,
            rope=rope,
            attn_backend="flex",
        )
        self.model = titan.Llama3Model.Config(
            dim=width,
            vocab_size=spec.vocab_size,
            tok_embeddings=common.Embedding.Config(
                num_embeddings=spec.vocab_size, embedding_dim=width, param_init=titan._EMBEDDING_INIT
            ),
            norm=common.RMSNorm.Config(normalized_shape=width, param_init=titan._NORM_INIT),
            lm_head=common.Linear.Config(
                in_features=width, out_features=spec.vocab_size, param_init=titan._output_linear_init(width)
            ),
            layers=layers,
        ).build()
        self._masks: dict[torch.Size, tuple[Tensor, Any]] = {}

    def compile_blocks(self) -> None:
        for layer in self.model.layers.values():
            layer.compile()

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        if tokens_BS.shape not in self._masks:
            positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
            self._masks[tokens_BS.shape] = positions, self.model.get_attention_masks(positions)
        logits_BSV = self.model(tokens_BS, *self._masks[tokens_BS.shape])
        return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten())


class NanochatModel(nn.Module):
    """nanochat's GPT at a model's width, depth and heads; its MLP has no gate and is four times as wide as the model,
    and its embedding and head are its own, so that only its MFU can be set beside others'."""

    def __init__(self, spec: ModelSpec, seq_len: int) -> None:
        super().__init__()
        gpt = _imported("nanochat.gpt")
        self.model = gpt.GPT(
            gpt.GPTConfig(
                sequence_len=seq_len,
                vocab_size=spec.vocab_size,
                n_layer=spec.num_layers,
                n_head=spec.num_heads,
                n_kv_head=spec.num_kv_heads,
                n_embd=spec.hidden_size,
            )
        )
        self.model.init_weights()

    def flops_per_token(self) -> float:
        return float(self.model.estimate_flops())

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        return self.model(tokens_BS, labels_BS)


OTHERS: dict[str, type[nn.Module]] = {"torchtitan": TorchtitanLlama, "nanochat": NanochatModel}
"""Programs of a `StepCase` that are other trainers'."""
