"""`muster plan`: the best plans for a model on a cluster."""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.cli.parser import Parser, whole_number
from muster.spec.errors import ConfigError, InfeasibleError, MusterError

if TYPE_CHECKING:
    from muster.planner.footprint import Footprint
    from muster.planner.judge import Verdict
    from muster.planner.request import Request
    from muster.planner.search import Found
    from muster.planner.unequal import Arranged
    from muster.spec.plan import Plan

SEARCH_S = 8.0
"""After so long the search stops with what it has, and says what may be missed."""


@dataclass(frozen=True)
class Answer:
    """What was asked, and what was found."""

    arranged: "Arranged"
    footprints: "list[Footprint] | None"
    derived: list[str]
    """A line for each value that was left out and derived."""
    explain: bool

    @property
    def request(self) -> "Request":
        return self.arranged.request

    @property
    def found(self) -> "Found":
        return self.arranged.found


def run(arguments: list[str]) -> int:
    """Searches. Returns the exit code."""
    args = _parse(arguments)
    from muster.planner.explain import no_plan
    from muster.planner.unequal import arrange

    request, tokens, derived = _request(args)
    if args.output and not args.output.absolute().parent.is_dir():
        raise ConfigError(f"--output {args.output}: there is no folder {args.output.absolute().parent}")
    if args.output and args.output.is_dir():
        raise ConfigError(f"--output {args.output} is a folder: expected a file such as {args.output / 'plan.yaml'}")
    arranged = arrange(request, args.top, args.limit)
    found = arranged.found
    if not found.best:
        raise InfeasibleError(no_plan(arranged.request, found, arranged.judge))
    answer = Answer(arranged, _footprints(found.best, tokens), derived, args.explain)
    written = [args.output] if args.output else []
    if args.output or args.launch:
        _write_plan(args.output or Path("plan.yaml"), found.best[0].plan)
    if args.launch:
        written += _launch(args, answer)
    if args.json:
        print(json.dumps(_json(answer), indent=2))
        return 0
    _show(answer)
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
    add("--model", metavar="M", help="a model that comes with Muster, such as llama3-8b, or a Hugging Face directory")
    add(
        "--cluster", metavar="C", help="devices, such as 64xh100, a preset, a file of muster profile, or this (machine)"
    )
    add("--seq-len", type=whole_number, metavar="S", help="tokens of a sequence (default: 4096, or the model's most)")
    add(
        "--global-batch",
        type=whole_number,
        metavar="B",
        help="sequences of a step (default: 4 Mi tokens, or the Step Law)",
    )
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
    add("--run-file", default="run.yaml", metavar="FILE", help="the run file that they name (default: run.yaml)")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse(arguments)
    for flag, example in (("model", "llama3-8b"), ("cluster", "64xh100")):
        if getattr(args, flag) is None:
            raise ConfigError(f"--{flag} is missing: expected for example --{flag} {example}")
    return args


# ----------------------------------------------------------------------------------------------------------------------
# The request


def _request(args: argparse.Namespace) -> "tuple[Request, float | None, list[str]]":
    """What is searched for, the tokens of the training, and a line for each value that was derived."""
    from muster.planner.request import Request
    from muster.spec.load_cluster import load_cluster
    from muster.spec.named_model import load_model
    from muster.spec.plan import PRECISIONS
    from muster.spec.step_law import SOURCE, non_embedding_parameters, step_law
    from muster.spec.suggest import did_you_mean
    from muster.spec.workload import Workload

    model, cluster = load_model(args.model), load_cluster(_cluster_name(args.cluster))
    if cluster.num_devices > MOST_DEVICES:
        raise ConfigError(f"--cluster {args.cluster}: expected at most {MOST_DEVICES:,} devices")
    tokens = None if args.tokens is None else parse_size(args.tokens, "--tokens")
    seq_len, batch, derived = args.seq_len or min(4096, model.max_positions or 4096), args.global_batch, []
    if tokens is not None:
        law = step_law(non_embedding_parameters(model), tokens)
        if batch is None:
            batch = 2 ** max(0, round(_log2(law.batch_tokens / seq_len)))
            derived.append(f"global batch {batch} sequences, derived ({SOURCE})")
        derived.append(f"learning rate {law.lr:.3g}, derived ({SOURCE})")
    batch = batch or max(1, 2 ** round(_log2(DEFAULT_BATCH_TOKENS / seq_len)))
    if batch * seq_len > MOST_BATCH_TOKENS:
        raise ConfigError(
            f"a step of {batch:,} sequences of {seq_len:,} tokens: expected at most {MOST_BATCH_TOKENS:,} tokens;"
            " give a smaller --global-batch"
        )
    fixed = _fixed(args.fix)
    if args.precision not in (None, *PRECISIONS):
        known = f"expected one of {', '.join(PRECISIONS)}"
        raise ConfigError(f"--precision {args.precision}: {known}{did_you_mean(args.precision, PRECISIONS)}")
    if args.precision and fixed.get("precision", args.precision) != args.precision:
        raise ConfigError(f"--precision {args.precision} contradicts --fix {args.fix}: leave one of them out")
    precision = args.precision or fixed.get("precision") or ("fp32" if cluster.device.kind == "cpu" else "bf16")
    request = Request(
        model,
        cluster,
        Workload(seq_len=seq_len, global_batch_size=batch),
        args.objective,
        precision,
        fixed,
        args.fix or "",
        None if args.memory is None else _bytes(args.memory),
        runnable=args.runnable,
    )
    return request, tokens, derived


def _cluster_name(text: str) -> str:
    """`this` is the machine that `muster profile` measured in the working directory."""
    if text != "this":
        return text
    if not Path(MACHINE).exists():
        raise ConfigError(
            f"--cluster this needs what 'muster profile' measures: run it here first, it writes {MACHINE}"
        )
    return MACHINE


