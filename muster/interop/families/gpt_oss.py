"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, and a sliding window in every second layer.

The matrices of all experts are one tensor (experts, input, output), in which columns of gate and up alternate.
"""

from collections.abc import Iterator
from typing import Any

from muster.interop.families.family import (
    AUX_LOSS_DEFAULT,
    AUX_LOSS_KEY,
    SLIDING_ATTENTION,
    Config,
    ModelFamily,
    read_sliding_windows,
    require_count,
)
from muster.interop.families.llama import hf_parameter_name, read_llama, write_llama
from muster.interop.families.mixtral import MIXTRAL_KEYS
from muster.interop.families.weight_link import WeightLink, link_whole
from muster.layout.tensor_layout import Box
from muster.spec.model import ModelSpec, parameter_shapes

_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "attention_bias": True,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "rope_theta": 150_000.0,
}
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Values that `transformers` has for keys that are left out."""
_UNUSED_AUX_LOSS = 0.9
"""Coefficient in published configurations, none of which turns the loss on (output_router_logits)."""


def read_gpt_oss(config: Config) -> dict[str, Any]:
    """Read a config.json. Experts always have biases, and every second layer, the first included, has a window
    (arXiv:2508.10925 §2.2)."""
    given = {**_DEFAULTS, **config}
    if not (given.get("rope_parameters") or given.get("rope_scaling")):
        given["rope_scaling"] = _DEFAULT_ROPE
    usual = [
        SLIDING_ATTENTION if layer % 2 == 0 else "full_attention"
        for layer in range(require_count(config, "num_hidden_layers"))
    ]
    moe = {"num_experts": config["num_local_experts"], "top_k": config["num_experts_per_tok"], "router_bias": True}
    return read_llama(given) | {
        "mlp_bias": True,
        "attention_sinks": True,
        "swiglu_limit": given["swiglu_limit"],
        "swiglu_alpha": given["swiglu_alpha"],
        "moe": moe | {"expert_size": config["intermediate_size"], "aux_loss_coef": _aux_loss_coef(config)},
        **read_sliding_windows(given, usual),
    }


def _aux_loss_coef(config: Config) -> Any:
    coefficient = config.get(AUX_LOSS_KEY, AUX_LOSS_DEFAULT)
    is_used = config.get("output_router_logits", False) or coefficient != _UNUSED_AUX_LOSS
    return coefficient if is_used else AUX_LOSS_DEFAULT


def write_gpt_oss(spec: ModelSpec) -> dict[str, Any]:
    config = write_llama(spec)
    del config["mlp_bias"]
    if spec.rope_scaling is None:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    kinds = ("full_attention", SLIDING_ATTENTION)
    config |= {
        "layer_types": [kinds[spec.attention_window(layer) is not None] for layer in range(spec.num_layers)],
        "sliding_window": spec.sliding_window,
        "swiglu_limit": spec.swiglu_limit,
        "swiglu_alpha": spec.swiglu_alpha,
    }
    if spec.moe is not None:
        config |= {"num_local_experts": spec.moe.num_experts, "num_experts_per_tok": spec.moe.top_k}
        config |= {"intermediate_size": spec.moe.expert_size, AUX_LOSS_KEY: spec.moe.aux_loss_coef}
    return config


_COLUMNS = {"gate": ("gate_up_proj", 0, 2), "up": ("gate_up_proj", 1, 2), "down": ("down_proj", 0, 1)}
"""Tensor of an expert's matrix, its first column there, and the distance of its columns."""


def weight_links(spec: ModelSpec) -> Iterator[WeightLink]:
    """Yield the weight map of a gpt-oss."""
    for name, shape in parameter_shapes(spec):
        layer, _, part = name.partition(".mlp.experts.")
        if not part:
            yield link_whole(name, hf_parameter_name(name), shape)
            continue
        matrix, _, leaf = part.partition(".")
        tensor, first, step = _COLUMNS[matrix]
        tensor = f"model.{layer}.mlp.experts.{tensor}"
        if leaf == "bias":
            yield WeightLink(name, Box((0, 0), shape), f"{tensor}_bias", Box((0, first), shape), hf_step=step)
            continue
        experts, rows, columns = shape
        for expert in range(experts):
            box, theirs = Box((expert, 0, 0), (1, rows, columns)), Box((expert, 0, first), (1, columns, rows))
            yield WeightLink(name, box, tensor, theirs, transposed=True, hf_step=step)


GPT_OSS = ModelFamily("GptOssForCausalLM", read_gpt_oss, write_gpt_oss, weight_links, MIXTRAL_KEYS)
