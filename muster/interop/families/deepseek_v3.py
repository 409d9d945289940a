"""DeepSeek-V3: latent attention, experts of which some are shared, and layers that predict further tokens.

Those come as layers after the last, with copies of embedding and head that are the model's own. The numbers that are
turned lie in neighbouring pairs, in queries as in keys (`rope_interleave` of the configuration).
"""

from collections.abc import Iterator

from muster.interop.families.llama import LAYER_NAMES, TOP_LEVEL_NAMES
from muster.interop.families.weight_link import WeightLink, link_stacked, link_whole
from muster.spec.model import ModelSpec, parameter_shapes

_ATTENTION = {
    "q_down": "q_a_proj",
    "q_down_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_down_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
}
_FURTHER = {"embed_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"}


def weight_links(spec: ModelSpec) -> Iterator[WeightLink]:
    """The weight map of a DeepSeek-V3."""
    for name, shape in parameter_shapes(spec):
        kind, _, rest = name.partition(".")
        if kind not in ("layers", "mtp"):
            yield link_whole(name, f"{TOP_LEVEL_NAMES[kind]}.{rest}", shape)
            continue
        index, _, part = rest.partition(".")
        layer = int(index) + (spec.num_layers if kind == "mtp" else 0)
        yield from _in_layer(name, shape, f"model.layers.{layer}", part)


def _in_layer(name: str, shape: tuple[int, ...], prefix: str, part: str) -> Iterator[WeightLink]:
    module, _, leaf = part.rpartition(".")
    if module.startswith("mlp.experts."):
        matrix = LAYER_NAMES[module.rpartition(".")[2]]
        yield from link_stacked(name, [f"{prefix}.mlp.experts.{i}.{matrix}.{leaf}" for i in range(shape[0])], shape)
    elif module == "mlp.router":
        yield link_whole(name, f"{prefix}.mlp.gate.{'e_score_correction_bias' if leaf == 'bias' else leaf}", shape)
    else:
        words = {"shared": "shared_experts", **LAYER_NAMES, **_ATTENTION, **_FURTHER}
        yield link_whole(
            name, f"{prefix}.{'.'.join(words.get(word, word) for word in module.split('.'))}.{leaf}", shape
        )
