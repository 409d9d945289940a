"""A peer's side of the connections to other peers: the ring of one exchange, and states that are handed over."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from hashlib import sha256
from itertools import pairwise
from typing import Any

from muster.launch.network import ConnectionAcceptor
from muster.launch.peers.bandwidth import Address, answer_measurement
from muster.launch.peers.channel import MAX_FRAME_BYTES, Channel, Frame, Message, RefusedError, accept, connect
from muster.spec.endpoint import MAX_CONNECTIONS

LINK_TIMEOUT_S = 10.0
"""Time without a byte after which a link has failed."""


class LinkError(OSError):
    """Failure of a link of a ring."""

    def __init__(self, neighbour: str, reason: object) -> None:
        super().__init__(str(reason))
        self.neighbour = neighbour


class Ring:
    """A peer's two links in one exchange: it sends to the next peer, and receives from the one before. A link has one
    or several connections, each of which carries an equal share of all that is sent."""

    def __init__(self, generation: int, round_: int, names: Sequence[str], own: str) -> None:
        self.generation, self.round = generation, round_
        self.size, self.index = len(names), names.index(own)
        self.next, self.previous = names[(self.index + 1) % self.size], names[self.index - 1]
        self.sent_bytes = 0
        self._channels: dict[str, dict[int, Channel]] = {"next": {}, "previous": {}}
        self._is_aborted = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2 * MAX_CONNECTIONS, "ring")

    def attach(self, neighbour: str, channel: Channel, number: int = 0) -> None:
        """Use a connection, of several the one with this number, to the neighbour named `next` or `previous`. Raises
        LinkError where the exchange was aborted."""
        with self._lock:
            self._channels[neighbour][number] = channel
            if self._is_aborted:
                channel.close()
                raise LinkError("", "the exchange was aborted")

    def abort(self) -> None:
        """End the exchange: whoever sends or receives in it raises LinkError."""
        with self._lock:
            self._is_aborted = True
            channels = [channel for one in self._channels.values() for channel in one.values()]
        for channel in channels:
            channel.close()

    def close(self) -> None:
        """Close the links after the exchange."""
        self.abort()
        self._threads.shutdown(wait=False)

    def exchange(self, content: bytes | memoryview) -> bytes:
        """Send bytes to the next peer while as many come from the one before; returns these. Raises LinkError."""
        sinks, sources = (self._numbered(neighbour) for neighbour in ("next", "previous"))
        counts = [share.stop - share.start for share in _shares(len(content), len(sources))]
        receiving = [self._threads.submit(self._receive, *one) for one in zip(sources, counts, strict=True)]
        parts = [memoryview(content)[share] for share in _shares(len(content), len(sinks))]
        sending = [self._threads.submit(self._send, *one) for one in zip(sinks, parts, strict=True)]
        both: list[Future[Any]] = [*receiving, *sending]
        ended, _ = wait(both, return_when=FIRST_EXCEPTION)
        failed = next((one for one in both if one in ended and one.exception()), None)
        if failed is not None:
            self.abort()
            wait(both)
            failed.result()
        return b"".join(one.result() for one in receiving)

    def _numbered(self, neighbour: str) -> list[Channel]:
        """Return a neighbour's connections by their numbers, which are the same at both ends."""
        channels = self._channels[neighbour]
        return [channels[number] for number in sorted(channels)]

    def _send(self, channel: Channel, content: memoryview) -> None:
        try:
            for part in split(content):
                channel.send(part, self.generation, self.round)
                with self._lock:
                    self.sent_bytes += len(part)
        except OSError as error:
            raise LinkError(self.next, error) from None

    def _receive(self, channel: Channel, count: int) -> bytes:
        try:
            return receive_parts(channel, count, self._check)
        except (OSError, RefusedError) as error:
            raise LinkError(self.previous, error) from None

    def _check(self, frame: Frame) -> None:
        if (frame.generation, frame.round) != (self.generation, self.round):
            raise RefusedError(
                f"a frame of exchange {frame.generation}, round {frame.round}: expected {self.generation}"
            )


