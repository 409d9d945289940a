"""Contestants of train_step.py that train a model with experts: transformers' Mixtral, and DeepSpeed-MoE.

Both drop no tokens and have no auxiliary loss, so that all compute the same function.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contestant_parts import (
    Pace,
    common_name,
    decayed_groups,
    is_decayed,
    read_batches,
    step_deepspeed,
)
from benchmarks.plain_llama import PlainLlama, SwiGLU, draw
from benchmarks.train_step import BETAS, CLIP_NORM, LEARNING_RATE, SEQ_LEN, WEIGHT_DECAY, Size
from muster.data.dataset import Dataset


def _mixtral_values(name: str, shape: tuple[int, ...]) -> Tensor:
    """Initial values of a parameter of transformers' Mixtral, which stores gate and up as one."""
    ours = common_name(name)
    if not ours.endswith("experts.gate_up"):
        return draw(f"{ours}.weight" if ours.endswith("experts.down") else ours, shape)
    half = shape[0], shape[1] // 2, shape[2]
    return torch.cat([draw(ours.replace("gate_up", part), half) for part in ("gate.weight", "up.weight")], dim=1)


def transformers_moe(size: Size, dataset: Dataset, rank: int, world_size: int, pace: Pace) -> None:
    """A hand-written loop around transformers' Mixtral; several ranks shard every layer and the root (FSDP2).

    The implementation of the experts is the one that is fastest on a CPU.
    """
    import transformers

    spec = size.model
    assert spec.moe is not None
    config = transformers.MixtralConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.moe.expert_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.norm_eps,
        rope_theta=spec.rope_theta,
        num_local_experts=spec.moe.num_experts,
        num_experts_per_tok=spec.moe.top_k,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": spec.rope_theta}
    model = transformers.MixtralForCausalLM(config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_mixtral_values(name, tuple(parameter.shape)))
    if world_size > 1:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    named = [(common_name(name), parameter) for name, parameter in model.named_parameters()]
    groups = [
        {"params": [p for name, p in named if is_decayed(name)], "weight_decay": WEIGHT_DECAY},
        {"params": [p for name, p in named if not is_decayed(name)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
    batches = read_batches(dataset, rank, world_size, size.global_batch)
    wanted = pace.wait()
    while wanted:
        tokens_BS, labels_BS = next(batches)
        loss = F.cross_entropy(model(input_ids=tokens_BS).logits.flatten(0, 1), labels_BS.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wanted = pace.step_done(loss.item())


class _OutputAlone(nn.Module):
    """DeepSpeed's MoE without its auxiliary loss and counts."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.moe(x_BSD)[0]


def deepspeed_moe(size: Size, dataset: Dataset, rank: int, world_size: int, pace: Pace) -> None:
    """The hand-written model with DeepSpeed-MoE's layers, experts spread over all ranks, and ZeRO stage 2."""
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    deepspeed.init_distributed(dist_backend="gloo")
    moe = size.model.moe
    assert moe is not None
    assert moe.top_k == 2
    inner = size.model.model_copy(update={"intermediate_size": moe.expert_size, "moe": None})
    model = PlainLlama(inner, SEQ_LEN)
    for layer in model.layers:
        layer.mlp = _OutputAlone(
            MoE(
                inner.hidden_size,
                SwiGLU(inner),
                num_experts=moe.num_experts,
                ep_size=world_size,
                k=moe.top_k,
                drop_tokens=False,
                use_rts=False,
                top2_2nd_expert_sampling=False,
            )
        )
    here = moe.num_experts // world_size
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            ours = name.replace("moe.deepspeed_moe.gate.wg", "router")
            prefix, found, expert = ours.partition("moe.deepspeed_moe.experts.deepspeed_experts.")
            if not found:
                parameter.copy_(draw(ours, tuple(parameter.shape)))
                continue
            index, _, part = expert.partition(".")
            stacked = draw(f"{prefix}experts.{part}", (moe.num_experts, *parameter.shape))
            parameter.copy_(stacked[rank * here + int(index)])
    groups = [{"name": f"group-{index}", **group} for index, group in enumerate(decayed_groups(model))]
    groups = split_params_into_different_moe_groups_for_optimizer(groups)
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
    step_deepspeed(model, optimizer, {"stage": 2}, read_batches(dataset, rank, world_size, size.global_batch), pace)
