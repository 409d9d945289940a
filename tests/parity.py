"""Work of each rank in the parity tests: training small models under a plan and comparison with plain PyTorch."""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.config.freezing import matches_freeze
from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import skips_weight_decay
from muster.config.run_config import DataConfig, RunConfig, TrainConfig
from muster.cost.host_updates import host_updated_numels
from muster.cost.param_offload import offloaded_params
from muster.cost.precision_bytes import master_bytes
from muster.data.dataset import Batch, Dataset, Packing, SampleStream
from muster.data.prepare import PrepareOptions, open_or_prepare
from muster.data.store import TokenStore
from muster.data.tokenizer import ByteTokenizer
from muster.layout.context_parallel import AttentionBlock, packed_blocks
from muster.layout.update_buckets import update_buckets
from muster.model import block_attention, varlen_attention
from muster.model.attention_sinks import add_sinks_
from muster.model.block_attention import MergedAttention, block_forward, block_scores
from muster.model.decoder import Decoder
from muster.model.documents import Documents
from muster.model.dropout import InputDropout, sample_keys
from muster.model.four_bit import FourBitWeight, dequantize, quantize
from muster.model.further_tokens import FurtherTokens, shift_further
from muster.model.grouped_matmul import StackedLinear, grouped_linears, grouped_weight_grad
from muster.model.init import draw, initial_value
from muster.model.loss import cross_entropy_sum
from muster.model.recompute import _RecomputedTensor
from muster.model.routing import Router, RouterState
from muster.optim.host_optimizer import FetchedPart, HostOptimizer, HostPart
from muster.optim.lr import learning_rate
from muster.parallel import cp_ring, ep_all_to_all, expert_parallel, op_profile, tensor_parallel
from muster.parallel.axis import TensorAxis
from muster.parallel.expert_copies import CopiedExperts
from muster.parallel.file_store import FileSlot
from muster.parallel.fsdp import LastBackward
from muster.parallel.layer_activations import HostActivations, SavedLayer
from muster.parallel.offload import ActivationOffload
from muster.parallel.offloaded_group import OffloadedGroup
from muster.parallel.p2p import PendingReceive
from muster.parallel.param_offload import ParamOffload
from muster.parallel.shard_levels import LeveledAllGather, LeveledReduceScatter
from muster.parallel.stage import DecoderStage
from muster.parallel.vocab_loss import CombinedLoss, hidden_gradient
from muster.parallel.weight_grad_store import WeightGradStore
from muster.parallel.world import World, open_world
from muster.schedule.action import Kind
from muster.schedule.resolve import resolve_schedule
from muster.spec.adapters import AdapterSpec
from muster.spec.four_bit import has_four_bits, is_four_bit_part, with_whole_weights
from muster.spec.low_rank import LowRankSpec
from muster.spec.model import ModelSpec
from muster.spec.model_components import LinearAttentionSpec, MlaSpec, MoeSpec, RopeScaling
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.redundant_experts import ExpertCopies
from muster.train.batch_loader import BatchLoader
from muster.train.finalize import _memory_terms
from muster.train.grouped_batches import GroupedStep, GroupReader
from muster.train.parameter_updater import ParameterUpdater
from muster.train.prefetch import LocalBatch
from muster.train.schedule_refinement import refine_schedule_from_profile
from muster.train.trainer import Trainer
from tests.emulated_symmetric_memory import gradients_out_of_order, symmetric_memory
from tests.faults_of_units import UNIT_FAULTS
from tests.kraken_faults import KRAKEN_FAULTS
from tests.ladder_faults import LADDER_FAULTS
from tests.optim_ranks import plain_newton_schulz
from tests.recorded_graphs import one_pair_for_all, recorded_graphs, stale_inputs

CPU = torch.device("cpu")


def linear_layers(kind: str, *layers: int) -> LinearAttentionSpec:
    return LinearAttentionSpec(
        kind=kind,  # type: ignore[arg-type]
        layers=layers or (0, 2, 3),
        num_key_heads=4,
        num_value_heads=4,
        key_head_dim=6,
        value_head_dim=10,
    )


