"""`muster profile`: measure this machine, and write a cluster file for `muster predict`."""

from pathlib import Path

from muster.api.torch_import import import_torch_module
from muster.cli.parser import Parser, positive_int


def run(arguments: list[str]) -> int:
    """Measure and write. Returns the exit code."""
    parser = Parser(
        "profile",
        "Measure this machine for a minute or two: matrix products by shape and type, memory, collectives, overheads.",
        epilog="Nothing else should compute meanwhile: what shares the cores with it is measured too.",
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("machine.yaml"), metavar="FILE", help="default: machine.yaml"
    )
    parser.add_argument(
        "--ranks", type=positive_int, metavar="N", help="processes that measure (default: one a GPU, or 4 to 8)"
    )
    parser.add_argument("--quick", action="store_true", help="few sizes and one type, in some seconds: a rough picture")
    args = parser.parse(arguments)
    probe = import_torch_module("muster.probe.profile")
    cluster = probe.profile(args.output, args.ranks, args.quick)
    print(probe.summary(cluster))
    print(f"written to {args.output}: muster predict --cluster {args.output} takes it")
    return 0
