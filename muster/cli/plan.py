"""`muster plan`: the best plans for a model on a cluster."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from muster.cli.parser import Parser, whole_number
from muster.cli.work import add_work, model_of, require, seq_len_of
from muster.spec.errors import ConfigError, MusterError

if TYPE_CHECKING:
    from muster.planner.answer import Answer
    from muster.planner.request import Asked
    from muster.spec.plan import Plan

SEARCH_S = 8.0
"""After so long the search stops with what it has, and says what may be missed."""


def run(arguments: list[str]) -> int:
    """Searches. Returns the exit code."""
    args = _parse(arguments)
    from muster.planner.answer import answer_to
    from muster.report.plan_answer import answer_json, show_answer

    answer = answer_to(_asked(args), args.top, args.limit)
    written = _write(args, answer)
    if args.json:
        print(json.dumps(answer_json(answer, args.explain), indent=2))
        return 0
    show_answer(answer, args.explain)
    if written:
        print("\nwritten   " + ", ".join(map(str, written)))
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        "plan",
        "Find the best plans for a model on a cluster, simulate them, and say why they are the best.",
        usage="muster plan --model M --cluster C [--seq-len S] [--global-batch B] [--tokens T] [flags]",
        epilog="A plan marked * is predicted, but can't be run yet.",
    )
    add = parser.add_argument
    add_work(parser, "4 Mi tokens, or the Step Law")
    add("--tokens", metavar="T", help="tokens of the whole training, such as 15T: days, cost, energy and CO₂ of it")
    add("--objective", choices=("time", "cost", "energy", "memory"), default="time", help="what is made small")
    add("--top", type=whole_number, default=5, metavar="K", help="plans that are shown (default: 5)")
    add("--precision", metavar="P", help="of the compute (default: bf16, fp32 on CPUs)")
    add("--fix", metavar="PARTS", help="parts of a plan's name that the plans must have, such as tp8-z1")
    add("--memory", metavar="SIZE", help="of each device, what may be used at most, such as 70GB")
    add("--runnable", action="store_true", help="only plans that muster train runs today")
    add("--explain", action="store_true", help="say what became of every family of plans")
    add(
        "--limit",
        type=_seconds,
        default=SEARCH_S,
        metavar="S",
        help="seconds of search at most; most need less (default: %(default)g)",
    )
    add("-o", "--output", type=Path, metavar="FILE", help="write the best plan, for muster train --parallel FILE")
    add("--launch", choices=("torchrun", "slurm", "kubernetes", "skypilot"), help="write files that start it on nodes")
    add("--run-file", metavar="FILE", help="the run file that they name (default: run.yaml)")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse(arguments)
    require(args, {"model": "llama3-8b", "cluster": "64xh100"})
    if args.run_file and not args.launch:
        raise ConfigError(f"--run-file {args.run_file} is named in the files of --launch: say which, such as slurm")
    if args.output and not args.output.absolute().parent.is_dir():
        raise ConfigError(f"--output {args.output}: there is no folder {args.output.absolute().parent}")
    if args.output and args.output.is_dir():
        raise ConfigError(f"--output {args.output} is a folder: expected a file such as {args.output / 'plan.yaml'}")
    return args


def _asked(args: argparse.Namespace) -> "Asked":
    from muster.planner.request import ask
    from muster.spec.machine import cluster_here
    from muster.spec.sizes import read_bytes, read_count

    model = model_of(args.model)
    return ask(
        model,
        cluster_here(args.cluster),
        seq_len_of(args, model),
        args.global_batch,
        None if args.tokens is None else read_count(args.tokens, "--tokens"),
        args.objective,
        args.precision,
        args.fix or "",
        None if args.memory is None else read_bytes(args.memory, "--memory"),
        args.runnable,
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got '{text}'")
    return value


def _write(args: argparse.Namespace, answer: "Answer") -> list[Path]:
    """Writes what is wanted as files, and returns where."""
    if not (args.output or args.launch):
        return []
    plan_file = args.output or Path("plan.yaml")
    _write_plan(plan_file, answer.found.best[0].plan)
    return [plan_file, *(_launch(args, answer) if args.launch else ())]


def _write_plan(path: Path, plan: "Plan") -> None:
    from muster.spec.load import plan_text
    from muster.spec.write import replace_text

    try:
        replace_text(path, plan_text(plan))
    except OSError as error:
        raise MusterError(f"the plan can't be written to {path}: {error.strerror}") from None


def _launch(args: argparse.Namespace, answer: "Answer") -> list[Path]:
    """Writes the plan and the files that start it, beside each other."""
    from muster.planner.launch import job_of, write_launch_files

    plan_file = args.output or Path("plan.yaml")
    plan, cluster = answer.found.best[0].plan, answer.request.cluster
    job = job_of(plan, cluster, f"muster-{answer.request.model.name}", args.run_file or "run.yaml", str(plan_file))
    try:
        return write_launch_files(args.launch, job, plan_file.parent)
    except OSError as error:
        raise MusterError(f"the launch files can't be written to {plan_file.parent}: {error.strerror}") from None
