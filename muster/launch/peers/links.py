"""A peer's side of the connections to other peers: the ring of one exchange, and states that are handed over."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256

from muster.launch.network import ConnectionAcceptor
from muster.launch.peers.channel import MAX_FRAME_BYTES, Channel, Frame, Message, RefusedError, accept, connect

Address = tuple[str, int]
LINK_TIMEOUT_S = 10.0
"""Time without a byte after which a link has failed."""


class LinkError(OSError):
    """A link of a ring has failed."""

    def __init__(self, neighbour: str, reason: object) -> None:
        super().__init__(str(reason))
        self.neighbour = neighbour


class Ring:
    """A peer's two links in one exchange: it sends to the next peer, and receives from the one before."""

    def __init__(self, generation: int, round_: int, names: Sequence[str], own: str) -> None:
        self.generation, self.round = generation, round_
        self.size, self.index = len(names), names.index(own)
        self.next, self.previous = names[(self.index + 1) % self.size], names[self.index - 1]
        self.sent_bytes = 0
        self._channels: dict[str, Channel] = {}
        self._is_aborted = False
        self._lock = threading.Lock()
        self._sender = ThreadPoolExecutor(1, "ring")

    def attach(self, neighbour: str, channel: Channel) -> None:
        """Use a connection, named `next` or `previous`. Raises LinkError where the exchange was aborted."""
        with self._lock:
            self._channels[neighbour] = channel
            if self._is_aborted:
                channel.close()
                raise LinkError("", "the exchange was aborted")

    def abort(self) -> None:
        """End the exchange: whoever sends or receives in it raises LinkError."""
        with self._lock:
            self._is_aborted = True
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()

    def close(self) -> None:
        """Close the links after the exchange."""
        self.abort()
        self._sender.shutdown(wait=False)

    def exchange(self, content: bytes | memoryview) -> bytes:
        """Send bytes to the next peer while as many come from the one before; returns these. Raises LinkError."""
        sending: Future[None] = self._sender.submit(self._send, content)
        try:
            received = self._receive(len(content))
        except BaseException:
            self.abort()
            with contextlib.suppress(OSError):
                sending.result()
            raise
        sending.result()
        return received

    def _send(self, content: bytes | memoryview) -> None:
        try:
            for part in split(content):
                self._channels["next"].send(part, self.generation, self.round)
                self.sent_bytes += len(part)
        except OSError as error:
            raise LinkError(self.next, error) from None

    def _receive(self, count: int) -> bytes:
        try:
            return receive_parts(self._channels["previous"], count, self._check)
        except (OSError, RefusedError) as error:
            raise LinkError(self.previous, error) from None

    def _check(self, frame: Frame) -> None:
        if (frame.generation, frame.round) != (self.generation, self.round):
            raise RefusedError(
                f"a frame of exchange {frame.generation}, round {frame.round}: expected {self.generation}"
            )


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
    """Takes connections from other peers: links of rings, and requests for the shared state."""

    def __init__(
        self, listener: socket.socket, secret: bytes, snapshot: Callable[[], bytes], log: Callable[[str], None]
    ) -> None:
        self._secret, self._snapshot, self._log = secret, snapshot, log
        self._came = threading.Condition()
        self._links: dict[tuple[int, str], Channel] = {}
        self._acceptor = ConnectionAcceptor(listener, self._serve, "peers")

    def close(self) -> None:
        """Accept no connections."""
        self._acceptor.close()

    def take_link(self, generation: int, name: str, timeout_s: float, is_over: Callable[[], bool]) -> Channel:
        """Return the connection from a peer for an exchange, once it is there. Raises LinkError."""
        deadline = time.monotonic() + timeout_s
        with self._came:
            for key in [key for key in self._links if key[0] < generation]:
                self._links.pop(key).close()
            while (generation, name) not in self._links:
                if is_over() or time.monotonic() > deadline:
                    raise LinkError(name, "no connection has come")
                self._came.wait(0.1)
            return self._links.pop((generation, name))

    def _serve(self, connection: socket.socket) -> None:
        host = ""
        try:
            host = connection.getpeername()[0]
            channel = accept(connection, self._secret)
            channel.set_timeout(LINK_TIMEOUT_S)
            wanted = channel.receive_message()
            if wanted.get("want") == "link":
                with self._came:
                    self._links[int(wanted["generation"]), str(wanted["name"])] = channel
                    self._came.notify_all()
                return
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
) -> None:
    """Connect a ring's links. Raises LinkError."""
    if ring.size == 1:
        return
    try:
        channel = connect(addresses[ring.next], secret)
        channel.set_timeout(LINK_TIMEOUT_S)
        ring.attach("next", channel)
        channel.send_message({"want": "link", "generation": ring.generation, "name": own})
    except LinkError:
        raise
    except (OSError, RefusedError, KeyError) as error:
        raise LinkError(ring.next, error) from None
    previous = listener.take_link(ring.generation, ring.previous, LINK_TIMEOUT_S, is_over)
    ring.attach("previous", previous)


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
