"""A peer's side of a swarm: it serves the stage that the trainer gives it, until the run is over."""

import contextlib
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Protocol

from muster.launch.network import format_endpoint
from muster.launch.peers.channel import Channel, Message, RefusedError, connect
from muster.launch.peers.client import listen_for_peers
from muster.launch.peers.links import Address, LinkError, PeerListener, Ring, fetch_state, open_ring
from muster.launch.peers.packets import Packets
from muster.spec.errors import ConfigError, MusterError

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
"""Times before the trainer is tried again; each is twice the one before."""
_FETCH_PAUSE_S = 0.2
_CONTROL, _PASS = 0, 1
"""Priorities of messages: those that aren't passes come first."""


class StageWorker(Protocol):
    """A stage of the model, its optimizer, and the gradients of the step under way."""

    step: int
    """Step after which the state is; -1: none yet."""

    def serve(self, stage: int) -> None:
        """Hold another stage, without state."""

    def load(self, content: bytes) -> None:
        """Take over the state of the stage. Raises ValueError where it is another one's."""

    def snapshot(self) -> bytes:
        """Return the state of the stage, from any thread."""
        ...

    def digest(self) -> str:
        """Return the SHA-256 of `snapshot`."""
        ...

    def forward(self, micro_batch: int, inputs: bytes, hidden: bytes) -> bytes:
        """Run a forward, keep what its backward needs, and return what enters the next stage."""
        ...

    def backward(self, micro_batch: int, gradient: bytes) -> tuple[bytes, list[float]]:
        """Run the backward of a forward that was kept; returns the gradient of what has entered the stage and the
        losses. The gradient of the parameters replaces the one of the same micro-batch, where there is one."""
        ...

    def count(self, micro_batch: int) -> bool:
        """Add the gradient of a micro-batch to the step's sum, once; returns whether the sum has it."""
        ...

    def reduce(self, ring: Ring) -> tuple[str, float]:
        """Sum the step's gradients over the peers of the stage, beside this peer's own; returns the hash of the sum and
        its sum of squares. Raises LinkError."""
        ...

    def update(self, message: Message) -> None:
        """Update from the sum, and begin the next step."""


