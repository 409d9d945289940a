"""Connections between peers: both ends prove that they know the run's secret, and every frame carries a checksum keyed
by it. Contents aren't encrypted."""

import contextlib
import hmac
import json
import os
import socket
import stat
import struct
import threading
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from muster.launch.network import format_endpoint
from muster.spec.errors import ConfigError, MusterError

_MAGIC = b"muster-peers-2\n\0"
_NONCE_BYTES, _PROOF_BYTES, _CHECKSUM_BYTES = 16, 32, 16
_HEADER = struct.Struct("!IQQ")
"""Length of the content, generation, round."""
MAX_FRAME_BYTES = 1 << 20
"""Longest content of a frame; longer ones are sent as several."""
HANDSHAKE_TIMEOUT_S = 5.0
SECRET_BYTES = 32

Message = dict[str, Any]


class RefusedError(MusterError):
    """Refusal of a connection, whose other end isn't let in or sends what no peer sends."""


class Frame(NamedTuple):
    """Content, with the exchange that it belongs to."""

    content: bytes
    generation: int
    round: int


class Channel:
    """Authenticated connection. One thread may receive while others send."""

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._socket = connection
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0
        """Frames so far: the checksum covers their number, so that none can be repeated or left out."""
        self._sending = threading.Lock()

    def local_host(self) -> str:
        """Return this end's address."""
        return self._socket.getsockname()[0]

    def set_timeout(self, timeout_s: float | None) -> None:
        """Let each wait for the other end last no longer than this."""
        self._socket.settimeout(timeout_s)

    def send(self, content: bytes | memoryview, generation: int = 0, round_: int = 0) -> None:
        """Send one frame. Raises OSError."""
        header = _HEADER.pack(len(content), generation, round_)
        with self._sending:
            checksum = _checksum(self._send_key, self._sent, header, content)
            self._sent += 1
            self._socket.sendall(header + checksum)
            self._socket.sendall(content)

    def receive(self) -> Frame:
        """Return the next frame. Raises OSError where the connection ends, RefusedError at a wrong checksum."""
        head = receive_exactly(self._socket, _HEADER.size + _CHECKSUM_BYTES)
        header, checksum = head[: _HEADER.size], head[_HEADER.size :]
        length, generation, round_ = _HEADER.unpack(header)
        if length > MAX_FRAME_BYTES:
            raise RefusedError(f"a frame of {length} bytes: expected at most {MAX_FRAME_BYTES}")
        content = receive_exactly(self._socket, length)
        if not hmac.compare_digest(checksum, _checksum(self._receive_key, self._received, header, content)):
            raise RefusedError("a frame has a wrong checksum")
        self._received += 1
        return Frame(content, generation, round_)

    def send_message(self, message: Message) -> None:
        """Send a message as JSON. Raises OSError."""
        self.send(json.dumps(message).encode())

    def receive_message(self) -> Message:
        """Return the next message. Raises OSError or RefusedError."""
        try:
            message = json.loads(self.receive().content)
        except ValueError:
            raise RefusedError("a message isn't JSON") from None
        if not isinstance(message, dict):
            raise RefusedError("a message isn't a JSON object")
        return message

    def close(self) -> None:
        """End the connection; whoever waits on it, here or at the other end, raises OSError at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def receive_exactly(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """Return the next `count` bytes. Raises OSError where the connection ends or the deadline passes before."""
    found = bytearray(count)
    view, done = memoryview(found), 0
    while done < count:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        got = connection.recv_into(view[done:])
        if not got:
            raise ConnectionResetError("the other end has closed the connection")
        done += got
    return bytes(found)


def _checksum(key: bytes, number: int, header: bytes, content: bytes | memoryview) -> bytes:
    digest = blake2b(struct.pack("!Q", number) + header, key=key, digest_size=_CHECKSUM_BYTES)
    digest.update(content)
    return digest.digest()


# ----------------------------------------------------------------------------------------------------------------------
# Proof of the secret


def connect(address: tuple[str, int], secret: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Channel:
    """Connect to a peer or the coordinator, each of which proves that it knows the secret.

    A challenge and its answer both ways: each end sends a number that was never used before, and the HMAC of both.
    Raises OSError where nobody answers, RefusedError where the other end doesn't know the secret.
    """
    deadline = time.monotonic() + timeout_s
    connection = socket.create_connection(address, timeout_s)
    try:
        mine = os.urandom(_NONCE_BYTES)
        connection.sendall(_MAGIC + mine)
        answer = receive_exactly(connection, len(_MAGIC) + _NONCE_BYTES + _PROOF_BYTES, deadline)
        theirs = answer[len(_MAGIC) : len(_MAGIC) + _NONCE_BYTES]
        if not answer.startswith(_MAGIC):
            raise RefusedError(f"what listens at {format_endpoint(*address)} is no peer of Muster")
        if not hmac.compare_digest(answer[-_PROOF_BYTES:], _proof(secret, b"listener", mine + theirs)):
            raise RefusedError(
                f"{format_endpoint(*address)} has another secret: give all peers a copy of its secret file"
            )
        connection.sendall(_proof(secret, b"caller", mine + theirs))
        return _channel(connection, secret, mine + theirs, is_caller=True)
    except BaseException:
        connection.close()
        raise


def accept(connection: socket.socket, secret: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Channel:
    """Return the channel of a caller that knows the secret; closes the connection and raises RefusedError otherwise."""
    deadline = time.monotonic() + timeout_s
    reason = "it is no peer of Muster"
    try:
        start = receive_exactly(connection, len(_MAGIC), deadline)
        if start != _MAGIC:
            raise RefusedError(reason)
        theirs, mine = receive_exactly(connection, _NONCE_BYTES, deadline), os.urandom(_NONCE_BYTES)
        reason = "it doesn't know the run's secret"
        connection.sendall(_MAGIC + mine + _proof(secret, b"listener", theirs + mine))
        proof = receive_exactly(connection, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(secret, b"caller", theirs + mine)):
            raise RefusedError(reason)
        return _channel(connection, secret, theirs + mine, is_caller=False)
    except (OSError, RefusedError):
        connection.close()
        raise RefusedError(reason) from None


def refusal(channel: Channel, reason: str) -> RefusedError:
    """Tell a caller why it isn't let in; returns the error to raise."""
    with contextlib.suppress(OSError):
        channel.send_message({"do": "refuse", "reason": reason})
    return RefusedError(reason)


