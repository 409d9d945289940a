"""Watches ranks that another launcher, such as torchrun, has started: one such process on each node, free of torch.

    python -m muster.train.watcher JOB

JOB is a `WatchJob` as JSON. What Muster's own launcher would see, this sees in its place: who holds up the others, and
who died without a word. It ends with the ranks of its node.
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

from muster.parallel.whereabouts import Page
from muster.spec.errors import MusterError
from muster.train.diagnosis import Finding, Sighting, diagnose, doing, table
from muster.train.errors import hang_path, read_error, write_exit
from muster.train.nodes.job import Elsewhere, tell_sightings
from muster.train.nodes.line import Message
from muster.train.nodes.meet import meet
from muster.train.nodes.request import NodesRequest
from muster.train.nodes.team import Over, Team, why_gone
from muster.train.watch import LOOK_S, Watched, hangs

_MEET_LIMIT_S = 120.0
_LAST_WORDS_S = 3.0
"""How long node 0 waits, after its own ranks' end, for what the other nodes have seen."""
_STOPPABLE = ("profile", "load", "data", "run", "save", "validate")
"""The phases in which a rank ends by a request only with a word, so that one that is gone was killed."""


@dataclass(frozen=True)
class WatchJob:
    """What is watched here."""

    run_dir: str
    hang_s: float
    world_size: int
    node: int
    nodes: int
    host: str
    """Of node 0, as all call it."""
    port: int
    """Where its watcher listens."""
    ranks: list[tuple[int, int, int]]
    """Of this node: number, process, file descriptor of its page."""
    attempt: int
    """What `attempt_in` said of the run directory when the ranks began."""


def attempt_in(run_dir: Path) -> int:
    """A number that differs between attempts in one run directory: each writes its configuration anew. 0: none has."""
    try:
        return (run_dir / "config.yaml").stat().st_mtime_ns
    except OSError:
        return 0


