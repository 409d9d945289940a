"""Weight maps between our parameters and Hugging Face tensors: one file for each family, torch-free.

A map is a list of `Link`s (`link.py`), each of which says that a box of a parameter holds the same numbers as a box of
a Hugging Face tensor, transposed or not. All parameters are covered once by the boxes of their links, and so are the
tensors of a complete directory, but for those that `is_derived` names.
"""

from collections.abc import Callable, Iterator

from muster.interop.families import deepseek_v3, gpt2, llama, mixtral, qwen3_moe
from muster.interop.families.weight_link import WeightLink
from muster.interop.hf_config import hf_config_from_spec
from muster.spec.model import ModelSpec

WEIGHT_MAPS: dict[str, Callable[[ModelSpec], Iterator[WeightLink]]] = {
    "llama": llama.weight_links,
    "mistral": llama.weight_links,
    "qwen2": llama.weight_links,
    "qwen3": llama.weight_links,
    "gpt2": gpt2.weight_links,
    "mixtral": mixtral.weight_links,
    "qwen3_moe": qwen3_moe.weight_links,
    "deepseek_v3": deepseek_v3.weight_links,
}
"""By the `model_type` of a config.json, as `muster.interop.hf_config` gives it for a ModelSpec."""

__all__ = ["WEIGHT_MAPS", "WeightLink", "hf_shapes", "is_derived_tensor", "weight_map"]


def weight_map(spec: ModelSpec) -> list[WeightLink]:
    """The weight map of a model, in the order of its parameters. Raises InfeasibleError where no family fits it."""
    return list(WEIGHT_MAPS[hf_config_from_spec(spec)["model_type"]](spec))


def hf_shapes(links: list[WeightLink]) -> dict[str, tuple[int, ...]]:
    """The shape of each Hugging Face tensor, in the order in which they are first linked."""
    shapes: dict[str, tuple[int, ...]] = {}
    for link in links:
        end = tuple(a + n for a, n in zip(link.hf_box.start, link.hf_box.size, strict=True))
        shapes[link.hf_name] = tuple(map(max, shapes.get(link.hf_name, end), end))
    return shapes


def is_derived_tensor(spec: ModelSpec, hf_name: str) -> bool:
    """Whether a tensor of a directory follows from others: a tied head, a buffer with the mask or the angles, a copy
    of embedding or head in a layer that predicts further tokens."""
    if spec.tied_embeddings and hf_name == "lm_head.weight":
        return True
    if hf_name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")):
        return True
    return bool(spec.mtp_layers) and hf_name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))