MACHINE = "machine.yaml"
"""Where `muster profile` writes, if not told otherwise."""

DEFAULT_BATCH_TOKENS = 4 * 2**20
"""Of a step where nobody says otherwise: that of Llama 3's first phase."""


def _log2(number: float) -> float:
    from math import log2

    return log2(number)


def _fixed(parts: str | None) -> dict[str, Any]:
    """The fields that parts of a plan's name say."""
    if parts is None:
        return {}
    from muster.spec.plan_name import said_by

    return said_by(parts)


MOST_DEVICES = 1_000_000
MOST_BATCH_TOKENS = 10**12


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got '{text}'")
    return value


def _bytes(text: str) -> int:
    """`70GB`, `512M`. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])B?", text.strip().upper())
    if match is None or not float(match[1]):
        raise ConfigError(f"--memory: expected a size such as 70GB, got '{text}'")
    return int(float(match[1]) * _FACTORS[match[2]])


def parse_size(text: str, flag: str) -> float:
    """`15T`, `300e9`, `70G`. Raises ConfigError."""
    number, factor = text.strip(), 1.0
    if number and number[-1].upper() in _FACTORS:
        number, factor = number[:-1], _FACTORS[number[-1].upper()]
    try:
        value = float(number) * factor
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{flag}: expected a number above 0 such as 300B or 15T, got '{text}'")
    return value


_FACTORS = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def _footprints(verdicts: "list[Verdict]", tokens: float | None) -> "list[Footprint] | None":
    from muster.planner.footprint import footprint

    return None if tokens is None else [footprint(verdict.prediction, tokens) for verdict in verdicts]


# ----------------------------------------------------------------------------------------------------------------------
# The answer


def _show(answer: "Answer") -> None:
    from rich.console import Console

    from muster.planner.explain import families, neighbours
    from muster.report.plans import footprint_table, plan_names, plan_table

    request, found, console = answer.request, answer.found, Console(highlight=False)
    workload = request.workload
    print(f"model     {request.model.name}, {request.model.num_parameters:,} parameters")
    print(f"cluster   {request.cluster.name}, {request.cluster.num_devices:,} devices")
    print(f"step      {workload.global_batch_size:,} sequences of {workload.seq_len:,} tokens")
    for line in answer.derived:
        print(f"          {line}")
    print(f"searched  {_searched(found)}")
    for line in _arrangement(answer.arranged):
        print(line)
    print()
    print("\n".join(plan_names(found.best)) + "\n")
    console.print(plan_table(found.best))
    if answer.footprints:
        print()
        console.print(footprint_table(answer.footprints))
    if any(verdict.not_yet for verdict in found.best):
        print("\n* can't be run yet: " + "; ".join(sorted({line for one in found.best for line in one.not_yet})))
    print("\nWhy the first, and what one change to it would do:")
    for neighbour in neighbours(found.best[0], answer.arranged.judge):
        print(f"  {neighbour.sentence}")
    if answer.explain:
        print("\nThe best of every family:")
        for family in families(request, found.best[0]):
            print(f"  {family.name}: {family.sentence}")


def _arrangement(arranged: "Arranged") -> list[str]:
    """Where nodes differ: their order, and what it gains."""
    if arranged.order is None:
        return []
    lines = [f"nodes     in this order of those listed: {' '.join(map(str, arranged.order))}"]
    if arranged.naive_step_s is not None:
        gain = arranged.naive_step_s / arranged.found.best[0].prediction.step_time_s
        lines.append(f"          {gain:.2f} times as fast as the best plan for nodes as listed and equal stages")
    return lines


def _searched(found: "Found") -> str:
    seen = found.seen
    text = (
        f"{seen['drafts']:,} plans of {seen['shapes']:,} shapes in {found.seconds:.1f} s,"
        f" {seen['simulated']:,} simulated:\n          "
    )
    if found.proven:
        return text + "no other can be better than the first"
    return text + f"stopped there: another may be better by up to {found.gap:.1%}"


def _json(answer: "Answer") -> dict[str, Any]:
    from muster.planner.explain import families, neighbours
    from muster.report.plans import verdict_json

    request, found = answer.request, answer.found
    footprints = answer.footprints or [None] * len(found.best)
    plain = {
        "version": 1,
        "model": request.model.name,
        "cluster": request.cluster.name,
        "devices": request.cluster.num_devices,
        "seq_len": request.workload.seq_len,
        "global_batch_size": request.workload.global_batch_size,
        "objective": request.objective,
        "derived": answer.derived,
        "plans": [
            verdict_json(number, *both) for number, both in enumerate(zip(found.best, footprints, strict=True), 1)
        ],
        "why": [
            {"change": one.change, "slower": one.slower, "sentence": one.sentence}
            for one in neighbours(found.best[0], answer.arranged.judge)
        ],
        "node_order": answer.arranged.order,
        "naive_step_time_s": answer.arranged.naive_step_s,
        "search": {**found.seen, "seconds": found.seconds, "proven": found.proven, "gap": found.gap},
    }
    if answer.explain:
        plain["families"] = [
            {
                "family": one.name,
                "plan": one.best.name if one.best else None,
                "step_time_s": one.best.prediction.step_time_s if one.best else None,
                "sentence": one.sentence,
            }
            for one in families(request, found.best[0])
        ]
    return plain


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
    job = job_of(plan, cluster, f"muster-{answer.request.model.name}", args.run_file, str(plan_file))
    try:
        return write_launch_files(args.launch, job, plan_file.parent)
    except OSError as error:
        raise MusterError(f"the launch files can't be written to {plan_file.parent}: {error.strerror}") from None
