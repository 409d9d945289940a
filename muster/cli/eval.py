"""`muster eval`: loss and perplexity of a trained model."""

import argparse
import json
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from muster.api.defaults import DEFAULT_SAMPLES
from muster.api.torch_import import import_torch_module
from muster.cli.data import keys_as_flags
from muster.cli.parser import Parser, positive_int, sequence_length
from muster.spec.errors import ConfigError

_FLAGS = {key: f"--{key.replace('_', '-')}" for key in ("source", "tokenizer", "on_invalid_row")}
"""Run-file keys below `data` → flags."""


def run(arguments: list[str]) -> int:
    """Evaluate and print. Returns the exit code."""
    args = _parse(arguments)
    if args.tasks is not None:
        return _run_tasks(args)
    from muster.api.trained_models import evaluate

    try:
        found = evaluate(
            args.place,
            source=args.source,
            tokenizer=args.tokenizer,
            on_invalid_row=args.on_invalid_row,
            seq_len=args.seq_len,
            samples=args.samples or DEFAULT_SAMPLES,
            precision=args.precision,
            plan=args.plan or "dp1",
            path=args.path,
            reroute_every=args.reroute_every,
        )
    except ConfigError as error:
        raise (ConfigError(keys_as_flags(str(error), _FLAGS)) if args.source else error) from None
    if args.json:
        print(json.dumps({"version": 1, "place": str(args.place), "sources": found}))
    else:
        for name, of in found.items():
            print(f"{name:<12} loss {of['loss']:.4f}  perplexity {of['perplexity']:.4g}  {of['tokens']:,} tokens")
    return 0


def _run_tasks(args: argparse.Namespace) -> int:
    """Run tasks of lm-evaluation-harness."""
    if other := next(
        (
            key
            for key in (
                "source",
                "tokenizer",
                "seq_len",
                "on_invalid_row",
                "precision",
                "plan",
                "path",
                "reroute_every",
            )
            if getattr(args, key) is not None
        ),
        None,
    ):
        raise ConfigError(f"--{other.replace('_', '-')} is not for --tasks, which bring their own data: leave it out")
    wanted = import_torch_module("muster.train.harness")
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        found = wanted.run_tasks(args.place, args.tasks.split(","), args.task_dir, args.samples)
    if args.json:
        print(json.dumps({"version": 1, "place": str(args.place), "tasks": found}))
    else:
        for task, values in found.items():
            print(f"{task:<12} " + "  ".join(f"{name} {value:.4g}" for name, value in values.items()))
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("eval", "Compute a trained model's loss and perplexity on validation or other data, or run tasks.")
    parser.add_argument(
        "place",
        type=Path,
        metavar="RUN|DIR",
        help="a run, a checkpoint of it (RUN@best, RUN@STEP), its average (RUN@ema), or a Hugging Face directory",
    )
    parser.add_argument("--source", metavar="SOURCE", help="data to use instead of the run's validation split")
    parser.add_argument("--tokenizer", metavar="T", help="tokenizer to use instead of the run's or directory's")
    parser.add_argument(
        "--on-invalid-row",
        choices=("stop", "skip"),
        help="stop at an invalid row of --source, or skip it (default: the run's data.on_invalid_row, or stop)",
    )
    parser.add_argument(
        "--seq-len", type=sequence_length, metavar="N", help="tokens of each sample (default: the run's)"
    )
    parser.add_argument(
        "--samples",
        type=positive_int,
        metavar="N",
        help=f"samples of each source (default: {DEFAULT_SAMPLES}) or task (default: all)",
    )
    parser.add_argument(
        "--precision",
        metavar="P",
        help="precision of weights and passes: fp64, fp32, bf16 or fp16 (default: the run's, or that of the"
        " directory's weights)",
    )
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        help="plan, such as dp4 (four processes share the samples) or tp2 (two share the layers) (default: dp1)",
    )
    parser.add_argument(
        "--tasks", metavar="A,B", help="tasks of lm-evaluation-harness, run on a Hugging Face directory"
    )
    parser.add_argument("--task-dir", type=Path, metavar="DIR", help="directory of further tasks")
    parser.add_argument(
        "--path",
        type=int,
        metavar="N",
        help="path, counted from 0, that reads all samples, of a run with outer.method dipaco (default: the one"
        " to which its router sends each part of a sample)",
    )
    parser.add_argument(
        "--reroute-every",
        type=positive_int,
        metavar="N",
        help="positions of a sample after which its path is chosen anew (default: the run's outer.reroute_every)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse(arguments)
