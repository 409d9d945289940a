"""gpt-oss: experts with biases, attention sinks, and a sliding window in every second layer. Only read."""

from typing import Any

from muster.interop.families.family import (
    SLIDING_ATTENTION,
    Config,
    ModelFamily,
    read_sliding_windows,
    require_count,
)
from muster.interop.families.llama import read_llama
from muster.interop.families.mixtral import MIXTRAL_KEYS


def read_gpt_oss(config: Config) -> dict[str, Any]:
    """Read a config.json. Experts always have biases, and every second layer, the first included, has a window
    (arXiv:2508.10925 §2.2)."""
    moe = {"num_experts": config["num_local_experts"], "top_k": config["num_experts_per_tok"], "router_bias": True}
    usual = [
        SLIDING_ATTENTION if layer % 2 == 0 else "full_attention"
        for layer in range(require_count(config, "num_hidden_layers"))
    ]
    bias = config.get("attention_bias", True)
    return read_llama({"rms_norm_eps": 1e-5, "head_dim": 64, **config}) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": True,
        "attention_sinks": True,
        "moe": moe | {"expert_size": config["intermediate_size"]},
        **read_sliding_windows(config, usual),
    }


GPT_OSS = ModelFamily("GptOssForCausalLM", read_gpt_oss, keys=MIXTRAL_KEYS)
