"""Former parts of plan names, and the notice that tells a former name's successor."""

import re
import sys
from collections.abc import Iterable

PLAN_PARTS = {"rsel": "relem", "rattn": "rcore", "ralt": "rmm2", "share": "uneven", "keep": "inflight"}
"""Former part of a plan's short name, or its letters before a number → today's."""


def current_plan_part(part: str) -> str:
    """Return today's spelling of one part of a plan's short name: `rsel` → `relem`, `share3.1` → `uneven3.1`."""
    letters = re.match(r"[a-z]*", part)
    head = letters[0] if letters else ""
    tail = part[len(head) :]
    if head not in PLAN_PARTS or (head[0] != "r") != bool(tail):
        return part
    return PLAN_PARTS[head] + tail


def report_renames(source: str, renames: Iterable[tuple[str, str]]) -> None:
    """Print on stderr, in one line and once per process, the pairs (former name, today's) found in `source`; today's is
    empty for a switch that is the default."""
    unreported = [(old, new) for old, new in renames if (source, old) not in _REPORTED]
    _REPORTED.update((source, old) for old, _ in unreported)
    if unreported:
        said = (f"{old} is called {new} now" if new else f"{old} is the default now" for old, new in unreported)
        print(f"{source}: {'; '.join(said)}", file=sys.stderr)


_REPORTED: set[tuple[str, str]] = set()
"""Pairs (source, former name) that have been reported."""
