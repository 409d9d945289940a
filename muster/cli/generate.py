"""`muster generate`: text from a trained model."""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from muster.cli.parser import Parser, number, positive_int
from muster.spec.errors import ConfigError


def run(arguments: list[str]) -> int:
    """Generate and print text. Returns the exit code."""
    args = _parse(arguments)
    from muster.api.trained_models import converse, generate
    from muster.spec.plan_name import format_plan_name

    start_s = perf_counter()
    names = (
        "tokens",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "stop",
        "system",
        "plan",
        "window",
        "memory_limit",
        "path",
    )
    again = {} if args.prompt is None else {"reroute_every": args.reroute_every}
    flags = {name: getattr(args, name) for name in names}
    try:
        if args.prompt is None:
            for answer in converse(args.run, _lines_of_a_person(), **flags):
                print(answer, flush=True)
            return 0
        found = generate(args.run, args.prompt, chat=args.chat, **flags, **again)
    except ConfigError as error:
        raise ConfigError(re.sub("^(temperature|top_[kp]|seed|stop|window)(?=[ :])", _as_flag, str(error))) from None
    if args.json:
        texts = [{"prompt": prompt, "text": text} for prompt, text in zip(found.prompts, found.texts, strict=True)]
        facts = {
            "version": 1,
            "checkpoint": str(found.checkpoint),
            "step": found.step,
            "plan": format_plan_name(found.plan),
        }
        print(json.dumps(facts | {"time_s": perf_counter() - start_s, "texts": texts}))
        return 0
    for prompt, text in zip(found.prompts, found.texts, strict=True):
        print(text if args.chat else prompt + text)
    return 0


def _lines_of_a_person() -> Iterator[str]:
    """Yield the lines of standard input that aren't blank, with a prompt where it is a terminal."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.strip()


def _as_flag(argument: re.Match[str]) -> str:
    return "--" + argument[0].replace("_", "-")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        "generate",
        "Let a trained model continue a prompt, or several at once.",
        usage="muster generate RUN --prompt TEXT [--prompt TEXT …] [--chat] [flags]",
    )
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a run directory, such as runs/demo, a checkpoint of it (RUN@best, RUN@STEP), its average (RUN@ema), or a"
        " converted directory",
    )
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="beginning of the text; with --chat, the user's message"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer as the assistant of a dialogue, in the form of the chat template; without --prompt, each line of"
        " standard input is the user's next message",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the dialogue (with --chat)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text appears; repeatable"
    )
    parser.add_argument(
        "--tokens", type=positive_int, default=200, metavar="N", help="maximum number of new tokens (default: 200)"
    )
    parser.add_argument(
        "--temperature",
        type=number,
        default=0.7,
        metavar="T",
        help="sampling temperature; 0: always the likeliest token (default: 0.7)",
    )
    parser.add_argument(
        "--top-k", type=int, default=40, metavar="K", help="sample from the K likeliest tokens; 0: all (default: 40)"
    )
    parser.add_argument(
        "--top-p",
        type=number,
        default=1.0,
        metavar="P",
        help="sample from the likeliest tokens with total probability P (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of sampling (default: 0)")
    parser.add_argument(
        "--plan",
        default="dp1",
        metavar="PLAN",
        help="plan, such as tp2 (two processes), bf16 (precision), oparam or oparamd (layers in host memory, on disk)"
        " (default: dp1)",
    )
    parser.add_argument(
        "--window",
        type=positive_int,
        metavar="N",
        help="layers on the device at once of those that oparam or oparamd keep elsewhere (default: 2)",
    )
    parser.add_argument("--memory-limit", metavar="SIZE", help="memory that may be taken of each device, such as 20GB")
    parser.add_argument(
        "--path",
        type=int,
        metavar="N",
        help="path, counted from 0, that continues all prompts, of a run with outer.method dipaco (default: the one"
        " to which its router sends each prompt)",
    )
    parser.add_argument(
        "--reroute-every",
        type=positive_int,
        metavar="N",
        help="positions of a text after which its path is chosen anew (default: the path of its beginning stays)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse(arguments)
    _require_texts(args)
    return args


def _require_texts(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags of a dialogue without one, and of texts without any."""
    if args.prompt is None and not args.chat:
        raise ConfigError("generate needs a text to continue: give --prompt TEXT, or --chat for a dialogue")
    if args.prompt is None and args.json:
        raise ConfigError("--json prints one object at the end: give --prompt TEXT, since a dialogue has no end")
    if args.prompt is None and args.reroute_every is not None:
        raise ConfigError("a dialogue keeps to one of the model's paths: leave --reroute-every out, or give --prompt")
    if args.system is not None and not args.chat:
        raise ConfigError("--system is for a dialogue: give --chat, too")
