"""Samples of cases: a few run in `make test`, all of them in `make soak`."""

import random
from collections.abc import Sequence
from typing import Any

import pytest


def quick_sample(cases: Sequence[Any], *kept: int) -> list[Any]:
    """Return the cases, all but those at the indices `kept` marked as soak tests."""
    rest = (pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases)
    return [case if index in kept else marked for index, (case, marked) in enumerate(zip(cases, rest, strict=True))]


def seeded_sample(cases: Sequence[Any], count: int) -> list[Any]:
    """Return `count` of the cases, the same ones each time, in their order."""
    chosen = sorted(random.Random(count).sample(range(len(cases)), count))
    return [cases[index] for index in chosen]
