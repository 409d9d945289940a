"""`muster plan`: the best plans for a model on a cluster."""

import argparse
import json
import sys
from collections.abc import Iterable
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from muster.api.defaults import SEARCH_EFFORT
from muster.cli.parser import Parser, output_file, positive_int, split_overrides
from muster.cli.planning_flags import (
    add_planning_flags,
    add_training_flags,
    conditions_of,
    outer_steps_of,
    require_flags,
    unit_warnings_shown,
)
from muster.spec.errors import ConfigError, InfeasibleError, MusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muster.planner.answer import PlanAnswer
    from muster.planner.pareto import ParetoFront
    from muster.planner.request import PlanRequest
    from muster.planner.search_budget import SearchBudget


def run(arguments: list[str]) -> int:
    """Search and print. Returns the exit code."""
    from muster.planner.lockstep import kept_processes

    begin_s = perf_counter()
    args = _parse(arguments)
    args.begin_s = begin_s
    try:
        with kept_processes():
            return _run(args)
    except KeyboardInterrupt:
        print(
            "muster: interrupted before an answer; --time-limit S ends a search with its best plan so far",
            file=sys.stderr,
        )
        return 130


def _run(args: argparse.Namespace) -> int:
    """Answer the request in the form that the flags ask for."""
    from muster.planner.answer import answer_request
    from muster.planner.launch_files import check_launch
    from muster.report.plan_answer import answer_json, print_answer
    from muster.spec.frameworks import FRAMEWORK_SCHEDULES
    from muster.spec.supported import require_supported_model

    if args.pareto:
        return _pareto(args)
    if args.what_if:
        return _what_if(args)
    budget = _budget(args)
    asked = _request(args)
    if args.launch:
        check_launch(args.launch, asked.cluster)
    if args.launch or args.output:
        require_supported_model(asked.model)
    answer = answer_request(asked, args.top, budget)
    refusal = _refusal(args, answer)
    if args.json:
        print(json.dumps(answer_json(answer, args.explain), indent=2))
    else:
        print_answer(answer, args.explain)
    if refusal:
        raise refusal
    written = _write(args, answer)  # after the answer, which a full disk must not lose
    if written and not args.json:
        print("\nwritten   " + ", ".join(map(str, written)))
        if comment := _outer_comment(answer):
            print(f"          {comment.removeprefix('# ').strip()}")
        if asked.framework.name in FRAMEWORK_SCHEDULES:
            print(f"          the file runs Muster; the plan is the best for {asked.framework.name}")
    return 0


def _refusal(args: argparse.Namespace, answer: "PlanAnswer") -> InfeasibleError | None:
    """Return the error about a best plan that is to be written, but that `muster train` refuses; None if it doesn't."""
    from muster.spec.nearest_plans import require_runnable

    if not (args.output or args.launch):
        return None
    request, plan = answer.request, answer.result.best[0].plan
    try:
        require_runnable(plan, request.model, request.workload, request.cluster.num_devices)
    except InfeasibleError as error:
        return InfeasibleError(
            f"nothing is written: {error}; without --anticipate, the best plan that can run is written"
        )
    return None


_ALLOW_HELP = (
    "name parts that plans may have though they change losses: epfp8, epint8, eplsh, islands; or though no GPU has run"
    " them: asynctp, domino, tppairs; repeatable"
)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        "plan",
        "Find the best plans for a model on a cluster by simulation, and explain why they are best.",
        usage="muster plan --model M --cluster C [--seq-len S] [--global-batch B] [--tokens T] [flags]",
        epilog="Plans marked * (--anticipate) are predicted, but muster train can't run them yet.",
    )
    add = parser.add_argument
    add_planning_flags(parser, "4 Mi tokens, or the Step Law")
    add_training_flags(parser)
    add(
        "--objective",
        choices=("time", "cost", "energy", "memory"),
        default="time",
        help="metric to minimize (default: time)",
    )
    add("--top", type=positive_int, default=5, metavar="K", help="number of plans to show (default: 5)")
    add("--precision", metavar="P", help="compute precision (default: bf16, fp32 on CPUs)")
    add(
        "--require",
        action="append",
        metavar="PARTS",
        help="name parts that all plans must have, such as tp8-z1; repeatable",
    )
    add("--allow", action="append", metavar="PARTS", help=_ALLOW_HELP)
    add("--memory-limit", metavar="SIZE", help="memory that may be used of each device, such as 70GB")
    add(
        "--host-memory",
        metavar="SIZE",
        help="host memory of each node, such as 128G: optimizer state may lie in it",
    )
    add("--disk", metavar="SIZE", help="disk space of each node, such as 2T: optimizer state may lie on it")
    add(
        "--anticipate",
        action="store_true",
        help="also search plans and models that can be predicted, but not trained yet",
    )
    add("--explain", action="store_true", help="show the best plan of every family")
    add(
        "--fastest",
        action="store_true",
        help="the best plan by itself, not the simplest of those within 3%% of it",
    )
    add(
        "--effort",
        type=_positive,
        default=SEARCH_EFFORT,
        metavar="E",
        help="work of the search: 1 is about 8 seconds of two quiet cores, and finds the same on any machine"
        " (default: %(default)g)",
    )
    add(
        "--time-limit",
        type=_seconds,
        metavar="S",
        help="maximum seconds of the command, whatever its effort (default: none)",
    )
    _add_files(parser)
    add(
        "--what-if",
        action="append",
        metavar="CHANGE",
        help="compare with another cluster: nodes=x2, network=/2, failed=1, cluster=64xa100; repeatable",
    )
    add("--json", action="store_true", help="print one JSON object")
    rest, overrides = split_overrides(arguments)
    args = parser.parse(rest)
    _refuse_peers(key for key, _ in overrides)
    args.outer = outer_steps_of(overrides)
    _check_flags(args)
    return args


