"""`muster profile`: measure this machine, or the links between several, and write a cluster file."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from muster.api.torch_import import import_torch_module
from muster.cli.node_flags import add_node_flags, nodes_request
from muster.cli.parser import Parser, output_file, positive_int
from muster.spec.errors import ConfigError

if TYPE_CHECKING:
    from muster.launch.nodes.rendezvous_config import RendezvousConfig

QUICK_SECONDS = 0.25
"""Seconds of sending over each link, where links are measured roughly."""


def run(arguments: list[str]) -> int:
    """Measure and write. Returns the exit code."""
    parser = Parser(
        "profile",
        "Measure this machine for a minute or two: matmuls by shape and dtype, memory, collectives, overheads.",
        epilog="Stop other computations first: whatever shares the cores distorts the measurement.",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=output_file,
        metavar="FILE",
        help="cluster file to write (default: machine.yaml; with --nodes: nodes.yaml)",
    )
    parser.add_argument(
        "--ranks", type=positive_int, metavar="N", help="measuring processes (default: one per GPU, or 4 to 8)"
    )
    parser.add_argument("--quick", action="store_true", help="measure few sizes and one dtype, roughly, in seconds")
    parser.add_argument(
        "--cluster", metavar="C", help="with --nodes: the nodes, in the order of their ranks (default: as detected)"
    )
    parser.add_argument(
        "--connections", type=positive_int, metavar="K", help="with --nodes: TCP connections a link (default: 1)"
    )
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="TABLE",
        help="measure nothing: keep in the cluster file how far predictions were off for these runs on this machine"
        " (rows of 'muster report RUN --as-measurement')",
    )
    add_node_flags(parser)
    args = parser.parse(arguments)
    if (nodes := nodes_request(args)) is not None:
        if args.runs is not None:
            raise ConfigError("--runs is for the runs of one machine: leave it out with --nodes")
        return _profile_nodes(args, nodes)
    for flag in ("cluster", "connections"):
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag} {getattr(args, flag)} is for the links between nodes: add --nodes N")
    output = args.output or Path("machine.yaml")
    if args.runs is not None:
        return _keep_runs(args, output)
    probe = import_torch_module("muster.probe.profile")
    cluster = probe.profile(output, args.ranks, args.quick)
    print(probe.summary(cluster))
    print(f"written to {output}, for muster predict --cluster {output}")
    return 0


def _keep_runs(args: argparse.Namespace, output: Path) -> int:
    """Keep the errors of predictions of one's own runs in the machine's file."""
    from muster.config.local_machine import profiled_machine
    from muster.validate.local_runs import keep_run_errors, runs_summary

    if args.quick or args.ranks is not None:
        raise ConfigError("--runs measures nothing: leave out --quick and --ranks")
    if not output.exists():
        raise ConfigError(f"--runs needs a profile of this machine: run 'muster profile' first, it writes {output}")
    print(runs_summary(keep_run_errors(args.runs, output, profiled_machine(output))))
    print(f"written to {output}, for muster predict --cluster {output}")
    return 0


def _profile_nodes(args: argparse.Namespace, nodes: "RendezvousConfig") -> int:
    """Measure the links between nodes; node 0 writes the file."""
    from muster.config.file_writer import write_output
    from muster.config.local_machine import cluster_by_name
    from muster.probe.profile_nodes import LinkProfileRequest, links_summary, nodes_text, profile_nodes

    if args.ranks is not None:
        raise ConfigError(f"--ranks {args.ranks} is for measuring one machine: leave it out with --nodes")
    output = args.output or Path("nodes.yaml")
    cluster = None if args.cluster is None else cluster_by_name(args.cluster)
    seconds = QUICK_SECONDS if args.quick else 1.0
    request = LinkProfileRequest(cluster, args.connections or 1, seconds)
    found = profile_nodes(nodes, request)
    if found is None:
        print("measured; node 0 has the figures")
        return 0
    print(links_summary(found))
    write_output(output, nodes_text(found, request), "the cluster file")
    print(f"written to {output}, for muster plan --cluster {output}")
    return 0
