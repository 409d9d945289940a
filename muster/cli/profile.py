"""`muster profile`: measure this machine, and write a cluster file for `muster predict`."""

from pathlib import Path

from muster.api.torch_import import import_torch_module
from muster.cli.parser import Parser, positive_int


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
        type=Path,
        default=Path("machine.yaml"),
        metavar="FILE",
        help="cluster file to write (default: machine.yaml)",
    )
    parser.add_argument(
        "--ranks", type=positive_int, metavar="N", help="measuring processes (default: one per GPU, or 4 to 8)"
    )
    parser.add_argument("--quick", action="store_true", help="measure few sizes and one dtype, roughly, in seconds")
    args = parser.parse(arguments)
    probe = import_torch_module("muster.probe.profile")
    cluster = probe.profile(args.output, args.ranks, args.quick)
    print(probe.summary(cluster))
    print(f"written to {args.output}, for muster predict --cluster {args.output}")
    return 0
