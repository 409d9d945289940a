"""Two nodes on one machine: network namespaces joined by a cable, each with a host name of its own."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train_runs import Command

ADDRESSES = ("10.77.1.1", "10.77.1.2")
STRAY = "10.99.0.1"
"""An address that each node has on an interface of its own, `stray`, from which the other can't be reached."""
HOSTS = ("node-a", "node-b")
PORT = 29400


class Network:
    """The namespaces of two nodes."""

    def __init__(self, name: str) -> None:
        self._spaces = [f"{name}-{node}" for node in range(2)]

    def make(self) -> bool:
        """Create the namespaces; False where that isn't allowed."""
        first, second = self._spaces
        made = ip("netns", "add", first) and ip("netns", "add", second)
        made = made and ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "cable", "netns", second)
        for node, space in enumerate(self._spaces):
            for words in (
                ("addr", "add", f"{ADDRESSES[node]}/24", "dev", "cable"),
                ("link", "set", "cable", "up"),
                ("link", "set", "lo", "up"),
                ("link", "add", "stray", "type", "veth", "peer", "nowhere"),
                ("addr", "add", f"{STRAY}/24", "dev", "stray"),
                ("link", "set", "stray", "up"),
                ("link", "set", "nowhere", "up"),
            ):
                made = made and ip("-n", space, *words)
        return made

    def remove(self) -> None:
        for space in self._spaces:
            ip("netns", "del", space)

    def cut(self, node: int) -> None:
        """Takes the cable out: no packet says so to the other side."""
        assert ip("-n", self._spaces[node], "link", "set", "cable", "down")

    def mend(self, node: int) -> None:
        """Puts the cable back."""
        assert ip("-n", self._spaces[node], "link", "set", "cable", "up")

    def inside(self, node: int, own_memory: bool = False) -> tuple[str, ...]:
        """Return the command prefix that runs a command on a node, with `own_memory` with a /dev/shm that is gone with
        its processes."""
        memory = "mount -t tmpfs tmpfs /dev/shm && " if own_memory else ""
        shell = f'{memory}hostname {HOSTS[node]} && exec "$@"'
        return ("ip", "netns", "exec", self._spaces[node], "unshare", "--uts", "--mount", "sh", "-c", shell, "sh")

    def launcher(
        self, node: int, *words: str | Path, own_memory: bool = False, before: tuple[str, ...] = (), **more: Any
    ) -> Command:
        """`muster train`, or another verb, as one of two nodes; `before` begins its command line there."""
        place = ("--nodes", "2", "--node-rank", str(node), "--rendezvous", ADDRESSES[0])
        given = {str(word) for word in words}
        kept = [pair for pair in zip(place[::2], place[1::2], strict=True) if pair[0] not in given]
        inside = (*self.inside(node, own_memory), *before)
        return Command(*(word for pair in kept for word in pair), *words, before=inside, **more)


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], check=False, capture_output=True).returncode == 0


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network that is gone afterwards; the test is skipped where none can be made."""
    with tempfile.TemporaryDirectory(prefix="nodes-") as unique:
        nodes = Network(f"mu{os.getpid()}{Path(unique).name[-8:].replace('_', '')}")
    try:
        if not nodes.make():
            pytest.skip("two nodes are network namespaces, which need root")
        yield nodes
    finally:
        nodes.remove()