def _add_files(parser: Parser) -> None:
    """Add the flags of what is written, and --pareto, whose page is one of the files."""
    add = parser.add_argument
    add(
        "-o",
        "--output",
        type=output_file,
        metavar="FILE",
        help="write the best plan, for muster train --parallel FILE",
    )
    add(
        "--launch", choices=("torchrun", "slurm", "kubernetes", "skypilot"), help="write launch files for the best plan"
    )
    add("--run-file", metavar="FILE", help="run file named in the launch files (default: run.yaml)")
    add(
        "--pareto", action="store_true", help="show the Pareto front over step time, memory, cost and number of devices"
    )
    add("--html", type=output_file, metavar="FILE", help="with --pareto: write it as a page")


def _refuse_peers(keys: Iterable[str]) -> None:
    """Raise ConfigError for keys of runs with peers, which come and go, so that no plan can be for them."""
    for key in keys:
        page = "coordinator" if key in ("outer.coordinator", "outer.secret_file") else key.partition(".")[0]
        if page in ("swarm", "coordinator"):
            raise ConfigError(
                f"--{key}: muster plan chooses plans of fixed ranks, not for peers that come and go: give the run file"
                f" to muster predict --plan FILE, which takes each device for a peer (docs/{page}.md)"
            )


def _check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that are missing, or that don't go together."""
    require_flags(args, {"model": "llama3-8b", "cluster": "64xh100"})
    others = [flag for flag in ("output", "launch", "explain") if getattr(args, flag)]
    if (args.pareto or args.what_if) and (others or (args.pareto and args.what_if)):
        mine = "pareto" if args.pareto else "what-if"
        given = [*(["what-if"] if mine == "pareto" and args.what_if else []), *others]
        raise ConfigError(f"--{mine} compares plans and can't be combined with --{', --'.join(given)}: leave that out")
    if args.html and not args.pareto:
        raise ConfigError(f"--html {args.html} is the page of --pareto, which is missing")
    if args.run_file and not args.launch:
        raise ConfigError(
            f"--run-file {args.run_file} is for the files of --launch, which is missing: add --launch slurm"
        )


def _pareto(args: argparse.Namespace) -> int:
    """Print the Pareto front."""
    from muster.planner.pareto import pareto_front
    from muster.report.page import write_page
    from muster.report.pareto import front_json, front_page

    asked = _request(args)
    if asked.skip_fields:
        raise ConfigError(
            "--pareto weighs plans in which no stage is skipped: leave out --pareto, or skipR in --require"
        )
    found = pareto_front(asked, _budget(args))
    if args.json:
        print(json.dumps(front_json(found), indent=2))
    else:
        _show_front(found)
    if args.html:
        write_page(args.html, front_page(found, f"{args.model} on {args.cluster}: Pareto front"))
    return 0


