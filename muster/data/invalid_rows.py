"""Rows that can't be used, and what happens then."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from muster.spec.errors import ConfigError

InvalidRowPolicy = Literal["stop", "skip"]
MAX_EXAMPLES = 20


class InvalidRow(Exception):
    """A row can't be used; `kind` is a word for the statistics, the message a clause."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class InvalidRowLog:
    """What happens to bad rows: the first ends everything (`stop`), or they are passed over and counted (`skip`)."""

    policy: InvalidRowPolicy = "stop"
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    """The first sentences."""

    def record(self, where: str, row: InvalidRow) -> None:
        """`place`: file and line, or file and row. Raises ConfigError under `stop`."""
        if self.policy == "stop":
            raise ConfigError(f"{where}: {row}; mend it, or leave such rows out with data.on_invalid_row skip")
        self.counts[row.reason] += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{where}: {row}")
