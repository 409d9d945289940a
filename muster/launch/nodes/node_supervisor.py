"""One node's part of a job on several nodes: its launcher supervises its own ranks and hears of the others'."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from muster.launch.exit_status import ExitStatus, RankExit, make_observed_error, rank_exit_from_json
from muster.launch.hang_diagnosis import RankSnapshot
from muster.launch.nodes.connection import Message
from muster.launch.nodes.launcher_group import LauncherGroup, describe_disconnect
from muster.launch.rank_monitor import snapshot_from_json, snapshot_to_json
from muster.launch.supervisor import RankSupervisor

_SNAPSHOT_MAX_AGE_S = 3.0
"""Age above which snapshots of another node's ranks are out of date."""


class RemoteNodes:
    """Ranks of the other nodes, as node 0 has heard of them."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[float, list[RankSnapshot]]] = {}

    def receive(self, node: int, message: Message) -> None:
        """Take a message of kind `snapshots`."""
        self._heard[node] = time.monotonic(), [snapshot_from_json(row) for row in message["rows"]]

    def snapshots(self, nodes: Iterable[int]) -> list[RankSnapshot] | None:
        """Return snapshots of all ranks of these nodes; None where a node has sent none of late."""
        found: list[RankSnapshot] = []
        for node in nodes:
            at, rows = self._heard.get(node, (0.0, []))
            if time.monotonic() - at > _SNAPSHOT_MAX_AGE_S:
                return None
            found += rows
        return found


def send_snapshots(group: LauncherGroup, snapshots: Sequence[RankSnapshot]) -> None:
    """Send node 0 snapshots of the ranks here."""
    group.send("snapshots", rows=[snapshot_to_json(snapshot) for snapshot in snapshots])


class NodeSupervisor(RankSupervisor):
    """Supervises the ranks here and ends them with those elsewhere. Node 0 collects how all ended and tells all."""

    def __init__(
        self, run_dir: Path, grace_s: float, hang_timeout_s: float | None, group: LauncherGroup, num_ranks: int
    ) -> None:
        super().__init__(run_dir, grace_s, hang_timeout_s)
        self._group = group
        self._num_ranks = num_ranks
        self._remote_nodes = RemoteNodes()
        self._node_exits: dict[int, list[RankExit]] = {}
        """Ends of the ranks, by node, of nodes whose ranks have all ended or that are gone."""
        self._failed_elsewhere = self._killed_elsewhere = False
        self._sent: set[str] = set()
        self._final_status: ExitStatus | None = None

    def poll(self) -> bool:
        """Poll as `RankSupervisor.poll`, and exchange messages with the other nodes. True until the ranks of all have
        ended."""
        messages = self._group.receive()
        while messages and self._final_status is None:
            self._handle(*messages.pop(0))
        self._group.put_back(messages)  # messages after the job's end belong to whatever follows it
        if self._failed_elsewhere:
            self.start_grace_period()
        if self._killed_elsewhere:
            self.kill()
        running = super().poll()
        self._send_updates(running)
        if running:
            return True
        if self._group.is_coordinator:
            return len(self._node_exits) < self._group.num_nodes - 1
        return self._final_status is None and 0 not in self._node_exits

    def _handle(self, node: int, message: Message) -> None:
        match message["kind"]:
            case "snapshots":
                self._remote_nodes.receive(node, message)
            case "stop":
                self.stop_requested = True
            case "failing":
                self._failed_elsewhere = True
            case "kill":
                self._killed_elsewhere = True
                self.kill_requested |= message["requested"]
            case "ended":
                offset_s = self._group.clock_offset_s.get(node, 0.0)
                self._node_exits.setdefault(node, [rank_exit_from_json(row, offset_s) for row in message["ends"]])
            case "over":
                self._final_status = ExitStatus(**{key: value for key, value in message.items() if key != "kind"})
                self._failed_elsewhere = True
            case "failed":  # its ranks could not be started
                self._handle_lost_node(node, message["reason"])
            case "gone":
                self._handle_lost_node(node, f"is gone with {self._group.nodes[node]}: {describe_disconnect(message)}")

    def _handle_lost_node(self, node: int, sentence: str) -> None:
        if connection := self._group.connections.pop(node, None):
            connection.close(timeout_s=0)  # nobody listens there, and the other nodes wait for this one's status
        if node in self._node_exits or self._final_status is not None:
            return
        host = self._group.nodes[node].host
        first_rank = node * self._num_ranks
        error = make_observed_error(first_rank, host, sentence, time.time())
        self._node_exits[node] = [RankExit(first_rank, host, 1, killed=False, reported=None, observed=error)]
        self._failed_elsewhere = True

    def _send_updates(self, running: bool) -> None:
        """Send the other nodes what they have to know, each kind of message once."""
        if self.stop_requested:
            self._send_once("stop")
        if self.failed or self._failed_elsewhere:
            self._send_once("failing")
        if self.kill_requested or self.hang_fault:
            self._send_once("kill", requested=self.kill_requested)
        if not running and not self._group.is_coordinator:
            self._send_once("ended", ends=[end.to_json() for end in self.rank_exits()])

    def _send_once(self, kind: str, **content: object) -> None:
        if kind not in self._sent:
            self._sent.add(kind)
            self._group.send(kind, **content)

    def check_for_hang(self, snapshots: list[RankSnapshot]) -> None:
        """Check for a hang on node 0, from snapshots of all nodes' ranks; other nodes send theirs."""
        if not self._group.is_coordinator:
            send_snapshots(self._group, snapshots)
        elif not self._failed_elsewhere:
            others = self._remote_nodes.snapshots(set(range(1, self._group.num_nodes)) - set(self._node_exits))
            if others is not None:
                self.diagnose_if_hung(snapshots + others)

    def exit_status(self) -> ExitStatus:
        """Return the exit status that node 0 declares; on another node that never received it, its own view."""
        if self._final_status is not None:
            self.writes_exit_file = False
            return self._final_status
        ends = self.rank_exits() + [end for node in sorted(self._node_exits) for end in self._node_exits[node]]
        # Node 0 writes exit.json, or any other node when node 0 is gone. Where only the network between them is down,
        # node 0 may have written it already.
        self.writes_exit_file = self._group.is_coordinator or not (self.run_dir / "exit.json").exists()
        status = self._determine_status(ends)
        if not self._group.is_coordinator:
            return replace(status, step=0)  # other nodes may have seen another step, and all have to decide alike
        self._group.send("over", **asdict(status))
        return status
