"""The recoveries of a run without a restart, from its record, in words and numbers."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

from muster.report.approximation import approximation_from_json
from muster.report.run_files import RECOVERIES_FILE, read_metrics
from muster.spec.units import pluralize

LossCause = Literal["dead", "hung", "slow", "wrong results", "node lost"]
"""Cause of the loss of a rank: its process ended, its place was taken from it, or it is gone with its node."""
Row = Mapping[str, Any]
_MOST_TOLD = 5
"""Recoveries whose reasons a note tells."""


def loss_causes(row: Row) -> Mapping[int, LossCause]:
    """Return why each lost rank of a row was lost; rows of earlier versions say it in their sentence alone."""
    if "causes" in row:
        return dict(zip(row["ranks"], row["causes"], strict=True))
    former: tuple[tuple[str, LossCause], ...] = (
        ("the others to compute", "slow"),
        ("take its device out of service", "wrong results"),
    )
    cause: LossCause = "dead"
    for end, other in former:
        if row["ranks"] and row["reason"].endswith(end):
            cause = other
    return dict.fromkeys(cast(list[int], row["ranks"]), cause)


def recoveries_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the recoveries, returns of ranks and changes of the plan, each as its rows: ranks that are lost
    before a recovery has ended belong to it."""
    found: list[list[Row]] = [[row] for row in rows[:1]]
    for before, row in pairwise(rows):
        # An attempt begins with generation 0.
        is_same_attempt = row["generation"] > before["generation"]
        if before["ranks"] and row["ranks"] and before["recovered_s"] is None and is_same_attempt:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def recoveries_note(run_dir: Path) -> str | None:
    """Return a sentence about the losses and returns of ranks, and changes of the plan, that took no restart; None
    where there were none."""
    found = recoveries_of(read_metrics(run_dir / RECOVERIES_FILE))
    if not found:
        return None
    told = "; ".join(map(_describe, found[-_MOST_TOLD:]))
    losses = sum(bool(rows[0]["ranks"]) for rows in found)
    changes = sum(rows[0].get("changes_plan", False) for rows in found)
    returns = len(found) - losses - changes
    counts = [f"{losses} {'recovery' if losses == 1 else 'recoveries'}"] * bool(losses)
    counts += [f"{pluralize(returns, 'return')} of ranks"] * bool(returns)
    counts += [f"{pluralize(changes, 'change')} of the plan"] * bool(changes)
    last = f", the last {_MOST_TOLD}" if len(found) > _MOST_TOLD else ""
    return f"{' and '.join(counts)} without a restart{last}: {told}"


def _describe(rows: Sequence[Row]) -> str:
    last = rows[-1]
    took = "" if last["recovered_s"] is None else f" (next step finished after {last['recovered_s']:.1f} s)"
    about = [
        one for row in rows if (found := row.get("approximation")) for one in approximation_from_json(found).sentences
    ]
    reasons = " and ".join(row["reason"] for row in rows)
    return f"after step {last['step']}, when {reasons}{took}{''.join(f', {one}' for one in about)}"
