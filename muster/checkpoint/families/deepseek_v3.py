"""DeepSeek-V3: latent attention, experts of which some are shared, and layers that predict further tokens.

Those come as layers after the last, with copies of embedding and head that are the model's own. The numbers that are
turned lie in neighbouring pairs, in queries as in keys (`rope_interleave` of the configuration).
"""

from collections.abc import Iterator

from muster.checkpoint.families.link import Link, stacked, whole
from muster.checkpoint.families.llama import ENDS, IN_LAYER
from muster.spec.model import ModelSpec, parameters

_ATTENTION = {
    "q_down": "q_a_proj",
    "q_down_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_down_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
}
_FURTHER = {"embed_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"}


def links(spec: ModelSpec) -> Iterator[Link]:
    """The weight map of a DeepSeek-V3."""
    for name, shape in parameters(spec):
        kind, _, rest = name.partition(".")
        if kind not in ("layers", "mtp"):
            yield whole(name, f"{ENDS[kind]}.{rest}", shape)
            continue
        index, _, part = rest.partition(".")
        layer = int(index) + (spec.num_layers if kind == "mtp" else 0)
        yield from _in_layer(name, shape, f"model.layers.{layer}", part)


def _in_layer(name: str, shape: tuple[int, ...], prefix: str, part: str) -> Iterator[Link]:
    module, _, leaf = part.rpartition(".")
    if module.startswith("mlp.experts."):
        matrix = IN_LAYER[module.rpartition(".")[2]]
        yield from stacked(name, [f"{prefix}.mlp.experts.{i}.{matrix}.{leaf}" for i in range(shape[0])], shape)
    elif module == "mlp.router":
        yield whole(name, f"{prefix}.mlp.gate.{'e_score_correction_bias' if leaf == 'bias' else leaf}", shape)
    else:
        words = {"shared": "shared_experts", **IN_LAYER, **_ATTENTION, **_FURTHER}
        yield whole(name, f"{prefix}.{'.'.join(words.get(word, word) for word in module.split('.'))}.{leaf}", shape)
