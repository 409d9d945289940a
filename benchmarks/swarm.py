"""Throughput of stages that swarms of unequal peers serve, as a share of what the peers together could do.

`python -m benchmarks.swarm [--micro-batches N] [--steps N] [--pass-ms MS]`. Peers are processes of this machine with
the real transport, wiring and driver, whose passes sleep, so that they need no cores: a backward twice as long as a
forward. Each row is the mean of the steps after the first, in which the trainer measures the peers.
"""

import argparse
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from muster.launch.peers.channel import Message, create_secret, load_secret
from muster.launch.peers.links import Ring
from muster.launch.swarm.driver import SwarmDriver
from muster.launch.swarm.peer import SwarmPeer
from muster.launch.swarm.settings import SwarmSettings
from muster.schedule.swarm.step_passes import Pass
from muster.schedule.swarm.wiring import Method
from muster.simulate.swarm import SimulatedPeer, SwarmSimulator, settled_step, stage_rate

STAGES = 2
SPEEDS = (1, 2, 4)
HIDDEN_BYTES = 1 << 14
_CONTEXT = multiprocessing.get_context("spawn")


class SleepingWorker:
    """A stage whose passes sleep."""

    def __init__(self, forward_s: float) -> None:
        self.forward_s, self.step = forward_s, -1
        self._done: set[int] = set()

    def serve(self, stage: int) -> None:
        self.step = -1

    def load(self, content: bytes) -> None:
        self.step = int(content)

    def snapshot(self) -> bytes:
        return str(self.step).encode()

    def digest(self) -> str:
        return sha256(self.snapshot()).hexdigest()

    def forward(self, micro_batch: int, inputs: bytes, hidden: bytes) -> bytes:
        time.sleep(self.forward_s)
        return bytes(HIDDEN_BYTES)

    def backward(self, micro_batch: int, gradient: bytes) -> tuple[bytes, list[float]]:
        time.sleep(2 * self.forward_s)
        self._done.add(micro_batch)
        return bytes(HIDDEN_BYTES), [0.0]

    def count(self, micro_batch: int) -> bool:
        return micro_batch in self._done

    def reduce(self, ring: Ring) -> tuple[str, float]:
        for _ in range(2 * (ring.size - 1)):
            ring.exchange(bytes(HIDDEN_BYTES))
        return sha256(b"sum").hexdigest(), 1.0

    def update(self, message: Message) -> None:
        self.step, self._done = int(message["step"]), set()


class Source:
    """State of a run without parameters."""

    def __init__(self) -> None:
        self.driver: SwarmDriver | None = None

    @property
    def step(self) -> int:
        return self.driver.step if self.driver is not None else 0

    def snapshot(self, stage: int) -> bytes:
        return str(self.step).encode()

    def inputs(self, stage: int, micro_batch: int) -> bytes:
        return b""


def serve(name: str, port: int, secret: Path, forward_s: float) -> None:
    """A process that is a peer."""
    own = ("127.0.0.1", port), load_secret(secret), name, lambda welcome: SleepingWorker(forward_s)
    SwarmPeer(*own, log=lambda line: None).run()


def pass_places(micro_batches: int) -> dict[Pass, int]:
    """Return the passes of a step with their places."""
    return {
        Pass(kind, stage, n): 2 * n + (kind == "F")
        for stage in range(STAGES)
        for n in range(micro_batches)
        for kind in ("F", "B")
    }