def _shares(count: int, connections: int) -> list[slice]:
    """Return the parts of `count` bytes that go over so many connections."""
    ends = [count * n // connections for n in range(connections + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def split(content: bytes | memoryview) -> list[memoryview]:
    """Return the parts in which bytes are sent."""
    view = memoryview(content)
    return [view[n : n + MAX_FRAME_BYTES] for n in range(0, len(view), MAX_FRAME_BYTES)]


def receive_parts(channel: Channel, count: int, check: Callable[[Frame], None] = lambda frame: None) -> bytes:
    """Return `count` bytes that come in parts. Raises OSError or RefusedError."""
    found = bytearray()
    while len(found) < count:
        frame = channel.receive()
        check(frame)
        found += frame.content
    if len(found) != count:
        raise RefusedError(f"{len(found)} bytes have come: expected {count}")
    return bytes(found)


class PeerListener:
    """Listener for other peers: links of rings, their measurements, and requests for the shared state."""

    def __init__(
        self, listener: socket.socket, secret: bytes, snapshot: Callable[[], bytes], log: Callable[[str], None]
    ) -> None:
        self._secret, self._snapshot, self._log = secret, snapshot, log
        self._came = threading.Condition()
        self._links: dict[tuple[int, str], list[Channel | None]] = {}
        """Connections by exchange and peer; None: one that is still to come."""
        self._acceptor = ConnectionAcceptor(listener, self._serve, "peers")

    def close(self) -> None:
        """Accept no connections."""
        self._acceptor.close()

    def take_link(self, generation: int, name: str, timeout_s: float, is_over: Callable[[], bool]) -> list[Channel]:
        """Return the connections from a peer for an exchange by their numbers, once all are there. Raises LinkError."""
        deadline, key = time.monotonic() + timeout_s, (generation, name)
        with self._came:
            for former in [one for one in self._links if one[0] < generation]:
                for channel in filter(None, self._links.pop(former)):
                    channel.close()
            while None in self._links.get(key, [None]):
                if is_over() or time.monotonic() > deadline:
                    raise LinkError(name, "no connection has come")
                self._came.wait(0.1)
            return [channel for channel in self._links.pop(key) if channel is not None]

    def _add_link(self, channel: Channel, wanted: Message) -> None:
        """Keep a connection for the exchange that it is for. Raises KeyError, TypeError or ValueError."""
        count, number = int(wanted["connections"]), int(wanted["number"])
        if not 0 <= number < count <= MAX_CONNECTIONS:
            raise ValueError(f"connection {number} of {count}: expected at most {MAX_CONNECTIONS}")
        with self._came:
            links = self._links.setdefault((int(wanted["generation"]), str(wanted["name"])), [None] * count)
            if len(links) != count:
                raise ValueError(f"a link of {count} connections: expected {len(links)}")
            links[number] = channel
            self._came.notify_all()

    def _serve(self, connection: socket.socket) -> None:
        host = ""
        try:
            host = connection.getpeername()[0]
            channel = accept(connection, self._secret)
            channel.set_timeout(LINK_TIMEOUT_S)
            wanted = channel.receive_message()
            if wanted.get("want") == "link":
                self._add_link(channel, wanted)
                return
            if wanted.get("want") == "measure":
                answer_measurement(channel, int(wanted["bytes"]))
            else:
                self._hand_over(channel)
            channel.close()
        except (RefusedError, KeyError, TypeError, ValueError) as error:
            connection.close()
            self._log(f"refused a connection from {host}: {error}")
        except OSError:
            connection.close()

    def _hand_over(self, channel: Channel) -> None:
        content = self._snapshot()
        channel.send_message({"bytes": len(content)})
        for part in split(content):
            channel.send(part)


def open_ring(
    ring: Ring,
    addresses: dict[str, Address],
    own: str,
    secret: bytes,
    listener: PeerListener,
    is_over: Callable[[], bool],
    connections: int = 1,
) -> None:
    """Connect a ring's links, that to the next peer by so many connections. Raises LinkError."""
    if ring.size == 1:
        return

    def call(number: int) -> None:
        channel = connect(addresses[ring.next], secret)
        channel.set_timeout(LINK_TIMEOUT_S)
        ring.attach("next", channel, number)
        link = {"generation": ring.generation, "name": own, "number": number, "connections": connections}
        channel.send_message({"want": "link"} | link)

    try:
        with ThreadPoolExecutor(connections) as threads:
            list(threads.map(call, range(connections)))
    except LinkError:
        raise
    except (OSError, RefusedError, KeyError) as error:
        raise LinkError(ring.next, error) from None
    previous = listener.take_link(ring.generation, ring.previous, LINK_TIMEOUT_S, is_over)
    for number, channel in enumerate(previous):
        ring.attach("previous", channel, number)


def fetch_state(address: Address, secret: bytes, digest: str) -> bytes:
    """Return the shared state of a peer, whose hash is `digest`. Raises OSError, or RefusedError where it has another
    one."""
    channel = connect(address, secret)
    try:
        channel.set_timeout(LINK_TIMEOUT_S)
        request: Message = {"want": "state"}
        channel.send_message(request)
        content = receive_parts(channel, int(channel.receive_message()["bytes"]))
    finally:
        channel.close()
    if sha256(content).hexdigest() != digest:
        raise RefusedError("its state isn't the one that was asked for")
    return content
