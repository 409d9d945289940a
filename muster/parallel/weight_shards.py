"""Shapes of a rank's parameters under tensor parallelism."""

import torch

from muster.layout.tensor_layout import is_expert, tp_shard
from muster.model.decoder import Decoder
from muster.model.experts import Experts
from muster.model.four_bit import FourBitWeight
from muster.parallel.axis import TensorAxis
from muster.spec.four_bit import CODES, elements_per_entry
from muster.spec.model import ModelSpec


def shard_weights(module: Decoder, spec: ModelSpec, axis: TensorAxis, slices_experts: bool = True) -> int:
    """Give the parameters of a whole stage on the meta device this rank's tensor-parallel shapes, those of experts
    where these are sliced, too; return its first vocabulary entry."""
    vocab_start = 0
    for part in module.modules():
        if isinstance(part, Experts) and slices_experts:  # their results are partial sums
            part.down.adds_bias = axis.index == 0
    for name, parameter in list(module.named_parameters()):
        if is_expert(name) and not slices_experts:
            continue
        box, *_ = tp_shard(spec, name, tuple(parameter.shape), axis.size, axis.index)
        owner, _, leaf = name.rpartition(".")
        shard = torch.nn.Parameter(parameter.new_empty(box.size), parameter.requires_grad)
        part = module.get_submodule(owner)
        setattr(part, leaf, shard)
        if leaf == CODES and isinstance(part.weight, FourBitWeight):
            part.weight.place(box.start[0], box.start[1] * elements_per_entry(name))
        if name in ("embed.weight", "head.weight"):
            vocab_start = box.start[0]
    return vocab_start
