"""Monitoring of ranks by their launcher: their status, how long it has not changed, and whether the job hangs."""

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muster.launch.hang_diagnosis import RankSnapshot
from muster.launch.heartbeat import SHORT_PHASES, HeartbeatPage, RankStatus
from muster.launch.socket_health import find_connection_problem
from muster.schedule.action import Action

SNAPSHOT_INTERVAL_S = 0.25
"""Time between snapshots."""
SUSPENSION_S = 5.0
"""Time between snapshots above which the launcher itself was suspended, and so may its ranks have been."""


class RankMonitor:
    """Monitor of one rank: its process and its heartbeat page."""

    def __init__(self, rank: int, page: HeartbeatPage | None = None, pid: int = 0) -> None:
        self.rank = rank
        self.page = page or HeartbeatPage()
        self.pid = pid
        self._status: RankStatus | None = None
        self._since = self._last_snapshot = time.monotonic()
        self._stacks_requested = False

    def snapshot(self, hang_timeout_s: float | None) -> RankSnapshot:
        """Take a snapshot of the rank. One without progress for half of `hang_timeout_s` is asked for its stacks,
        once."""
        status = self.page.read()
        now = time.monotonic()
        self._since += max(0.0, now - self._last_snapshot - SUSPENSION_S)
        self._last_snapshot = now
        if status != self._status:
            self._status = status
            self._since = now
            self._stacks_requested = False
        stalled_s = now - self._since
        state = process_state(self.pid)
        if (
            status is not None
            and hang_timeout_s is not None
            and stalled_s > hang_timeout_s / 2
            and not self._stacks_requested
            and state not in "TtX"
        ):
            self._request_stacks()
        stacks = self.page.read_stacks() if self._stacks_requested else ""
        problem = find_connection_problem(self.pid) if self._stacks_requested else ""
        return RankSnapshot(self.rank, socket.gethostname(), self.pid, state, stalled_s, status, stacks, problem)

    def _request_stacks(self) -> None:
        self._stacks_requested = True
        with contextlib.suppress(ProcessLookupError):
            self.page.request_stacks(self.pid)


def snapshot_to_json(snapshot: RankSnapshot) -> dict[str, Any]:
    """Return a snapshot as plain data, which `snapshot_from_json` reads."""
    return asdict(snapshot)


def snapshot_from_json(row: dict[str, Any]) -> RankSnapshot:
    """Read a snapshot that another launcher has taken."""
    status = row["status"]
    if status is not None:
        device = status["device_action"]
        actions = {"action": Action(*status["action"]), "device_action": None if device is None else Action(*device)}
        status = RankStatus(**{**status, **actions})
    return RankSnapshot(**{**row, "status": status})


def process_state(pid: int) -> str:
    """Return the state letter of a process (see proc(5)); X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def is_hung(snapshots: Sequence[RankSnapshot], hang_timeout_s: float) -> bool:
    """Return whether no rank makes progress for `hang_timeout_s` although each should: the job hangs.

    Ranks in phases that may take long, such as saving, are given all the time they need, unless a process is stopped,
    for which the others may wait in any phase.
    """
    if not snapshots or any(seen.stalled_s <= hang_timeout_s for seen in snapshots):
        return False
    phases = [None if seen.status is None else seen.status.phase for seen in snapshots]
    return any(seen.state in "Tt" for seen in snapshots) or all(phase in SHORT_PHASES for phase in phases)
