"""A decoder for making text: whole, or the part of it that a tensor-parallel rank holds."""

import torch
from torch import Tensor

from muster.model.decoder import Decoder
from muster.parallel.axis import TensorAxis
from muster.parallel.deferred import WeightWork
from muster.parallel.shard import DTYPES
from muster.parallel.stage import cut_weights
from muster.parallel.tensor import apply_products, apply_words
from muster.spec.layout import TensorLayout, shard_rows, stage_layouts
from muster.spec.mesh import Coordinates
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, Precision


def decoder_for_text(
    spec: ModelSpec, precision: Precision, device: torch.device, axis: TensorAxis | None
) -> tuple[Decoder, dict[str, TensorLayout]]:
    """A decoder with all layers in the dtype of `precision`, uninitialised, and what it holds of each parameter."""
    with torch.device("meta"):
        module = Decoder(spec, range(spec.num_layers), first=True, last=True)
    module.to(DTYPES[precision]).requires_grad_(False)
    if axis is not None:
        apply_words(module, axis, cut_weights(module, spec, axis), seq_len=0)
        module.where.seq_len = None  # there is no sequence parallelism: hidden states have all positions that are read
        apply_products(module, axis, WeightWork())
    module.to_empty(device=device)
    plan = Plan(tp=1 if axis is None else axis.size)
    at = Coordinates(0, 0, 0, 0, 0 if axis is None else axis.index)
    return module, {layout.name: layout for layout in stage_layouts(spec, plan, 0, at)}


def join_words(axis: TensorAxis, vocab_size: int, logits_BV: Tensor) -> Tensor:
    """The logits of all words, of logits of which each rank has those of its words; the same bits on every rank."""
    first, count = shard_rows(vocab_size, axis.size, axis.index)
    whole_BV = logits_BV.new_zeros(len(logits_BV), vocab_size)
    whole_BV[:, first : first + count] = logits_BV
    return axis.add_up(whole_BV).wait()
