"""Suggestions of the name that a mistyped one was meant to be."""

from collections.abc import Iterable
from difflib import SequenceMatcher


def closest_match(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the one of `known` that `word` was most likely meant to be, the first of several that are as close; None
    where none is so alike (1: equal)."""

    def likeness_of(name: str) -> float:
        return SequenceMatcher(None, name, word).ratio()

    closest = max(known, key=likeness_of, default=None)
    return closest if closest is not None and likeness_of(closest) >= likeness else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error's sentence that names the closest of `known`; empty where none is close."""
    match = closest_match(word, known)
    return f"; did you mean '{match}'?" if match else ""
