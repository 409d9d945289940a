"""`muster doctor`: check that this machine can train."""

import json
from dataclasses import asdict
from pathlib import Path

from muster.cli.node_flags import add_node_flags, nodes_request
from muster.cli.parser import Parser, positive_int

_MARKS = {"ok": "ok      ", "note": "note    ", "problem": "PROBLEM "}
"""Prefixes of the lines of each level."""


def run(arguments: list[str]) -> int:
    """Check the machine. Returns 0 when all is well, 1 otherwise."""
    parser = Parser(
        "doctor",
        "Check this machine before training: versions, memory, disk, clocks, ports, ranks, bandwidth.",
        epilog="Exit code 0: all is well; 1: problems. No check takes longer than --time-limit.",
    )
    parser.add_argument("--run", type=Path, default=Path("runs"), metavar="DIR", help="directory for runs")
    parser.add_argument(
        "--ranks",
        type=positive_int,
        metavar="N",
        help="processes of the all-reduce check (default: 2, or 1 per node)",
    )
    parser.add_argument(
        "--time-limit", type=positive_int, default=60, metavar="S", help="seconds for each check (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_node_flags(parser)
    args = parser.parse(arguments)
    nodes = nodes_request(args)
    from muster.probe.doctor import DoctorRequest, run_checks

    request = DoctorRequest(args.run, args.ranks or (1 if nodes else 2), args.time_limit)
    if nodes is None:
        findings = run_checks(request)
    else:
        from muster.probe.doctor_nodes import run_node_checks

        findings = run_node_checks(request, nodes)
    found = []
    for finding in findings:
        found.append(finding)
        if not args.json:
            print(f"{_MARKS[finding.level]}{finding.check:<10} {finding.sentence}", flush=True)
    problems = sum(finding.level == "problem" for finding in found)
    if args.json:
        print(json.dumps({"version": 1, "ok": not problems, "findings": [asdict(finding) for finding in found]}))
    elif problems:
        print(f"{problems} {'problem' if problems == 1 else 'problems'}")
    else:
        print("all is well")
    return 1 if problems else 0