class _Rank:
    """A rank that some other program has started."""

    def __init__(self, rank: int, process: int, fd: int) -> None:
        self.rank, self._handle = rank, os.pidfd_open(process)
        self.watched = Watched(rank, Page.of(process, fd), process)
        self.last: Sighting | None = None

    @property
    def alive(self) -> bool:
        return not select.select([self._handle], [], [], 0)[0]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class Watch:
    """The eye on one node's ranks; node 0's judges for all."""

    def __init__(self, job: WatchJob, ranks: Sequence[_Rank], team: Team | None) -> None:
        self._job, self._ranks, self._team = job, ranks, team
        self._run_dir, self._is_judge = Path(job.run_dir), team is None or team.is_hub
        self._elsewhere = Elsewhere()
        self._others = set(range(1, job.nodes)) if self._is_judge else set[int]()
        """Nodes whose ranks still run."""
        self._found: Finding | None = None
        self._hangs, self._end = False, False
        self._missed: set[int] = set()
        self._failed_at: float | None = None
        """When a rank was first known to be gone with an error."""

    def go(self) -> None:
        """Watches until the ranks here are gone, and says what was seen."""
        while alive := [rank for rank in self._ranks if rank.alive]:
            self._hear()
            self._notice_deaths()
            sightings = [rank.watched.look(self._job.hang_s) for rank in alive]
            for rank, seen in zip(alive, sightings, strict=True):
                rank.last = seen
            self._judge(sightings)
            if self._end:
                for rank in alive:
                    rank.kill()
            time.sleep(LOOK_S)
        self._notice_deaths()
        if self._team is not None and not self._is_judge:
            self._team.tell("ended", failed=any(self._has_said_why(rank) for rank, _, _ in self._job.ranks))
        limit = time.monotonic() + _LAST_WORDS_S
        while self._others and time.monotonic() < limit:
            self._hear()
            time.sleep(LOOK_S / 5)
        self._conclude()

    def _judge(self, sightings: list[Sighting]) -> None:
        if not self._is_judge:
            assert self._team is not None
            tell_sightings(self._team, sightings)
            return
        if not self._end and self._failed_at is not None and time.monotonic() > self._failed_at + self._job.hang_s:
            self._end_all()  # no launcher did, and a rank that waits for one that never joined ends by itself never
        others = self._elsewhere.sightings(self._others)
        if self._end or others is None or not hangs(everyone := sightings + others, self._job.hang_s):
            return
        self._found, self._hangs = diagnose(everyone), True
        with contextlib.suppress(OSError):
            hang_path(self._run_dir).write_text(table(everyone))
        self._end_all()

    def _end_all(self) -> None:
        self._end = True
        if self._team is not None:
            self._team.tell("kill")

    def _has_said_why(self, rank: int) -> bool:
        return read_error(self._run_dir, rank) is not None

    def _note_failure(self) -> None:
        self._failed_at = self._failed_at or time.monotonic()

    def _notice_deaths(self) -> None:
        for rank in self._ranks:
            if rank.rank in self._missed or rank.alive:
                continue
            self._missed.add(rank.rank)
            if self._has_said_why(rank.rank):
                self._note_failure()
                continue
            place = rank.watched.page.read()  # its last word, now that it can't say another
            if self._end or rank.last is None or place is None or place.phase not in _STOPPABLE:
                continue
            how = f"is gone without a word, as if killed, while it {doing(replace(rank.last, place=place))}"
            self._find(Finding(rank.rank, socket.gethostname(), how))

    def _find(self, finding: Finding) -> None:
        self._note_failure()
        if not self._is_judge:
            assert self._team is not None
            self._team.tell("dead", **asdict(finding))
        elif self._found is None:
            self._found = finding

    def _hear(self) -> None:
        for node, message in self._team.receive() if self._team else ():
            self._take(node, message)

    def _take(self, node: int, message: Message) -> None:
        assert self._team is not None
        match message["kind"]:
            case "sightings":
                self._elsewhere.hear(node, message)
            case "kill":
                self._end = True
            case "dead":
                self._find(Finding(message["rank"], message["host"], message["sentence"]))
            case "ended":
                self._others.discard(node)
                if message["failed"]:
                    self._note_failure()
            case "gone":
                self._team.lines.pop(node, None)
                self._end |= "silent_s" in message  # nobody else ends a job whose network is cut
                if node in self._others:
                    self._others.discard(node)
                    member, per_node = self._team.members[node], self._job.world_size // self._job.nodes
                    self._find(Finding(node * per_node, member.host, f"is gone with {member}: {why_gone(message)}"))

    def _conclude(self) -> None:
        """Says what was found, where no rank says it better, or what a rank has said to nobody."""
        errors = [read_error(self._run_dir, rank) for rank in range(self._job.world_size)]
        cause = min(
            (error for error in errors if error is not None),
            key=lambda error: (not error.primary, error.time),
            default=None,
        )
        if not self._is_judge or attempt_in(self._run_dir) != self._job.attempt:
            return  # a launcher that starts ranks again may have done so by now: their end is another's to tell
        if self._found is not None and (self._hangs or cause is None or not cause.primary):
            self._say(self._found.rank, self._found.host, f" {self._found.sentence}", 1)
        elif cause is not None and not (self._run_dir / "exit.json").exists():
            self._say(cause.rank, cause.host, f": {cause.sentence}", cause.exit_code)

    def _say(self, rank: int, host: str, what: str, code: int) -> None:
        reason = f"rank {rank} on {host}{what}"
        print(f"error: {reason}", file=sys.stderr, flush=True)
        write_exit(self._run_dir, code, reason, rank, host)


def main() -> None:
    """Watches the ranks of the job that the command line names."""
    job = WatchJob(**json.loads(sys.argv[1]))
    ranks = []
    try:
        for row in job.ranks:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended already
                ranks.append(_Rank(*row))
    except OSError as error:
        print(f"hangs can't be seen: can't look at the ranks of this node ({error.strerror})", flush=True)
        return
    if job.nodes == 1:
        Watch(job, ranks, None).go()
        return
    request = NodesRequest(job.nodes, job.node, job.host, job.port, join_limit_s=_MEET_LIMIT_S)
    try:
        with contextlib.redirect_stdout(open(os.devnull, "w")), meet(request, {"job": "watch"}) as team:
            Watch(job, ranks, team).go()
    except (MusterError, Over) as problem:
        print(f"hangs can't be seen: {problem}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
