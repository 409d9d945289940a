"""`muster predict`: step time of a plan on a cluster, its breakdown, and memory by rank."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from muster.api.defaults import FRAMEWORK_NAMES, MICRO_BATCHES_PER_PIPELINE_RANK
from muster.cli.parser import Parser, output_file, split_overrides
from muster.cli.planning_flags import (
    TRAINING_FLAGS,
    add_planning_flags,
    add_training_flags,
    conditions_of,
    outer_steps_of,
    require_flags,
    unit_warnings_shown,
)
from muster.spec.errors import ConfigError, InfeasibleError

if TYPE_CHECKING:
    from muster.planner.training_cost import TrainingCost
    from muster.simulate.predict import Prediction

MAX_DRAWN_EVENTS = 20_000
"""Most events of a program that is drawn; passes of larger ones are far narrower than a letter."""


def run(arguments: list[str]) -> int:
    """Predict. Returns the exit code: 3, for infeasible, where the plan doesn't fit in memory."""
    args = _parse(arguments)
    if _has_swarm(args):
        return _run_swarm(args)
    with unit_warnings_shown():
        prediction = _predict(args)
    training = _training_cost(args, prediction)
    if args.json:
        from muster.report.training import prediction_json

        print(json.dumps(prediction_json(prediction, training), indent=2))
    else:
        _show(prediction, training)
    if args.trace:
        _write_trace(args.trace, prediction)
    if args.html:
        from muster.report.page import write_page
        from muster.report.prediction import prediction_page

        write_page(args.html, prediction_page(prediction, f"{prediction.model.name} on {args.cluster}", training))
    return InfeasibleError.exit_code if prediction.fits is False else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        "predict",
        "Predict step time, throughput and memory of a plan from the specification of a cluster.",
        usage="muster predict [--model M] --cluster C --plan PLAN [flags]",
        epilog="With a cluster file of muster profile, the measured times of that machine are used.",
    )
    add = parser.add_argument
    add(
        "--plan",
        metavar="PLAN",
        help="plan: a name such as dp8-tp4-pp2, a plan file, or a run file, with its model, step and optimizer"
        " (whose plan, where it is auto, is searched for)",
    )
    add_planning_flags(parser, f"{MICRO_BATCHES_PER_PIPELINE_RANK} micro-batches per pipeline rank")
    add_training_flags(parser)
    add(
        "--node-order",
        metavar="N,N,…",
        help="nodes of the cluster, counted from 0, in the order of their ranks, as muster plan names it"
        " (default: as listed)",
    )
    add("--json", action="store_true", help="print one JSON object")
    add("--trace", type=output_file, metavar="FILE", help="write the step as a trace for Perfetto or chrome://tracing")
    add("--html", type=output_file, metavar="FILE", help="write the prediction as a page")
    rest, overrides = split_overrides(arguments)
    args = parser.parse(rest)
    args.outer = outer_steps_of(overrides)
    args.given_keys = [key for key, _ in overrides]
    require_flags(args, {"cluster": "64xh100", "plan": "dp8-tp4-pp2"})
    return args


def _has_swarm(args: argparse.Namespace) -> bool:
    from muster.api.inputs import resolve_plan_input

    return resolve_plan_input(args.plan).swarm is not None


def _run_swarm(args: argparse.Namespace) -> int:
    """Predict a step of the swarm of a run file; the devices of the cluster are its peers. Returns the exit code."""
    from muster.api.swarms import predict_swarm
    from muster.report.swarm_prediction import swarm_prediction_lines

    flags = ("trace", "html", "compile", "node_order", "expert_load", "adapter", *TRAINING_FLAGS)
    given = [flag.replace("_", "-") for flag in flags if getattr(args, flag) is not None]
    for flag in (*given, *args.given_keys):
        raise ConfigError(f"--{flag} isn't built for predictions of swarms: leave it out")
    if args.framework != FRAMEWORK_NAMES[0]:
        raise ConfigError(f"--framework {args.framework} has no swarms: leave it out")
    with unit_warnings_shown():
        found = predict_swarm(args.model, args.cluster, args.plan, args.seq_len, args.global_batch)
    print(json.dumps(found.to_json(), indent=2) if args.json else "\n".join(swarm_prediction_lines(found)))
    return InfeasibleError.exit_code if found.fits is False else 0


def _predict(args: argparse.Namespace) -> "Prediction":
    from muster.api.verbs import predict

    return predict(
        args.model,
        args.cluster,
        args.plan,
        seq_len=args.seq_len,
        global_batch=args.global_batch,
        framework=args.framework,
        compile=args.compile,
        node_order=args.node_order,
        expert_load=args.expert_load,
        adapter=args.adapter,
        outer=args.outer,
    )


def _training_cost(args: argparse.Namespace, prediction: "Prediction") -> "TrainingCost | None":
    """Return the cost of the whole training where its tokens are given."""
    from muster.api.verbs import check_batch_ramp
    from muster.planner.training_cost import training_cost
    from muster.spec.units import parse_count

    conditions = conditions_of(args)
    check_batch_ramp(conditions, prediction.workload.global_batch_size)
    return training_cost(prediction, parse_count(args.tokens, "--tokens"), conditions) if args.tokens else None


def _write_trace(path: Path, prediction: "Prediction") -> None:
    from muster.config.file_writer import write_output
    from muster.report.trace import chrome_trace
    from muster.spec.plan_name import format_plan_name

    write_output(path, json.dumps(chrome_trace(prediction.timeline, format_plan_name(prediction.plan))), "the trace")


def _show(prediction: "Prediction", training: "TrainingCost | None") -> None:
    """Print plan, prediction and, for small programs, a picture of the step."""
    from muster.report.console import table_console, text_width
    from muster.report.prediction import prediction_lines
    from muster.report.terminal import gantt_text, plan_lines

    plan = prediction.plan
    cluster = prediction.cluster
    num_micro_batches = plan.num_micro_batches(prediction.workload)
    print(plan_lines(plan, prediction.model, prediction.workload, num_micro_batches))
    print(f"cluster   {cluster.name or cluster.device.name}")
    print("\n".join(prediction_lines(prediction, training)))
    if sum(len(lane) for lanes in prediction.program.ranks for lane in lanes.values()) <= MAX_DRAWN_EVENTS:
        print()
        table_console().print(gantt_text(prediction.timeline, text_width()))
