"""`muster program`: the program of a plan as text, and the check of a program in a file."""

import sys
from pathlib import Path

from muster.cli.parser import Override, Parser, run_file_keys, split_overrides
from muster.spec.errors import ConfigError, InfeasibleError


def run(arguments: list[str]) -> int:
    """Print or check a program. Returns the exit code."""
    parser = Parser(
        "program",
        "Print each pipeline rank's instructions in one step of a plan, or check a program.",
        usage="muster program (PLAN [--preset NAME] [--model NAME] [--section.key VALUE …] | --check FILE)",
        epilog="Batch and sequence length come from the preset; change them as in --train.global_batch_size 64.",
    )
    parser.add_argument("plan", nargs="?", metavar="PLAN", help="a plan's name, such as dp2-pp2-mb4, or its file")
    parser.add_argument("--preset", default="tiny", metavar="NAME", help="preset of the run (default: tiny)")
    parser.add_argument("--model", metavar="NAME", help="a model that comes with Muster, such as llama3-8b")
    parser.add_argument("--check", metavar="FILE", help="check the program in a file (- is standard input) instead")
    rest, overrides = split_overrides(arguments)
    args = parser.parse(rest, run_file_keys)
    if (args.plan is None) == (args.check is None):
        raise ConfigError("expected a plan such as dp2-pp2-mb4, or --check FILE")
    if args.check is not None:
        _check(args.check)
    else:
        model = [("model", args.model)] if args.model is not None else []
        _print(args.preset, [("parallel", args.plan), *model, *overrides])
    return 0


def _print(preset: str, overrides: list[Override]) -> None:
    """Print the program of a plan."""
    from muster.config.load_config import load_run_config
    from muster.config.outer_config import OuterConfig
    from muster.planner.auto import resolve_plan
    from muster.schedule.build import build_program
    from muster.schedule.outer_steps import NO_EXCHANGE, round_end_events
    from muster.schedule.resolve import resolve_schedule as resolved_plan
    from muster.spec.legality import plan_violations, required_world_size

    resolved = load_run_config(preset, None, overrides)
    config = resolved.config
    plan = resolve_plan(resolved, None) if resolved.plan_is_auto else config.parallel
    if found := plan_violations(plan, config.model, config.workload, required_world_size(plan)):
        raise InfeasibleError(f"the plan has no program: {'; '.join(found)}")
    outer = round_end_events(config.outer or OuterConfig()) if plan.islands > 1 else NO_EXCHANGE
    resolved_schedule = resolved_plan(plan, config.model, config.workload)
    own = resolved_schedule, config.model, config.workload
    print(build_program(*own, outer=outer, optim=config.optim), end="")


def _check(file: str) -> None:
    """Check a program in a file."""
    from muster.schedule.check import check
    from muster.schedule.program import parse_program

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        program = parse_program(text)
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not a program: {error}") from None
    peaks = ", ".join(map(str, check(program).peak_activations))
    print(f"{file} can be run; peak activations by pipeline rank, in micro-batches: {peaks}")
