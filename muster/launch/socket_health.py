"""Health of a process's network connections, by the kernel's tables in /proc."""

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_ESTABLISHED = "01"


def find_connection_problem(pid: int) -> str:
    """Return the problem of a connection of `pid` to another machine or rank, as a clause; empty without one.

    A missing route says more than unacknowledged data, which wait at both ends of a cut: it is reported first.
    """
    try:
        inodes = set(_socket_inodes(pid))
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        routes = list(_routes(pid))
    except OSError:
        return ""
    unsent = ""
    for _, _, remote, state, queues, timer, retransmits, _, _, inode, *_ in rows:
        if state != _ESTABLISHED or inode not in inodes:
            continue
        address = int(remote.partition(":")[0], 16)
        name, loopback = socket.inet_ntoa(struct.pack("<I", address)), address & 0xFF == 127
        if not loopback and not any(address & mask == network for network, mask in routes):
            return f"there is no route to {name} any more"
        waiting = int(queues.partition(":")[0], 16)
        if waiting and (int(retransmits, 16) or timer.startswith("01")):
            unsent = f"{waiting:,} bytes that it sent to {name} have not been acknowledged"
    return unsent


def _socket_inodes(process: int) -> Iterator[str]:
    """Yield the inodes of the process's sockets."""
    for link in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]


def _routes(process: int) -> Iterator[tuple[int, int]]:
    """Yield (network, mask) of each route, in /proc's byte order."""
    for line in Path(f"/proc/{process}/net/route").read_text().splitlines()[1:]:
        fields = line.split()
        yield int(fields[1], 16), int(fields[7], 16)
