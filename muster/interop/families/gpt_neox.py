"""GPT-NeoX and Pythia: attention and MLP in parallel; one tensor has queries, keys and values, head after head."""

from collections.abc import Iterator, Mapping
from typing import Any

from muster.interop.families.family import (
    HF_ACTIVATIONS,
    SHARED_COUNTS,
    SHARED_KEYS,
    Config,
    ModelFamily,
    read_activation,
    read_rope,
    require_count,
    write_rope,
)
from muster.interop.families.weight_link import WeightLink, link_whole
from muster.layout.tensor_layout import Box
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec, parameter_shapes

_KEYS = {**SHARED_KEYS, "norm_eps": "layer_norm_eps", "rotary_dim": "rotary_pct", "rope_theta": "rotary_emb_base"}


def read_gpt_neox(config: Config) -> dict[str, Any]:
    bias = config.get("attention_bias", True)
    return {
        **{field: config[key] for key, field in SHARED_COUNTS.items()},
        "norm": "layer",
        "norm_eps": config.get("layer_norm_eps", 1e-5),
        "max_positions": config.get("max_position_embeddings", 2048),
        "activation": read_activation(config.get("hidden_act", "gelu")),
        "init_std": config.get("initializer_range", 0.02),
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "parallel_residual": config.get("use_parallel_residual", True),
        "gated": False,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": True,
        **_read_rotary(config),
    }


def _read_rotary(config: Config) -> dict[str, Any]:
    """Read base and scaling of the rotary wavelengths, and the share of a head that is turned."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"rope_parameters: expected a mapping, got {given!r}")
    share = given.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"rotary_pct: expected a share of a head, more than 0 and at most 1, got {share!r}")
    others = {key: value for key, value in given.items() if key != "partial_rotary_factor"}
    theta = config.get("rotary_emb_base", config.get("rope_theta", 10_000))
    rope = read_rope({**config, "rope_theta": theta, "rope_scaling": others, "rope_parameters": None})
    heads = require_count(config, "num_attention_heads")
    if share == 1 or not heads:
        return rope
    return rope | {"rotary_dim": int(require_count(config, "hidden_size") // heads * share)}


def write_gpt_neox(spec: ModelSpec) -> dict[str, Any]:
    rope = write_rope(spec)
    return {
        **{key: getattr(spec, field) for key, field in SHARED_COUNTS.items()},
        "layer_norm_eps": spec.norm_eps,
        "hidden_act": HF_ACTIVATIONS[spec.activation],
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied_embeddings,
        "use_parallel_residual": spec.parallel_residual,
        "attention_bias": spec.out_bias,
        "rotary_pct": (spec.rotary_dim or spec.head_dim) / spec.head_dim,
        "rotary_emb_base": rope["rope_theta"],
        **({} if rope["rope_scaling"] is None else {"rope_scaling": rope["rope_scaling"]}),
        **({} if spec.max_positions is None else {"max_position_embeddings": spec.max_positions}),
    }


_TOP_LEVEL_NAMES = {"embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"}
_NAMES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn.o": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def weight_links(spec: ModelSpec) -> Iterator[WeightLink]:
    """Yield the weight map of a GPT-NeoX."""
    for name, shape in parameter_shapes(spec):
        module, _, leaf = name.rpartition(".")
        if not module.startswith("layers."):
            yield link_whole(name, f"{_TOP_LEVEL_NAMES[module]}.{leaf}", shape)
            continue
        _, layer, part = module.split(".", 2)
        prefix = f"gpt_neox.layers.{layer}"
        if part in ("attn.q", "attn.k", "attn.v"):
            yield from _link_heads(
                spec, name, f"{prefix}.attention.query_key_value.{leaf}", shape, "qkv".index(part[-1])
            )
        else:
            yield link_whole(name, f"{prefix}.{_NAMES[part]}.{leaf}", shape)


def _link_heads(spec: ModelSpec, name: str, hf_name: str, shape: tuple[int, ...], place: int) -> Iterator[WeightLink]:
    """Yield the links of queries, keys or values: of each head in turn the three lie one below the other."""
    size, others = (spec.head_dim, *shape[1:]), (0,) * (len(shape) - 1)
    for head in range(spec.num_heads):
        own, hf = head * spec.head_dim, (3 * head + place) * spec.head_dim
        yield WeightLink(name, Box((own, *others), size), hf_name, Box((hf, *others), size))


_DROPOUT = {
    "hidden_dropout": "hidden_dropout",
    "embedding_dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout",
}
GPT_NEOX = ModelFamily("GPTNeoXForCausalLM", read_gpt_neox, write_gpt_neox, weight_links, _KEYS, _DROPOUT)
