"""Which layers of a rank pay time for memory: an exact multiple-choice knapsack.

Galvatron (arXiv:2211.13878 §4.2) chooses per layer by a dynamic program over discretised memory. Here the states are
the choices that no other beats in both time and memory, so nothing is rounded and the answer is the best there is.
Layers of a stage are alike, so that it is enough to say of each stage how many go each way.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Option(NamedTuple):
    """One way to store and compute a part of the model."""

    label: Any
    """What the choice is made of."""
    time_s: float
    memory_bytes: float


class Choice(NamedTuple):
    """What was chosen for the parts."""

    time_s: float
    memory_bytes: float
    labels: tuple[Any, ...]
    """Of the options, part by part."""


def cheapest_choice(parts: Sequence[Sequence[Option]], capacity_bytes: float) -> Choice | None:
    """The choice of one option for each part that takes the least time within the capacity; None where none fits.

    Of choices that take the same time the one with less memory is taken, and of those the first in the order of the
    options.
    """
    front = [Choice(0.0, 0.0, ())]
    least_after = _least_memory_after(parts)
    for index, options in enumerate(parts):
        room = capacity_bytes - least_after[index + 1]
        longer = [
            Choice(
                choice.time_s + option.time_s, choice.memory_bytes + option.memory_bytes, (*choice.labels, option.label)
            )
            for choice in front
            for option in options
            if choice.memory_bytes + option.memory_bytes <= room
        ]
        front = _non_dominated(longer)
    return front[0] if front else None


def _least_memory_after(parts: Sequence[Sequence[Option]]) -> list[float]:
    """The least that parts `index` and later can hold."""
    least = [0.0]
    for options in reversed(parts):
        least.append(least[-1] + min(option.memory_bytes for option in options))
    return least[::-1]


def _non_dominated(choices: list[Choice]) -> list[Choice]:
    """By rising time and falling memory; the sort is stable, so the first of equals stays."""
    front: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: choice[:2]):
        if not front or choice.memory_bytes < front[-1].memory_bytes:
            front.append(choice)
    return front
