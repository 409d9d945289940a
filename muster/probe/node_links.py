"""Bandwidth and latency from one node to another, measured over TCP with one or several connections. Free of torch."""

import contextlib
import json
import socket
import struct
import threading
import time
from hmac import compare_digest
from statistics import median
from typing import NamedTuple

import numpy as np

from muster.launch.network import ConnectionAcceptor, address_family
from muster.spec.errors import MusterError

CHUNK_BYTES = 1 << 18
PINGS = 20
"""Messages there and back, of whose times the shortest counts: others wait for something else than the link."""
WARM_UP_SHARE = 0.3
"""Share of the sending time in which connections find their rate, which isn't counted."""
TIMEOUT_S = 60.0
"""Longest wait for the other end: what buffers hold takes a slow link some time to send."""
WINDOWS = 5
"""Equal times of whose rates the median counts."""
_SECONDS = struct.Struct("!d")


class LinkRate(NamedTuple):
    """Rates of a link from one node to another."""

    bytes_per_s: float
    latency_s: float
    """Half of the shortest time of a message there and back."""


class LinkListener:
    """Receives what others send to measure their links, and tells them how fast it came. Those without the token, which
    node 0 draws for each measurement, are sent away."""

    def __init__(self, address: str, token: str) -> None:
        self._token = token.encode()
        listener = socket.socket(address_family(address))
        listener.bind((address, 0))
        listener.listen(1024)
        self.port: int = listener.getsockname()[1]
        self.close = ConnectionAcceptor(listener, self._receive, "link").close

    def _receive(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, struct.error):
            connection.settimeout(TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not compare_digest(_exactly(connection, len(self._token)), self._token):
                return
            while (word := _exactly(connection, 1)) == b"p":
                connection.sendall(word)
            if word == b"s":
                (warm_up_s,) = _SECONDS.unpack(_exactly(connection, _SECONDS.size))
                connection.sendall(json.dumps({"bytes_per_s": _received_bytes_per_s(connection, warm_up_s)}).encode())


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes, or fewer where the other end has closed."""
    found = b""
    while len(found) < size and (more := connection.recv(size - len(found))):
        found += more
    return found


def _received_bytes_per_s(connection: socket.socket, warm_up_s: float) -> float:
    """Return the rate at which bytes come until the other end has sent all: the median of some equal times behind the
    warm-up, since a busy machine stops reading now and then."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    begin_s = time.perf_counter()
    times_s, totals = [0.0], [0.0]
    while size := connection.recv_into(buffer):
        times_s.append(time.perf_counter() - begin_s)
        totals.append(totals[-1] + size)
    edges_s = [warm_up_s + (times_s[-1] - warm_up_s) * number / WINDOWS for number in range(WINDOWS + 1)]
    if edges_s[-1] <= warm_up_s:  # a link so slow that its warm-up was all
        return totals[-1] / max(times_s[-1], 1e-9)
    return float(median(np.diff(np.interp(edges_s, times_s, totals)) / (edges_s[1] - edges_s[0])))


def measure_link(
    address: str, port: int, token: str, local_address: str, connections: int = 1, seconds: float = 1.0
) -> LinkRate:
    """Send to a LinkListener for some seconds over some connections at once, and return the rate that it saw, the sum
    of all. Raises MusterError where it can't be reached, or goes away."""
    with contextlib.ExitStack() as opened:
        try:
            lines = [
                opened.enter_context(socket.create_connection((address, port), TIMEOUT_S, (local_address, 0)))
                for _ in range(connections)
            ]
            for line in lines:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.sendall(token.encode())
            latency_s = min(_ping_s(lines[0]) for _ in range(PINGS)) / 2
            return LinkRate(sum(_send_all(lines, seconds)), latency_s)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise MusterError(
                f"the link to {address} could not be measured ({reason}): start all nodes again"
            ) from None


def _ping_s(line: socket.socket) -> float:
    start_s = time.perf_counter()
    line.sendall(b"p")
    if _exactly(line, 1) != b"p":
        raise OSError("the other end has closed the connection")
    return time.perf_counter() - start_s


def _send_all(lines: list[socket.socket], seconds: float) -> list[float]:
    """Send over all connections at once; return the rate of each as the other end saw it."""
    chunk = bytes(CHUNK_BYTES)
    end_s = time.perf_counter() + seconds
    problems: list[OSError] = []

    def send(line: socket.socket) -> None:
        try:
            line.sendall(b"s" + _SECONDS.pack(WARM_UP_SHARE * seconds))
            while time.perf_counter() < end_s:
                line.sendall(chunk)
            line.shutdown(socket.SHUT_WR)
        except OSError as error:
            problems.append(error)

    threads = [threading.Thread(target=send, args=(line,), daemon=True) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return [json.loads(line.makefile("rb").read())["bytes_per_s"] for line in lines]
