"""Recovery over several nodes: node 0 supervises the ranks of all, and lets launchers join that were lost.

The launchers of the other nodes do what node 0 asks (`rank_agent.py`), so that there is one place where it is decided
who goes on, and one order of events. A node is lost when its launcher is; its ranks are then lost together.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from muster.launch.exit_status import ExitStatus
from muster.launch.launcher_words import Membership
from muster.launch.nodes.connection import Message
from muster.launch.nodes.copy_ring import choose_ranks_per_node, missing_pairs
from muster.launch.nodes.handshake import node_differences
from muster.launch.nodes.launcher_group import LauncherGroup, describe_disconnect
from muster.launch.nodes.remote_rank import RemoteRank
from muster.launch.recovery import MAX_RECOVERIES_IN_A_ROW, Elasticity, ElasticSupervisor
from muster.launch.shared_filesystem import write_marker
from muster.launch.supervised_rank import SupervisedRank
from muster.launch.supervisor import RankSupervisor
from muster.spec.errors import MusterError

_FAREWELL_S = 0.1
"""Longest time to tell a lost launcher so."""


class ElasticNodes(ElasticSupervisor):
    """Supervisor, on node 0, of the ranks of all nodes."""

    def __init__(
        self,
        run_dir: Path,
        grace_s: float,
        hang_timeout_s: float | None,
        elastic: Elasticity,
        group: LauncherGroup,
        ranks_per_node: int,
        store: str,
    ) -> None:
        """`store` is the endpoint of the store, which launchers that join later are told."""
        super().__init__(run_dir, grace_s, hang_timeout_s, elastic)
        self._group, self._ranks_per_node, self._store = group, ranks_per_node, store
        self._remote: dict[int, RemoteRank] = {}
        """Processes on other nodes, by their numbers there."""
        self._joined = set(group.nodes)
        """Nodes whose launchers run processes."""
        self._ring: tuple[int, ...] = ()
        """Nodes of the last ranks that have finished a step together, in whose memory are the newest copies, in the
        order of their ranks; before the first step all nodes."""

    def start(
        self, command_for_rank: Callable[[int], list[str]], ranks: range, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the ranks of all nodes, and their spares; `ranks` are those of this node."""
        self._command_for_rank, self._num_ranks = command_for_rank, len(ranks) * self._group.num_nodes
        self._environment = {"LOCAL_WORLD_SIZE": str(len(ranks)), **(environment or {})}
        RankSupervisor.start(self, command_for_rank, ranks, environment)
        for rank in range(len(ranks), self._num_ranks):
            self.ranks.append(self._start_remote(rank, rank // len(ranks)))
        self._note_states()
        self._start_spares()

    def _note_states(self) -> None:
        """Note the states that the ranks hold now, and the nodes that hold their copies."""
        super()._note_states()
        self._ring = tuple(dict.fromkeys(rank.node for rank in self.ranks))

    def _start_remote(self, rank: int, node: int) -> RemoteRank:
        number = len(self._remote)
        host, send = self._group.nodes[node].host, partial(self._group.send_to, node)
        self._remote[number] = RemoteRank(rank, node, host, number, send)
        return self._remote[number]

    def _start_spare(self) -> SupervisedRank:
        """Start a process that waits for a place, on the node whose memory is needed, or that with the most room."""
        if (needed := self._needed_node()) is not None and all(one.node != needed for one in self._waiting_spares()):
            return self._start_on(needed)
        room = self._room_of_nodes()
        return self._start_on(max(sorted(room), key=lambda node: room[node]))

    def _start_on(self, node: int) -> SupervisedRank:
        return self._start_remote(-1, node) if node else super()._start_spare()

    def _take_spare(self, node: int = 0, elsewhere: bool = False) -> SupervisedRank:
        """Return a spare; where the newest copies would be lost without a process on a node, one of that, even if it
        has still to start: those of other nodes can't read its memory."""
        needed = self._needed_node()
        spare = next((one for one in self._waiting_spares() if one.node == needed), None)
        if spare is not None:
            self._spares.remove(spare)
            return spare
        if needed is not None:
            with contextlib.suppress(MusterError, OSError):  # there can be no other process: the job goes on from disk
                return self._start_on(needed)
        return super()._take_spare(node, elsewhere)

    def _smaller_size(self, failed: list[SupervisedRank]) -> int | None:
        """Return as `ElasticSupervisor._smaller_size`, but None also where the newest copies would be lost with so few
        ranks, and there can be processes for the places of the failed ones, which takes longer. Not in the last of
        several recoveries in a row."""
        size = super()._smaller_size(failed)
        if size is None or len(failed) > len(self._waiting_spares()) + self._room() or self._is_last_recovery:
            return size
        if self._needed_node() is not None:
            return None
        keeps_copies = self._missing_pairs(self._choose(self.running(), size)) == self._missing_pairs(self.running())
        return size if keeps_copies else None

    @property
    def _is_last_recovery(self) -> bool:
        return self._in_a_row >= MAX_RECOVERIES_IN_A_ROW - 1

    def _missing_pairs(self, ranks: list[SupervisedRank]) -> list[tuple[int, int]]:
        """Return the neighbours of the ring of which none of these ranks can read the memory; none where nothing is
        kept there."""
        return [] if self._elastic.states_by_size else missing_pairs(self._ring, {rank.node for rank in ranks})

    def _needed_node(self) -> int | None:
        """Return a node that is there, on which no rank is any more and without whose memory the newest copies aren't
        complete: one that makes the most of them so, and of several one where a process waits. None where they are
        lost, and in the last of several recoveries in a row: the processes of those before have not survived them."""
        pairs = self._missing_pairs(self.running())
        if self._in_a_row == MAX_RECOVERIES_IN_A_ROW or not all(self._joined.intersection(pair) for pair in pairs):
            return None
        num_pairs = Counter(node for pair in pairs for node in set(pair) & self._joined)
        waiting = {spare.node for spare in self._waiting_spares()}
        return max(num_pairs, key=lambda node: (num_pairs[node], node in waiting, -node), default=None)

    def _room(self) -> int:
        return sum(max(0, room) for room in self._room_of_nodes().values())

    def _room_of_nodes(self) -> dict[int, int]:
        """Return how many more processes each node may have: as many as at the start, and spares for them."""
        alive = Counter(rank.node for rank in [*self.running(), *self._waiting_spares()])
        return {node: self._ranks_per_node + self._elastic.num_spares - alive[node] for node in self._joined}

    def _membership(self, rank: SupervisedRank, size: int, at_step_end: bool = False) -> Membership:
        neighbours = [one for one in self.ranks if one.node == rank.node]
        local = neighbours.index(rank) if rank in neighbours else None
        return Membership(self._generation, rank.rank, size, at_step_end, local, self._ranks_per_node)

    def _choose(self, left: list[SupervisedRank], size: int) -> list[SupervisedRank]:
        """Return the ranks that go on; on nodes that together have the newest copies, if these are kept and they
        can."""
        if self._elastic.states_by_size:
            return super()._choose(left, size)
        per_node = choose_ranks_per_node(self._ring, Counter(rank.node for rank in left), size)
        return [rank for node, count in sorted(per_node.items()) for rank in _on_node(left, node)[:count]]

    def _supervise(self) -> None:
        """Hear what the other nodes tell, and supervise as `RankSupervisor`."""
        for node, message in self._group.receive():
            self._handle(node, message)
        super()._supervise()

    def _handle(self, node: int, message: Message) -> None:
        match message["kind"]:
            case "snapshots":
                for number, row in message["rows"].items():
                    self._remote[int(number)].receive_snapshot(row)
            case "ended":
                offset_s = self._group.clock_offset_s.get(node, 0.0)
                self._remote[message["process"]].receive_end(message, offset_s)
            case "no spare":
                name = self._group.nodes[node]
                print(f"no other process can be started on {name} for now: {message['reason']}", flush=True)
            case "stop":
                self.stop_requested = True
            case "kill":
                self.stop_requested = self.kill_requested = True
            case "failed":
                self._lose(node, message["reason"])
            case "gone":
                self._lose(node, describe_disconnect(message))
            case "came" if node not in self._joined:
                self._receive_launcher(node)
            case "clock is":
                delay_s = message["received"] - message["sent"]
                self._group.clock_offset_s[node] = message["time"] - message["sent"] - delay_s / 2
            case "reached" if message["problems"] and node not in self._joined:
                self._refuse(node, message["problems"][0])
            case "ready" if node not in self._joined:
                self._group.send_to(node, "start", store=self._store)
                self._joined.add(node)
                self._num_starts, self._next_start = 0, 0.0
                print(f"{self._group.nodes[node]} is back", flush=True)
                if self._elastic.num_spares:
                    self._try_to_start_spares()

    def _lose(self, node: int, reason: str) -> None:
        """Take a node, whose launcher is gone, for lost with its processes."""
        name = str(self._group.nodes[node])
        connection = self._group.connections.pop(node, None)
        if connection is None:
            return  # it has said why it ends, and then closed its connection
        # A launcher that was only silent, and hears again, has no part in the job any more.
        connection.send("over", code=1, reason=f"the job goes on without {name}: {reason}")
        connection.close(_FAREWELL_S)
        if node not in self._joined:
            print(f"{name} has left again: {reason}", flush=True)
        elif all(rank.node != node for rank in self.running()):
            print(f"{name}, on which no rank was, is gone: {reason}", flush=True)
        self._joined.discard(node)
        for rank in self._remote.values():
            if rank.node == node:
                rank.lose(f"is gone with {name}: {reason}")

    def _receive_launcher(self, node: int) -> None:
        """Let a launcher that has come during the job begin where those of the start have begun, or refuse it."""
        if said := next(node_differences(self._group.local_node, self._group.nodes[node]), None):
            self._refuse(node, said, code=2)
            return
        send = partial(self._group.send_to, node)
        send("agreed")
        send("clock", sent=time.time())
        send("members", members=self._group.member_rows(node))
        send("prepared", mark=write_marker(self.run_dir))

    def _refuse(self, node: int, reason: str, code: int = 1) -> None:
        """Send a launcher away; the others go on."""
        self._group.send_to(node, "over", code=code, reason=reason)
        self._group.connections.pop(node).close()
        print(f"{reason}; the job goes on without it", flush=True)

    def exit_status(self) -> ExitStatus:
        """Return how the job ended, and tell the other nodes."""
        status = super().exit_status()
        self._group.send("over", **asdict(status))
        return status

    def shut_down(self) -> None:
        """Kill the processes that still run; the other nodes' end when their launchers hear how the job ended."""
        for rank in self._remote.values():
            if rank.exit_code is None:
                rank.killed = True
                rank.exit_code = -9
        super().shut_down()


def _on_node(ranks: list[SupervisedRank], node: int) -> list[SupervisedRank]:
    """Return those of the ranks that are on a node."""
    return [rank for rank in ranks if rank.node == node]
