"""Model from the widths of a row.

Rules, in this order:

1. A name in the catalogue (`LLAMA3-70B`, `Qwen/Qwen3-30B-A3B`) fills what the row leaves empty: widths, norms, biases,
head width, details of experts. A width that the row states wins.

2. Otherwise the name tells the family. GPT models (GPT, GPT-2, GPT-3, OPT, BLOOM, Megatron) have LayerNorm, learned
positions, GELU, biases and a tied head; MPT the same without biases; Nemotron LayerNorm, rotary positions, squared ReLU
and no biases. All others are Llama-style.

3. A Llama-style model has no gate if its `params_b` is met better without one, by more than a twentieth of it.

4. A GPT model whose inner width isn't stated has one of four times its width. An unstated vocabulary is a choice:
GPT-2's, padded, for a GPT model, and for others Llama's of 32,000 or of 128,256.
"""

import re
from dataclasses import replace
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
"""Names of GPT-style models."""
_MPT = re.compile(r"^mpt", re.IGNORECASE)
_NEMOTRON = re.compile(r"^nemotron", re.IGNORECASE)

_PUBLISHER_AFFIXES = re.compile(r"^meta-|[-_ ](hf|base|instruct|chat|v\d(\.\d)?)\b", re.IGNORECASE)
"""Prefixes and suffixes that publishers add to the name of a model's shape."""

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


_GPT_VOCABULARY = 51_200
"""GPT-2's vocabulary of 50,257, padded to a multiple of 1,024, as Megatron-LM does for 8 tensor-parallel ranks."""
_VOCABULARIES = (32_000, 128_256)
"""Vocabularies of Llama 2 and Llama 3."""


def models_from_row(row: MeasurementRow) -> list[ModelSpec]:
    """Return the models that a row may mean, the likeliest first: several where it doesn't state the vocabulary.

    Raises UnpredictableRowError.
    """
    if row.seq_len is None:
        raise UnpredictableRowError("seq_len is empty: expected the tokens of a sequence")
    if row.vocab is not None or _known_model(row) is not None:
        return [_model(row)]
    sizes = (_GPT_VOCABULARY,) if _GPT.match(row.model_name) else _VOCABULARIES
    return [_model(replace(row, vocab=size)) for size in sizes]


def _known_model(row: MeasurementRow) -> ModelSpec | None:
    """Return the catalogue's model that the row names, unless its widths are another's."""
    known = _catalogue_model(row.model_name)
    if known is None or row.hidden not in (None, known.hidden_size) or row.heads not in (None, known.num_heads):
        return None
    return known


def _model(row: MeasurementRow) -> ModelSpec:
    """Return the model of a row that states the vocabulary or names a model of the catalogue."""
    known = _known_model(row)
    if known is not None:
        widths = _widths(row)
        if known.moe is not None:
            widths.pop("intermediate_size", None)  # a table's is often that of an expert
        return _validated(known.model_dump() | widths)
    if row.hidden and row.ffn_hidden is None:
        row = replace(row, ffn_hidden=4 * row.hidden if _GPT.match(row.model_name) else row.expert_hidden)
    for column in ("hidden", "layers", "heads", "ffn_hidden"):
        if getattr(row, column) is None:
            in_catalogue = _catalogue_model(row.model_name) is not None
            hint = did_you_mean(row.model_name.lower(), names("models"))
            unknown = "" if in_catalogue else f", and the catalogue has no model '{row.model_name}'{hint}"
            raise UnpredictableRowError(f"{column} is empty{unknown}")
    fields = _widths(row) | _style(row) | _experts(row)
    model = _validated(fields)
    if model.gated and row.params_b and not row.n_experts:
        plain = _validated(fields | {"gated": False})
        gaps = [abs(spec.num_parameters / 1e9 - row.params_b) for spec in (model, plain)]
        if gaps[1] < gaps[0] and gaps[0] > row.params_b / 20:
            return plain
    return model


def _widths(row: MeasurementRow) -> dict[str, object]:
    """Return the widths that the row states."""
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
    """Return the fields that the family's habits decide."""
    if _NEMOTRON.match(row.model_name):
        return _NEMOTRON_STYLE
    if _MPT.match(row.model_name):
        return _MPT_STYLE
    return _GPT_STYLE if _GPT.match(row.model_name) else {}


def _experts(row: MeasurementRow) -> dict[str, object]:
    """Return experts for every layer, each as wide as the row's `ffn_hidden` says."""
    if not row.n_experts:
        return {}
    if not row.top_k:
        raise UnpredictableRowError(
            f"n_experts is {row.n_experts}, but top_k is empty: expected the experts of a token"
        )
    width = row.expert_hidden or row.ffn_hidden
    assert width is not None
    return {"moe": MoeSpec(num_experts=row.n_experts, top_k=row.top_k, expert_size=width)}


def _validated(fields: dict[str, object]) -> ModelSpec:
    """Validate a model. Raises UnpredictableRowError with the first problem."""
    try:
        return ModelSpec.model_validate(fields)
    except ValidationError as error:
        raise UnpredictableRowError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


@cache
def _catalogue_model(name: str) -> ModelSpec | None:
    """Return the catalogue's model of that name, regardless of publisher, hyphens, dots, parentheses and suffixes of
    fine-tuning."""
    own = re.sub(r"\(.*?\)", "", name).strip().rpartition("/")[2]
    own = re.sub(r"(llama)\W*3\W+(?=405b)", r"\1-3.1-", own, flags=re.IGNORECASE)  # of 3.1 alone, often called 3
    for words in (own, _PUBLISHER_AFFIXES.sub("", own)):
        for entry in names("models"):
            if _alphanumeric(entry) == _alphanumeric(words):
                fields = yaml.safe_load(read("models", entry))
                fields.pop("version", None)
                return ModelSpec.model_validate(fields)
    return None


def _alphanumeric(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
