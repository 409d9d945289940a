"""`muster doctor`: check that this machine can train."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from muster.cli.node_flags import add_node_flags, nodes_request
from muster.cli.parser import Parser, positive_int, sequence_length
from muster.spec.errors import ConfigError

if TYPE_CHECKING:
    from muster.probe.doctor_plan import PlanNeed

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
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        help="plan whose memory and disk are to be there: a name such as dp2-z3-ooptd, a plan file, or a run file",
    )
    parser.add_argument("--model", metavar="M", help="with --plan: the model, where that is no run file")
    parser.add_argument("--seq-len", type=sequence_length, metavar="S", help="with --plan: tokens per sequence")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_node_flags(parser)
    args = parser.parse(arguments)
    nodes = nodes_request(args)
    from muster.probe.doctor import DoctorRequest, run_checks

    need = _plan_need(args, nodes.num_nodes if nodes else 1)
    request = DoctorRequest(args.run, args.ranks or (1 if nodes else 2), args.time_limit, need)
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


def _plan_need(args: argparse.Namespace, nodes: int) -> "PlanNeed | None":
    """Return the memory of the plan that is to fit on nodes like this one; None where none is given."""
    if args.plan is None:
        for flag, value in (("--model", args.model), ("--seq-len", args.seq_len)):
            if value is not None:
                raise ConfigError(f"{flag} {value} is of a plan: add --plan, such as --plan dp2-z3-ooptd")
        return None
    from muster.api.inputs import resolve_plan_input
    from muster.api.verbs import predict
    from muster.config.local_machine import detect_machine
    from muster.probe.doctor_plan import PlanNeed
    from muster.spec.plan_name import format_plan_name

    given = resolve_plan_input(args.plan)
    if given.is_auto:
        raise ConfigError(f"--plan {args.plan} leaves its plan open (auto), which fits where one is found: name a plan")
    cluster = detect_machine(given.plan.world_size, nodes)
    found = predict(args.model, cluster, args.plan, seq_len=args.seq_len)
    return PlanNeed(format_plan_name(found.plan), found.forecast, cluster.device.shared_cores is not None, nodes)
