"""`muster generate`: text from a trained model."""

import argparse
import json
import re
from pathlib import Path
from time import perf_counter

from muster.cli.parser import Parser, positive_int
from muster.spec.errors import ConfigError


def run(arguments: list[str]) -> int:
    """Generate and print text. Returns the exit code."""
    args = _parse(arguments)
    from muster.api.trained_models import generate
    from muster.spec.plan_name import format_plan_name

    start_s = perf_counter()
    try:
        found = generate(
            args.run,
            args.prompt,
            tokens=args.tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            plan=args.plan,
        )
    except ConfigError as error:
        raise ConfigError(re.sub("^(temperature|top_[kp]|seed) ", _as_flag, str(error))) from None
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
        print(prompt + text)
    return 0


def _as_flag(argument: re.Match[str]) -> str:
    return "--" + argument[0].replace("_", "-")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        "generate",
        "Let a trained model continue a prompt, or several at once.",
        usage="muster generate RUN --prompt TEXT [--prompt TEXT …] [flags]",
    )
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a run directory, such as runs/demo, a checkpoint, or a converted directory",
    )
    parser.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="beginning of the text")
    parser.add_argument(
        "--tokens", type=positive_int, default=200, metavar="N", help="maximum number of new tokens (default: 200)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="T",
        help="sampling temperature; 0: always the likeliest token (default: 0.7)",
    )
    parser.add_argument(
        "--top-k", type=int, default=40, metavar="K", help="sample from the K likeliest tokens; 0: all (default: 40)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the likeliest tokens with total probability P (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of sampling (default: 0)")
    parser.add_argument(
        "--plan",
        default="dp1",
        metavar="PLAN",
        help="plan, such as tp2 (two processes) or bf16 (precision) (default: dp1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse(arguments)
