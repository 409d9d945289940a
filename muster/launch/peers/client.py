"""A peer's side of the coordinator: it says what it is, does what it is told, and reconnects where it has to."""

import contextlib
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from muster.launch.network import address_family, format_endpoint
from muster.launch.peers.bandwidth import LinkMeasurement
from muster.launch.peers.channel import Channel, Message, RefusedError, connect
from muster.launch.peers.links import Address, LinkError, PeerListener, Ring, fetch_state, open_ring
from muster.launch.peers.membership import PeerState, Phase
from muster.launch.peers.settings import Settings
from muster.spec.errors import ConfigError

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 0.5
"""Times before the coordinator is tried again; each is twice the one before."""
_FETCH_PAUSE_S = 0.2


class Stopped(Exception):
    """Request to stop, which came while the peer waited for the others."""


class SharedState(Protocol):
    """State that the peers share. Only the thread that calls PeerClient changes it."""

    round: int
    """Exchanges that it has gone through."""

    def digest(self) -> str:
        """Return its hash, the SHA-256 of `snapshot`."""
        ...

    def snapshot(self) -> bytes:
        """Return all of it, from any thread."""
        ...

    def load(self, content: bytes) -> None:
        """Take over another peer's snapshot; own changes since are lost."""
        ...

    def reduce(self, ring: Ring, weights: tuple[int, ...]) -> str:
        """Compute the mean of the changes of all peers, by their weights in the order of the ring, and keep it beside
        the state, which stays as it is. Returns the mean's hash. Raises LinkError."""
        ...

    def apply(self, trained: int) -> None:
        """Apply the mean that was kept, at the end of a round in which so many peers trained; the round is then one
        more."""
        ...


@dataclass(frozen=True)
class Round:
    """Beginning of a round."""

    members: tuple[str, ...]
    """Peers that train in it."""
    index: int
    """Place of this peer among them."""
    sent_bytes: int = 0
    """Bytes that this peer has sent in the exchange before, failed ones included."""
    transfer_s: float = 0.0
    weight: int = 0
    """Changes of the peers that were averaged in it; 0 where the round begins without an exchange."""
    has_jumped: bool = False
    """True where the state of another peer was taken over."""