@dataclass
class Swarm:
    """A trainer with its peers, `peers`: time of a forward by name."""

    peers: dict[str, float]
    wiring: Method = "throughput"
    rebalance_every: int = 0
    processes: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> "Swarm":
        self.folder = tempfile.TemporaryDirectory(prefix="swarm-")
        secret = Path(self.folder.name) / "secret"
        listener = socket.create_server(("127.0.0.1", 0))
        source = Source()
        settings = SwarmSettings(STAGES, self.wiring, rebalance_every=self.rebalance_every)
        self.driver = SwarmDriver(listener, create_secret(secret), settings, {}, source, lambda line: None)
        source.driver, self._source = self.driver, source
        for name, forward_s in self.peers.items():
            own = name, listener.getsockname()[1], secret, forward_s
            self.processes[name] = _CONTEXT.Process(target=serve, args=own, daemon=True)
            self.processes[name].start()
            while name not in self.driver.peers or self.driver.peers[name].phase != "ready":
                self.driver._admit()
                self.driver._take_events()
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.close(is_over=True)
        for process in self.processes.values():
            process.kill()
            process.join()
        self.folder.cleanup()

    def kill(self, name: str) -> None:
        """Kill a peer as by kill −9."""
        os.kill(self.processes[name].pid, signal.SIGKILL)

    def predicted(self, micro_batches: int) -> tuple[float, float]:
        """Return the micro-batches a second of a step as `muster predict` simulates it, and their bound."""
        peers = [
            SimulatedPeer(name, peer.stage or 0, self.peers[name], 2 * self.peers[name])
            for name, peer in self.driver.peers.items()
        ]
        carried = {(kind, stage): (HIDDEN_BYTES, HIDDEN_BYTES) for kind in ("F", "B") for stage in range(STAGES)}
        found = settled_step(SwarmSimulator(pass_places(micro_batches), peers, carried, method=self.wiring))
        bound = min(stage_rate([peer for peer in peers if peer.stage == stage]) for stage in range(STAGES))
        return micro_batches / max(found.stage_s.values()), bound

    def step(self, micro_batches: int) -> float:
        """Return the seconds of a step."""
        start_s = time.perf_counter()
        self.driver.run_step(pass_places(micro_batches), self._source)
        self.driver.commit({})
        return time.perf_counter() - start_s

    def done(self) -> Counter[str]:
        """Return the micro-batches that each peer has done since the last call."""
        found: Counter[str] = Counter()
        for row in self.driver.rows:
            found.update({one["name"]: one["counted"] for one in row["peers"]})
        self.driver.rows = []
        return found


def measure_wiring(wiring: Method, micro_batches: int, steps: int, pass_s: float) -> list[str]:
    """Return a row: peers of speed 1, 2 and 4 on each of two stages."""
    # A new peer serves the stage with the fewest, so that pairs of the same speed part.
    peers = {f"{speed}{side}": pass_s / speed for speed in SPEEDS for side in "ab"}
    with Swarm(peers, wiring) as swarm:
        stages = {name: peer.stage for name, peer in swarm.driver.peers.items()}
        assert all(stages[f"{speed}a"] != stages[f"{speed}b"] for speed in SPEEDS), stages
        swarm.step(micro_batches)
        swarm.done()
        rate = micro_batches * steps / sum(swarm.step(micro_batches) for _ in range(steps))
        done = swarm.done()
        predicted, bound = swarm.predicted(micro_batches)
    shares = ":".join(str(sum(done[f"{speed}{side}"] for side in "ab") // (2 * steps)) for speed in SPEEDS)
    own = f"{rate:.1f}", f"{predicted:.1f}", f"{bound:.1f}", f"{rate / bound:.2f}"
    return [wiring.replace("_", " "), *own, shares]


def measure_rebalancing(every: int, micro_batches: int, steps: int, pass_s: float) -> list[str]:
    """Return a row: six equal peers, of which two on the first stage are killed."""
    peers = {f"p{n}": pass_s / 2 for n in range(6)}
    with Swarm(peers, rebalance_every=every) as swarm:
        swarm.step(micro_batches)
        for name in [name for name, peer in swarm.driver.peers.items() if peer.stage == 0][:2]:
            swarm.kill(name)
        for _ in range(2):
            swarm.step(micro_batches)
        rate = micro_batches * steps / sum(swarm.step(micro_batches) for _ in range(steps))
        counts = Counter(peer.stage for peer in swarm.driver.peers.values())
        predicted, _ = swarm.predicted(micro_batches)
    bound = 2 / (3 * pass_s / 2)
    name = "peers move" if every else "peers stay"
    own = f"{rate:.1f}", f"{predicted:.1f}", f"{bound:.1f}", f"{rate / bound:.2f}"
    return [name, *own, f"{counts[0]} + {counts[1]} peers"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of both wirings, and one of rebalancing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--micro-batches", type=int, default=112)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--pass-ms", type=float, default=80.0, help="a forward of the slowest peer")
    args = parser.parse_args(arguments)
    own = args.micro_batches, args.steps, args.pass_ms / 1e3
    print("peers of speed 1, 2 and 4 on each of two stages")
    print_table("wiring", "micro-batches each", [measure_wiring(one, *own) for one in ("throughput", "round_robin")])
    print("\nsix equal peers on two stages, after two of the three on the first were killed")
    print_table("after two steps", "stages", [measure_rebalancing(one, *own) for one in (0, 1)])


def print_table(first: str, last: str, rows: list[list[str]]) -> None:
    """Print rows under their heads."""
    heads = [first, "micro-batches/s", "predicted", "bound", "share", last]
    for row in [heads, ["---"] * len(heads), *rows]:
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
