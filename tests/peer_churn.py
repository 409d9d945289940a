"""Random events among toy peers: joins, leaves, kills of peers and of the coordinator, cut and slow links."""

import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from muster.launch.peers.channel import create_secret
from muster.launch.peers.settings import Settings
from tests.toy_peers import QUICK, Proxy, free_ports, run_coordinator, run_peer

PATIENCE_S = 60.0
MOST, LEAST = 5, 2


@dataclass
class Alive:
    """A peer that runs, with the links by which others and it reach each other."""

    process: BaseProcess
    peer_link: Proxy
    coordinator_link: Proxy


class Churn:
    """A group of toy peers with a coordinator, and what has happened to it."""

    def __init__(self, folder: Path, seed: int, round_s: float, settings: Settings = QUICK) -> None:
        self.folder, self.random, self.round_s, self.settings = folder, random.Random(seed), round_s, settings
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.toy_peers"])
        create_secret(folder / "secret")
        self.port = free_ports(1)[0]
        self.peers: dict[str, Alive] = {}
        self.events: list[str] = []
        self.kinds: list[str] = []
        self.lifetimes: dict[str, list[float]] = {}
        """Times of the beginning and, after it, the end of each peer."""
        self._num_peers = 0
        self._rows: dict[Path, tuple[int, list[dict[str, Any]]]] = {}
        """What has been read of each peer's file: bytes, and lines."""
        self.start_coordinator()

    def __enter__(self) -> "Churn":
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.peers):
            self.end(name, signal.SIGKILL)
        self._kill(self.coordinator, signal.SIGKILL)

    # ------------------------------------------------------------------------------------------------------------------
    # Events

    def start_coordinator(self) -> None:
        own = self.port, self.folder / "secret", self.folder / "coordinator.txt", self.settings
        self.coordinator = self.context.Process(target=run_coordinator, args=own, daemon=True)
        self.coordinator.start()

    def join(self) -> str:
        name = f"p{self._num_peers:03}"
        self._num_peers += 1
        own_port = free_ports(1)[0]
        links = Proxy(own_port), Proxy(self.port)
        ports = links[1].port, links[0].port, own_port
        own = name, *ports, self.folder / "secret", self.folder / f"{name}.jsonl", self.round_s, self.settings
        process = self.context.Process(target=run_peer, args=own, daemon=True)
        process.start()
        self.peers[name] = Alive(process, *links)
        self.lifetimes[name] = [time.time()]
        return name

    def end(self, name: str, number: signal.Signals) -> None:
        one = self.peers.pop(name)
        self.lifetimes[name].append(time.time())
        self._kill(one.process, number)
        one.peer_link.close()
        one.coordinator_link.close()

    def _kill(self, process: BaseProcess, number: signal.Signals) -> None:
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(PATIENCE_S)
        assert not process.is_alive()

    def any_event(self) -> None:
        """Let something happen: at the beginning of a round, where peers have still to apply the last, or later in it.
        What is cut, slow or stands still is so for at most the time of a round, and the coordinator away for half of
        it."""
        kinds = ["kill coordinator", "cut link", "cut coordinator link", "slow link", "freeze"]
        kinds += ["join", "join"] if len(self.peers) < MOST else []
        kinds += ["leave", "kill"] if len(self.peers) > LEAST else []
        kind = self.random.choice(kinds)
        name = self.random.choice(sorted(self.peers))
        pause_s = self.random.uniform(0, self.round_s)
        time.sleep(self.random.choice([0.0, self.random.uniform(0, self.round_s)]))
        match kind:
            case "join":
                name = self.join()
            case "leave":
                self.end(name, signal.SIGTERM)
            case "kill":
                self.end(name, signal.SIGKILL)
            case "kill coordinator":
                name = ""
                self._kill(self.coordinator, signal.SIGKILL)
                time.sleep(pause_s / 2)
                self.start_coordinator()
            case "freeze":
                pid = self.peers[name].process.pid
                assert pid is not None
                os.kill(pid, signal.SIGSTOP)
                time.sleep(pause_s)
                os.kill(pid, signal.SIGCONT)
            case "slow link":
                self.peers[name].peer_link.delay_s = 0.02
                time.sleep(pause_s)
                self.peers[name].peer_link.delay_s = 0.0
            case _:
                one = self.peers[name]
                link = one.peer_link if kind == "cut link" else one.coordinator_link
                link.cut()
                time.sleep(pause_s)
                link.is_cut = False
        self.events.append(f"{kind} {name}".strip())
        self.kinds.append(kind)

    # ------------------------------------------------------------------------------------------------------------------
    # What the peers have written

    def rows(self) -> list[dict[str, Any]]:
        for path in sorted(self.folder.glob("p*.jsonl")):
            done, rows = self._rows.get(path, (0, []))
            with path.open("rb") as file:
                file.seek(done)
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._rows[path] = done + len(text), [*rows, *map(json.loads, text.splitlines())]
        return [row for _, rows in self._rows.values() for row in rows]

    def last_round(self, names: set[str] | None = None) -> int:
        return max(
            (row["round"] for row in self.rows() if "round" in row and (not names or row["name"] in names)), default=-1
        )

    def wait_for_round(self, round_: int) -> None:
        """Wait until a peer has come to a round."""
        self._wait(lambda: self.last_round() >= round_, f"round {round_}")

    def wait_for_all(self) -> None:
        """Wait until all peers that run have trained a round together."""

        def is_together() -> bool:
            last = {row["name"]: row for row in self.rows() if "round" in row}
            mine = [last.get(name) for name in self.peers]
            return all(row is not None and {*self.peers} <= {n for n, w in row["weights"].items() if w} for row in mine)

        self._wait(is_together, "an exchange between all peers")

    def _wait(self, is_reached: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_reached():
            assert time.monotonic() < deadline, f"{what} was not reached: {self.story()}"
            time.sleep(0.02)

    def story(self) -> str:
        said = [
            f"{row['name']}: {row.get('said') or row['error']}"
            for row in self.rows()
            if "said" in row or "error" in row
        ]
        log = (self.folder / "coordinator.txt").read_text().splitlines()
        return "\n".join([f"after {self.events[-5:]}", *said[-20:], *log[-40:]])

    def check(self) -> tuple[int, float]:
        """Hold the peers' states against each other; returns the rounds, and of the rounds that each peer was there for
        all of, the share that counted."""
        rows = self.rows()
        assert not [row["error"] for row in rows if "error" in row]
        digests: dict[int, set[str]] = {}
        for row in (row for row in rows if "round" in row):
            digests.setdefault(row["round"], set()).add(row["digest"])
        assert [round_ for round_, found in digests.items() if len(found) > 1] == []
        first = {round_: min(row["time"] for row in rows if row.get("round") == round_) for round_ in digests}
        counted = possible = 0
        for round_ in range(2, max(digests) + 1):
            began, ended = first.get(round_ - 1), first.get(round_)
            weights = next((row["weights"] for row in rows if row.get("round") == round_ and row["weights"]), {})
            if began is None or ended is None:
                continue
            there = {
                n for n, times in self.lifetimes.items() if times[0] < began and (len(times) < 2 or times[1] > ended)
            }
            there = {name for name in there if self._begins(name, rows) < began}
            possible += len(there)
            counted += len(there & {name for name, weight in weights.items() if weight})
        return len(digests), counted / max(1, possible)

    def stops(self) -> list[float]:
        """Times from one round to the next beyond that of training, sorted: how long no peer trained, the time of the
        exchange and of what was away or stood still included."""
        times = {}
        for row in self.rows():
            if "round" in row:
                times[row["round"]] = min(row["time"], times.get(row["round"], row["time"]))
        gaps = [times[n] - times[n - 1] - self.round_s for n in times if n - 1 in times]
        return sorted(max(0.0, gap) for gap in gaps)

    def _begins(self, name: str, rows: list[dict[str, Any]]) -> float:
        """Time of a peer's first round."""
        return min((row["time"] for row in rows if row["name"] == name and "round" in row), default=float("inf"))
