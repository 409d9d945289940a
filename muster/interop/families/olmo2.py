"""OLMo 2: Llama's keys and tensors, norms behind attention and MLP, and norms over all heads of queries and keys."""

from collections.abc import Iterator
from typing import Any

from muster.interop.families.family import Config, ModelFamily
from muster.interop.families.llama import hf_parameter_name, read_llama, write_llama
from muster.interop.families.weight_link import WeightLink, link_whole
from muster.spec.model import ModelSpec, parameter_shapes

_NORMS = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}


def read_olmo2(config: Config) -> dict[str, Any]:
    post_norms = {"norm_placement": "post", "qk_norm": True, "qk_norm_width": "projection"}
    return read_llama({"rms_norm_eps": 1e-5, **config}) | post_norms


def write_olmo2(spec: ModelSpec) -> dict[str, Any]:
    config = write_llama(spec)
    del config["mlp_bias"]
    return config


def weight_links(spec: ModelSpec) -> Iterator[WeightLink]:
    """Yield the weight map of an OLMo 2."""
    for name, shape in parameter_shapes(spec):
        yield link_whole(name, hf_parameter_name(name, _NORMS), shape)


OLMO2 = ModelFamily("Olmo2ForCausalLM", read_olmo2, write_olmo2, weight_links)
