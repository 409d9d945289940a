"""Result of one check of `muster doctor`."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: a sentence, which for a problem also says what to do."""

    check: str
    level: Level
    sentence: str


def ok(check: str, sentence: str) -> CheckResult:
    """Return the result of a check that found nothing wrong."""
    return CheckResult(check, "ok", sentence)


def note(check: str, sentence: str) -> CheckResult:
    """Return the result of a check that found something to know."""
    return CheckResult(check, "note", sentence)


def problem(check: str, sentence: str) -> CheckResult:
    """Return the result of a check that found something to mend."""
    return CheckResult(check, "problem", sentence)
