"""Peers of the tests of membership: real processes with the real transport, coordinator and shared state, whose rounds
are no training but a change that follows from the peer's name and the round, so that each mean can be computed anew."""

import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.config.outer_config import OuterConfig
from muster.launch.peers import links
from muster.launch.peers.channel import load_secret
from muster.launch.peers.client import PeerClient, Stopped
from muster.launch.peers.coordinator import Coordinator
from muster.launch.peers.links import LinkError, Ring
from muster.launch.peers.settings import Settings
from muster.optim.outer.base import OuterParameter
from muster.optim.outer.build import build_outer_method
from muster.train.peer_state import PeerState

SIZES = (700, 33, 5)
QUICK = Settings(beat_s=0.1, silence_s=3.0, reconnect_s=0.3, straggler_s=5.0, measure_every=5)
"""Settings under which tests need not wait for long."""


def change_of(name: str, round_: int) -> Tensor:
    """The change of a peer in a round: float32 of very unequal size, so that any order of additions has its own sum."""
    generator = torch.Generator().manual_seed(int.from_bytes(sha256(f"{name} {round_}".encode()).digest()[:7]))
    scale = torch.randn(sum(SIZES), generator=generator).mul(4).exp()
    return torch.randn(sum(SIZES), generator=generator) * scale


def serial_mean(changes: list[Tensor], weights: list[int]) -> Tensor:
    """The mean as the ring has it, computed on one process: part p is summed from peer p on."""
    size = len(changes)
    chunk = -(-changes[0].numel() // size)
    found = []
    for part in range(size):
        rows = [
            changes[(part + n) % size][part * chunk : (part + 1) * chunk] * weights[(part + n) % size]
            for n in range(size)
        ]
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        found.append(total / sum(weights))
    return torch.cat(found)


class ToyState(PeerState):
    """Shared state that holds every exchange against `serial_mean`, and inputs of aborted ones against themselves."""

    def __init__(self, name: str, compression: str = "none") -> None:
        config = OuterConfig(every=1, compression=compression)  # type: ignore[arg-type]
        zeros = [torch.zeros(size) for size in SIZES]
        parameters = {str(n): OuterParameter(x.clone(), x.clone()) for n, x in enumerate(zeros)}
        super().__init__(config, build_outer_method(config), parameters, lambda round_: 1)
        self.name = name
        self.weights: dict[str, int] = {}
        self.aborted = 0

    def train(self) -> None:
        """Do what a round of training would."""
        self.change = change_of(self.name, self.round)

    def reduce(self, ring: Ring, weights: tuple[int, ...]) -> str:
        change, state = None if self.change is None else self.change.clone(), self.snapshot()
        self.weights = dict(zip(self.names, weights, strict=True))
        try:
            result = super().reduce(ring, weights)
        except LinkError:
            self.aborted += 1
            raise
        finally:
            if change is not None and self.change is not None:
                assert torch.equal(change, self.change), "an exchange has changed its input"
            assert state == self.snapshot(), "an exchange has changed the state before all had confirmed"
        expected = serial_mean([change_of(name, ring.round) for name in self.names], list(weights))
        assert self.mean is not None
        assert torch.equal(self.mean, expected), "a mean is not that of one process"
        return result

    names: tuple[str, ...] = ()


class ToyClient(PeerClient):
    """Client that tells its state the names of a ring."""

    def _exchange(self, ring: Ring, order: dict[str, Any], is_stopping: Any) -> bool:
        self.shared.names = tuple(order["ring"])  # type: ignore[attr-defined]
        return super()._exchange(ring, order, is_stopping)


def run_peer(
    name: str,
    coordinator: int,
    announce: int,
    port: int,
    secret: Path,
    log: Path,
    round_s: float,
    settings: Settings = QUICK,
) -> None:
    """A process that is a peer until SIGTERM, and writes a line for each exchange that it has applied."""
    torch.set_num_threads(1)
    links.LINK_TIMEOUT_S = min(2.0, settings.silence_s)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    state = ToyState(name)
    with log.open("a", buffering=1) as file:

        def write(**row: Any) -> None:
            file.write(json.dumps({"name": name, "time": time.time(), **row}) + "\n")

        listener = socket.create_server(("127.0.0.1", port))
        own = ("127.0.0.1", coordinator), load_secret(secret), {}, state, name, ("127.0.0.1", announce)
        client = ToyClient(*own, lambda line: write(said=line), listener)
        try:
            begun = client.join(stopping.is_set)
            while not stopping.is_set():
                weights = state.weights if begun.weight else {}
                write(round=state.round, digest=state.digest(), weights=weights, aborted=state.aborted)
                stopping.wait(round_s)
                state.train()
                begun = client.meet(stopping.is_set)
        except Stopped:
            pass
        except BaseException as error:
            write(error=repr(error))
            raise
        client.close()


def run_coordinator(port: int, secret: Path, log: Path, settings: Settings = QUICK) -> None:
    """A process that is the coordinator until it is killed."""
    with log.open("a", buffering=1) as file:
        listener = socket.create_server(("127.0.0.1", port))

        def write(line: str) -> None:
            file.write(f"{line}\n")

        Coordinator(listener, load_secret(secret), settings, write)
        threading.Event().wait()


class Proxy:
    """A link to a port of this machine that can be cut and slowed down."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.is_cut = False
        self.delay_s = 0.0
        """Time that each piece of up to 512 bytes takes."""
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break what is connected, and let nothing connect."""
        self.is_cut = True
        for end in list(self._open):
            _break(end)

    def close(self) -> None:
        self.cut()
        _break(self._listener)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self.is_cut:
                    raise OSError
                far = socket.create_connection(("127.0.0.1", self._target), 2)
            except OSError:
                _break(near)
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open |= {near, far}
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := source.recv(512 if self.delay_s else 1 << 16):
                time.sleep(self.delay_s)
                sink.sendall(piece)
        except OSError:
            pass
        for end in (source, sink):
            self._open.discard(end)
            _break(end)


def _break(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def free_ports(count: int) -> list[int]:
    """Ports below those that the system gives to connections, so that none is taken meanwhile."""
    found: list[int] = []
    start = random.Random(os.getpid() + time.time_ns()).randrange(10_000, 30_000)
    for port in range(start, start + 2000):
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")
