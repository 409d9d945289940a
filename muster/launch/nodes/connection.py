"""Connection between two launchers: JSON objects, one on each line, each with a `kind`; free of torch."""

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Collection
from typing import Any

Message = dict[str, Any]
MAX_MESSAGE_BYTES = 1 << 24
"""Longest line; no launcher sends a longer one."""
CLOSE_TIMEOUT_S = 2.0
"""Longest time to send pending messages on close."""


class LauncherConnection:
    """One end of a connection. A thread reads, and puts (node, message) into an inbox, nothing more once this end has
    been closed; the kind `gone` means that the other end has closed."""

    def __init__(self, connection: socket.socket, node: int, inbox: "queue.SimpleQueue[tuple[int, Message]]") -> None:
        self.node = node
        self.last_received = time.monotonic()
        """Time of the last message from the other end, on this machine's monotonic clock."""
        self._connection = connection
        self._inbox = inbox
        self._is_closed = False
        # Messages wait here for a thread that sends them, since sending blocks when the network is cut.
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sender = threading.Thread(target=self._send, name=f"to-{node}", daemon=True)
        self._sender.start()

    def start_reading(self) -> None:
        """Start the thread that reads."""
        threading.Thread(target=self._read, name=f"from-{self.node}", daemon=True).start()

    def send(self, kind: str, **content: Any) -> None:
        """Queue a message; it is dropped when the other end has closed."""
        self._outbox.put(json.dumps({"kind": kind, **content}).encode() + b"\n")

    def finish_sending(self) -> None:
        """Close for sending, after the messages that are queued."""
        self._outbox.put(None)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send the queued messages, for `timeout_s` at most, and close."""
        self._is_closed = True
        self.finish_sending()
        self._sender.join(max(0.0, timeout_s))
        self._connection.close()

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while (data := self._outbox.get()) is not None:
                self._connection.sendall(data)
            self._connection.shutdown(
                socket.SHUT_WR
            )  # keep reading: to close with unread data could drop what was sent

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            while line := lines.readline(MAX_MESSAGE_BYTES):
                message = json.loads(line)
                self.last_received = time.monotonic()
                if message["kind"] == "clock":
                    self.send("clock is", sent=message["sent"], time=time.time())
                elif message["kind"] == "clock is":
                    self._put(message | {"received": time.time()})
                elif message["kind"] != "beat":
                    self._put(message)
        self._put({"kind": "gone"})

    def _put(self, message: Message) -> None:
        if not self._is_closed:  # another launcher may have the node's number by now
            self._inbox.put((self.node, message))


def close_connections(connections: Collection[LauncherConnection]) -> None:
    """Close connections together, so that one whose network is cut takes no time from the others."""
    limit = time.monotonic() + CLOSE_TIMEOUT_S
    for connection in connections:
        connection.finish_sending()
    for connection in connections:
        connection.close(limit - time.monotonic())


def read_first_message(connection: socket.socket, timeout_s: float) -> Message | None:
    """Read the first message of a connection that nothing else reads yet, and no further.

    None where none comes in time, or where it is not a message.
    """
    data, limit = b"", time.monotonic() + timeout_s
    with contextlib.suppress(OSError, ValueError):
        while not data.endswith(b"\n") and len(data) < MAX_MESSAGE_BYTES:
            connection.settimeout(max(0.01, limit - time.monotonic()))
            peeked = connection.recv(1 << 16, socket.MSG_PEEK)
            if not peeked:
                return None
            part = peeked[: peeked.index(b"\n") + 1] if b"\n" in peeked else peeked
            data += connection.recv(len(part))
        message = json.loads(data)
        return message if isinstance(message, dict) and "kind" in message else None
    return None