class PeerClient:
    """Connection of a peer to the others, from its start to `close`."""

    def __init__(
        self,
        coordinator: Address,
        secret: bytes,
        run_settings: Mapping[str, object],
        shared: SharedState,
        name: str,
        announce: Address | None = None,
        log: Callable[[str], None] = print,
        listener: socket.socket | None = None,
        connections: int = 1,
    ) -> None:
        """`run_settings`: what all peers must have the same of, by names that a person knows, as JSON has it.
        `announce`: address at which other peers reach this one; None: its own towards the coordinator.
        `connections`: those by which it sends to the next peer of a ring."""
        self.name, self.shared, self._log = name, shared, log
        self._coordinator, self._secret, self._announce = coordinator, secret, announce
        self._run_settings = dict(run_settings)
        self._place = announce or ("", 0)
        """Address at which others reach this peer, once it has said so."""
        self._socket = listener or listen_for_peers(coordinator, announce, "outer.announce")
        self._listener = PeerListener(self._socket, secret, shared.snapshot, log)
        self._connections = connections
        self._settings = Settings()
        self._state = PeerState("idle", shared.round, shared.digest())
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._channel: Channel | None = None
        self._ring: Ring | None = None
        self._measurement: LinkMeasurement | None = None
        self._aborted = 0
        self._refusal = ""
        """Sentence with which the run ends."""
        self._was_welcome = False
        self._closed = threading.Event()
        for target in (self._stay_connected, self._beat):
            threading.Thread(target=target, name="peer", daemon=True).start()

    def close(self) -> None:
        """Leave the others."""
        self._end_measurement()
        with self._lock:
            self._closed.set()
            channel = self._channel
            if channel is not None:
                with contextlib.suppress(OSError):
                    channel.send_message({"phase": "left"})
        self._listener.close()
        if channel is not None:
            channel.close()

    # ------------------------------------------------------------------------------------------------------------------
    # Rounds

    def join(self, is_stopping: Callable[[], bool] = lambda: False) -> Round:
        """Return once this peer may train: at the beginning, or after the exchange at the end of the round that the
        others are in, in which it takes part with no change of its own. Raises Stopped, ConfigError."""
        return self._next_round("idle", is_stopping)

    def meet(self, is_stopping: Callable[[], bool] = lambda: False) -> Round:
        """Exchange the changes of a trained round with the others; returns once the result is applied. Where the
        others have gone on without this peer, it takes over their state. Raises Stopped, ConfigError."""
        return self._next_round("arrived", is_stopping)

    def _next_round(self, phase: Phase, is_stopping: Callable[[], bool]) -> Round:
        has_jumped, sent_bytes = False, 0
        self._end_measurement()
        self._report(phase, digest=self.shared.digest(), round=self.shared.round)
        while True:
            order = self._next_order(is_stopping)
            state = self._state
            if order["do"] == "begin" and state.phase == "idle" and order["round"] == state.round:
                members = tuple(order["members"])
                self._report("training", members=members)
                return Round(members, members.index(self.name), sent_bytes, has_jumped=has_jumped)
            if order["do"] == "fetch" and order["round"] >= state.round and order["digest"] != state.digest:
                has_jumped |= self._fetch(order)
            elif (
                order["do"] == "exchange"
                and order["round"] == state.round
                and order["generation"] > max(state.failed, state.committed, self._aborted)
            ):
                start_s = time.perf_counter()
                ring = Ring(order["generation"], order["round"], order["ring"], self.name)
                is_applied = self._exchange(ring, order, is_stopping)
                sent_bytes += ring.sent_bytes
                if is_applied:
                    members, weight = tuple(order["ring"]), sum(order["weights"].values())
                    taken_s = time.perf_counter() - start_s
                    return Round(members, members.index(self.name), sent_bytes, taken_s, weight, has_jumped)

    def _fetch(self, order: Message) -> bool:
        """Take over the state of another peer; returns whether that succeeded."""
        self._report("fetching")
        source = order["source"]
        try:
            self.shared.load(fetch_state(tuple(order["addresses"][source]), self._secret, order["digest"]))
        except (OSError, RefusedError, KeyError, ValueError) as error:
            self._log(f"the state of {source} could not be taken over ({error}): another peer is asked")
            time.sleep(_FETCH_PAUSE_S)
            self._report("idle", suspect=source)
            return False
        self._report("idle", digest=self.shared.digest(), round=self.shared.round, suspect="")
        return True

    def _exchange(self, ring: Ring, order: Message, is_stopping: Callable[[], bool]) -> bool:
        """Take part in an exchange; returns whether its result was applied. Where not, the state and this peer's
        change are as before."""
        generation, before = ring.generation, self._state
        self._report("exchanging", generation=generation, ring=tuple(order["ring"]))
        try:
            with self._lock:
                self._ring = ring
            addresses = {name: tuple(address) for name, address in order["addresses"].items()}
            is_over = lambda: self._aborted >= generation  # noqa: E731
            own = self.name, self._secret, self._listener, is_over, self._connections
            open_ring(ring, addresses, *own)
            if is_over():
                raise LinkError("", "the exchange was aborted")
            result = self.shared.reduce(ring, tuple(order["weights"][name] for name in order["ring"]))
        except LinkError as error:
            suspect = "" if self._aborted >= generation else error.neighbour
            self._report(before.phase, failed=generation, suspect=suspect, generation=0, ring=())
            return False
        finally:
            self._ring = None
            ring.close()
        self._report("prepared", result=result)
        while True:
            verdict = self._next_order(is_stopping)
            if verdict.get("generation") != generation:
                continue
            if verdict["do"] == "abort":
                self._report(before.phase, failed=generation, suspect="", generation=0, ring=(), result="")
                return False
            if verdict["do"] == "commit":
                self.shared.apply(order["trained"])
                shared = {"round": self.shared.round, "digest": self.shared.digest(), "members": tuple(order["ring"])}
                more = {"committed": generation, "generation": 0, "ring": (), "result": "", "suspect": ""}
                self._report("training", **shared, **more)
                return True

    def _next_order(self, is_stopping: Callable[[], bool]) -> Message:
        while True:
            if self._refusal:
                raise ConfigError(self._refusal)
            if is_stopping():
                raise Stopped
            with contextlib.suppress(queue.Empty):
                return self._orders.get(timeout=0.1)

    # ------------------------------------------------------------------------------------------------------------------
    # The connection to the coordinator

    def _report(self, phase: Phase, **changes: object) -> None:
        """Change what this peer is, and tell the coordinator, now or when it is reached again."""
        with self._lock:
            self._state = replace(self._state, phase=phase, **changes)  # type: ignore[arg-type]
            self._send_state()

    def _send_state(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send_message(asdict(self._state))

    def _beat(self) -> None:
        while not self._closed.wait(self._settings.beat_s):
            with self._lock:
                self._send_state()

    def _stay_connected(self) -> None:
        """Keep a connection to the coordinator, and read its orders."""
        wait_s, told = _FIRST_WAIT_S, ""
        while not self._closed.is_set():
            channel, problem = None, ""
            try:
                channel = self._connect()
                channel.set_timeout(self._settings.silence_s)
                self._introduce(channel)
                self._read_orders(channel)
            except RefusedError as error:
                problem = str(error)
            except OSError as error:
                problem = f"the coordinator does not answer ({error.strerror or error}): this peer tries again"
            finally:
                with self._lock:
                    self._channel = None
                if channel is not None:
                    wait_s = _FIRST_WAIT_S
                    channel.close()
            if self._closed.is_set() or self._refusal:
                return
            if problem and problem != told:
                self._log(problem)
            told = problem
            self._closed.wait(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(_LONGEST_WAIT_S, 2 * wait_s)

    def _connect(self) -> Channel:
        """Connect to the coordinator. Another secret than this peer's ends the run, unless the coordinator has let it
        in before: then something else answers in its place, until it is back."""
        try:
            return connect(self._coordinator, self._secret)
        except RefusedError as error:
            if not self._was_welcome:
                self._refusal = str(error)
            raise

    def _introduce(self, channel: Channel) -> None:
        host, port = self._place = self._announce or (channel.local_host(), self._socket.getsockname()[1])
        with self._lock:
            hello = {"name": self.name, "settings": self._run_settings, "host": host, "port": port}
            channel.send_message(hello | {"state": asdict(self._state)})
            self._channel = channel

    def _read_orders(self, channel: Channel) -> None:
        while True:
            order = channel.receive_message()
            if order["do"] == "welcome":
                self._was_welcome = True
                self._settings = replace(self._settings, beat_s=order["beat_s"], silence_s=order["silence_s"])
                channel.set_timeout(self._settings.silence_s)
            elif order["do"] == "refuse":
                self._refusal = f"{format_endpoint(*self._coordinator)} has refused this run: {order['reason']}"
                return
            elif order["do"] == "wait":
                present, needed = order["present"], order["needed"]
                are = "is" if present == 1 else "are"
                self._log(f"waiting for other peers: {present} of at least {needed} {are} there")
            elif order["do"] == "leave_out":
                self._log(
                    f"left out of the exchange that ends round {order['round'] + 1}, since links to other peers have"
                    f" failed: they reach this one at {format_endpoint(*self._place)} (outer.announce gives another)"
                )
            elif order["do"] != "beat":
                if order["do"] == "abort":
                    self._abort(order["generation"])
                if order["do"] == "measure":
                    threading.Thread(target=self._measure, args=(order,), name="peer", daemon=True).start()
                else:
                    self._orders.put(order)

    def _abort(self, generation: int) -> None:
        """Leave an exchange, in whose midst another thread may be."""
        with self._lock:
            self._aborted = max(self._aborted, generation)
            ring = self._ring
        if ring is not None and ring.generation <= generation:
            ring.abort()

    # ------------------------------------------------------------------------------------------------------------------
    # Measured links

    def _measure(self, order: Message) -> None:
        """Measure the link to another peer beside the training, and say what was found. The end of the round breaks it
        off; then nothing is said, and it is made again in the next."""
        measurement = LinkMeasurement(order["target"])
        with self._lock:
            if self._measurement is not None or self._state.phase != "training":
                return
            self._measurement = measurement
        target, address = measurement.target, order["addresses"].get(measurement.target)
        rate = 0.0 if address is None else measurement.run(tuple(address), self._secret, self._connections)
        with self._lock:
            self._measurement = None
            if rate is not None:
                state = self._state
                others = [one for one in state.rates if one[0] in state.members and one[0] != target]
                self._report(state.phase, rates=(*others, (target, rate, order["round"])))

    def _end_measurement(self) -> None:
        with self._lock:
            measurement = self._measurement
        if measurement is not None:
            measurement.abort()


def listen_for_peers(coordinator: Address, announce: Address | None, key: str) -> socket.socket:
    """Listen for other peers: at the port that is announced by a key, else at any. Raises ConfigError."""
    family = address_family(coordinator[0])
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port = announce[1] if announce else 0
    try:
        listener.bind(("::" if family == socket.AF_INET6 else "", port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"{key}: port {port} can't be listened at ({error.strerror}): give another") from None
    listener.listen()
    return listener
