"""Weight maps between our parameters and Hugging Face tensors: one file for each family, torch-free.

A map is a list of `Link`s (`link.py`), each of which says that a box of a parameter holds the same numbers as a box of
a Hugging Face tensor, transposed or not. All parameters are covered once by the boxes of their links, and so are the
tensors of a complete directory, but for those that `is_derived` names.
"""

from collections.abc import Callable, Iterator

from muster.checkpoint.families import deepseek_v3, gpt2, llama, mixtral, qwen3_moe
from muster.checkpoint.families.link import Link
from muster.spec.hf_config import hf_config
from muster.spec.model import ModelSpec

FAMILIES: dict[str, Callable[[ModelSpec], Iterator[Link]]] = {
    "llama": llama.links,
    "mistral": llama.links,
    "qwen2": llama.links,
    "qwen3": llama.links,
    "gpt2": gpt2.links,
    "mixtral": mixtral.links,
    "qwen3_moe": qwen3_moe.links,
    "deepseek_v3": deepseek_v3.links,
}
"""By the `model_type` of a config.json, as `muster.spec.hf_config` gives it for a ModelSpec."""

__all__ = ["FAMILIES", "Link", "hf_shapes", "is_derived", "links_of"]


def links_of(spec: ModelSpec) -> list[Link]:
    """The weight map of a model, in the order of its parameters. Raises InfeasibleError where no family fits it."""
    return list(FAMILIES[hf_config(spec)["model_type"]](spec))


def hf_shapes(links: list[Link]) -> dict[str, tuple[int, ...]]:
    """The shape of each Hugging Face tensor, in the order in which they are first linked."""
    shapes: dict[str, tuple[int, ...]] = {}
    for link in links:
        end = tuple(a + n for a, n in zip(link.hf_box.start, link.hf_box.size, strict=True))
        shapes[link.hf_name] = tuple(map(max, shapes.get(link.hf_name, end), end))
    return shapes


def is_derived(spec: ModelSpec, hf_name: str) -> bool:
    """Whether a tensor of a directory follows from others: a tied head, a buffer with the mask or the angles, a copy
    of embedding or head in a layer that predicts further tokens."""
    if spec.tied_embeddings and hf_name == "lm_head.weight":
        return True
    if hf_name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")):
        return True
    return bool(spec.mtp_layers) and hf_name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))
