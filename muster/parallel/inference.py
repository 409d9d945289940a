"""Decoder for text generation: whole, or a tensor-parallel rank's shard of it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from muster.layout.mesh import MeshCoordinates
from muster.layout.tensor_layout import TensorLayout, chunk_bounds, stage_layouts
from muster.model.decoder import Decoder
from muster.model.dtypes import DTYPES
from muster.parallel.axis import ExpertAxis, TensorAxis
from muster.parallel.expert_parallel import apply_expert_parallel
from muster.parallel.layer_window import make_memory
from muster.parallel.projection_norms import apply_projection_norms
from muster.parallel.tensor_parallel import (
    apply_parallel_linears,
    apply_vocab_parallel_embedding,
)
from muster.parallel.weight_grad_store import WeightGradStore
from muster.parallel.weight_shards import shard_weights
from muster.spec.expert_kinds import ExpertDispatch
from muster.spec.layer_strategy import Tier
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, Precision


def build_inference_decoder(
    spec: ModelSpec,
    precision: Precision,
    device: torch.device,
    axis: TensorAxis | None,
    experts: ExpertAxis | None = None,
    away: Mapping[int, Tier] | None = None,
) -> tuple[Decoder, dict[str, TensorLayout]]:
    """Build a decoder with all layers in the dtype of `precision`, uninitialised, and return it with this rank's layout
    of each parameter. Ranks of `axis` have slices of every expert, or those of `experts`, the same ranks, some whole
    experts each. Layers that are `away` lie in host memory or on disk (`LayerWindow`)."""
    with torch.device("meta"):
        module = Decoder(spec, range(spec.num_layers), first=True, last=True)
    module.to(DTYPES[precision]).requires_grad_(False)
    if axis is not None:
        vocab_start = shard_weights(module, spec, axis, slices_experts=experts is None)
        apply_vocab_parallel_embedding(module, axis, vocab_start, seq_len=0)
        module.position_state.seq_len = None  # without sequence parallelism hidden states have all positions
        apply_projection_norms(module, spec, axis)
        apply_parallel_linears(module, axis, WeightGradStore())
        apply_expert_parallel(module, experts, ExpertDispatch("slicing", axis.size))
    make_memory(module, device, away)
    plan = Plan()
    if axis is not None:
        plan = Plan(tp=axis.size, etp=axis.size)
    if axis is not None and experts is not None:
        plan = Plan(tp=axis.size, ep=axis.size, ep_dispatcher="slicing")
    at = MeshCoordinates(0, 0, 0, 0, 0 if axis is None else axis.index)
    return module, {layout.name: layout for layout in stage_layouts(spec, plan, 0, at)}


def all_gather_logits(axis: TensorAxis, vocab_size: int, logits_BV: Tensor) -> Tensor:
    """Return the logits of the whole vocabulary from those of each rank's entries; the same bits on every rank."""
    first, count = chunk_bounds(vocab_size, axis.size, axis.index)
    whole_BV = logits_BV.new_zeros(len(logits_BV), vocab_size)
    whole_BV[:, first : first + count] = logits_BV
    return axis.all_reduce(whole_BV).wait()
