"""Flags of commands that are started once on each of several nodes."""

import argparse
from typing import TYPE_CHECKING

from muster.cli.parser import Parser, positive_int
from muster.spec.endpoint import parse_endpoint
from muster.spec.errors import ConfigError

if TYPE_CHECKING:
    from muster.launch.nodes.rendezvous_config import RendezvousConfig

OTHER_LAUNCHERS_FLAGS = {
    "--nnodes": "--nodes",
    "--num-nodes": "--nodes",
    "--num-machines": "--nodes",
    "--node-id": "--node-rank",
    "--machine-rank": "--node-rank",
    "--master-addr": "--rendezvous",
    "--master-port": "--rendezvous",
    "--main-process-ip": "--rendezvous",
    "--main-process-port": "--rendezvous",
    "--rdzv-endpoint": "--rendezvous",
    "--rdzv-backend": "--rendezvous",
    "--rdzv-id": "--rendezvous",
    "--join-timeout": "--rendezvous-timeout",
    "--rdzv-conf": "--rendezvous-timeout",
    "--nproc-per-node": "--nproc",
    "--num-processes": "--nproc",
}
"""Flags of other launchers with the same meaning."""
_USAGE = "--nodes N --node-rank R --rendezvous HOST[:PORT]"


def add_node_flags(parser: Parser) -> None:
    """Add the flags, which `nodes_request` reads."""
    parser.foreign_flags |= OTHER_LAUNCHERS_FLAGS
    add = parser.add_argument
    add("--nodes", type=positive_int, metavar="N", help="number of nodes, on each of which this command is started")
    add("--node-rank", type=_node_rank, metavar="R", help="number of this node, from 0")
    add(
        "--rendezvous",
        metavar="HOST[:PORT]",
        help="address at which node 0 listens for the others (default port: 29400)",
    )
    add("--interface", metavar="NAME", help="network interface of the ranks (default: that of the route to HOST)")
    add(
        "--rendezvous-timeout",
        type=positive_int,
        metavar="S",
        help="seconds to wait for the others (default: 600)",
    )


def nodes_request(args: argparse.Namespace) -> "RendezvousConfig | None":
    """Return the rendezvous that the flags describe; None for one node. Raises ConfigError for missing or
    contradictory flags."""
    given = [f"--{flag}" for flag in _FLAGS if getattr(args, flag.replace("-", "_")) is not None]
    if args.nodes in (None, 1) and given in ([], ["--nodes"]):
        return None
    if args.nodes is None:
        raise ConfigError(f"{given[0]} without --nodes would train on one node: expected {_USAGE}")
    if args.nodes == 1:
        raise ConfigError(f"--nodes 1 with {given[1]}: expected {_USAGE} with N >= 2, or none of these flags")
    missing = [f"--{flag}" for flag in ("node-rank", "rendezvous") if f"--{flag}" not in given]
    if missing:
        raise ConfigError(
            f"--nodes {args.nodes} without {missing[0]}: expected {_USAGE}, with a different R on each node"
        )
    if args.node_rank >= args.nodes:
        raise ConfigError(
            f"--node-rank {args.node_rank} of {args.nodes} nodes: expected 0 to {args.nodes - 1}, one for each node"
        )
    from muster.launch.nodes.rendezvous_config import DEFAULT_PORT, DEFAULT_TIMEOUT_S, RendezvousConfig

    host, port = _address(args.rendezvous, DEFAULT_PORT)
    return RendezvousConfig(
        args.nodes, args.node_rank, host, port, args.interface, args.rendezvous_timeout or DEFAULT_TIMEOUT_S
    )


_FLAGS = ("nodes", "node-rank", "rendezvous", "interface", "rendezvous-timeout")


def _address(text: str, usual_port: int) -> tuple[str, int]:
    """Parse `HOST`, `HOST:PORT` or `[fd00::1]:PORT`."""
    try:
        return parse_endpoint(text, usual_port)
    except ValueError:
        raise ConfigError(f"--rendezvous {text}: expected HOST or HOST:PORT, such as node-0:{usual_port}") from None


def _node_rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number >= 0, got '{text}'")
    return int(text)