DEEPSEEK_YARN = RopeScaling(kind="yarn", factor=4.0, original_positions=8, mscale=0.7, mscale_all_dim=1.3)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {
        "norm": "layer",
        "position": "learned",
        "max_positions": 16,
        "activation": "gelu_tanh",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    },
    "qwen3": {
        "qk_norm": True,
        "head_dim": 12,
        "sliding_window": 5,
        "window_layers": (1, 3),
        "rope_scaling": RopeScaling(kind="llama3", factor=4.0, original_positions=8),
    },
    "gemma2": {
        "head_dim": 12,
        "norm_unit_offset": True,
        "norm_placement": "both",
        "scale_embeddings": True,
        "query_pre_attn_scalar": 24,
        "attention_softcap": 0.5,
        "logit_softcap": 1.5,
        "activation": "gelu_tanh",
        "sliding_window": 5,
        "window_layers": (0, 2),
    },
    "gemma3": {
        "head_dim": 12,
        "qk_norm": True,
        "norm_unit_offset": True,
        "norm_placement": "both",
        "scale_embeddings": True,
        "query_pre_attn_scalar": 24,
        "activation": "gelu_tanh",
        "sliding_window": 5,
        "window_layers": (0, 1, 3),
        "window_rope_theta": 50.0,
        "rope_scaling": RopeScaling(kind="linear", factor=8.0),
    },
    "gpt_neox": {
        "norm": "layer",
        "parallel_residual": True,
        "rotary_dim": 6,
        "activation": "gelu",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    },
    "experts": {
        "moe": MoeSpec(
            num_experts=8,
            top_k=2,
            expert_size=24,
            shared_size=12,
            shared_gate=True,
            dense_layers=1,
            aux_loss_coef=0.1,
            router_z_loss_coef=0.01,
        )
    },
    "switch": {
        "gated": False,
        "activation": "relu",
        "moe": MoeSpec(num_experts=4, top_k=1, expert_size=24, norm_top_k=False, every=2, aux_loss_coef=0.05),
    },
    "grouped": {
        "moe": MoeSpec(
            num_experts=8,
            top_k=3,
            expert_size=10,
            router="sigmoid",
            num_groups=4,
            top_groups=2,
            route_scale=1.5,
            aux_loss_coef=0.05,
        )
    },
    "latent": {
        "mla": MlaSpec(q_lora_rank=10, kv_lora_rank=12, nope_head_dim=6, rope_head_dim=4, v_head_dim=8),
        "rope_scaling": DEEPSEEK_YARN,
    },
    "direct latent": {"mla": MlaSpec(kv_lora_rank=12, nope_head_dim=4, rope_head_dim=6, v_head_dim=10)},
    "deepseek": {
        "mla": MlaSpec(q_lora_rank=10, kv_lora_rank=12, nope_head_dim=6, rope_head_dim=4, v_head_dim=8),
        "rope_scaling": DEEPSEEK_YARN,
        "moe": MoeSpec(
            num_experts=8,
            top_k=3,
            expert_size=10,
            shared_size=12,
            dense_layers=1,
            router="sigmoid",
            router_bias=True,
            router_bias_update_rate=0.05,
            num_groups=4,
            top_groups=2,
            route_scale=1.5,
            aux_loss_coef=0.05,
        ),
    },
    "gpt_oss": {
        "head_dim": 12,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "attention_sinks": True,
        "swiglu_limit": 0.02,
        "sliding_window": 5,
        "window_layers": (0, 2),
        "rope_scaling": RopeScaling(kind="yarn", factor=8.0, original_positions=8, truncate=False),
        "moe": MoeSpec(num_experts=4, top_k=2, expert_size=12, router_bias=True, aux_loss_coef=0.05),
    },
    "sinks": {"attention_sinks": True},
    "linear": {"linear_attention": linear_layers("linear_attn")},
    "simple_gla": {"linear_attention": linear_layers("simple_gla")},
    "gla": {"linear_attention": linear_layers("gla"), "qk_norm": True, "head_dim": 12},
    "only gla": {"linear_attention": linear_layers("gla", 0, 1, 2, 3), "position": "none"},
    "dropout": {
        "position": "learned",
        "max_positions": 16,
        "sliding_window": 5,
        "window_layers": (1,),
        "hidden_dropout": 0.1,
        "attention_dropout": 0.2,
        "embedding_dropout": 0.05,
    },
    "hidden dropout": {"norm_placement": "both", "hidden_dropout": 0.3, "embedding_dropout": 0.2},
    "balanced": {
        "moe": MoeSpec(
            num_experts=8,
            top_k=2,
            expert_size=10,
            router="sigmoid",
            router_bias=True,
            router_bias_update_rate=0.05,
            aux_loss_coef=0.0,
        )
    },
    "capacity": {
        "moe": MoeSpec(num_experts=4, top_k=2, expert_size=12, shared_size=8, capacity_factor=0.8, aux_loss_coef=0.05)
    },
    "shortcut": {
        "moe": MoeSpec(num_experts=4, top_k=2, expert_size=12, shared_size=8, aux_loss_coef=0.05, shortcut=True)
    },
    "bi-level": {
        "moe": MoeSpec(
            num_experts=8,
            top_k=2,
            expert_size=10,
            router="bi_level",
            num_groups=4,
            top_groups=2,
            router_bias=True,
            aux_loss_coef=0.05,
            router_z_loss_coef=0.01,
        )
    },
    # Positions are learned, since equal tokens that begin a sequence would score alike for an expert that takes one.
    "choice": {
        "position": "learned",
        "max_positions": 16,
        "moe": MoeSpec(num_experts=4, top_k=2, expert_size=12, router="expert_choice", router_z_loss_coef=0.01),
    },
    "olmo2": {"norm_placement": "post", "qk_norm": True, "qk_norm_width": "projection"},
    "dora": {
        "adapter": AdapterSpec(kind="dora", r=3, lora_alpha=6, target_modules=("q", "k", "v", "gate", "up")),
        "qkv_bias": True,
    },
    "dora everywhere": {"adapter": AdapterSpec(kind="dora", r=3, target_modules=("all-linear",)), "out_bias": True},
    "lora": {"adapter": AdapterSpec(r=3, lora_alpha=6, target_modules=("all-linear",)), "out_bias": True},
}
FAMILIES |= {
    f"{kind} 4-bit": {
        "adapter": AdapterSpec(kind=kind, r=3, lora_alpha=6, load_in_4bit=True, target_modules=targets),  # type: ignore[arg-type]
        "hidden_size": 64,
        "head_dim": 64,
        "intermediate_size": 512,
        "qkv_bias": True,
    }
    for kind, targets in (("lora", ("q", "k", "o", "up", "down")), ("dora", ("q", "v", "gate")))
}
FAMILIES |= {
    "low rank": {"low_rank": LowRankSpec(rank=5), "qkv_bias": True, "out_bias": True},
    "low rank of some": {"low_rank": LowRankSpec(ratio=0.4, target_modules=("q", "k", "down")), "gated": False},
}
LORA_DROPOUT = AdapterSpec(r=3, lora_alpha=6, target_modules=("all-linear",), lora_dropout=0.2)
FAMILIES["lora dropout"] = {"adapter": LORA_DROPOUT, "out_bias": True}
FAMILIES |= {f"{family} ladder": FAMILIES[family] | {"residual": "ladder"} for family in ("llama", "gpt2", "qwen3")}
FAMILIES |= {
    f"{family} kraken{count}": FAMILIES[family] | {"parallel_sublayers": count}
    for family in ("llama", "gpt2", "qwen3")
    for count in (2, 4)
}
MTP_FACTOR = 0.7
FAMILIES |= {
    f"{family} mtp": FAMILIES[family] | {"mtp_layers": layers, "mtp_loss_scaling_factor": MTP_FACTOR}
    for family, layers in (("llama", 2), ("gemma2", 1), ("deepseek", 2), ("experts", 1), ("gpt2", 1), ("balanced", 1))
}


