"""Peers of a swarm, on the page of a run and in a line: what each of them did."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.report.html import Html, element
from muster.spec.units import pluralize

_MOST_NAMED = 8
"""Peers that the line names, the busiest first."""


@dataclass
class _Peer:
    """Sums of one peer over the steps of a run."""

    stages: list[int] = field(default_factory=list)
    steps: int = 0
    forwards: int = 0
    backwards: int = 0
    counted: int = 0


def _by_peer(rows: Sequence[Mapping[str, Any]]) -> dict[str, _Peer]:
    """Return the sums by name, of whom did most first."""
    found: dict[str, _Peer] = {}
    for row in rows:
        for one in row["peers"]:
            peer = found.setdefault(one["name"], _Peer())
            if one["stage"] not in peer.stages:
                peer.stages.append(one["stage"])
            peer.steps += 1
            peer.forwards += one["forwards"]
            peer.backwards += one["backwards"]
            peer.counted += one["counted"]
    return dict(sorted(found.items(), key=lambda item: -item[1].counted))


def draw_swarm(rows: Sequence[Mapping[str, Any]]) -> Html | None:
    """Return the table of a run's peers, by rows of swarm.jsonl; None without any."""
    if not rows:
        return None
    columns = ("peer", "stages", "steps", "forwards", "backwards", "micro-batches that counted")
    head = element("tr", *(element("th", word, scope="col") for word in columns))
    body = [
        element(
            "tr",
            element("th", name, scope="row"),
            element("td", ", ".join(map(str, one.stages))),
            *(element("td", f"{count:,}") for count in (one.steps, one.forwards, one.backwards, one.counted)),
        )
        for name, one in _by_peer(rows).items()
    ]
    return element("table", element("thead", head), element("tbody", *body))


def swarm_note(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence about the peers of a run; None without any."""
    if not rows:
        return None
    peers = _by_peer(rows)
    told = [
        f"{name} {one.counted:,} (stage {', '.join(map(str, one.stages))})"
        for name, one in list(peers.items())[:_MOST_NAMED]
    ]
    more = f" and {len(peers) - len(told)} others" if len(peers) > len(told) else ""
    retried = sum(row["retried"] for row in rows)
    return (
        f"micro-batches of {pluralize(len(peers), 'peer')}: {', '.join(told)}{more};"
        f" {pluralize(retried, 'pass')} sent again"
    )