def _channel(connection: socket.socket, secret: bytes, nonces: bytes, is_caller: bool) -> Channel:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    keys = [_proof(secret, label, nonces) for label in (b"to listener", b"to caller")]
    return Channel(connection, *(keys if is_caller else reversed(keys)))


def _proof(secret: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, label + nonces, "sha256")


# ----------------------------------------------------------------------------------------------------------------------
# The secret's file


def create_secret(path: Path) -> bytes:
    """Return the secret of a file, which is made, readable for its owner alone, where it isn't there. Raises
    ConfigError."""
    with contextlib.suppress(FileExistsError):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(os.urandom(SECRET_BYTES).hex() + "\n")
        except FileExistsError:
            raise
        except OSError as error:
            raise ConfigError(f"the secret file {path} can't be made ({error.strerror}): give another") from None
    return load_secret(path)


def load_secret(path: Path) -> bytes:
    """Return the secret of a file. Raises ConfigError where it isn't there, isn't one or others may read it."""
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(
            f"the secret file {path} can't be read ({reason}): copy the one that muster coordinator, or the trainer of"
            " a swarm, has made"
        ) from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"the secret file {path} can be read by others: chmod 600 {path}")
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"{path} holds no secret: expected {2 * SECRET_BYTES} hexadecimal digits, as muster coordinator, or"
            " the trainer of a swarm, writes them"
        )
    return secret
