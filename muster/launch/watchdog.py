"""Watchdog for ranks that another launcher, such as torchrun, has started: one process on each node, free of torch.

    python -m muster.launch.watchdog CONFIG

CONFIG is a `WatchdogConfig` as JSON. The watchdog sees what Muster's own launcher would see: which rank holds up the
others, and which died without a word. It ends with the ranks of its node.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from muster.config.attempt_files import attempt_id
from muster.launch.hang_diagnosis import RankFault, RankSnapshot, describe_activity, diagnose, format_snapshots
from muster.launch.heartbeat import HeartbeatPage
from muster.launch.nodes.connection import Message
from muster.launch.nodes.launcher_group import JobEnded, LauncherGroup, describe_disconnect
from muster.launch.nodes.node_supervisor import RemoteNodes, send_snapshots
from muster.launch.nodes.rendezvous import rendezvous
from muster.launch.nodes.rendezvous_config import RendezvousConfig
from muster.launch.rank_errors import hang_path, read_rank_error, write_exit_file
from muster.launch.rank_monitor import SNAPSHOT_INTERVAL_S, RankMonitor, is_hung
from muster.spec.errors import MusterError

_RENDEZVOUS_TIMEOUT_S = 120.0
_FINAL_REPORTS_TIMEOUT_S = 3.0
"""Longest wait of node 0, after its own ranks have ended, for reports of the other nodes."""
_STOPPABLE_PHASES = ("profile", "load", "data", "run", "save", "validate")
"""Phases in which a rank that is asked to stop reports it before it ends: one that ended without a word was killed."""


@dataclass(frozen=True)
class WatchdogConfig:
    """Ranks to watch on one node."""

    run_dir: str
    hang_timeout_s: float
    world_size: int
    node: int
    num_nodes: int
    host: str
    """Node 0's name or address, as all nodes call it."""
    port: int
    """Port of node 0's watchdog."""
    ranks: list[tuple[int, int, int]]
    """Local ranks: (rank, process id, file descriptor of its heartbeat page)."""
    attempt: int
    """`attempt_id` of the run directory when the ranks started."""