def _show_front(found: "ParetoFront") -> None:
    """Print the front as a table and as a picture."""
    from dataclasses import replace

    from muster.planner.pareto import thin_front
    from muster.report.console import table_console, text_width
    from muster.report.pareto import front_lines, front_picture, front_table

    all_of_them = len(found.points)
    found = replace(found, points=thin_front(found.points))
    print("\n".join(front_lines(found)) + "\n")
    table_console().print(front_table(found))
    print("\nmemory of the fullest device over step time:\n")
    print("\n".join(front_picture(found, text_width())))
    more = all_of_them - len(found.points)
    if more:
        print(f"\nLeft out: {more:,} within 3 % of one of these (--json and --html have them).")
    print(f"\n{found.num_simulated:,} plans simulated in {found.seconds:.1f} s")
    if not found.proven:
        print("'may save': part of a step that another plan may save; more --effort settles it.")


def _what_if(args: argparse.Namespace) -> int:
    """Print the best plans of changed clusters."""
    from muster.planner.what_if import what_if
    from muster.report.console import table_console
    from muster.report.pareto import what_if_json, what_if_lines, what_if_table

    cases = what_if(_request(args), args.what_if, _budget(args))
    if args.json:
        print(json.dumps(what_if_json(cases), indent=2))
        return 0
    table_console().print(what_if_table(cases))
    print("\n" + "\n".join(what_if_lines(cases)))
    return 0


def _request(args: argparse.Namespace) -> "PlanRequest":
    """Return the request of the planner."""
    from muster.api.verbs import plan_request

    with unit_warnings_shown():
        return plan_request(
            args.model,
            args.cluster,
            seq_len=args.seq_len,
            global_batch=args.global_batch,
            tokens=args.tokens,
            conditions=conditions_of(args),
            objective=args.objective,
            precision=args.precision,
            require="-".join(args.require or ()),
            allow="-".join(args.allow or ()),
            memory_limit=args.memory_limit,
            anticipate=args.anticipate,
            framework=args.framework,
            compile=args.compile,
            expert_load=args.expert_load,
            fastest=args.fastest,
            host_memory=args.host_memory,
            disk=args.disk,
            adapter=args.adapter,
            outer=args.outer,
        )


def _budget(args: argparse.Namespace) -> "SearchBudget":
    """Return the budget of all searches of the command, whose clock started with it."""
    from muster.planner.search_budget import SearchBudget

    return SearchBudget.start(args.effort, args.time_limit, args.begin_s)


def _seconds(text: str) -> float:
    return _positive(text, "seconds")


def _positive(text: str, unit: str = "a number") -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"expected {unit} above 0, got '{text}'")
    return value


def _write(args: argparse.Namespace, answer: "PlanAnswer") -> list[Path]:
    """Write the requested files and return their paths."""
    if not (args.output or args.launch):
        return []
    from muster.config.file_writer import write_output
    from muster.config.load_config import plan_yaml
    from muster.planner.request import with_placed_experts

    plan_file = args.output or Path("plan.yaml")
    plan = with_placed_experts(answer.request, answer.result.best[0].plan)
    comment = _outer_comment(answer) + _node_order_comment(answer.search.node_order)
    write_output(plan_file, comment + plan_yaml(plan), "the plan")
    return [plan_file, *(_launch(args, answer) if args.launch else ())]


def _outer_comment(answer: "PlanAnswer") -> str:
    """Return a comment that names the outer steps for which a plan with islands is."""
    from muster.planner.islands import outer_flags

    first = answer.result.best[0]
    if first.plan.islands == 1 or first.prediction.outer is None:
        return ""
    return f"# With the outer steps {outer_flags(first.prediction.outer)} (flags of muster train)\n"


def _node_order_comment(node_order: "Sequence[int] | None") -> str:
    """Return a comment that names the order in which nodes get their ranks, where it isn't as listed."""
    if node_order is None or list(node_order) == sorted(node_order):
        return ""
    order = ",".join(map(str, node_order))
    return f"# For the cluster's nodes in this order: {order} (--node-order of muster predict)\n"


def _launch(args: argparse.Namespace, answer: "PlanAnswer") -> list[Path]:
    """Write the launch files beside the plan."""
    from muster.planner.launch_files import write_launch_files
    from muster.planner.launch_spec import launch_spec_of

    plan_file = args.output or Path("plan.yaml")
    plan = answer.result.best[0].plan
    cluster = answer.search.listed_cluster
    name = f"muster-{answer.request.model.name}"
    run_file = args.run_file or "run.yaml"
    job = launch_spec_of(plan, cluster, name, run_file, str(plan_file), answer.search.node_order)
    try:
        return write_launch_files(args.launch, job, plan_file.parent)
    except OSError as error:
        raise MusterError(f"the launch files can't be written to {plan_file.parent}: {error.strerror}") from None
