"""`muster verify`: comparison of plans with training on one process, down to the first difference."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from muster.cli.parser import Override, Parser, positive_int, run_file_keys, split_overrides
from muster.spec.errors import ConfigError

if TYPE_CHECKING:
    from muster.report.parity import ParityResult


def run(arguments: list[str]) -> int:
    """Compare plans with one process. Returns the exit code: 1 when one differs."""
    args, overrides = _parse(arguments)
    from muster.api.trained_models import verify

    verdicts = verify(
        args.file,
        preset=args.preset,
        against=args.against,
        steps=args.steps,
        tolerance=args.tolerance,
        precision=args.precision,
        progress=_progress,
        **dict(overrides),
    )
    _print(verdicts, args.steps, args.json)
    return 0 if all(verdict.agrees for verdict in verdicts) else 1


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[Override]]:
    parser = Parser(
        "verify",
        "Train a few steps under the run's own plan and under others, and compare each with plain PyTorch on one"
        " process. Exit code 1: a plan differs by more than the tolerance.",
        usage="muster verify [RUN.yaml] [--preset NAME] [--against PLAN …] [flags] [--section.key VALUE …]",
        epilog="The default tolerance depends on the precision: fp64 1e-10, fp32 1e-5, bf16 3e-2, fp8 1e-1.",
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="RUN.yaml", help="a run file or a run directory")
    parser.add_argument("--preset", metavar="NAME", help="a run file that comes with Muster, such as demo or tiny")
    parser.add_argument(
        "--against",
        nargs="+",
        action="extend",
        default=[],
        metavar="PLAN",
        help="further plans: names such as dp2-pp2, or files",
    )
    parser.add_argument("--steps", type=positive_int, default=3, metavar="N", help="steps to compare (default: 3)")
    parser.add_argument("--tolerance", type=_tolerance, metavar="X", help="allowed relative difference")
    parser.add_argument(
        "--precision", metavar="P", help="precision of all plans: fp64, fp32, bf16 or fp8 (default: as each plan says)"
    )
    parser.add_argument("--model", metavar="NAME", help="a model that comes with Muster, such as tiny or llama3-8b")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every parameter's differences")
    rest, overrides = split_overrides(arguments)
    given = [word for key, value in overrides if key == "parallel.plan" for word in ("--parallel", str(value))]
    _refuse_parallel_flag([*given, *rest])
    args = parser.parse(rest, run_file_keys)
    for name in args.against:
        if "," in name and not Path(name).exists():
            apart = " ".join(name.replace(",", " ").split())
            raise ConfigError(f"--against {name}: expected spaces between plans: --against {apart}")
    if args.file is None and args.preset is None:
        raise ConfigError("nothing to verify: expected a run file or --preset NAME, such as --preset tiny")
    flags = [("plugins", args.plugins or None), ("model", args.model)]
    return args, [(key, value) for key, value in flags if value is not None] + overrides


def _refuse_parallel_flag(arguments: Sequence[str]) -> None:
    """Raise ConfigError for a plan that is given as to `muster train` or `muster predict`."""
    for at, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in ("--parallel", "--plan"):
            plan = value if equals else next(iter(arguments[at + 1 :]), "")
            example = plan if plan and not plan.startswith("-") else "dp2"
            raise ConfigError(f"{flag}: plans to verify are given with --against, here --against {example}")


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, such as 1e-5, got '{text}'")
    return value


def _progress(sentence: str) -> None:
    print(f"running {sentence}", file=sys.stderr, flush=True)


def _print(verdicts: "Sequence[ParityResult]", steps: int, as_json: bool) -> None:
    from muster.report.console import table_console
    from muster.report.parity import parity_json, parity_sentence, parity_table

    if as_json:
        print(json.dumps({"version": 1, "steps": steps, "plans": [parity_json(verdict) for verdict in verdicts]}))
        return
    table_console().print(parity_table(verdicts))
    for verdict in verdicts:
        print(parity_sentence(verdict))
