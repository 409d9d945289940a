"""Check that the nodes reach each other at the addresses where their ranks will meet; free of torch.

gloo and NCCL connect every rank to the others at the address of an interface. Where that address can't be reached they
wait for minutes and name nobody; this check names the two nodes within seconds. An address such as that of a container
bridge exists on every machine, so each node answers with its number.
"""

import contextlib
import socket
import threading
from collections.abc import Collection, Mapping

from muster.launch.network import ConnectionAcceptor, address_family

CONNECT_TIMEOUT_S = 8.0
"""Timeout of each connection."""
MOST_NODES_IN_PAIRS = 16
"""Most nodes of which each tries to reach every other."""


class ProbeListener:
    """Listens at a node's address and answers each connection with the node's number."""

    def __init__(self, node: int, address: str) -> None:
        self._node = node
        listener = socket.socket(address_family(address))
        listener.bind((address, 0))
        listener.listen(1024)
        self.port: int = listener.getsockname()[1]
        self.close = ConnectionAcceptor(listener, self._answer, "doorstep").close

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"muster node %d\n" % self._node)


def nodes_to_reach(node: int, nodes: Collection[int]) -> list[int]:
    """Return the others that a node tries to reach: all of them, or of more than `MOST_NODES_IN_PAIRS` those that come
    1, 2, 4, 8 … places after it in a circle.

    An address, an interface or a port is wrong for a node rather than for a pair, and each of n nodes is tried by about
    log₂ n others; all pairs of a thousand nodes would be a million connections.
    """
    order = sorted(nodes)
    if len(order) <= MOST_NODES_IN_PAIRS:
        return [other for other in order if other != node]
    place = order.index(node)
    return [order[(place + (1 << power)) % len(order)] for power in range((len(order) - 1).bit_length())]


def find_unreachable(others: Mapping[str, tuple[int, str, int]], local_address: str) -> dict[str, str]:
    """Try to reach each of `others` (name → node, address, port) from `local_address`, all at once.

    Returns name → reason for those that can't be reached.
    """
    problems: dict[str, str] = {}

    def one(name: str, node: int, address: str, port: int) -> None:
        try:
            with socket.create_connection((address, port), CONNECT_TIMEOUT_S, (local_address, 0)) as connection:
                connection.settimeout(CONNECT_TIMEOUT_S)
                answer = connection.makefile("rb").readline()
        except OSError as error:
            problems[name] = error.strerror or str(error)
            return
        if answer != b"muster node %d\n" % node:
            problems[name] = "another machine or program answers there"

    threads = [threading.Thread(target=one, args=(name, *row), daemon=True) for name, row in others.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * CONNECT_TIMEOUT_S)
    return problems
