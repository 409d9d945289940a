"""Rows that can't be used, and what happens then."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from muster.spec.errors import ConfigError

Policy = Literal["stop", "skip"]
MOST_EXAMPLES = 20


class BadRow(Exception):
    """A row can't be used; `kind` is a word for the statistics, the message a clause."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class BadRows:
    """What happens to bad rows: the first ends everything (`stop`), or they are passed over and counted (`skip`)."""

    policy: Policy = "stop"
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    """The first sentences."""

    def add(self, place: str, row: BadRow) -> None:
        """`place`: file and line, or file and row. Raises ConfigError under `stop`."""
        if self.policy == "stop":
            raise ConfigError(f"{place}: {row}; mend it, or leave such rows out with data.bad_rows skip")
        self.counts[row.kind] += 1
        if len(self.examples) < MOST_EXAMPLES:
            self.examples.append(f"{place}: {row}")
