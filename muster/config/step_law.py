"""The Step Law: a learning rate and a batch size for a model and an amount of data.

H. Li et al., Predictable Scale, Part I: Step Law (arXiv:2503.04715): a fit to 3,700 dense and mixture-of-experts models
trained with AdamW and a cosine decay to a fixed final rate of 1e-5. The optimum is broad: half or twice the batch costs
little.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from muster.spec.model import ModelSpec, parameter_shapes

STEP_LAW_SOURCE = "Step Law, arXiv:2503.04715"
PARAMS_RANGE = (60e6, 1e9)
TOKENS_RANGE = (2e9, 100e9)
"""Approximate range of the fit; beyond it the law is an extrapolation."""

_BATCH_FACTOR = 0.58
_BATCH_POWER = 0.571


class StepLaw(NamedTuple):
    """Optimum of the law."""

    lr: float
    """Peak learning rate, for AdamW."""
    batch_tokens: float
    """Tokens per optimizer step."""


def step_law(num_params: float, num_tokens: float) -> StepLaw:
    """Return the optimum for `num_params` parameters outside embedding and head, and `num_tokens` tokens in all."""
    lr = 1.79 * num_params**-0.713 * num_tokens**0.307
    return StepLaw(lr, _BATCH_FACTOR * num_tokens**_BATCH_POWER)


def batch_tokens_for_steps(steps: int) -> float:
    """Return the optimal tokens per step where the steps are given: the solution B of law(steps · B) = B."""
    return (_BATCH_FACTOR * steps**_BATCH_POWER) ** (1 / (1 - _BATCH_POWER))


def non_embedding_parameters(spec: ModelSpec) -> int:
    """Return the number of parameters outside embedding and head: the law's N."""
    return sum(
        math.prod(shape) for name, shape in parameter_shapes(spec) if name not in ("embed.weight", "head.weight")
    )


def step_law_values(values: Mapping[str, Any]) -> dict[str, tuple[float | int, str]]:
    """Return the values that a run file leaves out of `train.global_batch_size` and `optim.lr`, by dotted key: value
    and origin.

    `values` are the file's values by dotted key. The batch is rounded to a power of two of sequences, which most plans
    can divide. A learning rate is derived for AdamW, and for Muon with updates as large as AdamW's. Nothing is derived
    where a required value is missing or wrong: validation names it.
    """
    model = _model(values)
    steps = _count(values, "train.steps")
    seq_len = _count(values, "train.seq_len")
    if model is None or steps is None or seq_len is None:
        return {}
    derived: dict[str, tuple[float | int, str]] = {}
    batch = _count(values, "train.global_batch_size")
    if "train.global_batch_size" not in values:
        ideal = batch_tokens_for_steps(steps)
        batch = 2 ** max(0, round(math.log2(ideal / seq_len)))
        origin = (
            f"{STEP_LAW_SOURCE}: {_short(ideal)} tokens per step for {_short(steps)}"
            f" steps{_warning(tokens=steps * ideal)}"
        )
        derived["train.global_batch_size"] = (batch, origin)
    if "optim.lr" not in values and batch is not None and _like_adamw(values):
        num_params = non_embedding_parameters(model)
        num_tokens = steps * batch * seq_len
        origin = (
            f"{STEP_LAW_SOURCE}: for {_short(num_params)} parameters outside embedding and head and"
            f" {_short(num_tokens)} tokens"
            f"{_warning(num_params, num_tokens)}"
        )
        derived["optim.lr"] = (float(f"{step_law(num_params, num_tokens).lr:.3g}"), origin)
    return derived


def derived_value_line(path: str, value: float, origin: str) -> str:
    """Return one line for people: `optim.lr 0.00163, derived (Step Law, …)`."""
    return f"{path} {value:g}, derived ({origin})"


def _model(values: Mapping[str, Any]) -> ModelSpec | None:
    fields = {path.removeprefix("model."): value for path, value in values.items() if path.startswith("model.")}
    try:
        return ModelSpec.model_validate(fields)
    except ValidationError:
        return None


def _count(values: Mapping[str, Any], path: str) -> int | None:
    value = values.get(path)
    return value if isinstance(value, int) and value > 0 else None


def _like_adamw(values: Mapping[str, Any]) -> bool:
    name = values.get("optim.name", "adamw")
    scale = values.get("optim.muon_scale", "match_rms")
    return name == "adamw" or (name == "muon" and scale == "match_rms")


def _warning(params: float | None = None, tokens: float | None = None) -> str:
    """Return the end of a sentence about values outside the range of the fit."""
    outside = [
        f"{_short(low)} to {_short(high)} {unit}"
        for value, (low, high), unit in (
            (params, PARAMS_RANGE, "parameters"),
            (tokens, TOKENS_RANGE, "tokens"),
        )
        if value is not None and not low <= value <= high
    ]
    return f"; an extrapolation, fitted to {' and '.join(outside)}" if outside else ""


def _short(number: float) -> str:
    """Return three digits: `1.63M`."""
    number = float(f"{number:.3g}")
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
