"""GPT-2: matrices are stored transposed (input, output), and queries, keys and values side by side in one."""

from collections.abc import Iterator
from typing import Any

from muster.interop.families.family import HF_ACTIVATIONS, Config, ModelFamily, read_activation, require_count
from muster.interop.families.weight_link import WeightLink, link_slice, link_whole
from muster.spec.model import ModelSpec, parameter_shapes

_KEYS = {
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "init_std": "initializer_range",
    "tied_embeddings": "tie_word_embeddings",
}


def read_gpt2(config: Config) -> dict[str, Any]:
    hidden = require_count(config, "n_embd")
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": hidden,
        "num_layers": config["n_layer"],
        "num_heads": config["n_head"],
        "intermediate_size": config.get("n_inner") or 4 * hidden,
        "max_positions": config.get("n_positions", 1024),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": read_activation(config.get("activation_function", "gelu_new")),
        "init_std": config.get("initializer_range", 0.02),
        "tied_embeddings": config.get("tie_word_embeddings", True),
        "norm": "layer",
        "position": "learned",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    }


def write_gpt2(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab_size,
        "n_embd": spec.hidden_size,
        "n_layer": spec.num_layers,
        "n_head": spec.num_heads,
        "n_inner": spec.intermediate_size,
        "n_positions": spec.max_positions,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": HF_ACTIVATIONS[spec.activation],
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied_embeddings,
    }


_NAMES = {
    "embed": "wte",
    "positions": "wpe",
    "norm": "ln_f",
    "attn_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attn.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def weight_links(spec: ModelSpec) -> Iterator[WeightLink]:
    """Yield the weight map of a GPT-2."""
    for name, shape in parameter_shapes(spec):
        module, _, leaf = name.rpartition(".")
        if not module.startswith("layers."):
            yield link_whole(name, f"transformer.{_NAMES[module]}.{leaf}", shape)
            continue
        _, layer, part = module.split(".", 2)
        prefix = f"transformer.h.{layer}"
        is_matrix = len(shape) == 2
        if part in ("attn.q", "attn.k", "attn.v"):
            start = "qkv".index(part[-1]) * shape[0]
            yield link_slice(name, f"{prefix}.attn.c_attn.{leaf}", shape, len(shape) - 1, start, transposed=is_matrix)
        else:
            yield link_whole(name, f"{prefix}.{_NAMES[part]}.{leaf}", shape, transposed=is_matrix)


_DROPOUT = {"hidden_dropout": "resid_pdrop", "embedding_dropout": "embd_pdrop", "attention_dropout": "attn_pdrop"}
GPT2 = ModelFamily("GPT2LMHeadModel", read_gpt2, write_gpt2, weight_links, _KEYS, _DROPOUT, default_dropout=0.1)
