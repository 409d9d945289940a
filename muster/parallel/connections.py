"""Connections of a World, which another thread can break so that no call on them waits any longer.

gloo has no other way out: neither `abort` nor `destroy_process_group` from another thread wakes a rank that waits for a
live peer, and after a wait has timed out the group is unusable all the same. A connection that is shut down, however,
raises at once in every call on it, at both ends.
"""

import os
import socket
import threading
from contextlib import suppress

_REPEAT_S = 0.02
"""Time between attempts while connections may still be opened."""


class Connections:
    """TCP connections that this process opens from the construction until `seal`: those of a World."""

    def __init__(self) -> None:
        self._before = frozenset(_open_sockets().values())
        self._own: frozenset[int] | None = None
        """Inodes of the sockets; None while they are being opened."""
        self._left = threading.Event()

    def seal(self) -> None:
        """Let what is opened from now on belong to others."""
        self._own = frozenset(_open_sockets().values()) - self._before

    def break_until_left(self) -> None:
        """Break the connections, and those that are still being opened, until `leave` is called."""
        self._break()
        while not self._left.wait(_REPEAT_S):
            self._break()

    def leave(self) -> None:
        """Say that nobody waits on the connections any more."""
        self._left.set()

    def _break(self) -> None:
        for fd, inode in _open_sockets().items():
            if inode not in self._before if self._own is None else inode in self._own:
                _shut_down(fd, inode)


def _open_sockets() -> dict[int, int]:
    """Return the inode of each socket of this process, by file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(name)] = int(target[len("socket:[") : -1])
    return found


def _shut_down(fd: int, inode: int) -> None:
    """Shut down a connection, unless it is closed by now; sockets that listen stay."""
    with suppress(OSError):
        copy = os.dup(fd)
        if os.fstat(copy).st_ino != inode:
            os.close(copy)
            return
        with socket.socket(fileno=copy) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
            if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
