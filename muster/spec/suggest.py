"""Suggestions of the name that a mistyped one was meant to be."""

from collections.abc import Iterable
from difflib import get_close_matches


def closest_match(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the one of `known` that `word` was most likely meant to be; None where none is so alike (1: equal)."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=likeness)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error's sentence that names the closest of `known`; empty where none is close."""
    match = closest_match(word, known)
    return f"; did you mean '{match}'?" if match else ""
