"""Mixtral: Llama's names, and in place of the MLP a gate that chooses and a tensor for each matrix of each expert."""

from collections.abc import Iterator

from muster.interop.families.llama import hf_parameter_name
from muster.interop.families.weight_link import WeightLink, link_stacked, link_whole
from muster.spec.model import ModelSpec, parameter_shapes

_EXPERT = {"gate": "w1", "down": "w2", "up": "w3"}


def weight_links(spec: ModelSpec) -> Iterator[WeightLink]:
    """The weight map of a Mixtral."""
    for name, shape in parameter_shapes(spec):
        layer, _, part = name.partition(".mlp.")
        prefix = f"model.{layer}.block_sparse_moe"
        if part.startswith("experts."):
            matrix = _EXPERT[part.split(".")[1]]
            yield from link_stacked(
                name, [f"{prefix}.experts.{index}.{matrix}.weight" for index in range(shape[0])], shape
            )
        elif part.startswith("router."):
            yield link_whole(name, f"{prefix}.gate.weight", shape)
        else:
            yield link_whole(name, hf_parameter_name(name), shape)