class SwarmPeer:
    """A peer from its start to the end of the run. `make_worker` gets the trainer's welcome."""

    def __init__(
        self,
        trainer: Address,
        secret: bytes,
        name: str,
        make_worker: Callable[[Message], StageWorker],
        announce: Address | None = None,
        log: Callable[[str], None] = print,
        silence_s: float = 10.0,
        connections: int = 1,
    ) -> None:
        """`announce`: address at which other peers reach this one; None: its own towards the trainer. `connections`:
        those by which it sends to the next peer of its stage's ring."""
        self.name = name
        self._trainer, self._secret, self._announce, self._log = trainer, secret, announce, log
        self._make_worker = make_worker
        self._silence_s, self._connections = silence_s, connections
        self._socket = listen_for_peers(trainer, announce, "--announce")
        self._listener = PeerListener(self._socket, secret, self._snapshot, log)
        self.worker: StageWorker | None = None
        self.stage: int | None = None
        self.micro_batches = 0
        """Backwards that it has run."""
        self._state = threading.Lock()
        """Held while the state changes, or is read for another peer."""
        self._orders: queue.PriorityQueue[tuple[int, tuple[int, int], int, Message, list[bytes]]] = (
            queue.PriorityQueue()
        )
        self._numbers = itertools.count()
        self._packets: Packets | None = None
        self._ring_lock = threading.Lock()
        self._ring: Ring | None = None
        self._aborted = 0

    def _snapshot(self) -> bytes:
        with self._state:
            return b"" if self.worker is None or self.worker.step < 0 else self.worker.snapshot()

    def run(self, is_stopping: Callable[[], bool] = lambda: False) -> bool:
        """Serve until the run is over; returns False where it was asked to stop before. A trainer that is gone is
        looked for until it is back. Raises ConfigError where the secret is another, MusterError where a pass fails."""
        wait_s, told = _FIRST_WAIT_S, ""
        while not is_stopping():
            problem = ""
            try:
                self._packets = Packets(self._connect())
                wait_s, told = _FIRST_WAIT_S, ""
                if self._serve(self._packets, is_stopping):
                    return True
                problem = "the trainer is gone: this peer looks for it again"
            except RefusedError as error:
                raise MusterError(str(error)) from None
            except OSError as error:
                problem = f"the trainer does not answer ({error.strerror or error}): this peer tries again"
            finally:
                if self._packets is not None:
                    self._packets.close()
            if problem != told and not is_stopping():
                self._log(problem)
            told = problem
            time.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(_LONGEST_WAIT_S, 2 * wait_s)
        return False

    def _connect(self) -> Channel:
        try:
            return connect(self._trainer, self._secret)
        except RefusedError as error:
            raise ConfigError(str(error)) from None

    def close(self) -> None:
        """Accept no further connections."""
        self._listener.close()

    # ------------------------------------------------------------------------------------------------------------------
    # Messages

    def _serve(self, packets: Packets, is_stopping: Callable[[], bool]) -> bool:
        """Serve over one connection; returns True at the end of the run, False where the connection is lost."""
        host, port = self._announce or (packets.channel.local_host(), self._socket.getsockname()[1])
        packets.channel.set_timeout(self._silence_s)
        packets.send({"name": self.name, "host": host, "port": port})
        welcome, _ = packets.receive()
        if welcome.get("do") == "refuse":
            raise ConfigError(f"{format_endpoint(*self._trainer)} has refused this peer: {welcome['reason']}")
        if welcome.get("do") != "welcome":
            raise OSError("it sends what no trainer sends")
        self._orders = queue.PriorityQueue()
        ended = threading.Event()
        reading = threading.Thread(target=self._read, args=(packets, self._orders), name="swarm-read", daemon=True)
        beat_s = float(welcome["beat_s"])
        beating = threading.Thread(target=self._beat, args=(packets, beat_s, ended), name="swarm-beat", daemon=True)
        reading.start()
        beating.start()
        try:
            if self.worker is None:
                self.worker = self._make_worker(welcome)
            self.worker.step = -1
            while not is_stopping():
                try:
                    *_, message, contents = self._orders.get(timeout=0.1)
                except queue.Empty:
                    continue
                if message["do"] == "finish":
                    return True
                if message["do"] == "lost":
                    return False
                self._obey(packets, message, contents)
            return False
        except OSError:
            return False
        finally:
            ended.set()

    def _read(self, packets: Packets, orders: queue.PriorityQueue) -> None:
        """Sort what the trainer says: passes by their place in the Program, after all else."""
        try:
            while True:
                message, contents = packets.receive()
                if message["do"] == "abort":
                    self._abort(int(message["generation"]))
                elif message["do"] in ("F", "B"):
                    place = int(message["step"]), int(message["order"])
                    orders.put((_PASS, place, next(self._numbers), message, contents))
                elif message["do"] != "beat":
                    orders.put((_CONTROL, (0, 0), next(self._numbers), message, contents))
        except (OSError, RefusedError, KeyError, TypeError, ValueError):
            orders.put((_CONTROL, (0, 0), next(self._numbers), {"do": "lost"}, []))

    def _beat(self, packets: Packets, beat_s: float, ended: threading.Event) -> None:
        while not ended.wait(beat_s):
            with contextlib.suppress(OSError):
                packets.send({"beat": True})

    def _obey(self, packets: Packets, message: Message, contents: list[bytes]) -> None:
        worker, what = self.worker, message["do"]
        assert worker is not None
        if what in ("F", "B"):
            self._run_pass(packets, message, contents)
        elif what == "serve":
            self.stage = int(message["stage"])
            with self._state:
                worker.serve(self.stage)
                worker.step = -1
            self._log(f"serves stage {self.stage}")
        elif what == "load":
            packets.send({"loaded": self._load(packets, message, contents), "number": message["number"]})
        elif what == "digest":
            packets.send({"digest": worker.digest(), "step": worker.step})
        elif what == "state":
            packets.send({"state": worker.step}, [worker.snapshot()])
        elif what == "reduce":
            self._reduce(packets, message)
        elif what == "commit":
            with self._state:
                worker.update(message)

    def _load(self, packets: Packets, message: Message, contents: list[bytes]) -> int:
        """Take over the state of the stage; returns its step, -1 where it could not be had."""
        worker = self.worker
        assert worker is not None
        try:
            address = message.get("address")
            content = contents[0] if address is None else fetch_state(tuple(address), self._secret, message["digest"])
            with self._state:
                worker.load(content)
        except (OSError, RefusedError, ValueError) as error:
            packets.send({"problem": f"the state of stage {self.stage} could not be taken over ({error})"})
            time.sleep(_FETCH_PAUSE_S)
            return -1
        return worker.step

    # ------------------------------------------------------------------------------------------------------------------
    # Passes and sums

    def _run_pass(self, packets: Packets, message: Message, contents: list[bytes]) -> None:
        """Run a pass, and send what it has computed."""
        worker = self.worker
        assert worker is not None
        if message["step"] < worker.step or message["stage"] != self.stage:
            return  # another peer has answered, and the step is over; what counted then is no word on this step
        if message["step"] != worker.step:
            raise MusterError(
                f"a pass of step {message['step'] + 1} came to a peer with the state after step {worker.step}: the"
                " trainer has to send the state first, which is an error in Muster"
            )
        for micro_batch in message["accepted"]:
            worker.count(micro_batch)
        micro_batch = int(message["micro_batch"])
        answer = {"done": message["do"], "stage": self.stage, "micro_batch": micro_batch, "step": worker.step}
        if not message["has_kept"]:
            output = worker.forward(micro_batch, contents[0], contents[1])
        if message["do"] == "F":
            self._answer(packets, answer, output)
            return
        gradient, losses = worker.backward(micro_batch, contents[-1])
        self.micro_batches += 1
        self._answer(packets, answer | {"losses": losses}, gradient)

    def _answer(self, packets: Packets, message: Message, content: bytes) -> None:
        packets.send(message, [content])

    def _reduce(self, packets: Packets, message: Message) -> None:
        """Sum gradients with the other peers of the stage, and say what came of it."""
        worker, generation = self.worker, int(message["generation"])
        assert worker is not None
        missing = [micro_batch for micro_batch in message["micro_batches"] if not worker.count(micro_batch)]
        if missing:
            packets.send({"sum": "missing", "generation": generation, "micro_batches": missing})
            return
        ring = Ring(generation, int(message["step"]), message["ring"], self.name)
        with self._ring_lock:
            self._ring = ring
        is_over = lambda: self._aborted >= generation  # noqa: E731
        try:
            addresses = {name: tuple(address) for name, address in message["addresses"].items()}
            own = self.name, self._secret, self._listener, is_over, self._connections
            open_ring(ring, addresses, *own)
            if is_over():
                raise LinkError("", "the sum was given up")
            digest, squares = worker.reduce(ring)
        except LinkError as error:
            suspect = "" if is_over() else error.neighbour
            packets.send({"sum": "failed", "generation": generation, "suspect": suspect})
            return
        finally:
            self._ring = None
            ring.close()
        packets.send({"sum": "prepared", "generation": generation, "digest": digest, "squares": squares})

    def _abort(self, generation: int) -> None:
        """Leave a sum, in whose midst another thread may be."""
        with self._ring_lock:
            self._aborted = max(self._aborted, generation)
            ring = self._ring
        if ring is not None and ring.generation <= generation:
            ring.abort()
