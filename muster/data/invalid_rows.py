"""Invalid rows of a data set: stop at the first, or skip and count them."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from muster.spec.errors import ConfigError

InvalidRowPolicy = Literal["stop", "skip"]
MAX_EXAMPLES = 20
"""Number of messages that are kept for the summary."""


class InvalidRow(Exception):
    """A row that can't be used. `reason` is a word for the statistics, the message a clause for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class InvalidRowLog:
    """Log of invalid rows: under `stop` the first one raises, under `skip` they are counted."""

    policy: InvalidRowPolicy = "stop"
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    """Messages about the first invalid rows."""

    def record(self, where: str, row: InvalidRow) -> None:
        """Count an invalid row. `where` is its file and line, or file and row. Raises ConfigError under `stop`."""
        if self.policy == "stop":
            raise ConfigError(f"{where}: {row}; mend it, or leave such rows out with data.on_invalid_row skip")
        self.counts[row.reason] += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{where}: {row}")
