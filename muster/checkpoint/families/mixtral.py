"""Mixtral: Llama's names, and in place of the MLP a gate that chooses and a tensor for each matrix of each expert."""

from collections.abc import Iterator

from muster.checkpoint.families.link import Link, stacked, whole
from muster.checkpoint.families.llama import hf_name
from muster.spec.model import ModelSpec, parameters

_EXPERT = {"gate": "w1", "down": "w2", "up": "w3"}


def links(spec: ModelSpec) -> Iterator[Link]:
    """The weight map of a Mixtral."""
    for name, shape in parameters(spec):
        layer, _, part = name.partition(".mlp.")
        prefix = f"model.{layer}.block_sparse_moe"
        if part.startswith("experts."):
            matrix = _EXPERT[part.split(".")[1]]
            yield from stacked(name, [f"{prefix}.experts.{index}.{matrix}.weight" for index in range(shape[0])], shape)
        elif part.startswith("router."):
            yield whole(name, f"{prefix}.gate.weight", shape)
        else:
            yield whole(name, hf_name(name), shape)
