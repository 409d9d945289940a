"""Meeting of the launchers of many nodes, simulated on one machine.

    python -m benchmarks.rendezvous --nodes 64 1250

Node 0's launcher has a process of its own; those of the other nodes are threads of a few others. They meet, compare
clocks and try to reach each other as `muster train --nodes` does before it starts ranks: 1,250 nodes of eight GPUs are
10,000 ranks. Prints seconds.
"""

import argparse
import multiprocessing
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from muster.launch.nodes.rendezvous import rendezvous
from muster.launch.nodes.rendezvous_config import RendezvousConfig

PROCESSES = 5
"""Processes that the other nodes' launchers are divided among."""
LIMIT_S = 300.0


def main() -> None:
    """Let each number of launchers meet and print how long that took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 1250])
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(256 << 10)
    for nodes in args.nodes:
        print(f"{nodes} launchers met, compared clocks and reached each other: {meet(nodes):.1f} s", flush=True)


def meet(nodes: int) -> float:
    """Return the seconds from the start of all launchers until the last has ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    begin = time.monotonic()
    processes = [context.Process(target=lead, args=(port, nodes))]
    processes += [
        context.Process(target=follow_all, args=(port, nodes, range(1 + number, nodes, PROCESSES)))
        for number in range(min(PROCESSES, nodes - 1))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        if process.exitcode != 0:
            for other in processes:
                other.kill()
            raise SystemExit(f"a process ended with {process.exitcode}")
    return time.monotonic() - begin


def config_of(port: int, node: int, nodes: int) -> RendezvousConfig:
    """Return the request of a node's launcher."""
    return RendezvousConfig(nodes, node, "127.0.0.1", port, timeout_s=LIMIT_S)


def lead(port: int, nodes: int) -> None:
    """Run node 0's launcher until ranks would start."""
    with rendezvous(config_of(port, 0, nodes), {}) as group:
        group.measure_clocks(LIMIT_S)
        if problems := group.check_connectivity(LIMIT_S):
            raise SystemExit(problems[0])
        group.send("prepared")


def follow_all(port: int, nodes: int, part: range) -> None:
    """Run the launchers of some other nodes."""

    def follow(node: int) -> None:
        with rendezvous(config_of(port, node, nodes), {}) as group:
            group.check_connectivity(LIMIT_S)
            group.wait_for("prepared", LIMIT_S)

    with ThreadPoolExecutor(len(part)) as pool:
        list(pool.map(follow, part))


if __name__ == "__main__":
    main()
