"""GPT-2: matrices lie transposed (input, output), and queries, keys and values side by side in one."""

from collections.abc import Iterator

from muster.interop.families.weight_link import WeightLink, link_slice, link_whole
from muster.spec.model import ModelSpec, parameter_shapes

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
    """The weight map of a GPT-2."""
    for name, shape in parameter_shapes(spec):
        module, _, leaf = name.rpartition(".")
        if not module.startswith("layers."):
            yield link_whole(name, f"transformer.{_NAMES[module]}.{leaf}", shape)
            continue
        _, layer, part = module.split(".", 2)
        prefix, is_matrix = f"transformer.h.{layer}", len(shape) == 2
        if part in ("attn.q", "attn.k", "attn.v"):
            start = "qkv".index(part[-1]) * shape[0]
            yield link_slice(name, f"{prefix}.attn.c_attn.{leaf}", shape, len(shape) - 1, start, transposed=is_matrix)
        else:
            yield link_whole(name, f"{prefix}.{_NAMES[part]}.{leaf}", shape, transposed=is_matrix)
