"""SmolLM3: Llama's keys and tensors, and layers without rotary positions (NoPE, arXiv:2501.18795 §2.2)."""

from typing import Any

from muster.interop.families.family import Config, ModelFamily, read_sliding_windows, require_count
from muster.interop.families.llama import read_llama, weight_links, write_qwen
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec


def read_smollm3(config: Config) -> dict[str, Any]:
    count = require_count(config, "num_hidden_layers")
    interval = config.get("no_rope_layer_interval", 4)
    rotary = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
    if len(rotary) != count or not {*rotary} <= {0, 1}:
        raise ConfigError(f"no_rope_layers: expected {count} times 0 or 1, one for each layer, got {rotary!r}")
    nope = [layer for layer, has_rope in enumerate(rotary) if not has_rope]
    windows = {}
    if config.get("use_sliding_window"):
        windows = read_sliding_windows(config, ["sliding_attention" if layer in nope else "" for layer in range(count)])
    fields = read_llama({"tie_word_embeddings": True, **_with_theta(config)})
    return fields | {"nope_layers": nope} | windows


def _with_theta(config: Config) -> Config:
    """Return the configuration with SmolLM3's own base of the rotary wavelengths, where it gives none."""
    return {"rope_theta": 2_000_000.0, **config}


def write_smollm3(spec: ModelSpec) -> dict[str, Any]:
    config = write_qwen(spec)
    del config["max_window_layers"]
    return config | {"no_rope_layers": [int(layer not in spec.nope_layers) for layer in range(spec.num_layers)]}


SMOLLM3 = ModelFamily("SmolLM3ForCausalLM", read_smollm3, write_smollm3, weight_links)
