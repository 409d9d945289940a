"""Numbers as people write them: `15T` tokens, `70GB`, `2 processes`."""

import re
from collections.abc import Sequence

from muster.spec.errors import ConfigError

_FACTORS = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def parse_count(text: str, flag: str) -> float:
    """Parse `15T`, `300e9` or `70G`. Raises ConfigError, which names the flag."""
    number = text.strip()
    factor = 1.0
    if number and number[-1].upper() in _FACTORS:
        number, factor = number[:-1], _FACTORS[number[-1].upper()]
    try:
        value = float(number) * factor
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{flag}: expected a number above 0 such as 300B or 15T, got '{text}'")
    return value


def parse_bytes(text: str, flag: str) -> int:
    """Parse `70GB`, `512M`, `2GiB` or `900B`. Raises ConfigError, which names the flag."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?)B?|B)", text.strip().upper())
    size = 0
    if match is not None:
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))
    if size < 1:
        raise ConfigError(f"{flag}: expected a size such as 70GB or 2GiB, got '{text}'")
    return size


def numbered(thing: str, numbers: Sequence[int]) -> str:
    """Return things with their numbers: `rank 3`, `ranks 0, 2 and 5`."""
    if len(numbers) == 1:
        return f"{thing} {numbers[0]}"
    return f"{thing}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def pluralize(number: int, thing: str) -> str:
    """Return a count with its noun: `1 process`, `2 processes`."""
    plural = thing + ("es" if thing.endswith(("s", "ch")) else "s")
    return f"{number:,} {thing if number == 1 else plural}"


def alternatives(names: Sequence[str]) -> str:
    """Return names as a choice among them: `adamw, sgd or lion`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