class _WatchedRank:
    """A rank that another program has started."""

    def __init__(self, rank: int, process: int, fd: int) -> None:
        self.rank, self._handle = rank, os.pidfd_open(process)
        self.monitor = RankMonitor(rank, HeartbeatPage.of_process(process, fd), process)
        self.last_snapshot: RankSnapshot | None = None

    @property
    def alive(self) -> bool:
        return not select.select([self._handle], [], [], 0)[0]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class Watchdog:
    """Watches one node's ranks; node 0's watchdog decides for all."""

    def __init__(self, config: WatchdogConfig, ranks: Sequence[_WatchedRank], group: LauncherGroup | None) -> None:
        self._config, self._ranks, self._group = config, ranks, group
        self._run_dir, self._is_coordinator = Path(config.run_dir), group is None or group.is_coordinator
        self._remote_nodes = RemoteNodes()
        self._running_nodes = set(range(1, config.num_nodes)) if self._is_coordinator else set[int]()
        """Other nodes whose ranks still run."""
        self._fault: RankFault | None = None
        self._is_hung, self._kill_ranks = False, False
        self._ended_ranks: set[int] = set()
        self._failed_at: float | None = None
        """Time at which a rank was first known to have ended with an error."""

    def run(self) -> None:
        """Watch until the ranks here have ended, then report."""
        while alive := [rank for rank in self._ranks if rank.alive]:
            self._receive()
            self._check_for_deaths()
            sightings = [rank.monitor.snapshot(self._config.hang_timeout_s) for rank in alive]
            for rank, seen in zip(alive, sightings, strict=True):
                rank.last_snapshot = seen
            self._check_for_hang(sightings)
            if self._kill_ranks:
                for rank in alive:
                    rank.kill()
            time.sleep(SNAPSHOT_INTERVAL_S)
        self._check_for_deaths()
        if self._group is not None and not self._is_coordinator:
            self._group.send("ended", failed=any(self._has_reported(rank) for rank, _, _ in self._config.ranks))
        limit = time.monotonic() + _FINAL_REPORTS_TIMEOUT_S
        while self._running_nodes and time.monotonic() < limit:
            self._receive()
            time.sleep(SNAPSHOT_INTERVAL_S / 5)
        self._write_exit_status()

    def _check_for_hang(self, sightings: list[RankSnapshot]) -> None:
        if not self._is_coordinator:
            assert self._group is not None
            send_snapshots(self._group, sightings)
            return
        if (
            not self._kill_ranks
            and self._failed_at is not None
            and time.monotonic() > self._failed_at + self._config.hang_timeout_s
        ):
            # No launcher did, and a rank that waits for one that never joined never ends by itself.
            self._kill_all_nodes()
        others = self._remote_nodes.snapshots(self._running_nodes)
        if (
            self._kill_ranks
            or others is None
            or not is_hung(everyone := sightings + others, self._config.hang_timeout_s)
        ):
            return
        self._fault, self._is_hung = diagnose(everyone), True
        with contextlib.suppress(OSError):
            hang_path(self._run_dir).write_text(format_snapshots(everyone))
        self._kill_all_nodes()

    def _kill_all_nodes(self) -> None:
        self._kill_ranks = True
        if self._group is not None:
            self._group.send("kill")

    def _has_reported(self, rank: int) -> bool:
        return read_rank_error(self._run_dir, rank) is not None

    def _note_failure(self) -> None:
        self._failed_at = self._failed_at or time.monotonic()

    def _check_for_deaths(self) -> None:
        for rank in self._ranks:
            if rank.rank in self._ended_ranks or rank.alive:
                continue
            self._ended_ranks.add(rank.rank)
            if self._has_reported(rank.rank):
                self._note_failure()
                continue
            place = rank.monitor.page.read()  # its last word, now that it can't say another
            if self._kill_ranks or rank.last_snapshot is None or place is None or place.phase not in _STOPPABLE_PHASES:
                continue
            how = (
                f"ended without an error, as if killed, while it"
                f" {describe_activity(replace(rank.last_snapshot, status=place))}"
            )
            self._record_fault(RankFault(rank.rank, socket.gethostname(), how))

    def _record_fault(self, finding: RankFault) -> None:
        self._note_failure()
        if not self._is_coordinator:
            assert self._group is not None
            self._group.send("dead", **asdict(finding))
        elif self._fault is None:
            self._fault = finding

    def _receive(self) -> None:
        for node, message in self._group.receive() if self._group else ():
            self._handle(node, message)

    def _handle(self, node: int, message: Message) -> None:
        assert self._group is not None
        match message["kind"]:
            case "snapshots":
                self._remote_nodes.receive(node, message)
            case "kill":
                self._kill_ranks = True
            case "dead":
                self._record_fault(RankFault(message["rank"], message["host"], message["sentence"]))
            case "ended":
                self._running_nodes.discard(node)
                if message["failed"]:
                    self._note_failure()
            case "gone":
                self._group.connections.pop(node, None)
                self._kill_ranks |= "silent_s" in message  # nobody else ends a job whose network is cut
                if node in self._running_nodes:
                    self._running_nodes.discard(node)
                    member, per_node = self._group.nodes[node], self._config.world_size // self._config.num_nodes
                    self._record_fault(
                        RankFault(
                            node * per_node, member.host, f"is gone with {member}: {describe_disconnect(message)}"
                        )
                    )

    def _write_exit_status(self) -> None:
        """Write exit.json when no rank has given a better reason, or when nobody else has written a rank's reason."""
        errors = [read_rank_error(self._run_dir, rank) for rank in range(self._config.world_size)]
        cause = min(
            (error for error in errors if error is not None),
            key=lambda error: (not error.primary, error.time),
            default=None,
        )
        if not self._is_coordinator or attempt_id(self._run_dir) != self._config.attempt:
            return  # a launcher that starts ranks again may have done so by now: their end is another's to tell
        if self._fault is not None and (self._is_hung or cause is None or not cause.primary):
            self._report(self._fault.rank, self._fault.host, f" {self._fault.sentence}", 1)
        elif cause is not None and not (self._run_dir / "exit.json").exists():
            self._report(cause.rank, cause.host, f": {cause.sentence}", cause.exit_code)

    def _report(self, rank: int, host: str, what: str, code: int) -> None:
        reason = f"rank {rank} on {host}{what}"
        print(f"error: {reason}", file=sys.stderr, flush=True)
        write_exit_file(self._run_dir, code, reason, rank, host)


def main() -> None:
    """Watch the ranks of the configuration on the command line."""
    job = WatchdogConfig(**json.loads(sys.argv[1]))
    ranks = []
    try:
        for row in job.ranks:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended already
                ranks.append(_WatchedRank(*row))
    except OSError as error:
        print(f"hangs can't be detected: can't open the heartbeats of this node's ranks ({error.strerror})", flush=True)
        return
    if job.num_nodes == 1:
        Watchdog(job, ranks, None).run()
        return
    request = RendezvousConfig(job.num_nodes, job.node, job.host, job.port, timeout_s=_RENDEZVOUS_TIMEOUT_S)
    try:
        with contextlib.redirect_stdout(open(os.devnull, "w")), rendezvous(request, {"job": "watch"}) as group:
            Watchdog(job, ranks, group).run()
    except (MusterError, JobEnded) as problem:
        print(f"hangs can't be detected: {problem}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
