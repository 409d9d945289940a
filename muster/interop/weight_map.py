"""Weight maps between Muster's parameters and Hugging Face tensors, free of torch.

A map is a list of `WeightLink`s, each of which says that a box of a parameter holds the same elements as a box of a
Hugging Face tensor, transposed or not. The boxes of its links cover each parameter once, and each tensor of a complete
directory, except for those that `is_derived_tensor` names.
"""

from muster.interop.families import FAMILIES
from muster.interop.families.weight_link import WeightLink
from muster.interop.hf_config import hf_config_from_spec
from muster.spec.model import ModelSpec


def weight_map(spec: ModelSpec, preferred: str | None = None) -> list[WeightLink]:
    """Return the weight map of a model, in the order of its parameters, in the family that `hf_config_from_spec`
    writes.

    Raises InfeasibleError where no family that can be written fits it.
    """
    family = FAMILIES[hf_config_from_spec(spec, preferred)["model_type"]]
    assert family.weight_links is not None
    return list(family.weight_links(spec))


_ATTENTION, _MASKS = ("attn", "attention"), ("bias", "masked_bias")
"""Modules with buffers of the mask, in GPT-2 and GPT-NeoX, and the names of these buffers."""


def hf_shapes(links: list[WeightLink]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each Hugging Face tensor, in the order in which they are first linked."""
    shapes: dict[str, tuple[int, ...]] = {}
    for link in links:
        shapes[link.hf_name] = tuple(map(max, shapes.get(link.hf_name, link.hf_end), link.hf_end))
    return shapes


def is_derived_tensor(spec: ModelSpec, hf_name: str) -> bool:
    """Return True for a tensor of a directory that follows from others: a tied head, a buffer with the mask or the
    angles, a copy of embedding or head in a multi-token-prediction layer."""
    if spec.tied_embeddings and hf_name in ("lm_head.weight", "embed_out.weight"):
        return True
    if hf_name.endswith((".rotary_emb.inv_freq", *(f".{name}.{leaf}" for name in _ATTENTION for leaf in _MASKS))):
        return True
    return bool(spec.mtp_layers) and hf_name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))
