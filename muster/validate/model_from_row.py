"""From a row's widths to a model.

The rule, in this order:

1. A name that the catalogue knows (`LLAMA3-70B`, `Qwen/Qwen3-30B-A3B`) gives what the row's widths leave open: those
   that are empty, norms, biases, the width of a head, experts' details. The row's own stand where both say one.
2. Otherwise families are told apart by name. GPT's (GPT, GPT-2, GPT-3, OPT, BLOOM, Megatron) have LayerNorm, learned
   positions, GELU, biases and a tied head; MPT's the same without biases; Nemotron's LayerNorm, rotary positions,
   squared ReLU and no biases. What is left is Llama-style.
3. A Llama-style name whose `params_b` is met better without a gate (by more than a twentieth of it) has none.
"""

import re
from functools import cache

import yaml
from pydantic import ValidationError

from muster.catalog import names, read
from muster.spec.model import ModelSpec
from muster.spec.model_components import MoeSpec
from muster.spec.suggest import did_you_mean
from muster.validate.errors import UnpredictableRowError
from muster.validate.table import MeasurementRow

_GPT = re.compile(r"^(gpt(?!-?oss)|opt|bloom|megatron|turing|mt-nlg)", re.IGNORECASE)
_MPT = re.compile(r"^mpt", re.IGNORECASE)
_NEMOTRON = re.compile(r"^nemotron", re.IGNORECASE)

_LATER = re.compile(r"^meta-|[-_ ](hf|base|instruct|chat|v\d(\.\d)?)\b", re.IGNORECASE)
"""What owners put before and after the name of a shape."""

_GPT_STYLE: dict[str, object] = {
    "norm": "layer",
    "position": "learned",
    "activation": "gelu",
    "gated": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "tied_embeddings": True,
}
_MPT_STYLE: dict[str, object] = _GPT_STYLE | {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
_NEMOTRON_STYLE: dict[str, object] = {"norm": "layer", "activation": "relu", "gated": False}


def model_from_row(row: MeasurementRow) -> ModelSpec:
    """The model of a row. Raises UnreadableError."""
    if row.seq_len is None:
        raise UnpredictableRowError("seq_len is empty")
    known = _known(row.model_name)
    if known is not None and row.hidden in (None, known.hidden_size) and row.heads in (None, known.num_heads):
        widths = _widths(row)
        if known.moe is not None:
            widths.pop("intermediate_size", None)  # a table's is that of an expert
        return _made(known.model_dump() | widths)
    for column in ("hidden", "layers", "heads", "ffn_hidden", "vocab"):
        if getattr(row, column) is None:
            hint = did_you_mean(row.model_name.lower(), names("models"))
            unknown = f", and the catalogue has no model '{row.model_name}'{hint}" if known is None else ""
            raise UnpredictableRowError(f"{column} is empty{unknown}")
    fields = _widths(row) | _style(row) | _experts(row)
    model = _made(fields)
    if model.gated and row.params_b and not row.n_experts:
        plain = _made(fields | {"gated": False})
        gaps = [abs(spec.num_parameters / 1e9 - row.params_b) for spec in (model, plain)]
        if gaps[1] < gaps[0] and gaps[0] > row.params_b / 20:
            return plain
    return model


def _widths(row: MeasurementRow) -> dict[str, object]:
    """What the row says of them."""
    said = {
        "name": row.model_name,
        "vocab_size": row.vocab,
        "hidden_size": row.hidden,
        "num_layers": row.layers,
        "num_heads": row.heads,
        "num_kv_heads": row.kv_heads or row.heads,
        "intermediate_size": row.ffn_hidden,
        "max_positions": row.seq_len,
    }
    return {name: value for name, value in said.items() if value is not None}


def _style(row: MeasurementRow) -> dict[str, object]:
    if _NEMOTRON.match(row.model_name):
        return _NEMOTRON_STYLE
    if _MPT.match(row.model_name):
        return _MPT_STYLE
    return _GPT_STYLE if _GPT.match(row.model_name) else {}


def _experts(row: MeasurementRow) -> dict[str, object]:
    """Experts of every layer, each as wide as the row's `ffn_hidden`."""
    if not row.n_experts:
        return {}
    if not row.top_k:
        raise UnpredictableRowError(f"n_experts is {row.n_experts}, but top_k is empty")
    assert row.ffn_hidden is not None
    return {"moe": MoeSpec(num_experts=row.n_experts, top_k=row.top_k, expert_size=row.ffn_hidden)}


def _made(fields: dict[str, object]) -> ModelSpec:
    try:
        return ModelSpec.model_validate(fields)
    except ValidationError as error:
        raise UnpredictableRowError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


@cache
def _known(name: str) -> ModelSpec | None:
    """The catalogue's model of that name, whatever its owner, its hyphens and dots, what stands in parentheses and what
    it was trained for afterwards."""
    own = re.sub(r"\(.*?\)", "", name).strip().rpartition("/")[2]
    for words in (own, _LATER.sub("", own)):
        for entry in names("models"):
            if _plain(entry) == _plain(words):
                fields = yaml.safe_load(read("models", entry))
                fields.pop("version", None)
                return ModelSpec.model_validate(fields)
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
