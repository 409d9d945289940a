"""Connections of a swarm's trainer to its peers: who is there, what is sent, and what they say, as events."""

import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from muster.launch.network import ConnectionAcceptor
from muster.launch.peers.channel import Message, RefusedError, accept, refusal
from muster.launch.peers.packets import Packets
from muster.schedule.swarm.step_passes import Pass


@dataclass(eq=False)
class Peer:
    """A peer as the trainer knows it."""

    name: str
    number: int
    packets: Packets
    address: tuple[str, int]
    """Address at which it listens for other peers."""
    stage: int | None = None
    phase: Literal["new", "loading", "ready"] = "new"
    num_loads: int = 0
    """Times that it was told to load a state: it is ready after the last."""
    sent: dict[Pass, float] = field(default_factory=dict)
    """Passes under way, with the time at which they were sent."""
    accepted: list[int] = field(default_factory=list)
    """Micro-batches whose gradients count, of which it doesn't know yet."""
    last_answer_s: float = 0.0
    outbox: "queue.SimpleQueue[tuple[Message, Sequence[bytes]] | None]" = field(default_factory=queue.SimpleQueue)
    done: Counter[str] = field(default_factory=Counter)
    """Passes of the step, by kind."""
    moved_step: int = -1


class PeerEvent(NamedTuple):
    """Something that a peer's connection tells."""

    kind: Literal["joined", "said", "lost"]
    peer: Peer
    message: Message
    contents: list[bytes]
    time_s: float


class PeerConnections:
    """Lets peers in that know the secret, greets them with `welcome`, and gathers what they say, until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        welcome: Message,
        beat_s: float,
        silence_s: float,
        log: Callable[[str], None],
    ) -> None:
        self._secret, self._welcome, self._log = secret, welcome | {"do": "welcome", "beat_s": beat_s}, log
        self._beat_s, self._silence_s = beat_s, silence_s
        self._events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
        self._open: set[Peer] = set()
        self._num_peers = 0
        self._closed = threading.Event()
        self._acceptor = ConnectionAcceptor(listener, self._serve, "swarm")
        threading.Thread(target=self._beat, name="swarm-beat", daemon=True).start()

    def stop_accepting(self) -> None:
        """Let nobody else in."""
        self._acceptor.close()

    def close(self) -> None:
        """End all connections."""
        self._closed.set()
        for peer in list(self._open):
            peer.packets.close()

    def tell(self, peer: Peer, message: Message, contents: Sequence[bytes] = ()) -> None:
        """Send a message, in a thread of the peer's own, so that slow peers hold up nobody."""
        peer.outbox.put((message, contents))

    def events(self, wait_s: float) -> list[PeerEvent]:
        """Wait for an event; returns all that there are."""
        found = []
        try:
            found.append(self._events.get(timeout=wait_s))
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            return found

    def _serve(self, connection: socket.socket) -> None:
        """Let a caller in, and pass on what it says until it is gone."""
        host, peer = "", None
        try:
            host = connection.getpeername()[0]
            packets = Packets(accept(connection, self._secret))
            packets.channel.set_timeout(self._silence_s)
            hello, _ = packets.receive()
            if "settings" in hello:
                raise refusal(packets.channel, "it is the trainer of a swarm, which muster swarm joins")
            self._num_peers += 1
            address = str(hello["host"]), int(hello["port"])
            peer = Peer(str(hello["name"]), self._num_peers - 1, packets, address)
            self.tell(peer, self._welcome)  # before any beat
            self._open.add(peer)
            threading.Thread(target=self._write, args=(peer,), name="swarm-write", daemon=True).start()
            self._put("joined", peer)
            while True:
                message, contents = packets.receive()
                if "beat" not in message:
                    self._put("said", peer, message, contents)
        except RefusedError as error:
            self._log(f"refused a connection from {host}: {error}")
        except (KeyError, TypeError, ValueError):
            self._log(f"refused a connection from {host}: it sends what no peer sends")
        except OSError:
            pass
        connection.close()
        if peer is not None:
            self._open.discard(peer)
            self._put("lost", peer)
            peer.packets.close()
            peer.outbox.put(None)

    def _put(
        self,
        kind: Literal["joined", "said", "lost"],
        peer: Peer,
        message: Message | None = None,
        contents: list[bytes] | None = None,
    ) -> None:
        self._events.put(PeerEvent(kind, peer, message or {}, contents or [], time.monotonic()))

    def _write(self, peer: Peer) -> None:
        while (item := peer.outbox.get()) is not None:
            try:
                peer.packets.send(*item)
            except OSError:
                peer.packets.close()  # the thread that listens to it notices
                return

    def _beat(self) -> None:
        while not self._closed.wait(self._beat_s):
            for peer in list(self._open):
                self.tell(peer, {"do": "beat"})
