"""Phi-3: Mistral's keys; queries, keys and values lie in one tensor one below the other, and so do gate and up."""

from collections.abc import Iterator
from typing import Any

from muster.interop.families.family import Config, ModelFamily
from muster.interop.families.llama import hf_parameter_name, read_mistral, write_mistral
from muster.interop.families.weight_link import WeightLink, link_slice, link_whole
from muster.spec.model import ModelSpec, parameter_shapes

_FUSED = {"q": "qkv_proj", "k": "qkv_proj", "v": "qkv_proj", "gate": "gate_up_proj", "up": "gate_up_proj"}


def weight_links(spec: ModelSpec) -> Iterator[WeightLink]:
    """Yield the weight map of a Phi-3."""
    rows: dict[str, int] = {}
    for name, shape in parameter_shapes(spec):
        module, _, leaf = name.rpartition(".")
        prefix, _, part = module.rpartition(".")
        if part not in _FUSED:
            yield link_whole(name, hf_parameter_name(name), shape)
            continue
        hf_name = hf_parameter_name(f"{prefix}.{_FUSED[part]}.{leaf}")
        yield link_slice(name, hf_name, shape, 0, rows.get(hf_name, 0))
        rows[hf_name] = rows.get(hf_name, 0) + shape[0]


def read_phi3(config: Config) -> dict[str, Any]:
    return read_mistral({"rms_norm_eps": 1e-5, **config})


_DROPOUT = {"hidden_dropout": "resid_pdrop", "attention_dropout": "attention_dropout"}
PHI3 = ModelFamily("Phi3ForCausalLM", read_phi3, write_mistral, weight_links, dropout=_DROPOUT)
