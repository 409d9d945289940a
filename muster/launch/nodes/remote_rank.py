"""A rank on another node, which node 0 supervises through that node's launcher."""

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.launch.exit_status import RankExit, make_observed_error, rank_exit_from_json
from muster.launch.hang_diagnosis import RankSnapshot
from muster.launch.heartbeat import RankStatus
from muster.launch.nodes.connection import Message
from muster.launch.rank_monitor import snapshot_from_json
from muster.launch.supervised_rank import SupervisedRank

SNAPSHOT_MAX_AGE_S = 3.0
"""Age above which a snapshot of another node's rank says nothing about the present."""


class RemoteRank(SupervisedRank):
    """Node 0's end of a process that another node's launcher starts and watches on its behalf."""

    def __init__(self, rank: int, node: int, host: str, number: int, send: Callable[..., None]) -> None:
        """`number` is that of the process among all that node 0 has others start; `send` sends its launcher a
        message."""
        super().__init__(rank, time.time())
        self.node, self._host, self.number, self._send = node, host, number, send
        self._snapshot: RankSnapshot | None = None
        self._heard = time.monotonic()
        self._end: RankExit | None = None
        self._tell("start process", rank=rank)

    def _tell(self, kind: str, **content: Any) -> None:
        self._send(kind, process=self.number, **content)

    def poll(self) -> None:
        """Do nothing: its launcher tells when the process has ended."""

    def receive_snapshot(self, row: dict[str, Any]) -> None:
        """Take what its launcher has seen."""
        if self.exit_code is None:
            self._snapshot = snapshot_from_json(row)
            self._heard, self.last_alive = time.monotonic(), time.time()

    def receive_end(self, message: Message, clock_offset_s: float) -> None:
        """Take how the process has ended, from a launcher whose clock is ahead by `clock_offset_s`."""
        self._end = rank_exit_from_json(message["end"], clock_offset_s)
        self.last_alive = message["last_alive"] - clock_offset_s
        self.exit_code = self._end.code

    def lose(self, sentence: str) -> None:
        """Take the process for lost, with its node, as `sentence` says."""
        if self.exit_code is None:
            error = make_observed_error(self.rank, self._host, sentence, self.last_alive)
            error = replace(error, cause="node lost")
            self.exit_code = 1
            self._end = RankExit(self.rank, self._host, 1, killed=False, reported=None, observed=error)

    def status(self) -> RankStatus | None:
        return None if self._snapshot is None else self._snapshot.status

    def snapshot(self, hang_timeout_s: float | None) -> RankSnapshot:
        """Return what its launcher has seen last; a rank of which nobody has heard of late counts as one that makes
        progress."""
        seen = self._snapshot or RankSnapshot(self.rank, self._host, 0, "R", 0.0, None, "", "")
        stalled_s = seen.stalled_s if time.monotonic() - self._heard < SNAPSHOT_MAX_AGE_S else 0.0
        return replace(seen, rank=self.rank, stalled_s=stalled_s)

    def tell(self, word: bytes) -> None:
        if self.exit_code is None:
            self._tell("word", word=word.decode(), rank=self.rank)

    def send_signal(self, number: signal.Signals) -> None:
        self._tell("signal", number=int(number))

    def kill(self) -> None:
        self._tell("kill process", killed=self.killed)

    def renumber(self, rank: int) -> None:
        self.rank = rank

    def end(self, run_dir: Path, stop_requested: bool, ran_out_of_memory: bool | None) -> RankExit:
        if self._end is None:  # its launcher has not told in time
            return RankExit(self.rank, self._host, -signal.SIGKILL, True, None, None)
        return replace(self._end, rank=self.rank)

    def close(self) -> None:
        """Do nothing: its launcher frees what it holds."""
