"""An exact multiple-choice knapsack: the layers of a rank that trade time for memory.

Galvatron (arXiv:2211.13878 §4.2) chooses for each layer by a dynamic program over discretised memory. Here the states
are the choices that no other beats in both time and memory, so that nothing is rounded and the answer is exact. Layers
of a stage are alike, so that only the number of layers with each policy counts.

Example: parts with options (time, memory) {(0, 4), (1, 2)} and {(0, 3), (2, 1)} and a capacity of 5. Of the four
choices (0, 7), (2, 5), (1, 5) and (3, 3), three fit, and (1, 5) takes the least time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Option(NamedTuple):
    """One way to store and compute a part of the model."""

    label: Any
    """Identifier of the option."""
    time_s: float
    memory_bytes: float


class Choice(NamedTuple):
    """A choice of one option for each part."""

    time_s: float
    memory_bytes: float
    labels: tuple[Any, ...]
    """Labels of the chosen options, by part."""


def cheapest_choice(parts: Sequence[Sequence[Option]], capacity_bytes: float) -> Choice | None:
    """Return the choice that takes the least time within the capacity; None where none fits.

    Of choices with equal time the one with less memory is taken, and of those the first in the order of the options.
    """
    front = [Choice(0.0, 0.0, ())]
    least_after = _least_memory_after(parts)
    for index, options in enumerate(parts):
        available = capacity_bytes - least_after[index + 1]
        longer = [
            Choice(
                choice.time_s + option.time_s, choice.memory_bytes + option.memory_bytes, (*choice.labels, option.label)
            )
            for choice in front
            for option in options
            if choice.memory_bytes + option.memory_bytes <= available
        ]
        front = _non_dominated(longer)
    return front[0] if front else None


def _least_memory_after(parts: Sequence[Sequence[Option]]) -> list[float]:
    """Return the least memory of parts `index` and later."""
    least = [0.0]
    for options in reversed(parts):
        least.append(least[-1] + min(option.memory_bytes for option in options))
    return least[::-1]


def _non_dominated(choices: list[Choice]) -> list[Choice]:
    """Return the choices that no other beats, by rising time and falling memory; the first of equals stays."""
    front: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: choice[:2]):
        if not front or choice.memory_bytes < front[-1].memory_bytes:
            front.append(choice)
    return front
