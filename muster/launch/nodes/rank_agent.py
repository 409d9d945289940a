"""Agent of node 0 on another node, in a job that goes on when ranks are lost: it runs processes here as node 0 asks.

It decides nothing: it starts, tells, signals and kills processes, and tells node 0 what becomes of them. Where node 0
is gone, so is the store in which the ranks meet, and all processes here end.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from muster.launch.exit_status import ExitStatus, RankExit, make_observed_error
from muster.launch.nodes.connection import Message
from muster.launch.nodes.launcher_group import LauncherGroup, describe_disconnect
from muster.launch.rank_monitor import snapshot_to_json
from muster.launch.supervised_rank import SupervisedRank
from muster.launch.supervisor import RankSupervisor
from muster.spec.errors import MusterError

_SNAPSHOT_INTERVAL_S = 0.1
"""Time between what node 0 hears of the processes."""


class RankAgent(RankSupervisor):
    """Supervisor of the processes of another node than the first."""

    def __init__(self, run_dir: Path, grace_s: float, hang_timeout_s: float | None, group: LauncherGroup) -> None:
        super().__init__(run_dir, grace_s, hang_timeout_s)
        self._group = group
        self.terminal_fds = os.dup(1), os.dup(2)
        self._processes: dict[int, SupervisedRank] = {}
        """Processes whose end node 0 doesn't know, by the numbers that it has given them."""
        self._next_sending = 0.0
        self._requests_sent: set[str] = set()
        self._final_status: ExitStatus | None = None

    def start(
        self, command_for_rank: Callable[[int], list[str]], ranks: range, environment: Mapping[str, str] | None = None
    ) -> None:
        """Be ready to start processes with these commands; `ranks` are as many as node 0 will ask for at first."""
        self._command_for_rank = command_for_rank
        self._environment = {"LOCAL_WORLD_SIZE": str(len(ranks)), **(environment or {})}
        self._first_rank = ranks.start

    def poll(self) -> bool:
        """Do what node 0 asks, and tell it what has happened here; False once it has declared the job's end, or is
        gone."""
        messages = self._group.receive()
        while messages and self._final_status is None:
            self._handle(messages.pop(0)[1])
        self._group.put_back(messages)  # messages after the job's end belong to whatever follows it
        for rank in self.running():
            rank.poll()
        self._tell_node_0()
        return self._final_status is None

    def _handle(self, message: Message) -> None:
        process = self._processes.get(message.get("process", -1))
        match message["kind"]:
            case "start process":
                self._start(message["process"], message["rank"])
            case "word" if process is not None:
                process.renumber(message["rank"])
                process.tell(message["word"].encode())
            case "signal" if process is not None and process.exit_code is None:
                number = signal.Signals(message["number"])
                self.stop_requested |= number == signal.SIGTERM
                process.send_signal(number)
            case "kill process" if process is not None and process.exit_code is None:
                process.killed = message["killed"]
                process.kill()
            case "over":
                self._final_status = ExitStatus(**{key: value for key, value in message.items() if key != "kind"})
            case "gone":
                self._lose_node_0(message)

    def _start(self, number: int, rank: int) -> None:
        """Start a process; where that fails, node 0 is told that it has ended, and tries again or does without."""
        local = {"LOCAL_RANK": str(rank - self._first_rank)} if rank >= 0 else {}
        try:
            process = self._start_process(rank, self._command_for_rank(rank), {**self._environment, **local})
        except (MusterError, OSError) as error:
            host, now = self._group.local_node.host, time.time()
            observed = make_observed_error(rank, host, f"has no process: {error}", now)
            self._tell_end(number, RankExit(rank, host, 1, killed=False, reported=None, observed=observed), now)
            if rank < 0:  # whose end nobody else tells
                self._group.send("no spare", reason=str(error))
        else:
            self._processes[number] = process
            self.ranks.append(process)

    def _tell_end(self, number: int, end: RankExit, last_alive: float) -> None:
        self._group.send("ended", process=number, last_alive=last_alive, end=end.to_json())

    def _tell_node_0(self) -> None:
        """Send node 0 requests of this node's user, ends of processes, and now and then how the others are."""
        for request, wanted in (("stop", self.stop_requested), ("kill", self.kill_requested)):
            if wanted and request not in self._requests_sent:
                self._requests_sent.add(request)
                self._group.send(request)
        ended = {number: one for number, one in self._processes.items() if one.exit_code is not None}
        for number, process in ended.items():
            (end,) = self.rank_exits([process])
            self._tell_end(number, end, process.last_alive)
            process.close()
            self.ranks.remove(process)
            del self._processes[number]
        self._use_up_oom_kills(ended.values())
        if time.monotonic() >= self._next_sending:
            self._next_sending = time.monotonic() + _SNAPSHOT_INTERVAL_S
            seen = {number: one.snapshot(self.hang_timeout_s) for number, one in self._processes.items()}
            self._group.send("snapshots", rows={number: snapshot_to_json(one) for number, one in seen.items()})

    def _lose_node_0(self, message: Message) -> None:
        reason = (
            f"{self._group.nodes[0]} is gone, and with it the store in which ranks meet: {describe_disconnect(message)}"
        )
        self._group.connections.pop(0).close(timeout_s=0)
        host = self._group.nodes[0].host
        self._final_status = ExitStatus(1, reason, host=host, restartable=not self.stop_requested)
        self.writes_exit_file = not (self.run_dir / "exit.json").exists()

    def exit_status(self) -> ExitStatus:
        """Return what node 0 has declared, or that it is gone."""
        assert self._final_status is not None, "asked before the end"
        return self._final_status

    def shut_down(self) -> None:
        """Kill the processes that still run, and wait until they are gone."""
        super().shut_down()
        for number in self.terminal_fds:
            os.close(number)
