"""Bandwidth from one peer to another, measured while both train, over as many connections as exchanges use."""

import contextlib
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from muster.launch.peers.channel import Channel, RefusedError, connect

Address = tuple[str, int]
_MOST_BYTES, _MOST_S = 4 << 20, 0.5
"""Most bytes that a measurement sends, and the time after which it ends even if they haven't all arrived."""
_PART_BYTES = 16 << 10
_TIMEOUT_S = 5.0
"""Time without an answer after which a measurement has failed."""
_STEP = math.log(1.1)
"""Measured values less than a tenth apart are noise, and taken for one."""


class LinkMeasurement:
    """A measurement of the link to another peer, which another thread may break off."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._channels: list[Channel] = []
        self._is_aborted = False
        self._lock = threading.Lock()

    def run(self, address: Address, secret: bytes, connections: int) -> float | None:
        """Return the bytes a second; 0 where the link has failed, None where the measurement was broken off."""
        with ThreadPoolExecutor(connections) as threads:
            rates = list(
                threads.map(lambda _: self._rate(address, secret, _MOST_BYTES // connections), range(connections))
            )
        return None if self._is_aborted else min(rates) and sum(rates)

    def abort(self) -> None:
        """Break the measurement off."""
        with self._lock:
            self._is_aborted = True
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def _rate(self, address: Address, secret: bytes, count: int) -> float:
        """Return the bytes a second of one connection, by the receiver's clock; 0 where it has failed."""
        channel = None
        try:
            channel = connect(address, secret)
            channel.set_timeout(_TIMEOUT_S)
            with self._lock:
                self._channels.append(channel)
                if self._is_aborted:
                    return 0.0
            channel.send_message({"want": "measure", "bytes": count})
            sending = threading.Thread(target=_send_parts, args=(channel, count), name="measure", daemon=True)
            sending.start()
            answer = channel.receive_message()
            return max(0.0, float(answer["rate"]))
        except (OSError, RefusedError, KeyError, TypeError, ValueError):
            return 0.0
        finally:
            if channel is not None:
                channel.close()  # ends the sending too, where the receiver has seen enough


def _send_parts(channel: Channel, count: int) -> None:
    with contextlib.suppress(OSError):
        for _ in range(-(-count // _PART_BYTES)):
            channel.send(bytes(_PART_BYTES))


def answer_measurement(channel: Channel, count: int) -> None:
    """Receive what a measurement sends, until all is there or its time is over, and answer how fast it came. The first
    part begins the time, so that the way there isn't in it. Raises OSError or RefusedError."""
    channel.receive()
    start_s, found, taken_s = time.perf_counter(), 0, 0.0
    for _ in range(-(-min(count, _MOST_BYTES) // _PART_BYTES) - 1):
        found += len(channel.receive().content)
        taken_s = time.perf_counter() - start_s
        if taken_s > _MOST_S:
            break
    channel.send_message({"rate": found / max(taken_s, 1e-6)})
    with contextlib.suppress(OSError):  # what is still on its way, until the other end closes the connection
        while True:
            channel.receive()


def without_noise(rate: float) -> float:
    """Return the rate as a power of 1.1, so that the order of a ring changes only where that gains something."""
    return math.exp(_STEP * round(math.log(rate) / _STEP)) if rate > 0 else 0.0
