"""Qwen3-MoE: Qwen3's names, and in place of the MLP a gate that chooses and a tensor for each matrix of each expert."""

from collections.abc import Iterator

from muster.checkpoint.families.link import Link, stacked, whole
from muster.checkpoint.families.llama import IN_LAYER, hf_name
from muster.spec.model import ModelSpec, parameters


def links(spec: ModelSpec) -> Iterator[Link]:
    """The weight map of a Qwen3-MoE."""
    for name, shape in parameters(spec):
        layer, _, part = name.partition(".mlp.")
        if part.startswith("experts."):
            matrix = IN_LAYER[part.split(".")[1]]
            names = [f"model.{layer}.mlp.experts.{index}.{matrix}.weight" for index in range(shape[0])]
            yield from stacked(name, names, shape)
        elif part.startswith("router."):
            yield whole(name, f"model.{layer}.mlp.gate.weight", shape)
        else:
            yield whole(name, hf_name(name), shape)
