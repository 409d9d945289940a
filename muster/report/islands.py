"""Meetings of islands, on the page of a run and in a line."""

from collections.abc import Mapping, Sequence
from typing import Any

from muster.report.html import Html, element, join
from muster.spec.formatting import format_bytes, format_seconds
from muster.spec.units import pluralize

MAX_ROWS = 24
"""Most meetings in the table: the first and those up to the last."""


def draw_meetings(meetings: Sequence[Mapping[str, Any]]) -> Html | None:
    """Return the table of the meetings, by rows of islands.jsonl: when islands met and how far apart they were; None
    without any."""
    if not meetings:
        return None
    shown = [*meetings[:1], *meetings[1:][-(MAX_ROWS - 1) :]]
    columns = ("after step", "fragment", "distance from their mean", "change since", "losses", "sent", "waited", "took")
    head = element("tr", *(element("th", word, scope="col") for word in columns))
    body = [
        element(
            "tr",
            element("th", str(row["step"]), scope="row"),
            element("td", str(row["fragment"])),
            element("td", relative_length(row, "distance")),
            element("td", relative_length(row, "change")),
            element("td", ", ".join("–" if loss is None else f"{loss:.4f}" for loss in row["losses"])),
            element("td", format_bytes(row["sent_bytes"])),
            element("td", format_seconds(row["wait_s"])),
            element("td", format_seconds(row["transfer_s"])),
        )
        for row in shown
    ]
    left_out = len(meetings) - len(shown)
    more = f" {pluralize(left_out, 'meeting')} after the first one left out." if left_out else ""
    note = element(
        "p",
        "Distance: root mean square over the islands, as a share of the parameters' length; change: of the islands'"
        f" mean since they met before. Sent, waited and took: on rank 0.{more}",
    )
    return join(element("table", element("thead", head), element("tbody", *body)), note)


def relative_length(row: Mapping[str, Any], key: str) -> str:
    """Return a length of a meeting as a share of the parameters' own."""
    value, norm = row[key], row["norm"]
    return "–" if value is None or not norm else f"{value / norm:.2%}"


def meetings_note(meetings: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence about the meetings of a run; None without any."""
    if not meetings:
        return None
    first, last = meetings[0], meetings[-1]
    waited_s = sum(row["wait_s"] for row in meetings)
    paths = ""
    if samples := first.get("path_samples"):
        shares, now = (", ".join(f"{one / sum(of):.0%}" for one in of) for of in (samples, last["path_samples"]))
        paths = f"; they train {pluralize(len(samples), 'path')}, to which the router sends {shares} of the samples"
        paths += "" if now == shares else f" at first, {now} at last"
    ranks = [sum(row["ranks"].values()) / len(row["ranks"]) for row in (first, last) if row.get("ranks")]
    fell = f"; the mean rank of factors was {ranks[0]:.1f} at first, {ranks[1]:.1f} at last" if ranks else ""
    return (
        f"islands met {pluralize(len(meetings), 'time')}, from step {first['step']} to {last['step']}: they were"
        f" {relative_length(first, 'distance')} of the parameters' length apart from their mean at first,"
        f" {relative_length(last, 'distance')} at last; rank 0 waited {format_seconds(waited_s)} for them in all and"
        f" sent {format_bytes(sum(row['sent_bytes'] for row in meetings))}{paths}{fell}"
    )
