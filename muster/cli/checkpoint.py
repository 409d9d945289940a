"""`muster checkpoint`: inspect, verify, compare, prune and convert directories of weights."""

import argparse
import contextlib
import json
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.api.torch_import import import_torch_module
from muster.cli.parser import Parser, find_subcommand, positive_int
from muster.cli.progress import ByteProgress
from muster.report.checkpoint import converted_lines, described_lines, diff_lines, pruned_lines, verified_lines

_DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Formats of stored weights."""


def run(arguments: list[str]) -> int:
    """Run one of the subcommands below. Returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(), end="")
        return 0
    (_, parse, act), rest = find_subcommand("checkpoint", VERBS, arguments)
    args = parse(rest)
    # A request to stop is an error like any other: what was written so far is removed.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
            facts, lines, code = act(args)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(json.dumps(_without_nan(facts), allow_nan=False) if args.json else "\n".join(lines))
    return code


def _without_nan(value: Any) -> Any:
    """Return the value with null in place of non-finite numbers, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


SubcommandOutput = tuple[dict[str, Any], list[str], int]
"""JSON object, lines for people, exit code."""


def _warn(problem: str) -> None:
    print(f"muster: {problem}", file=sys.stderr)


def _convert(args: argparse.Namespace) -> SubcommandOutput:
    """Convert a directory of weights to another format."""
    from muster.api.trained_models import convert
    from muster.config.named_model import load_model

    with ByteProgress("writing") as bar:
        facts = convert(
            args.source,
            args.target,
            to=args.to,
            dtype=args.dtype,
            max_shard_size=args.max_shard_size,
            tokenizer=args.tokenizer,
            model=None if args.model is None else load_model(args.model),
            residual=args.residual,
            set_total=bar.add_total,
            progress=bar.advance,
            report=_warn,
        )
    return facts, converted_lines(facts), 0


def _inspect(args: argparse.Namespace) -> SubcommandOutput:
    """Describe a directory of weights."""
    facts = import_torch_module("muster.checkpoint.describe").describe(args.path, args.tensors, args.tensor, _warn)
    return facts, described_lines(facts), 0


def _verify(args: argparse.Namespace) -> SubcommandOutput:
    """Read everything, comparing checksums."""
    with ByteProgress("reading") as progress:
        found = import_torch_module("muster.checkpoint.describe").verify(
            args.path, progress.add_total, progress.advance
        )
    facts = {"version": 1, "directories": [vars(checked) for checked in found]}
    return facts, verified_lines(facts), int(any(checked.problems for checked in found))


def _diff(args: argparse.Namespace) -> SubcommandOutput:
    """Compare two directories tensor by tensor."""
    diff = import_torch_module("muster.checkpoint.diff")
    directories = import_torch_module("muster.checkpoint.model_directory")
    a = directories.open_directory(args.a, report=_warn)
    b = directories.open_directory(args.b, report=_warn)
    with ByteProgress("comparing") as progress:
        facts = diff.compare(a, b, progress.add_total, progress.advance)
    return facts, diff_lines(facts), int(not facts["equal"])


def _prune(args: argparse.Namespace) -> SubcommandOutput:
    """Remove a run's superfluous checkpoints."""
    facts = import_torch_module("muster.train.prune").prune_run(args.run, args.keep_last, args.keep_every, args.dry_run)
    return facts, pruned_lines(facts), 0


# ----------------------------------------------------------------------------------------------------------------------
# Arguments


def _parse_convert(arguments: list[str]) -> argparse.Namespace:
    parser = _parser(
        "convert",
        "Write a run's last checkpoint, one of its checkpoints, a Hugging Face directory or a"
        " torch.distributed.checkpoint folder as another kind of directory.",
        "SRC DST --to muster|hf|dcp|peft [flags]",
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="directory to convert")
    parser.add_argument("target", type=Path, metavar="DST", help="new directory; must not exist yet")
    parser.add_argument("--to", choices=("muster", "hf", "dcp", "peft"), required=True, help="format of DST")
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype of the weights (default: as stored)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="maximum size of a file (default: 5GB)")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="directory of the tokenizer files")
    parser.add_argument("--model", metavar="NAME", help="model in SRC if SRC doesn't name it: a name or hf:DIR")
    parser.add_argument(
        "--residual",
        choices=("standard", "ladder"),
        help="residual stream of the model in DST (default: as in SRC); another one changes what the model computes",
    )
    return parser.parse(arguments)


def _parse_inspect(arguments: list[str]) -> argparse.Namespace:
    parser = _parser("inspect", "Show the contents of a directory: plan, step, sizes, dtypes.", "PATH [flags]")
    parser.add_argument("path", type=Path, metavar="PATH", help="a run, a checkpoint, or another directory of weights")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument(
        "--tensor", action="append", default=[], metavar="NAME", help="statistics of a tensor's elements; repeatable"
    )
    return parser.parse(arguments)


def _parse_verify(arguments: list[str]) -> argparse.Namespace:
    parser = _parser(
        "verify",
        "Read everything once, and compare each shard with its checksum if there is one. Exit code 1: damaged.",
        "PATH [--json]",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a run (all of its checkpoints), or one directory")
    return parser.parse(arguments)


def _parse_diff(arguments: list[str]) -> argparse.Namespace:
    parser = _parser(
        "diff",
        "Compare two directories: step, plan, model, and every tensor that both may hold. Exit code 1: tensors differ.",
        "A B [--json]",
    )
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="a run, a checkpoint, or another directory")
    return parser.parse(arguments)


def _parse_prune(arguments: list[str]) -> argparse.Namespace:
    parser = _parser(
        "prune",
        "Remove a run's older checkpoints, and unfinished files of killed runs. The last good checkpoint always stays.",
        "RUN --keep-last N [flags]",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, such as runs/demo")
    parser.add_argument(
        "--keep-last", type=positive_int, required=True, metavar="N", help="number of newest checkpoints to keep"
    )
    parser.add_argument(
        "--keep-every",
        type=positive_int,
        metavar="N",
        help="also keep steps that are multiples of N (default: the run's train.keep_every)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what would be removed")
    return parser.parse(arguments)


def _parser(verb: str, description: str, usage: str) -> Parser:
    parser = Parser(f"checkpoint {verb}", description, usage=f"muster checkpoint {verb} {usage}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


VERBS: dict[
    str, tuple[str, Callable[[list[str]], argparse.Namespace], Callable[[argparse.Namespace], SubcommandOutput]]
] = {
    "convert": ("write a checkpoint as another kind of directory", _parse_convert, _convert),
    "inspect": ("show the contents of a directory", _parse_inspect, _inspect),
    "verify": ("read everything and check it", _parse_verify, _verify),
    "diff": ("compare two directories", _parse_diff, _diff),
    "prune": ("remove a run's older checkpoints", _parse_prune, _prune),
}
"""Subcommand → summary, parser of its arguments, action."""


def _help() -> str:
    verbs = "".join(f"  {verb:<8} {explanation}\n" for verb, (explanation, _, _) in VERBS.items())
    return (
        "usage: muster checkpoint VERB …\n\n"
        "Inspect, convert and prune checkpoints, Hugging Face directories and\n"
        "torch.distributed.checkpoint folders.\n\n"
        f"{verbs}\n'muster checkpoint VERB --help' explains a verb.\n"
    )
