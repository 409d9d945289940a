"""Time of an exchange between peers in the order of their names, and in the order that follows from measured links.

`python -m benchmarks.peer_ring_order [--rate MB/S] [--slow MB/S] [--megabytes MB] [--rounds N]`. Linux alone. Peers are
threads of this process with the real transport over loopback; the kernel sends on each link at `--rate` at the most
(SO_MAX_PACING_RATE), and at `--slow` on those from the first peer to the second and back, which are neighbours by name.
The links are measured as in a run. Orders take turns within each round, and the times are medians.
"""

import argparse
import socket
from collections import Counter
from collections.abc import Sequence
from statistics import median

import torch

from benchmarks.peer_links import exchange_s, limit_rate
from muster.launch.peers import bandwidth
from muster.launch.peers.bandwidth import Address, LinkMeasurement
from muster.launch.peers.channel import Channel, connect
from muster.launch.peers.links import PeerListener
from muster.launch.peers.membership import choose_ring

NAMES = "abcd"
SECRET = bytes(32)
Rates = dict[tuple[str, str], int]


def measured(rates: Rates) -> dict[tuple[str, str], float]:
    """Return the bytes a second of each link, as peers measure them."""
    listener = PeerListener(server := socket.create_server(("127.0.0.1", 0)), SECRET, bytes, print)
    address, found = server.getsockname(), {}
    for link, rate in rates.items():

        def paced(target: Address, secret: bytes, rate: int = rate) -> Channel:
            return limit_rate(connect(target, secret), rate)

        bandwidth.connect = paced  # type: ignore[assignment]
        found[link] = LinkMeasurement(link[1]).run(address, SECRET, 1) or 0.0
    listener.close()
    return found


def links_of(ring: Sequence[str]) -> list[tuple[str, str]]:
    """Return each peer with the next."""
    return list(zip(ring, [*ring[1:], ring[0]], strict=True))


def main() -> None:
    """Print the measured links, and a line for each order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=20.0, help="most MB/s of a link")
    parser.add_argument("--slow", type=float, default=4.0, help="most MB/s of the slow one")
    parser.add_argument("--megabytes", type=int, default=16, help="parameters of a peer, in MB of fp32")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rates = {(one, other): int(args.rate * 1e6) for one in NAMES for other in NAMES if one != other}
    rates |= dict.fromkeys((("a", "b"), ("b", "a")), int(args.slow * 1e6))
    found = measured(rates)
    told = ", ".join(f"{one}→{other} {rate / 1e6:.1f}" for (one, other), rate in found.items())
    print(f"measured MB/s: {told}")
    orders = {"by name": tuple(NAMES), "by measured links": choose_ring(NAMES, Counter(), 1, found)}
    times: dict[str, list[float]] = {name: [] for name in orders}
    values = [torch.randn(args.megabytes * 250_000) for _ in NAMES]
    for _ in range(args.rounds):
        for name, ring in orders.items():
            times[name].append(exchange_s(values, 1, [rates[link] for link in links_of(ring)]))
    for name, ring in orders.items():
        ratio = median(times["by name"]) / median(times[name])
        print(f"  {name:18} {' → '.join(ring)}  {median(times[name]):6.3f} s  {ratio:5.2f} ×")


if __name__ == "__main__":
    main()
