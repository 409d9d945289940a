"""One node's part of a job over several: each launcher watches its own ranks, and hears of the others'."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from muster.train.diagnosis import Sighting
from muster.train.job import Job
from muster.train.nodes.line import Message
from muster.train.nodes.team import Team, why_gone
from muster.train.outcome import Outcome, RankEnd, conclude, end_of_json, from_outside
from muster.train.watch import sighting_of_json, sighting_to_json

_FRESH_S = 3.0
"""Older sightings of another node's ranks say nothing of now."""


class Elsewhere:
    """Where the other nodes' ranks are, as node 0 has heard."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[float, list[Sighting]]] = {}

    def hear(self, node: int, message: Message) -> None:
        """Takes a message of kind `sightings`."""
        self._heard[node] = time.monotonic(), [sighting_of_json(row) for row in message["rows"]]

    def sightings(self, nodes: Iterable[int]) -> list[Sighting] | None:
        """Of all ranks of these nodes; None where one has said nothing of late."""
        found: list[Sighting] = []
        for node in nodes:
            at, rows = self._heard.get(node, (0.0, []))
            if time.monotonic() - at > _FRESH_S:
                return None
            found += rows
        return found


def tell_sightings(team: Team, sightings: Sequence[Sighting]) -> None:
    """Tells node 0 where the ranks here are."""
    team.tell("sightings", rows=[sighting_to_json(seen) for seen in sightings])


class NodeJob(Job):
    """The processes here, ended with those elsewhere. Node 0 collects how all ended, and says it to all."""

    def __init__(self, run_dir: Path, grace_s: float, hang_s: float | None, team: Team, num_ranks: int) -> None:
        super().__init__(run_dir, grace_s, hang_s)
        self._team, self._num_ranks = team, num_ranks
        self.first_to_last = range(team.node * num_ranks, (team.node + 1) * num_ranks)
        self._elsewhere = Elsewhere()
        self._ends: dict[int, list[RankEnd]] = {}
        """Of the nodes whose ranks have all ended, or that are gone."""
        self._others_failed = self._killed_elsewhere = False
        self._told: set[str] = set()
        self._verdict: Outcome | None = None

    def poll(self) -> bool:
        """As Job; also hears of the other nodes and tells them of this one. True until all of them have ended."""
        heard = self._team.receive()
        while heard and self._verdict is None:
            self._hear(*heard.pop(0))
        self._team.keep(heard)  # what follows the job's end isn't the job's
        if self._others_failed:
            self.be_brief()
        if self._killed_elsewhere:
            self.kill()
        running = super().poll()
        self._pass_on(running)
        if running:
            return True
        if self._team.is_hub:
            return len(self._ends) < self._team.count - 1
        return self._verdict is None and 0 not in self._ends

    def _hear(self, node: int, message: Message) -> None:
        match message["kind"]:
            case "sightings":
                self._elsewhere.hear(node, message)
            case "stop":
                self.stop_requested = True
            case "failing":
                self._others_failed = True
            case "kill":
                self._killed_elsewhere = True
                self.kill_requested |= message["requested"]
            case "ended":
                off_s = self._team.clock_off_s.get(node, 0.0)
                self._ends.setdefault(node, [end_of_json(row, off_s) for row in message["ends"]])
            case "over":
                self._verdict = Outcome(message["code"], message["reason"], message.get("rank"), message.get("host"))
                self._others_failed = True
            case "failed":  # its ranks could not be started
                self._lose(node, message["reason"])
            case "gone":
                self._lose(node, f"is gone with {self._team.members[node]}: {why_gone(message)}")

    def _lose(self, node: int, sentence: str) -> None:
        if line := self._team.lines.pop(node, None):
            line.close(wait_s=0)  # nobody listens there, and the nodes that are left wait for this one's word
        if node in self._ends or self._verdict is not None:
            return
        member = self._team.members[node]
        first = node * self._num_ranks
        seen = from_outside(first, member.host, sentence, time.time())
        self._ends[node] = [RankEnd(first, member.host, 1, killed=False, said=None, seen=seen)]
        self._others_failed = True

    def _pass_on(self, running: bool) -> None:
        """Tells the others what they must know, each thing once."""
        if self.stop_requested:
            self._tell_once("stop")
        if self.failed or self._others_failed:
            self._tell_once("failing")
        if self.kill_requested or self.hang:
            self._tell_once("kill", requested=self.kill_requested)
        if not running and not self._team.is_hub:
            self._tell_once("ended", ends=[end.to_json() for end in self.ends()])

    def _tell_once(self, kind: str, **content: object) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._team.tell(kind, **content)

    def judge(self, sightings: list[Sighting]) -> None:
        """Node 0 judges from where all nodes' ranks are; the others tell it."""
        if not self._team.is_hub:
            tell_sightings(self._team, sightings)
        elif not self._others_failed:
            others = self._elsewhere.sightings(set(range(1, self._team.count)) - set(self._ends))
            if others is not None:
                self.judge_all(sightings + others)

    def outcome(self) -> Outcome:
        """Node 0's word, which it gives here; or, where that never came, what this one knows."""
        if self._verdict is not None:
            self.writes = False
            return self._verdict
        ends = self.ends() + [end for node in sorted(self._ends) for end in self._ends[node]]
        # Node 0 writes, or any other when that is gone; where only the network between is, node 0 may have written.
        self.writes = self._team.is_hub or not (self.run_dir / "exit.json").exists()
        said = conclude(ends, self.stop_requested, self.kill_requested, self.hang)
        if self._team.is_hub:
            self._team.tell("over", code=said.code, reason=said.reason, rank=said.rank, host=said.host)
        return said
