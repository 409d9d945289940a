"""Former parts of plan names, and the notice that tells a former name's successor."""

import re
import sys

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


def report_rename(source: str, old: str, new: str) -> None:
    """Print once per process, on stderr, that something in `source` has a new name."""
    if (source, old) not in _REPORTED:
        _REPORTED.add((source, old))
        print(f"{source}: {old} is called {new} now", file=sys.stderr)


_REPORTED: set[tuple[str, str]] = set()