def start_value(spec: ModelSpec, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The initial value, with noise on norms and biases: ones and zeros would hide what is done to them twice. Without
    noise stays the bias of a choice of experts, which all tokens would make alike."""
    value = initial_value(spec, name, shape, seed)
    if is_four_bit_part(name):
        return value
    is_noisy = (len(shape) == 1 or name.endswith((".bias", ".lora_B.weight"))) and not name.endswith(".expert_bias")
    return value + draw(f"noise/{name}", shape, seed, 0.1) if is_noisy else value


def small_run(
    tied: bool = False,
    steps: int = 20,
    layers: int = 4,
    z_loss: float = 0.0,
    optim: str = "adamw",
    family: str = "llama",
    packing: Packing = "concatenate",
    kv_heads: int = 2,
) -> RunConfig:
    """A model of a few thousand parameters on the standard library's first source files."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48} | FAMILIES[family]
    model = ModelSpec(
        vocab_size=257,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=4 if "mla" in sizes else max(kv_heads, sizes.get("parallel_sublayers", 1)),
        tied_embeddings=tied,
        **sizes,
    )
    return RunConfig(
        seed=3,
        model=model,
        data=DataConfig(source="python-stdlib", max_bytes=100_000, packing=packing),
        train=TrainConfig(steps=steps, seq_len=16, global_batch_size=8, z_loss=z_loss),
        optim=OptimConfig(name=optim, lr=3e-3, warmup_steps=5),  # type: ignore[arg-type]
    )


def with_two_layers(case: dict[str, Any]) -> dict[str, Any]:
    """Return the case with two layers, if its plan and its model can have so few."""
    plan, family = parse_plan_name(case["plan"]), FAMILIES[case.get("family", "llama")]
    by_number = plan.stages or "changes" in case or "linear_attention" in family
    if by_number or plan.num_stages > 2 or max(family.get("window_layers", (0,))) > 1:
        return case
    return {"layers": 2} | case


def open_data(config: RunConfig, cache: str) -> Dataset:
    source, packing = config.data.source, config.data.packing
    store = _open_store("short" if packing == "none" else source, config.data.max_bytes, cache)
    return Dataset(store, config.train.seq_len, config.seed, config.data.validation_split, packing)


@lru_cache
def _open_store(source: str, max_bytes: int | None, cache: str) -> TokenStore:
    """Once for all cases, since it looks at every file of the source; `short`: rows of a few letters."""
    if source == "short":
        source = f"{cache}/short.jsonl"
        draft = Path(f"{source}.{os.getpid()}")
        draft.write_text(short_documents())
        with suppress(FileExistsError):  # another rank was the first
            os.link(draft, source)
    return open_or_prepare(PrepareOptions(source, ByteTokenizer(), max_bytes), Path(cache))


def short_documents() -> str:
    """Rows of 1 to 24 letters."""
    digits = "".join(hashlib.sha256(str(seed).encode()).hexdigest() for seed in range(300))
    lengths = [1 + int(digits[at : at + 2], 16) % 24 for at in range(0, 2400, 2)]
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    texts = (digits[start : start + length] for start, length in zip(starts, lengths, strict=True))
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


# ----------------------------------------------------------------------------------------------------------------------
# The reference: one process, no Muster but the model


References = dict[tuple[str, str, int], tuple[list[float], dict[str, Tensor]]]
"""Results of plain PyTorch by configuration, precision and number of steps."""


def share_references(rank: int, world_size: int, store: dist.Store, cache: str, needed: set[Any]) -> References:
    """Return the results of `reference` for each key: each rank computes some of them, and all read all."""
    keys = sorted(needed)
    for index, key in enumerate(keys):
        if index % world_size == rank:
            torch.save(reference(key[0], cache, *key[1:], start_value), path := Path(cache) / f"{os.getpid()}-{index}")
            store.set(f"reference/{index}", str(path))
    return {key: torch.load(store.get(f"reference/{index}").decode()) for index, key in enumerate(keys)}


@lru_cache
def reference(
    config_json: str, cache: str, precision: str, steps: int, start: Callable[..., Tensor] = initial_value
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of `steps` steps and of a validation batch after them, and the first step's gradients before clipping."""
    config = RunConfig.model_validate_json(config_json)
    dataset, spec = open_data(config, cache), config.model
    model = Decoder(with_whole_weights(spec), range(spec.num_layers), first=True, last=True)
    model.to(torch.float64 if precision == "fp64" else torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = start(spec, name, tuple(parameter.shape), config.seed)
            parameter.copy_(dequantize(*quantize(value)) if has_four_bits(spec, name) else value)
            parameter.requires_grad_(parameter.requires_grad and not matches_freeze(config.optim, name))
    optim, size = config.optim, config.train.global_batch_size
    named = list(model.named_parameters())
    plain = {n for n, p in named if n.startswith("layers.") and p.ndim == 2 and not n.endswith(".bias")}
    matrices = [p for n, p in named if n in plain] if optim.name == "muon" else []
    decaying = [p for n, p in named if not skips_weight_decay(n) and not any(p is matrix for matrix in matrices)]
    groups = [
        {"params": decaying, "weight_decay": optim.weight_decay},
        {"params": [p for n, p in named if skips_weight_decay(n)], "weight_decay": 0.0},
    ]
    momenta = [torch.zeros_like(p) for p in matrices]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(optim.beta1, optim.beta2), eps=optim.eps, foreach=False)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for step in range(steps):
        batch = dataset.train_batch(step * size, size)
        model.dropout_state.keys_B = keys_B = sample_keys(config.seed, range(step * size, (step + 1) * size), CPU)
        lengths_B = dataset.lengths(np.arange(step * size, (step + 1) * size))
        loss, z_loss, further = sums_of(model, batch, lengths_B, keys_B, config.train.z_loss)
        loss = loss / batch.num_valid_tokens
        model.zero_grad()
        model.router_state.loss_weight = 1 / batch.num_valid_tokens
        (loss + (config.train.z_loss * z_loss + further) / batch.num_valid_tokens).backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in named if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step,
                peak=optim.lr,
                warmup_steps=optim.warmup_steps,
                total_steps=config.train.num_steps,
                min_ratio=optim.min_lr_ratio,
                schedule=optim.schedule,
            )
        optimizer.step()
        balance_experts(model)
        muon_step(matrices, momenta, optimizer.param_groups[0]["lr"], optim)
        losses.append(loss.item())
    held_out = dataset.validation_batch(0, size)
    model.dropout_state.keys_B = None
    with torch.no_grad():
        loss, *_ = sums_of(model, held_out, dataset.lengths(np.arange(size), validation=True))
        losses.append(float(loss) / held_out.num_valid_tokens)
    return losses, first


@torch.no_grad()
def balance_experts(model: Decoder) -> None:
    """Move the biases of sigmoid routers towards an even load of the step."""
    for part in model.modules():
        if isinstance(part, Router) and (load_F := part.pop_load()) is not None and part.expert_bias is not None:
            load_E = load_F[:-1].double()
            part.expert_bias += part.moe.router_bias_update_rate * torch.sign(load_E.mean() - load_E)


def sums_of(
    model: Decoder,
    batch: Batch,
    lengths_B: np.ndarray | None,
    keys_B: Tensor | None = None,
    z_loss_coefficient: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, log² Z and the loss of multi-token prediction, summed over a batch; samples of unequal lengths
    each alone and without padding."""
    tokens_BS, labels_BS = torch.from_numpy(batch.tokens_BS), torch.from_numpy(batch.labels_BS)
    parts = [(tokens_BS, labels_BS)]
    if lengths_B is not None:
        parts = [
            (tokens_BS[row : row + 1, :length], labels_BS[row : row + 1, :length])
            for row, length in enumerate(lengths_B.tolist())
        ]
    sums = []
    if batch.positions_BS is not None:
        model.position_state.documents = Documents.from_positions(torch.from_numpy(batch.positions_BS), CPU)
    for row, (tokens, labels) in enumerate(parts):
        if keys_B is not None and len(parts) > 1:
            model.dropout_state.keys_B = keys_B[row : row + 1]
        hidden = model.final_hidden(tokens)
        logits = model.logits(hidden)
        found = [cross_entropy_sum(logits, labels), torch.logsumexp(logits, -1)[labels >= 0].square().sum()]
        further = found[0] * 0
        if model.mtp and torch.is_grad_enabled():
            further = further_loss(model, tokens, labels, hidden, batch.positions_BS, z_loss_coefficient)
        sums.append(torch.stack((*found, further)))
    loss, z_loss, further = torch.stack(sums).sum(0)
    return loss, z_loss, further


def further_loss(
    model: Decoder,
    tokens_BS: Tensor,
    labels_BS: Tensor,
    hidden_BSD: Tensor,
    positions_BS: np.ndarray | None,
    z_loss_coefficient: float,
) -> Tensor:
    """Loss of multi-token prediction, document by document, each a sequence that is one token shorter at each depth
    (arXiv:2412.19437, equations 21 to 25)."""
    model.position_state.documents = None
    total, embed = hidden_BSD.new_zeros(()), model.embed
    assert embed is not None
    for row in range(len(tokens_BS)):
        length = tokens_BS.shape[1]
        starts = [0] if positions_BS is None else np.flatnonzero(positions_BS[row] == 0).tolist()
        for start, stop in zip(starts, [*starts[1:], length], strict=True):
            hidden = hidden_BSD[row : row + 1, start:stop]
            for depth, layer in enumerate(model.mtp, start=1):
                if stop - start <= depth:
                    break
                embedded = embed.weight[tokens_BS[row : row + 1, start + depth : stop]]
                scale = embedded.shape[-1] ** 0.5 if model._embedding_scale else 1.0
                hidden = hidden[:, :-1]
                (constants,) = model._constants(hidden, {model._num_layers: layer})
                hidden = layer(hidden, embedded * scale, *constants)
                logits, labels = model.logits(hidden), labels_BS[row : row + 1, start + depth : stop]
                z_loss = torch.logsumexp(logits, -1)[labels >= 0].square().sum()
                total = total + cross_entropy_sum(logits, labels) + z_loss_coefficient * z_loss
    return total * MTP_FACTOR / len(model.mtp)


@torch.no_grad()
def muon_step(matrices: list[nn.Parameter], momenta: list[Tensor], lr: float, optim: OptimConfig) -> None:
    """One step of Muon with updates as large as AdamW's, on whole matrices."""
    for matrix, momentum in zip(matrices, momenta, strict=True):
        assert matrix.grad is not None
        momentum.mul_(optim.momentum).add_(matrix.grad)
        update = plain_newton_schulz((matrix.grad + optim.momentum * momentum).double()).to(matrix.dtype)
        matrix.mul_(1 - lr * optim.weight_decay).sub_(update, alpha=lr * 0.2 * max(matrix.shape) ** 0.5)


# ----------------------------------------------------------------------------------------------------------------------
# Muster


class WatchedTrainer(Trainer):
    """Keeps the first step's gradients."""

    first_gradients: dict[str, Tensor] | None = None

    def _update_parameters(self, action: Any) -> None:
        if self.first_gradients is None:
            self.first_gradients = {n: p.grad.clone() for n, p in self.updater.parameters.items() if p.grad is not None}
        super()._update_parameters(action)


class LateUpdater(ParameterUpdater):
    """Serial form of delayed updates: after `first_steps` each step updates, on the device, with the gradients and the
    learning rate of the one before."""

    first_steps = 0
    _waiting: tuple[float, dict[str, Tensor]] | None = None

    def apply(self) -> None:
        if self.state.step <= self.first_steps:
            super().apply()
            return
        waiting, self._waiting = self._waiting, None
        if self.state.skip_reason is None:
            self.clip()
            gradients = {name: local.grad.clone() for name, local in self.parameters.items() if local.grad is not None}
            self._waiting = self.state.learning_rate, gradients
        if waiting is not None:
            self.state.learning_rate, late = waiting
            for name, local in self.parameters.items():
                local.grad = late.get(name)
            self.optimizer_step()
        self.drop_gradients()


def run_cases(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Each case of `payload["cases"]` in turn, in a world of its own; what was found, by case."""
    cases, cache = payload["cases"], payload["cache"]
    references = share_references(rank, world_size, store, cache, {reference_key(**case) for case in cases})
    return [
        run_case(rank, world_size, store, index, cache, references[reference_key(**case)], **case)
        for index, case in enumerate(cases)
    ]


def reference_key(precision: str = "fp32", steps: int = 20, **case: Any) -> tuple[str, str, int]:
    """Return what the results of a case's reference depend on."""
    return config_of(**case).model_dump_json(), precision, steps


def config_of(
    tied: bool = False,
    layers: int = 4,
    optim: str = "adamw",
    z_loss: float = 0.0,
    family: str = "llama",
    packing: Packing = "concatenate",
    kv_heads: int = 2,
    **_: Any,
) -> RunConfig:
    """Return the run of a case, whose other keys are about the plan."""
    return small_run(tied, layers=layers, z_loss=z_loss, optim=optim, family=family, packing=packing, kv_heads=kv_heads)


def run_case(
    rank: int,
    world_size: int,
    store: dist.Store,
    generation: int,
    cache: str,
    expected: tuple[list[float], dict[str, Tensor]],
    plan: str,
    precision: str = "fp32",
    fault: str | None = None,
    steps: int = 20,
    profile: bool = False,
    changes: dict[str, Any] | None = None,
    micro_batch_size: int = 1,
    delay_after: int | None = None,
    overlaps: bool = False,
    in_backward: bool = False,
    **kind: Any,
) -> dict[str, Any]:
    """Errors relative to the reference: of the losses, and of this rank's part of the first gradients and their norm.

    With `overlaps` z1 gathers and reduces beside passes, as on GPUs. `changes` are fields of the plan that no name
    says. With `profile`, also what the rank held, beside the formulas. From `delay_after` steps on updates are delayed,
    by the program where the plan has a tier for them, else by `LateUpdater`. With `in_backward` each step clips by the
    norm of the step before, which lets a plan with a tier for it update layers within the last backward.
    """
    config, (losses, gradients) = config_of(**kind), expected
    base = Plan(precision=precision, micro_batch_size=micro_batch_size)  # type: ignore[arg-type]
    full_plan = Plan.model_validate(parse_plan_name(plan, base).model_dump() | (changes or {}))
    full_plan = resolve_schedule(full_plan, config.model, config.workload)
    require_runnable(full_plan, config.model, config.workload, world_size)
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5
    noise = patch("muster.model.init.initial_value", start_value)
    beside = patch.object(DecoderStage, "overlapping_devices", frozenset({"cpu"} if overlaps else ()))
    with open_world(store, rank, world_size, full_plan, generation) as world, FAULTS[fault](), noise, beside:
        delays = delay_after is not None and full_plan.default_strategy.offload_optimizer != "none"
        if delays:
            late = {"delayed_update": True, "delayed_update_warmup_steps": delay_after}
            config = config.model_copy(update={"train": config.train.model_copy(update=late)})
        if in_backward:
            config = with_updates_in_backward(config, full_plan)
        is_late = delay_after is not None and not delays
        updater_type = type("Late", (LateUpdater,), {"first_steps": delay_after}) if is_late else ParameterUpdater
        with patch.object(WatchedTrainer, "updater_type", updater_type):
            trainer = WatchedTrainer(config, full_plan, world, open_data(config, cache))
        with patch.multiple(op_profile, REPEATS=2, PASS_REPEATS=1):  # as often as all of it is done once
            found = trainer.profile() if profile else None
        if found and (order := refine_schedule_from_profile(config, full_plan, world, found)):
            trainer.use_order(order)
        memory = _memory_terms(trainer, found) if found else {}
        actions = [item.action for item in trainer.program.ranks[world.at.pp]["compute"]]
        trainer.first_gradients = None
        results = [trainer.step() for _ in range(steps)]
        own_samples = list(trainer.batch_loader.fed_samples()) if world.at.tp == 0 else []
        fed = sorted((number, row.tolist()) for rows in world.all_gather_object(own_samples) for number, row in rows)
        with patch.object(world.heartbeat, "update") as update:
            own = [result.loss for result in results] + [trainer.evaluator.mean_loss(1) or 0.0]
        assert all(call.args[0] in ("validate", "finish") for call in update.mock_calls), "the first may compile"
        layouts = {name: layout for stage in trainer.stages.values() for name, layout in stage.layouts.items()}
        digest, states = hashlib.sha256(), hashlib.sha256()
        gradient_error = 0.0
        for name, gradient in (trainer.first_gradients or {}).items():
            whole = gradients[name]
            part = torch.cat([whole[box.slices] for box in layouts[name].boxes])
            # The bias of keys that aren't turned adds the same to all scores of a query: its gradient is 0.
            size = max(float(whole.abs().max()), 1e-6 * norm)
            gradient_error = max(gradient_error, float((gradient - part).abs().max()) / size)
        for shard in sorted(trainer.updater.local_shards(), key=lambda one: one.name):
            own_digest = digest if shard.name.startswith("model/") else states
            own_digest.update(shard.tensor.numpy().tobytes())
        return {
            "loss_error": max(abs(a - b) / b for a, b in zip(own, losses, strict=True)),
            "gradient_error": max(gradient_error, abs(results[0].grad_norm - norm) / norm),
            "num_gradients": len(trainer.first_gradients or {}),
            "losses": own,
            "fed_right": fed == samples_of_step(trainer.dataset, steps - 1, config.train.global_batch_size),
            "parameters": digest.hexdigest(),
            "states": states.hexdigest(),
            "memory": memory,
            "updates_in_backward": sum(
                event.action.kind == Kind.BACKWARD_UPDATE
                for events in trainer.step_events().values()
                for event in events
            ),
            "waiting_bytes": waiting_bytes(trainer) if delays else [],
            "param_buffers": param_buffers(trainer),
            "untimed": [str(action) for action in actions if found and not found.times.duration_s(action)],
        }


def with_updates_in_backward(config: RunConfig, plan: Plan) -> RunConfig:
    """Return a run whose gradients are clipped by the norm of the step before, and whose host updates layers within the
    last backward where the plan lets it update any."""
    optim = config.optim.model_copy(update={"clip_norm": 0.5, "clip_by_previous_norm": True})
    early = plan.default_strategy.offload_optimizer != "none"
    train = config.train.model_copy(update={"update_in_backward": early})
    return config.model_copy(update={"optim": optim, "train": train})


def param_buffers(trainer: Trainer) -> tuple[int, int]:
    """Bytes of the buffers in host memory for parameters and gradients off the device, where layers are updated within
    the backward: forecast, with the master weights, and counted without."""
    own = trainer.config.model, trainer.plan
    planned = (offloaded_params(*own, stage).host_buffers_in_backward for stage in trainer.stages)
    return sum(planned), sum(stage.param_offload.link.pool.num_bytes for stage in trainer.stages.values())


def waiting_bytes(trainer: Trainer) -> list[int]:
    """Bytes of gradients and parameters that wait in host memory from one step to the next: forecast and counted."""
    own = trainer.config.model, trainer.plan
    numels = (sum(host_updated_numels(*own, stage, trainer.config.optim)) for stage in trainer.stages)
    parts = trainer.updater.optimizer.parts.values()  # type: ignore[attr-defined]
    pools = {id(part._link.pool): part._link.pool.num_bytes for part in parts}
    return [2 * sum(numels) * master_bytes(trainer.plan.precision), sum(pools.values())]


def samples_of_step(dataset: SampleStream, step: int, size: int) -> list[tuple[int, list[int]]]:
    """Number and tokens of each sample, without padding."""
    index = np.arange(step * size, (step + 1) * size)
    lengths = dataset.lengths(index)
    rows = dataset.rows(index).tokens_BS.tolist()
    return [(row, tokens if lengths is None else tokens[: lengths[row]]) for row, tokens in enumerate(rows)]


# ----------------------------------------------------------------------------------------------------------------------
# Bugs, sown on purpose


@contextmanager
def no_fault() -> Iterator[None]:
    yield


@contextmanager
def dropped_gradient() -> Iterator[None]:
    """The gradient of micro-batch 1 never reaches the parameters."""
    backward = DecoderStage.backward

    def faulty(self: DecoderStage, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        if micro_batch == 1 and self.is_last:
            x, y = self._saved[micro_batch]
            assert isinstance(y, Tensor)
            self._saved[micro_batch] = (x, y * 0)
        return backward(self, micro_batch, gradient)

    with patch.object(DecoderStage, "backward", faulty):
        yield


@contextmanager
def _changed_feed(change: Callable[[BatchLoader, LocalBatch], LocalBatch]) -> Iterator[None]:
    feed = BatchLoader.feed_stages

    def faulty(self: BatchLoader, share: LocalBatch, loss_scale: float = 1.0) -> None:
        feed(self, change(self, share), loss_scale)

    with patch.object(BatchLoader, "feed_stages", faulty):
        yield


@contextmanager
def swapped_micro_batches() -> Iterator[None]:
    """The last stage holds its labels against other micro-batches."""

    def change(feeder: BatchLoader, share: LocalBatch) -> LocalBatch:
        if (batch := share.batch) is not None and feeder.plan.num_stages - 1 in feeder.stages:
            share = replace(share, batch=Batch(batch.tokens_BS, batch.labels_BS[::-1].copy(), batch.num_valid_tokens))
        return share

    with _changed_feed(change):
        yield


@contextmanager
def wrong_recompute() -> Iterator[None]:
    """The tensor that the backward recomputes differs from the forward's."""
    unpack = _RecomputedTensor.unpack

    def faulty(self: _RecomputedTensor, packed: Tensor | torch.Size) -> Tensor:
        made = unpack(self, packed)
        return made if isinstance(packed, Tensor) else made * 1.01

    with patch.object(_RecomputedTensor, "unpack", faulty):
        yield


@contextmanager
def wrong_divisor() -> Iterator[None]:
    """Gradients are divided by twice the number of tokens."""
    with _changed_feed(lambda feeder, share: replace(share, num_valid=share.num_valid * 2)):
        yield


@contextmanager
def ranks_alike() -> Iterator[None]:
    """Each data-parallel rank takes the mean of its own tokens, and all means count the same, however many tokens."""

    def change(feeder: BatchLoader, share: LocalBatch) -> LocalBatch:
        own = share.num_valid if share.batch is None else share.batch.num_valid_tokens * feeder.plan.mesh(0).dp_size
        return replace(share, num_valid=own)

    with _changed_feed(change):
        yield


@contextmanager
def doubled_boundary() -> Iterator[None]:
    """The gradient that comes back over a boundary between stages is added twice."""
    backward = DecoderStage.backward

    def faulty(self: DecoderStage, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        return backward(self, micro_batch, None if gradient is None else gradient + gradient)

    with patch.object(DecoderStage, "backward", faulty):
        yield


@contextmanager
def half_a_boundary() -> Iterator[None]:
    """The last part of a hidden state that comes in parts is lost."""

    def faulty(self: PendingReceive) -> None:
        wait(self)
        for _, _, place in self.parts[1:]:
            place.zero_()

    wait = PendingReceive.wait
    with patch.object(PendingReceive, "wait", faulty):
        yield


@contextmanager
def doubled_bias() -> Iterator[None]:
    """Every tensor-parallel rank adds the bias to its own part of a sum."""

    def faulty(axis: TensorAxis, weight_grads: WeightGradStore, x: Tensor, linear: nn.Linear) -> Tensor:
        y = row_parallel_linear(axis, weight_grads, x, linear)
        return y if linear.bias is None else y + (axis.size - 1) * linear.bias

    row_parallel_linear = tensor_parallel.row_parallel_linear
    with patch.object(tensor_parallel, "row_parallel_linear", faulty):
        yield


@contextmanager
def copies_without_gradients() -> Iterator[None]:
    """Gradients of redundant experts don't go home."""
    depart = CopiedExperts._depart
    with patch.object(CopiedExperts, "_depart", lambda self, stacked: depart(self, stacked.detach())):
        yield


@contextmanager
def copies_of_other_experts() -> Iterator[None]:
    """Ranks send the neighbours of the experts that they should send."""
    sent_by = ExpertCopies.sent_by

    def faulty(found: ExpertCopies, rank: int, each: int) -> list[list[int]]:
        return [[(one + 1) % each for one in own] for own in sent_by(found, rank, each)]

    with patch.object(ExpertCopies, "sent_by", faulty):
        yield


@contextmanager
def lost_copies() -> Iterator[None]:
    """The gradients of weights that several ranks have a copy of are not summed."""
    with patch("muster.parallel.stage.tp_partial_grad_copies", lambda *_: {}):
        yield


@contextmanager
def lost_reload() -> Iterator[None]:
    """The activations that come back from host memory differ from those that went there."""
    reload = ActivationOffload.reload

    def faulty(self: ActivationOffload, micro_batch: int) -> Callable[[], None]:
        for _, buffer in self._offloaded[micro_batch][:1]:
            buffer.zero_()
        return reload(self, micro_batch)

    with patch.object(ActivationOffload, "reload", faulty):
        yield


@contextmanager
def lost_layer() -> Iterator[None]:
    """A layer's activations come back from host memory otherwise than they went there."""
    fetch = HostActivations._fetch

    def faulty(self: HostActivations, own: SavedLayer) -> Callable[[], None]:
        own.buffers[0].zero_()
        return fetch(self, own)

    with patch.object(HostActivations, "_fetch", faulty):
        yield


@contextmanager
def lost_read() -> Iterator[None]:
    """The activations that come back from disk differ from those that went there."""
    read = FileSlot.read

    def faulty(self: FileSlot, tensors: Sequence[Tensor]) -> None:
        read(self, tensors)
        tensors[0].zero_()

    with patch.object(FileSlot, "read", faulty):
        yield


@contextmanager
def lost_return() -> Iterator[None]:
    """Parameters that the host has updated don't come back."""

    def faulty(self: HostPart, in_backward: bool = False) -> Callable[[], None]:
        return self._free

    with patch.object(HostPart, "give_back", faulty):
        yield


@contextmanager
def columns_from_the_first() -> Iterator[None]:
    """A rank with some columns of an adapter's A drops those of the first rank."""
    drop = InputDropout.dropped_

    def faulty(self: InputDropout, x_NI: Tensor, rows: slice, first: int) -> Tensor:
        return drop(self, x_NI, rows, 0)

    with patch.object(InputDropout, "dropped_", faulty):
        yield


@contextmanager
def scales_from_the_first() -> Iterator[None]:
    """A rank with a part of a weight in 4 bits takes the scales of the weight's beginning."""
    with patch.object(FourBitWeight, "place", lambda *_: None):
        yield


@contextmanager
def halved_late_gradients() -> Iterator[None]:
    """The gradients of delayed updates are halved while they wait."""
    begin = ParameterUpdater.begin_delayed_step

    def faulty(self: ParameterUpdater) -> None:
        begin(self)
        if self.optimizer.pending is not None:  # type: ignore[attr-defined]
            for part in self.optimizer.parts.values():  # type: ignore[attr-defined]
                for gradient in part.pending_gradients().values():
                    gradient.mul_(0.5)

    with patch.object(ParameterUpdater, "begin_delayed_step", faulty):
        yield


@contextmanager
def early_gradients() -> Iterator[None]:
    """Gradients pass for complete in the backward before the last, whose own are lost to the update."""
    count = LastBackward.count

    def faulty(self: LastBackward) -> None:
        count(self)
        self.is_under_way = self._count == (self.backwards_per_step or 0) - 1

    with patch.object(LastBackward, "count", faulty):
        yield


@contextmanager
def norm_of_an_earlier_step() -> Iterator[None]:
    """Layers that are updated within the backward are clipped by the norm of the step before the last one."""
    begin = ParameterUpdater.begin_backward_updates

    def faulty(self: ParameterUpdater) -> None:
        begin(self)
        norms = self.__dict__.setdefault("norms", [])
        norms.append(self.previous_norm)
        update = type(self).update_part_in_backward

        def late(stage: int, part: int) -> None:
            with patch.object(self, "previous_norm", norms[max(0, len(norms) - 2)]):
                update(self, stage, part)

        self.update_part_in_backward = late  # type: ignore[method-assign]

    with patch.object(ParameterUpdater, "begin_backward_updates", faulty):
        yield


@contextmanager
def unreturned_state() -> Iterator[None]:
    """The state that the device has updated doesn't reach host memory."""

    def faulty(self: FetchedPart) -> Callable[[], None]:
        for tensor, kept in zip(self._state, self._in_host_memory, strict=True):
            tensor.data = kept
        return lambda: None

    with patch.object(FetchedPart, "return_state", faulty):
        yield


@contextmanager
def repeated_device_update() -> Iterator[None]:
    """The device updates a part twice."""
    update = HostOptimizer.update_on_device

    def faulty(self: HostOptimizer, key: tuple[int, int], lr: float) -> None:
        update(self, key, lr)
        update(self, key, lr)

    with patch.object(HostOptimizer, "update_on_device", faulty):
        yield


@contextmanager
def update_before_its_state() -> Iterator[None]:
    """The device updates a part before its state has arrived."""

    def faulty(self: FetchedPart) -> Callable[[], None]:
        for tensor, kept in zip(self._state, self._in_host_memory, strict=True):
            tensor.data = torch.zeros_like(kept)
        return lambda: None

    with patch.object(FetchedPart, "fetch_state", faulty):
        yield


@contextmanager
def stale_params() -> Iterator[None]:
    """Passes and updates read the parameters that were on disk first."""
    write = OffloadedGroup._prepare_write

    def faulty(self: OffloadedGroup, values: Sequence[Tensor], copies: Sequence[Tensor]) -> Callable[[], None]:
        return write(self, values, copies) if self._slot is None else lambda: None

    with patch.object(OffloadedGroup, "_prepare_write", faulty):
        yield


@contextmanager
def stale_shard() -> Iterator[None]:
    """What has been brought to the device for the next step, before the update, is gathered in it."""
    note_update = OffloadedGroup.note_update

    def faulty(self: OffloadedGroup) -> None:
        copies = [copy.clone() for copy in self._before]  # type: ignore[attr-defined]
        note_update(self)
        self._arrived = self._copy_to_device(copies)

    begin_pass = ParamOffload.begin_pass

    def begin(self: ParamOffload, backward: bool) -> None:
        for group in self.groups:
            group._before = [copy.clone() for copy in group._copies]  # type: ignore[attr-defined]
        begin_pass(self, backward)

    with patch.object(OffloadedGroup, "note_update", faulty), patch.object(ParamOffload, "begin_pass", begin):
        yield


@contextmanager
def unheard_words() -> Iterator[None]:
    """The terms of the last rank's vocabulary entries in the gradient of the hidden state are lost."""

    def faulty(partial_grads_R2ND: Tensor, combined: CombinedLoss) -> Tensor:
        partial_grads_R2ND[-1] = 0
        return hidden_gradient(partial_grads_R2ND, combined)

    with patch("muster.parallel.vocab_parallel.hidden_gradient", faulty):
        yield


@contextmanager
def mask_off_by_one() -> Iterator[None]:
    """Queries see all keys of their own block but the last."""

    def faulty(q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock, rule: Any) -> tuple[Tensor, Tensor]:
        keys = block.keys[: max(1, len(block.keys) - 1)] if block.mask == "none" else block.keys
        return block_forward(q, k[:, :, : len(keys)], v[:, :, : len(keys)], block._replace(keys=keys), rule)

    with patch.object(block_attention, "block_forward", faulty):
        yield


@contextmanager
def row_off_by_one() -> Iterator[None]:
    """Of a row of scores, the keys of another rank begin one position too late."""

    def faulty(*arguments: Any) -> Tensor:
        scores_BKGST = block_scores(*arguments)
        return scores_BKGST.roll(1, -1) if arguments[2].mask == "none" else scores_BKGST

    with patch("muster.parallel.cp_rsa.block_scores", faulty):
        yield


@contextmanager
def dropped_lse() -> Iterator[None]:
    """A block's log-sum-exp counts as 0."""

    def faulty(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = block_forward(*arguments)
        return out, lse * 0

    with patch.object(block_attention, "block_forward", faulty):
        yield


@contextmanager
def unshared_keys() -> Iterator[None]:
    """Ranks of a dynamic group see their own keys of each document alone."""

    def faulty(lengths: Any, cp: int, queries_of: int, keys_of: int, window: int | None) -> Any:
        return packed_blocks(lengths, cp, queries_of, keys_of, window) if queries_of == keys_of else ()

    with patch("muster.parallel.cp_blocks.packed_blocks", faulty):
        yield


@contextmanager
def padding_counts() -> Iterator[None]:
    """A rank without a group, and padding, count as labels."""
    read = GroupReader.read

    def faulty(*arguments: Any) -> GroupedStep:
        step = read(*arguments)
        counted = (one._replace(labels_S=np.maximum(one.labels_S, 0)) for one in step.micro_batches)
        return replace(step, micro_batches=tuple(counted))

    with patch.object(GroupReader, "read", faulty):
        yield


@contextmanager
def swapped_parts() -> Iterator[None]:
    """The late keys of another rank are taken for its early ones."""
    parts_of = cp_ring.blocks_of_keys

    def faulty(blocks: tuple[AttentionBlock, ...], part: range) -> tuple[AttentionBlock, ...]:
        return parts_of(blocks, range(0 if part.start else part.stop, part.start or 2 * part.stop))

    with patch.object(cp_ring, "blocks_of_keys", faulty):
        yield


@contextmanager
def labels_not_shifted() -> Iterator[None]:
    """Labels are those of the token itself instead of the next one."""

    def change(feeder: BatchLoader, share: LocalBatch) -> LocalBatch:
        if (batch := share.batch) is not None:
            share = replace(share, batch=replace(batch, labels_BS=batch.tokens_BS.copy()))
        return share

    with _changed_feed(change):
        yield


@contextmanager
def own_order() -> Iterator[None]:
    """Tokens go where their experts would lie without a placement."""
    with patch.object(expert_parallel, "to_places", lambda dispatch, order: dispatch):
        yield


@contextmanager
def unsorted_rows() -> Iterator[None]:
    """Rows that arrive from other ranks are taken for sorted by expert."""

    def faulty(counts: Tensor, dims: Any, num_rows: int) -> tuple[Tensor, Tensor]:
        return torch.arange(num_rows), torch.arange(num_rows)

    with patch.object(ep_all_to_all, "block_order", faulty):
        yield


@contextmanager
def averaged_experts() -> Iterator[None]:
    """Gradients of experts are averaged over the ranks that have the same tokens' experts."""

    def faulty(*arguments: Any) -> Tensor | None:
        made = grouped_weight_grad(*arguments)
        return None if made is None else made / 2

    deferred = patch.object(WeightGradStore, "compute_or_defer_grouped", lambda self, *rest: faulty(*rest))
    with deferred, patch.object(grouped_linears, "__kwdefaults__", {"weight_grad": faulty}):
        yield


@contextmanager
def repeated_balance() -> Iterator[None]:
    """Each tensor-parallel rank adds the whole gradient of the routers' losses."""

    def faulty(self: RouterState, name: str, value: Any) -> None:
        object.__setattr__(self, name, 2 * value if name == "loss_weight" else value)

    with patch.object(RouterState, "__setattr__", faulty, create=True):
        yield


@contextmanager
def forgotten_decay() -> Iterator[None]:
    """A state that comes from other ranks isn't decayed on its way past a rank's positions."""

    def faulty(states_RBHde: Tensor, kept_RBHd1: Tensor, ranks: Any) -> Tensor:
        return sum((states_RBHde[rank] for rank in ranks), torch.zeros_like(states_RBHde[0]))

    with patch("muster.parallel.cp_states._handed_on", faulty):
        yield


@contextmanager
def own_load_alone() -> Iterator[None]:
    """Each rank moves the biases of experts by the load of its own tokens."""
    all_reduce = World.all_reduce

    def faulty(self: World, values: Tensor) -> Tensor:
        own = values.clone()
        values = all_reduce(self, values)
        values[8:] = own[8:]
        return values

    with patch.object(World, "all_reduce", faulty):
        yield


@contextmanager
def blocks_out_of_order() -> Iterator[None]:
    """The blocks of a state that is handed on are put together in the wrong order."""
    cat = torch.cat

    def faulty(parts: Any, dim: int = 0) -> Tensor:
        return cat(parts[::-1], dim=dim)

    with patch("muster.parallel.cp_states.torch.cat", faulty):
        yield


@contextmanager
def load_of_one_micro_batch() -> Iterator[None]:
    """The biases of experts move by the load of the last micro-batch alone."""

    def faulty(self: Router, load_F: Tensor) -> None:
        self._load_F = load_F

    with patch.object(Router, "add_load", faulty):
        yield


@contextmanager
def lone_latents() -> Iterator[None]:
    """The gradient of latent vectors is that of a rank's own heads."""

    def faulty(axis: TensorAxis, *latents_BSL: Tensor) -> tuple[Tensor, ...]:
        return latents_BSL

    with patch.object(tensor_parallel, "enter_latents_parallel", faulty):
        yield


@contextmanager
def unseen_sinks() -> Iterator[None]:
    """Sinks take no part in the softmax of one rank."""

    def faulty(self: MergedAttention, q_BHSd: Tensor, sinks_H: Tensor | None = None) -> None:
        make(self, q_BHSd, None if dist.get_rank() == 1 else sinks_H)

    def unchanged(*tensors: Any) -> None:
        if dist.get_rank() != 1:
            add_sinks_(*tensors)

    make = MergedAttention.__init__
    with patch.object(MergedAttention, "__init__", faulty), patch.object(varlen_attention, "add_sinks_", unchanged):
        yield


@contextmanager
def repeated_expert_bias() -> Iterator[None]:
    """Every rank that has a slice of an expert adds its last bias."""
    always = property(lambda self: True, lambda self, value: None)
    with patch.object(StackedLinear, "adds_bias", always, create=True):
        yield


@contextmanager
def same_further_token() -> Iterator[None]:
    """Every depth of multi-token prediction embeds the token of the position itself."""

    def faulty(tokens_BS: Tensor, labels_BS: Tensor, depth: int, *others: Any) -> FurtherTokens:
        return shift_further(tokens_BS, labels_BS, depth, *others)._replace(tokens_BS=tokens_BS)

    with patch("muster.train.batch_loader.shift_further", faulty):
        yield


@contextmanager
def lone_embedding() -> Iterator[None]:
    """The last stage's copy of the embedding keeps its gradient to itself."""
    alone = SimpleNamespace(exchange=torch.zeros_like)
    with patch("muster.train.trainer.tied_embedding_routes", lambda *_: defaultdict(lambda: alone)):
        yield


@contextmanager
def routed_padding_counts() -> Iterator[None]:
    """Routers count positions of padding."""
    with patch.object(BatchLoader, "_counted", lambda *_: None):
        yield


@contextmanager
def lost_sums() -> Iterator[None]:
    """Only the last micro-batch's gradients are reduced from neighbours to all ranks."""
    reduce = LeveledReduceScatter.__call__

    def faulty(self: LeveledReduceScatter, *arguments: Any, **keywords: Any) -> None:
        self.sums = None
        reduce(self, *arguments, **keywords)

    with patch.object(LeveledReduceScatter, "__call__", faulty):
        yield


@contextmanager
def stale_copies() -> Iterator[None]:
    """Passes gather neighbours' copies of the first step's parameters."""
    with patch.object(LeveledAllGather, "drop", lambda self: None):
        yield


@contextmanager
def gathered_before_the_update() -> Iterator[None]:
    """A bucket is gathered for the next step before it is updated."""
    step_bucket = ParameterUpdater.step_bucket

    def faulty(self: ParameterUpdater, stage: int, bucket: int) -> None:
        layers = update_buckets(self.world.plan, self.config.model, stage)[bucket]
        self.stages[stage].unshard_bucket(layers)
        step_bucket(self, stage, bucket)

    with patch.object(ParameterUpdater, "step_bucket", faulty):
        yield


FAULTS = {
    **LADDER_FAULTS,
    **KRAKEN_FAULTS,
    **UNIT_FAULTS,
    "lost sums": lost_sums,
    "gathered before the update": gathered_before_the_update,
    "stale copies": stale_copies,
    "symmetric memory": symmetric_memory,
    "gradients out of order": gradients_out_of_order,
    "recorded graphs": recorded_graphs,
    "one pair of graphs for all": one_pair_for_all,
    "stale inputs of graphs": stale_inputs,
    "lost layer": lost_layer,
    "lost read": lost_read,
    "lost return": lost_return,
    "columns from the first": columns_from_the_first,
    "scales from the first": scales_from_the_first,
    "halved late gradients": halved_late_gradients,
    "unreturned state": unreturned_state,
    "repeated update by the device": repeated_device_update,
    "update before its state": update_before_its_state,
    "early gradients": early_gradients,
    "norm of an earlier step": norm_of_an_earlier_step,
    "stale parameters": stale_params,
    "stale shard": stale_shard,
    "same further token": same_further_token,
    "lone embedding": lone_embedding,
    "routed padding counts": routed_padding_counts,
    "lone latents": lone_latents,
    "unseen sinks": unseen_sinks,
    "repeated expert bias": repeated_expert_bias,
    "forgotten decay": forgotten_decay,
    "blocks out of order": blocks_out_of_order,
    "own load alone": own_load_alone,
    "load of one micro-batch": load_of_one_micro_batch,
    "unsorted rows": unsorted_rows,
    "own order": own_order,
    "averaged experts": averaged_experts,
    "copies without gradients": copies_without_gradients,
    "copies of other experts": copies_of_other_experts,
    "repeated balance": repeated_balance,
    None: no_fault,
    "mask off by one": mask_off_by_one,
    "row off by one": row_off_by_one,
    "unshared keys": unshared_keys,
    "padding counts": padding_counts,
    "dropped lse": dropped_lse,
    "swapped parts": swapped_parts,
    "labels not shifted": labels_not_shifted,
    "dropped gradient": dropped_gradient,
    "swapped micro-batches": swapped_micro_batches,
    "wrong divisor": wrong_divisor,
    "ranks count alike": ranks_alike,
    "wrong recompute": wrong_recompute,
    "doubled boundary": doubled_boundary,
    "half a boundary": half_a_boundary,
    "doubled bias": doubled_bias,
    "lost copies": lost_copies,
    "a rank's words unheard": unheard_words,
    "lost reload": lost_reload,
}
