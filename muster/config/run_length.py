"""The length of a run: steps, tokens or epochs are given, and become steps."""

import math
from collections.abc import Mapping
from typing import Any

from muster.spec.errors import ConfigError


def steps_from_tokens(values: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the steps that `train.tokens` stands for, and their origin; None where it isn't given.

    `values` are a run file's values by dotted key. Raises ConfigError where they contradict each other or are too few.
    """
    given = {key: values.get(f"train.{key}") for key in ("steps", "tokens", "epochs")}
    if given["tokens"] is not None and given["epochs"] is not None:
        raise _both("tokens", given["tokens"], "epochs", given["epochs"])
    if given["epochs"] is not None and given["steps"] is None:
        missing = [key for key in ("train.global_batch_size", "optim.lr") if values.get(key) is None]
        if missing:
            raise ConfigError(
                f"train.epochs: {' and '.join(missing)} can't be derived from it, since its number of steps is known"
                " only once the data are there; give a value, or train.steps or train.tokens instead of epochs"
            )
    if given["tokens"] is None:
        return None
    for key in ("train.tokens", *_STEP_KEYS):
        _require_count(key, values.get(key))
    steps, origin = _steps_of_tokens(given["tokens"], values)
    if given["steps"] not in (None, steps):
        raise _both("steps", given["steps"], "tokens", f"{given['tokens']} ({steps} steps)")
    return steps, origin


def steps_from_epochs(epochs: float, num_samples: int, batch: int, given_steps: int | None) -> tuple[int, str]:
    """Return the steps of `epochs` passes over so many training samples, and their origin.

    The last step may reach into the next epoch. Raises ConfigError where `given_steps`, the steps given in addition,
    are others.
    """
    steps = max(1, math.ceil(round(epochs * num_samples / batch, 9)))
    if given_steps not in (None, steps):
        raise _both("steps", given_steps, "epochs", f"{epochs:g} ({steps} steps)")
    return steps, f"train.epochs {epochs:g} of {num_samples} samples, {batch} in each step"


_STEP_KEYS = ("train.global_batch_size", "train.seq_len")
"""Keys of the tokens of a step."""


def _require_count(key: str, value: object) -> None:
    """Raise ConfigError for a value that is given and is no count."""
    if value is not None and not (isinstance(value, int) and value > 0):
        raise ConfigError(f"{key}: expected a whole number >= 1, got {value!r}")


def _steps_of_tokens(tokens: int, values: Mapping[str, Any]) -> tuple[int, str]:
    batch, seq_len = map(values.get, _STEP_KEYS)
    if batch is None or seq_len is None:
        raise ConfigError(
            "train.tokens: its number of steps follows from train.global_batch_size and train.seq_len; give both, or"
            " train.steps"
        )
    return -(-tokens // (batch * seq_len)), f"train.tokens {tokens} / ({batch} sequences of {seq_len} tokens)"


def _both(first: str, value: object, other: str, other_value: object) -> ConfigError:
    return ConfigError(f"train.{first} {value} and train.{other} {other_value} are given, expected one of them")
