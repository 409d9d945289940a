"""Qwen3-MoE: Qwen3's names, and in place of the MLP a gate that chooses and a tensor for each matrix of each expert."""

from collections.abc import Iterator

from muster.interop.families.llama import LAYER_NAMES, hf_parameter_name
from muster.interop.families.weight_link import WeightLink, link_stacked, link_whole
from muster.spec.model import ModelSpec, parameter_shapes


def weight_links(spec: ModelSpec) -> Iterator[WeightLink]:
    """The weight map of a Qwen3-MoE."""
    for name, shape in parameter_shapes(spec):
        layer, _, part = name.partition(".mlp.")
        if part.startswith("experts."):
            matrix = LAYER_NAMES[part.split(".")[1]]
            names = [f"model.{layer}.mlp.experts.{index}.{matrix}.weight" for index in range(shape[0])]
            yield from link_stacked(name, names, shape)
        elif part.startswith("router."):
            yield link_whole(name, f"model.{layer}.mlp.gate.weight", shape)
        else:
            yield link_whole(name, hf_parameter_name(name), shape)
