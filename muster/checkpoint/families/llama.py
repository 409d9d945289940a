"""Llama 2, 3, 3.1, 3.2, Mistral, Qwen2, Qwen2.5 and Qwen3: one tensor for each parameter, under other names.

The rotary pairs of these weights lie as `muster.model.kernels.rotate` wants them.
"""

from collections.abc import Iterator

from muster.checkpoint.families.link import Link, whole
from muster.spec.model import ModelSpec, parameters

ENDS = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
IN_LAYER = {
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


def links(spec: ModelSpec) -> Iterator[Link]:
    """The weight map of a dense model."""
    for name, shape in parameters(spec):
        yield whole(name, hf_name(name), shape)


def hf_name(name: str) -> str:
    """`layers.3.attn.q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    module, _, leaf = name.rpartition(".")
    if module in ENDS:
        return f"{ENDS[module]}.{leaf}"
    return "model." + ".".join([*(IN_LAYER.get(part, part) for part in module.split(".")), leaf])
