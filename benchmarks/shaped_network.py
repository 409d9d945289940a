"""Processes on links of a given rate: a network namespace for each rank, with a link to its node and one to the others.

Needs root and Linux (`ip`, `tc`). Every link is a pair of virtual cards on a bridge whose packets leave through a token
bucket: at `rate` bits per second, each packet counted with `overhead` bytes more, so that a message takes time besides
its bytes, as it does on real links.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

MTU = 9000


@dataclass(frozen=True)
class Shape:
    """Rate of a link and what each packet counts for besides its bytes."""

    megabits_per_s: int
    overhead_bytes: int = 4000

    def bucket(self) -> str:
        """Return the words of `tc` that say it; the bucket holds one packet, so that an idle link saves up nothing."""
        burst = MTU + self.overhead_bytes + 100
        return f"tbf rate {self.megabits_per_s}mbit burst {burst} latency 10s overhead {self.overhead_bytes}"


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.strip()}; shaped links need root on Linux with ip, tc and bridges")


def address(rank: int) -> str:
    """Return the address of a rank."""
    return f"10.77.0.{rank + 1}"


class ShapedNetwork:
    """Namespaces of ranks on some nodes; `with` makes and removes them."""

    def __init__(self, nodes: int, ranks_per_node: int, fabric: Shape, network: Shape) -> None:
        self.nodes, self.per_node, self.fabric, self.network = nodes, ranks_per_node, fabric, network
        self.tag = f"m{os.getpid() % 10000}"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.per_node

    def __enter__(self) -> "ShapedNetwork":
        try:
            for bridge in self._bridges:
                _run(f"ip link add {bridge} mtu {MTU} type bridge")
                _run(f"ip link set {bridge} up")
            for rank in range(self.size):
                self._add_rank(rank, self._bridges[0], self._bridges[1 + rank // self.per_node])
        except BaseException:
            self.__exit__()
            raise
        return self

    @property
    def _bridges(self) -> list[str]:
        """Bridge between nodes, then that of each node."""
        return [f"{self.tag}all", *(f"{self.tag}node{node}" for node in range(self.nodes))]

    def _add_rank(self, rank: int, network: str, fabric: str) -> None:
        space = f"{self.tag}r{rank}"
        _run(f"ip netns add {space}")
        _run(f"ip -n {space} link set lo up")
        _run(f"ip netns exec {space} sysctl -qw net.ipv4.tcp_slow_start_after_idle=0")
        for kind, bridge, shape in (("net", network, self.network), ("fab", fabric, self.fabric)):
            outside = f"{self.tag}{kind[0]}{rank}"
            _run(f"ip link add {outside} mtu {MTU} type veth peer name {kind} netns {space} mtu {MTU}")
            _run(f"ip link set {outside} master {bridge} up")
            _run(f"ip -n {space} link set {kind} up")
            _run(f"tc -n {space} qdisc add dev {kind} root {shape.bucket()}")
        _run(f"ip -n {space} address add {address(rank)}/32 dev net")
        for other in range(self.size):
            if other != rank:
                kind = "fab" if other // self.per_node == rank // self.per_node else "net"
                _run(f"ip -n {space} route add {address(other)}/32 dev {kind} src {address(rank)}")

    def __exit__(self, *error: object) -> None:
        for rank in range(self.size):
            subprocess.run(["ip", "netns", "del", f"{self.tag}r{rank}"], capture_output=True)
        for bridge in self._bridges:
            subprocess.run(["ip", "link", "del", bridge], capture_output=True)

    def run(self, module: str, arguments: Sequence[str], timeout_s: float) -> str:
        """Run `python -m module` once for each rank, with RANK, WORLD_SIZE and the address of rank 0 in its
        environment, and return what rank 0 printed."""
        with self._processes(module, arguments) as processes:
            end = time.monotonic() + timeout_s
            output = processes[0].communicate(timeout=timeout_s)[0]
            codes = [process.wait(max(1.0, end - time.monotonic())) for process in processes]
        if any(codes):
            raise SystemExit(f"ranks ended with exit codes {codes}")
        return output

    @contextmanager
    def _processes(self, module: str, arguments: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
        own = {"MASTER_ADDR": address(0), "MASTER_PORT": "29577", "WORLD_SIZE": str(self.size)}
        processes = []
        for rank in range(self.size):
            environment = os.environ | own | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "net", "OMP_NUM_THREADS": "1"}
            command = ["ip", "netns", "exec", f"{self.tag}r{rank}", sys.executable, "-m", module, *arguments]
            piped = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(command, env=environment, stdout=piped, text=True))
        try:
            yield processes
        finally:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
