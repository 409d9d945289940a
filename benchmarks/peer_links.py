"""Time of an exchange between peers over one and over several TCP connections a link.

`python -m benchmarks.peer_links [--rate MB/S] [--megabytes MB] [--rounds N]`. Linux alone. Peers are threads of this
process with the real transport over loopback; the kernel sends on each connection at `--rate` at the most
(SO_MAX_PACING_RATE), as the window does on a long line, and in a second table as fast as it can. Numbers of
connections take turns within each round, and the times are medians.
"""

import argparse
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch

from muster.launch.peers.channel import Channel, accept, connect
from muster.launch.peers.links import Ring
from muster.parallel.peer_ring import ring_mean

CONNECTIONS = (1, 2, 4, 8)
PEERS = 3
_SO_MAX_PACING_RATE = 47
"""Option of sockets on Linux (asm-generic/socket.h), which Python's socket module doesn't name."""


def channel_pair(rate: int | None) -> tuple[Channel, Channel]:
    """Return both ends of a connection, whose first end sends so many bytes a second at the most."""
    secret = bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        calling = thread.submit(connect, listener.getsockname(), secret)
        receiver, sender = accept(listener.accept()[0], secret), calling.result()
    return limit_rate(sender, rate), receiver


def limit_rate(channel: Channel, rate: int | None) -> Channel:
    """Let a channel send so many bytes a second at the most; returns it."""
    if rate is not None:
        channel._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
    return channel


def exchange_s(values: list[torch.Tensor], connections: int, rates: Sequence[int | None]) -> float:
    """Return the seconds in which peers compute the mean of their values, without those of connecting. `rates`: most
    bytes a second of a connection from each peer to the next."""
    names = [str(n) for n in range(len(values))]
    rings = [Ring(1, 1, names, name) for name in names]
    for one, other, rate in zip(rings, [*rings[1:], *rings[:1]], rates, strict=True):
        for number in range(connections):
            sender, receiver = channel_pair(rate)
            one.attach("next", sender, number)
            other.attach("previous", receiver, number)
    weights = [1] * len(values)
    with ThreadPoolExecutor(len(values)) as threads:
        begin_s = time.perf_counter()
        means = list(threads.map(lambda x, ring: ring_mean(x, ring, weights, "none"), values, rings))
        taken_s = time.perf_counter() - begin_s
    for ring in rings:
        ring.close()
    assert all(torch.equal(mean, means[0]) for mean in means)
    return taken_s


def main() -> None:
    """Print a line for each number of connections."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=20.0, help="most MB/s of a connection")
    parser.add_argument("--megabytes", type=int, default=24, help="parameters of a peer, in MB of fp32")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    values = [torch.randn(args.megabytes * 250_000) for _ in range(PEERS)]
    sent = 2 * (PEERS - 1) / PEERS * args.megabytes
    for rate in (int(args.rate * 1e6), None):
        times: dict[int, list[float]] = {count: [] for count in CONNECTIONS}
        for _ in range(args.rounds):
            for count, found in times.items():
                found.append(exchange_s(values, count, [rate] * PEERS))
        limit = f"{args.rate:g} MB/s a connection" if rate else "no limit"
        print(f"{PEERS} peers, each sends {sent:.0f} MB, {limit}")
        for count, found in times.items():
            ratio = median(times[1]) / median(found)
            print(f"  {count} connections  {median(found):6.3f} s  {sent / median(found):6.1f} MB/s  {ratio:5.2f} ×")


if __name__ == "__main__":
    main()
