"""`muster train`: a run from preset, run file and command line."""

import argparse
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from muster.api.torch_import import import_torch_module
from muster.cli.node_flags import add_node_flags, nodes_request
from muster.cli.parser import Override, Parser, positive_int, run_file_keys, split_overrides
from muster.spec.errors import ConfigError
from muster.spec.units import parse_bytes

if TYPE_CHECKING:
    from muster.config.load_config import ResolvedConfig
    from muster.train.preflight import TrainOptions


def run(arguments: list[str]) -> int:
    """Train. Returns the exit code."""
    args, overrides = _parse(arguments)
    nodes = nodes_request(args)
    from muster.config.load_config import load_run_config

    resolved = load_run_config(args.preset, args.file, overrides)
    run_dir = args.run or Path("runs") / (args.file.stem if args.file else args.preset)
    from muster.train.preflight import TrainOptions

    options = TrainOptions(run_dir, args.nproc, args.fresh, args.allow_changes, nodes, args.ignore_memory)
    if args.dry_run:
        _show(resolved, options)
        return 0
    return import_torch_module().train(resolved, options)


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[Override]]:
    parser = Parser(
        "train",
        "Train a model, or resume an interrupted run. The run file overrides the preset, the command line both.",
        usage="muster train [RUN.yaml] [--preset NAME] [flags] [--section.key VALUE …]",
        epilog="Any run-file key is a flag too, such as --train.steps 100 --optim.lr=1e-3.",
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="RUN.yaml", help="run file")
    parser.add_argument("--preset", metavar="NAME", help="a run file that comes with Muster, such as demo or tiny")
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="the run directory (default: runs/ and the file's name)"
    )
    parser.add_argument(
        "--nproc", type=positive_int, metavar="N", help="processes per node (default: as the plan requires)"
    )
    add_node_flags(parser)
    parser.add_argument("--parallel", metavar="PLAN", help="a plan's name, such as dp2-pp2-mb4, its file, or auto")
    parser.add_argument("--model", metavar="NAME", help="a model that comes with Muster, such as tiny or llama3-8b")
    parser.add_argument(
        "--init-from", metavar="DIR", help="checkpoint or Hugging Face directory of the initial weights"
    )
    parser.add_argument("--seed", metavar="S", help="seed of all randomness")
    parser.add_argument(
        *("--fresh", "--no-resume"),
        dest="fresh",
        action="store_true",
        help="start anew, even if the run directory holds a run",
    )
    parser.add_argument(
        "--allow-changes",
        action="store_true",
        help="resume with a changed configuration or changed data, and list the changes",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="memory that may be used of each device, such as 20GB; --parallel auto plans within it",
    )
    parser.add_argument(
        "--ignore-memory",
        action="store_true",
        help="train even if the plan's memory forecast exceeds that of this machine",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the request as a run does, print configuration, plan and program; write nothing",
    )
    rest, overrides = split_overrides(arguments)
    args = parser.parse(rest, run_file_keys)
    if args.file is None and args.preset is None:
        raise ConfigError("nothing to train: expected a run file or --preset NAME, such as --preset tiny")
    flags = [(key, getattr(args, key)) for key in ("parallel", "model", "seed")]
    limit = None if args.memory_limit is None else str(parse_bytes(args.memory_limit, "--memory-limit"))
    flags += [("train.init_from", args.init_from), ("train.memory_limit_bytes", limit)]
    flags.append(("plugins", args.plugins or None))
    return args, [(key, text) for key, text in flags if text is not None] + overrides


def _show(resolved: "ResolvedConfig", options: "TrainOptions") -> None:
    """Check the request, and print configuration, plan, program and run directory."""
    from muster.config.load_config import config_yaml
    from muster.schedule.build import build_program
    from muster.schedule.check import check
    from muster.spec.plan_name import format_plan_name
    from muster.train.preflight import dry_run

    notes = StringIO()
    with redirect_stdout(notes):
        chosen, passed = dry_run(resolved, options)
    resolved, plan = passed.resolved, passed.plan
    program = build_program(plan, resolved.config.model, resolved.config.workload, optim=resolved.config.optim)
    peaks = ", ".join(map(str, check(program).peak_activations))
    lanes: dict[str, int] = {}
    for rank in program.ranks:
        for lane, instructions in rank.items():
            lanes[lane] = lanes.get(lane, 0) + len(instructions)
    print(config_yaml(resolved, plan))
    print(f"model    {resolved.config.model.num_parameters:,} parameters")
    print(f"plan     {format_plan_name(plan)} (hash {plan.hash}), processes: {plan.world_size}")
    print(
        f"program  {program.schedule}, pipeline ranks: {program.num_ranks}, micro-batches: {program.num_micro_batches},"
        f" instructions: {', '.join(f'{count} {lane}' for lane, count in lanes.items())}"
    )
    if plan.uneven_micro_batches:
        print("         the number of micro-batches is that of the data-parallel ranks with the most")
    print(f"         can be run; peak activations by pipeline rank, in micro-batches: {peaks}")
    for line in (*chosen.lines, *filter(None, [chosen.step_line])):
        print(line)
    print(notes.getvalue(), end="")
    print(f"run      {options.run_dir} (dry run: nothing is written)")
