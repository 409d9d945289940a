"""Peers of a swarm for tests: real processes that serve real stages, and die, answer late or not at all by chance."""

import multiprocessing
import os
import random
import signal
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from muster.config.run_config import RunConfig
from muster.launch.peers import links
from muster.launch.peers.channel import Message, load_secret
from muster.launch.peers.packets import Packets
from muster.launch.swarm.peer import StageWorker, SwarmPeer
from muster.schedule.swarm.ledger import Ledger, Unit
from muster.schedule.swarm.step_passes import StepPasses
from muster.train.swarm_worker import SwarmStage

_CONTEXT = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Faults:
    """Chances of what happens to a peer in each of its passes, or of its sums."""

    die: float = 0.0
    die_in_sum: float = 0.0
    drop: float = 0.0
    """It has computed, and its answer is lost."""
    late_s: float = 0.0
    """Longest time by which answers come late."""
    pass_s: float = 0.0
    """Time that each pass takes longer."""
    skips_updates: bool = False
    """A seeded bug: it goes on with old weights."""


class FaultyPeer(SwarmPeer):
    """Peer with faults."""

    def __init__(self, *args: Any, faults: Faults, **more: Any) -> None:
        super().__init__(*args, **more)
        self.faults, self.chance = faults, random.Random(self.name)

    def _may_die(self, chance: float) -> None:
        if self.chance.random() < chance:
            os.kill(os.getpid(), signal.SIGKILL)

    def _run_pass(self, packets: Packets, message: Message, contents: list[bytes]) -> None:
        self._may_die(self.faults.die / 2)
        time.sleep(self.faults.pass_s)
        super()._run_pass(packets, message, contents)
        self._may_die(self.faults.die / 2)

    def _answer(self, packets: Packets, message: Message, content: bytes) -> None:
        if self.chance.random() < self.faults.drop:
            return
        if self.faults.late_s:
            time.sleep(self.chance.uniform(0, self.faults.late_s))
        super()._answer(packets, message, content)

    def _reduce(self, packets: Packets, message: Message) -> None:
        self._may_die(self.faults.die_in_sum / 2)
        super()._reduce(packets, message)
        if message["ring"][0] != self.name:  # where all die before one has told its new state, the stage is lost
            self._may_die(self.faults.die_in_sum / 2)


class ForgetfulStage(SwarmStage):
    """A stage that counts its updates and makes none."""

    def update(self, message: Message) -> None:
        super().update(message | {"is_skipped": True})


def run_peer(name: str, port: int, secret: Path, faults: Faults, log: Path) -> None:
    """A process that is a peer until the run is over."""
    torch.set_num_threads(1)
    links.LINK_TIMEOUT_S = 2.0
    stage_type = ForgetfulStage if faults.skips_updates else SwarmStage

    def make_worker(welcome: Message) -> StageWorker:
        return stage_type(RunConfig.model_validate(welcome["config"]), torch.device("cpu"))

    with log.open("a", buffering=1) as file:
        own = ("127.0.0.1", port), load_secret(secret), name, make_worker
        peer = FaultyPeer(*own, log=lambda line: print(name, line, file=file), silence_s=5.0, faults=faults)
        try:
            peer.run()
        except BaseException as error:
            print(name, repr(error), file=file)
            raise


class Nursery:
    """A process, forked before anything else runs, that forks the peers; those that die are replaced, up to a number
    of deaths, after which none dies any more."""

    def __init__(self, port: int, secret: Path, folder: Path, most_deaths: int = 0) -> None:
        self._own, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_keep, args=(theirs, port, secret, folder, most_deaths), daemon=False)
        self._process.start()

    def start(self, name: str, faults: Faults) -> None:
        """Start a peer."""
        self._own.send(("start", name, asdict(faults)))

    def kill(self, name: str) -> None:
        """Kill a peer, which isn't replaced, if it lives."""
        self._own.send(("kill", name, {}))

    def close(self) -> int:
        """End all peers; returns how many have died by themselves."""
        self._own.send(("close", "", {}))
        deaths = self._own.recv()
        self._process.join()
        return deaths


def _keep(orders: Connection, port: int, secret: Path, folder: Path, most_deaths: int) -> None:
    alive: dict[str, tuple[Any, Faults]] = {}
    deaths = 0

    def start(name: str, faults: Faults) -> None:
        process = _CONTEXT.Process(target=run_peer, args=(name, port, secret, faults, folder / "peers.txt"))
        process.start()
        alive[name] = process, faults

    while True:
        if orders.poll(0.05):
            what, name, faults = orders.recv()
            if what == "start":
                start(name, Faults(**faults))
            elif what == "kill" and name in alive:
                alive.pop(name)[0].kill()
            elif what == "close":
                for process, _ in alive.values():
                    process.kill()
                    process.join()
                orders.send(deaths)
                return
        for name, (process, faults) in list(alive.items()):
            if process.exitcode == -signal.SIGKILL:
                deaths += 1
                del alive[name]
                if deaths >= most_deaths:
                    faults = replace(faults, die=0.0, die_in_sum=0.0)
                start(f"{name}+", faults)


def seed_bug(bug: str) -> Any:
    """A patch with a bug that the tests have to find."""
    if bug == "counted twice":
        accept, answers = Ledger.accept, defaultdict[int, list[tuple[Unit, str]]](list)

        def accept_all(self: Ledger, unit: Unit, peer: str) -> bool:
            answers[id(self)].append((unit, peer))
            accept(self, unit, peer)
            return True

        def micro_batches(self: Ledger, peer: str, stage: int) -> list[int]:
            return sorted({n for (own, n), one in answers[id(self)] if (own, one) == (stage, peer)})

        return patch.multiple(Ledger, accept=accept_all, micro_batches=micro_batches)
    if bug == "lost":
        lose = StepPasses.lose
        return patch.object(StepPasses, "lose", lambda self, peer, sent, is_summed: lose(self, peer, sent, True))
    raise ValueError(bug)
