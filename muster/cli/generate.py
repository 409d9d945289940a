"""`muster generate`: text from a trained model."""

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from muster.api.torch_import import import_torch_module
from muster.cli.parser import Parser, positive_int
from muster.spec.errors import ConfigError

if TYPE_CHECKING:
    from muster.spec.text_generation import SamplingParams


def run(arguments: list[str]) -> int:
    """Generate and print text. Returns the exit code."""
    args = _parse(arguments)
    from muster.spec.plan import Plan
    from muster.spec.plan_name import format_plan_name, parse_plan_name
    from muster.spec.text_generation import require_generation_supported

    sampling = _sampling(args)
    wanted = import_torch_module("muster.train.text_generation")
    source = wanted.find_trained_model(args.run)
    plan = parse_plan_name(args.plan, Plan(precision=source.plan.precision))
    require_generation_supported(plan, source.model)
    prompts = tuple(args.prompt)
    start_s = perf_counter()
    request = wanted.GenerationRequest(
        trained_model=source, plan=plan, prompts=prompts, max_new_tokens=args.tokens, sampling=sampling
    )
    texts = import_torch_module("muster.train.generate").run_generation(request)
    if args.json:
        found = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        facts = {
            "version": 1,
            "checkpoint": str(source.checkpoint),
            "step": source.step,
            "plan": format_plan_name(plan),
        }
        print(json.dumps(facts | {"time_s": perf_counter() - start_s, "texts": found}))
        return 0
    for prompt, text in zip(prompts, texts, strict=True):
        print(prompt + text)
    return 0


def _sampling(args: argparse.Namespace) -> "SamplingParams":
    """Return the sampling parameters. Raises ConfigError in terms of the flags."""
    from pydantic import ValidationError

    from muster.spec.text_generation import SamplingParams

    try:
        return SamplingParams(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    except ValidationError as error:
        problem = error.errors()[0]
        flag = "--" + str(problem["loc"][0]).replace("_", "-")
        raise ConfigError(f"{flag} {problem['input']}: {problem['msg'].lower()}") from None


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
