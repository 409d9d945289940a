"""Transfer of files of in-memory checkpoints between nodes, over TCP connections of their own; free of torch.

A request is one line of JSON; the answer begins with a line that is `ok` or an error message. A client must know the
server's secret token, and only files of in-memory checkpoints are served.
"""

import contextlib
import json
import os
import re
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from muster.launch.network import ConnectionAcceptor, address_family

TIMEOUT_S = 120.0
"""Time for which a connection may stall."""
PART_TIMEOUT_S = 30.0
"""Longest silence of a node to which a part is sent after each step, or from which one is fetched: more than launchers
need to find that a node is silent, less than ranks have to join the next generation."""
_CHUNK_BYTES = 4 << 20
_BEGUN_TOGETHER = ".tmp"
"""Suffix of the folder of a step that all nodes have begun before anyone sends; the ranks of other steps may not have
begun yet here."""
_NAME = re.compile(r"step-\d{8,}(\.tmp)?/rank-\d{5,}\.(safetensors|json)")


class PeerAddress(NamedTuple):
    """Address of a rank's file server."""

    host: str
    port: int
    token: str
    """Secret that the server requires."""


class FileServer:
    """Server that sends and receives files below one folder, in threads, until `close` or the end of the process."""

    def __init__(self, root: Path, host: str) -> None:
        """Listen on any free port of this host's address `host`. Raises OSError."""
        self._root, self._token = root, secrets.token_hex(16)
        listener = socket.create_server((host, 0), family=address_family(host), backlog=128)
        self.address = PeerAddress(host, listener.getsockname()[1], self._token)
        self.close = ConnectionAcceptor(listener, self._serve, "copies").close

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the client sees that the connection ends
            connection.settimeout(TIMEOUT_S)
            with connection.makefile("rb") as lines:
                request = _parse_object(lines.readline(4096))
                if request.get("word") != self._token or not _NAME.fullmatch(str(request.get("name"))):
                    return
                try:
                    answer = _HANDLERS[request["do"]](connection, lines, self._root / request["name"], request)
                except (OSError, LookupError, TypeError, ValueError) as error:
                    answer = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                if answer:
                    connection.sendall(answer.encode() + b"\n")


def _receive_file(connection: socket.socket, lines: Any, path: Path, request: dict[str, Any]) -> str:
    """Receive a file: write the bytes that follow the request."""
    rest, buffer = int(request["nbytes"]), memoryview(bytearray(_CHUNK_BYTES))
    if path.parent.suffix != _BEGUN_TOGETHER:
        path.parent.mkdir(exist_ok=True)
    with open(path, "wb", buffering=0) as file:
        if rest and hasattr(os, "posix_fallocate"):  # fail at once if there is too little space
            os.posix_fallocate(file.fileno(), 0, rest)
        while rest:
            if not (count := lines.readinto1(buffer[:rest])):
                raise OSError(None, "the connection ended too early")
            file.write(buffer[:count])
            rest -= count
    return "ok"


def _send_range(connection: socket.socket, lines: Any, path: Path, request: dict[str, Any]) -> str:
    """Send a byte range of the file."""
    offset, nbytes = int(request["offset"]), int(request["nbytes"])
    with open(path, "rb") as file:
        if offset + nbytes > os.fstat(file.fileno()).st_size:
            return f"{path} ends too early"
        connection.sendall(b"ok\n")
        connection.sendfile(file, offset, nbytes)
    return ""


_HANDLERS = {"put": _receive_file, "get": _send_range}


def put(address: PeerAddress, name: str, path: Path, timeout_s: float = TIMEOUT_S) -> None:
    """Send a file, to be stored as `name` below the server's folder.

    Raises OSError; ConnectionError where the server is gone.
    """
    with (
        open(path, "rb") as file,
        _request(address, "put", name, timeout_s, nbytes=os.fstat(file.fileno()).st_size) as connection,
    ):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server's answer has the reason
            connection.sendfile(file)
        with connection.makefile("rb") as lines:
            _require_ok(lines)


def get(address: PeerAddress, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
    """Fill buffers in order with the bytes from `offset` on of the server's file `name`. Raises OSError."""
    nbytes = sum(len(buffer) for buffer in buffers)
    with (
        _request(address, "get", name, PART_TIMEOUT_S, offset=offset, nbytes=nbytes) as connection,
        connection.makefile("rb") as lines,
    ):
        _require_ok(lines)
        for buffer in buffers:
            while buffer:
                if not (count := lines.readinto1(buffer)):
                    raise ConnectionError("the connection ended too early")
                buffer = buffer[count:]


def _request(address: PeerAddress, action: str, name: str, timeout_s: float, **fields: int) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
    connection.sendall(json.dumps({"word": address.token, "do": action, "name": name, **fields}).encode() + b"\n")
    return connection


def _require_ok(lines: Any) -> None:
    answer = lines.readline(4096).decode(errors="replace").strip()
    if not answer:
        raise ConnectionError("the connection ended too early")
    if answer != "ok":
        raise OSError(None, answer)


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
