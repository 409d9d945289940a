"""Connections of a World, which another thread can break so that no call on them waits any longer.

gloo has no other way out: neither `abort` nor `destroy_process_group` from another thread wakes a rank that waits for a
live peer, and after a wait has timed out the group is unusable all the same. A connection that is shut down, however,
raises at once in every call on it, at both ends.

While a group is made, there may be no connection yet: of two ranks one listens until the other connects, and a dead one
never does. So this process connects to its own listening sockets in the others' stead, and then breaks that connection.

gloo forgets a message that was under way when its connection broke: of a message half sent or half received nobody is
told, and the call that waits for it only ends with its timeout. Such a rank can't be helped: it has to end.
"""

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_REPEAT_S = 0.02
"""Time between attempts while connections may still be opened."""
_CONNECT_TIMEOUT_S = 1.0
STUCK_S = 3.0
"""Time without any work by this process's threads, once its connections are broken, after which they wait for ever.
Time for which the process is stopped doesn't count."""
_IDLE_SHARE = 0.005
"""Share of the time that threads without work may compute."""
_SEQUENCE_NUMBER = struct.Struct("=q")
"""First bytes on a connection of gloo (`sequence_number_t`): which of the listening rank's peers connects, from 0."""


class Connections:
    """TCP connections that this process opens from the construction until `seal`: those of a World."""

    def __init__(self, num_ranks: int) -> None:
        """`num_ranks` is the size of the World."""
        self._num_ranks = num_ranks
        self._before = frozenset(_open_sockets().values())
        self._own: frozenset[int] | None = None
        """Inodes of the sockets; None while they are being opened."""
        self._left = threading.Event()
        self._breaking = threading.Lock()
        self._answered: set[int] = set()
        """Inodes of the listening sockets to which this process has connected in the stead of its peers."""

    def seal(self) -> None:
        """Let what is opened from now on belong to others."""
        self._own = frozenset(_open_sockets().values()) - self._before

    def break_until_left(self, give_up: Callable[[], None] = lambda: None) -> None:
        """Break the connections, and those that are still being opened, until `leave` is called.

        Calls `give_up`, again and again, where the other threads do nothing meanwhile: one of them waits for ever.
        """
        idle_s, computed_s = 0.0, _computed_s()
        while True:
            with self._breaking:
                if self._left.is_set():
                    return
                self._break()
            self._left.wait(_REPEAT_S)
            before_s, computed_s = computed_s, _computed_s()
            if before_s is None or computed_s is None or computed_s - before_s >= _IDLE_SHARE * _REPEAT_S:
                idle_s = 0.0
            else:
                idle_s += _REPEAT_S
            if idle_s > STUCK_S:
                idle_s = 0.0
                give_up()

    def leave(self, break_first: bool = False) -> None:
        """Say that nobody waits on the connections any more; nothing that is opened afterwards is broken.

        With `break_first` they are broken now, so that whatever else is under way on them ends: a group is not freed
        before, and keeps the interpreter's lock meanwhile.
        """
        self._left.set()
        with self._breaking:
            if break_first:
                self._break()

    def _break(self) -> None:
        for fd, inode in _open_sockets().items():
            if not (inode not in self._before if self._own is None else inode in self._own):
                continue
            with suppress(OSError), _duplicate(fd, inode) as connection:
                if not _is_tcp(connection):
                    continue
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)
                elif inode not in self._answered:
                    self._answered.add(inode)
                    _connect_as_peers(connection, self._num_ranks)


def _open_sockets() -> dict[int, int]:
    """Return the inode of each socket of this process, by file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(name)] = int(target[len("socket:[") : -1])
    return found


def _computed_s() -> float | None:
    """Return the processor time of all Python threads but this one, in seconds; None where the kernel doesn't tell."""
    tasks = Path("/proc/self/task")
    total_ns = 0
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            try:
                total_ns += int((tasks / str(thread.native_id) / "schedstat").read_text().split()[0])
            except OSError:
                if (tasks / str(thread.native_id)).exists():
                    return None
    return total_ns / 1e9


def _duplicate(fd: int, inode: int) -> socket.socket:
    """Return another handle of a socket. Raises OSError where the descriptor belongs to something else by now."""
    copy = os.dup(fd)
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        raise OSError(f"descriptor {fd} is another file by now")
    return socket.socket(fileno=copy)


def _is_tcp(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM


def _connect_as_peers(listening: socket.socket, num_ranks: int) -> None:
    """Connect to a listening socket of gloo as each of its peers would, so that it stops waiting for them."""
    for number in range(num_ranks):
        with socket.create_connection(listening.getsockname()[:2], _CONNECT_TIMEOUT_S) as connection:
            connection.sendall(_SEQUENCE_NUMBER.pack(number))
