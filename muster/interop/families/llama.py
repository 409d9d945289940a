"""Llama 2, 3, 3.1, 3.2, Mistral, Qwen2, Qwen2.5 and Qwen3: one tensor for each parameter, under other names.

The rotary pairs of these weights lie as `muster.model.kernels.rotate` wants them.
"""

from collections.abc import Iterator

from muster.interop.families.weight_link import WeightLink, link_whole
from muster.spec.model import ModelSpec, parameter_shapes

TOP_LEVEL_NAMES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn": "self_attn",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


def weight_links(spec: ModelSpec) -> Iterator[WeightLink]:
    """The weight map of a dense model."""
    for name, shape in parameter_shapes(spec):
        yield link_whole(name, hf_parameter_name(name), shape)


def hf_parameter_name(name: str) -> str:
    """`layers.3.attn.q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    module, _, leaf = name.rpartition(".")
    if module in TOP_LEVEL_NAMES:
        return f"{TOP_LEVEL_NAMES[module]}.{leaf}"
    return "model." + ".".join([*(LAYER_NAMES.get(part, part) for part in module.split(".")), leaf])
