"""`muster schedule`: draw, time and export a pipeline schedule; list or compare all of them."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from muster.cli.parser import Parser, output_file, positive_int
from muster.spec.errors import ConfigError

if TYPE_CHECKING:
    from muster.schedule.compare import CompareRequest
    from muster.schedule.makespan_bound import OptimalityGap
    from muster.schedule.schedule import Schedule
    from muster.schedule.timing import Timing


def run(arguments: list[str]) -> int:
    """Show the requested schedules. Returns the exit code."""
    args = _parse(arguments)
    if args.list:
        _list()
    elif args.compare:
        _compare(_request(args))
    elif args.file:
        schedule, timing, pair_share = _read(args)
        _show(args, schedule, timing, None, pair_share)
    else:
        _show(args, *_make(args), _pair_share(args))
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        "schedule",
        "Draw a pipeline schedule: the passes of each rank over time, its idle time and peak activations.",
        usage=(
            "muster schedule NAME --ranks P --microbatches M [flags]\n"
            "       muster schedule --compare --ranks P --microbatches M [flags]\n"
            "       muster schedule --file FILE [flags]\n"
            "       muster schedule --list"
        ),
        epilog="All times have the same unit. Unit of memory: the activations of one micro-batch on one rank.",
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="schedule such as 1f1b; see --list")
    add("--list", action="store_true", help="list all schedules with bubble and memory")
    add("--compare", action="store_true", help="compare all schedules for one set of flags, the shortest first")
    add("--file", metavar="FILE", help="your own schedule, in the format of --json (-: standard input)")
    add("--ranks", type=positive_int, metavar="P", help="pipeline ranks")
    add("--microbatches", type=positive_int, metavar="M", help="micro-batches per step, over all replicas")
    add(
        "--vpp",
        type=positive_int,
        metavar="V",
        help="stages per rank, over all replicas (default: the schedule's usual)",
    )
    add(
        "--times",
        default="1,1,1",
        metavar="F,I,W",
        help="times of forward, backward for inputs and for weights of one rank's share of the layers",
    )
    add(
        "--p2p-time",
        default="0",
        metavar="C",
        help="time to send a pass's result to another rank (default: 0)",
    )
    add(
        "--memory-limit",
        default="inf",
        metavar="X",
        help="maximum activations that a rank may keep (default: no limit)",
    )
    add("--replicas", type=positive_int, choices=(1, 2), help="copies of the model: 2 run in opposite directions")
    add(
        "--slices",
        type=positive_int,
        default=1,
        metavar="N",
        help="slices of a sequence, of equal work (default: 1)",
    )
    add(
        "--steps",
        type=positive_int,
        metavar="N",
        help="pipedream*, pipelined-backprop: optimizer steps between two flushes (default: 3)",
    )
    add("--skip", metavar="R", help="skippipe: share of the stages that each micro-batch skips (default: 0.25)")
    add(
        "--pair-time",
        metavar="T",
        help="dualpipe, dualpipe-v: a forward and a backward of one rank's share run as one, in T",
    )
    add("--fill", action="store_true", help="2bp-*: put weight backwards into idle slots instead of at the end")
    add(
        "--vocab-parallel", metavar="S", help="spread a vocabulary over the ranks; a rank's share of the logits takes S"
    )
    add("--json", action="store_true", help="print one JSON object instead of the picture")
    add("--svg", type=output_file, metavar="FILE", help="write the picture as SVG")
    add("--trace", type=output_file, metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    args = parser.parse(_join_negative(arguments))
    _require_combinable(args)
    args.times = _times(args.times)
    args.p2p_time, args.memory_limit = (
        _number("--p2p-time", args.p2p_time),
        _number("--memory-limit", args.memory_limit),
    )
    return args


def _require_combinable(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that can't be given together."""
    modes = [args.name is not None, args.list, args.compare, args.file is not None]
    if sum(modes) != 1:
        raise ConfigError("expected one of NAME (such as 1f1b), --file FILE, --compare and --list")
    if (args.list or args.compare) and (args.json or args.svg or args.trace):
        raise ConfigError("--json, --svg and --trace need a single schedule: leave out --list or --compare")
    if args.vocab_parallel is not None and args.slices > 1:
        raise ConfigError("--vocab-parallel has passes for whole micro-batches: leave out --slices")
    if args.vocab_parallel is not None and (args.list or args.compare or args.file):
        raise ConfigError("--vocab-parallel needs a schedule's name: leave out --list, --compare or --file")


def _join_negative(arguments: list[str]) -> list[str]:
    """Join `--times -1,1,1` to one argument, so that it is refused as a negative time instead of an unknown flag."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in ("--times", "--p2p-time", "--memory-limit", "--pair-time") and argument[:1] == "-":
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


_MAX_SIZE = 1_000_000
"""Largest ranks × micro-batches × chunks of a schedule; more would take minutes and many GiB."""
_ANNOUNCED_SIZE = 200_000
"""Size from which the wait is announced."""
_ANNOUNCED_COMPARED_SIZE = 40_000
"""The same where all schedules are made, with several numbers of stages per rank."""
_MAX_TOTAL_TIME = 1e100
"""Largest total of times; sums beyond it overflow."""


def _times(text: str) -> tuple[float, float, float]:
    """Parse `F,I,W`."""
    words = text.split(",")
    if len(words) != 3:
        raise ConfigError(f"--times: expected three numbers F,I,W such as 1,1,1, got '{text}'")
    forward, inputs, weights = (_number("--times", word) for word in words)
    if not 0 < forward + inputs + weights < _MAX_TOTAL_TIME:
        raise ConfigError(f"--times: expected finite times that are not all 0, got '{text}'")
    return forward, inputs, weights


def _number(flag: str, text: str) -> float:
    """Parse a number of at least 0; times must be below `_MAX_TOTAL_TIME`."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    is_finite = flag in ("--p2p-time", "--pair-time", "--vocab-parallel")
    if math.isnan(number) or number < 0 or (is_finite and number >= _MAX_TOTAL_TIME):
        most = f" and below {_MAX_TOTAL_TIME:g}" if is_finite and number > 0 else ""
        raise ConfigError(f"{flag}: expected a number >= 0{most}, got '{text}'")
    return number


def _request(args: argparse.Namespace) -> "CompareRequest":
    """Return the set of flags shared by all schedules. Raises ConfigError for missing or excessive sizes."""
    from muster.schedule.compare import CompareRequest

    for flag in ("ranks", "microbatches"):
        if getattr(args, flag) is None:
            raise ConfigError(
                f"--{flag} is missing: expected the number of {flag.replace('microbatches', 'micro-batches')}"
            )
    steps = _steps(args)
    compared = _compared_chunks(args)
    size = args.ranks * args.microbatches * (args.vpp or max((1, *compared))) * args.slices * steps
    if size > _MAX_SIZE:
        tried = f" (without --vpp, {max(compared)} is tried)" if compared else ""
        raise ConfigError(
            f"ranks × micro-batches × vpp are {size:,}{tried}, too many to draw: expected at most {_MAX_SIZE:,}."
            " Fewer micro-batches show the schedule, too" + ", and --vpp leaves the other sizes out" * bool(compared)
        )
    if size > (_ANNOUNCED_COMPARED_SIZE if compared else _ANNOUNCED_SIZE):
        print(f"scheduling {size:,} stages × micro-batches …", file=sys.stderr, flush=True)
    return CompareRequest(
        args.ranks,
        args.microbatches,
        args.vpp,
        args.times,
        args.p2p_time,
        args.memory_limit,
        args.replicas,
        args.fill,
        args.slices,
        _pair_share(args),
        steps,
        _skip_ratio(args),
    )


def _compared_chunks(args: argparse.Namespace) -> list[int]:
    """Return the stages per rank that the schedule, or `auto` among all, tries; none where it tries one number."""
    from muster.schedule.compare import chunks_to_compare
    from muster.spec.schedules import find_schedule

    entry = find_schedule("auto" if args.compare else args.name)
    if args.vpp is not None or args.slices > 1 or not entry.compared_chunks:
        return []
    return chunks_to_compare(entry, args.replicas or entry.default_replicas)


_USUAL_STEPS = 3
"""Steps of an asynchronous schedule that show how they follow each other."""


def _steps(args: argparse.Namespace) -> int:
    """Return the steps of an asynchronous schedule. Raises ConfigError for those of another."""
    from muster.spec.schedules import find_schedule

    if args.name is None or not find_schedule(args.name).is_asynchronous:
        if args.steps is not None:
            raise ConfigError("--steps is for schedules without a flush after each step, such as pipedream-2bw")
        return 1
    return args.steps or _USUAL_STEPS


_USUAL_SKIP_RATIO = 0.25


def _skip_ratio(args: argparse.Namespace) -> float:
    """Return the share of stages that micro-batches skip. Raises ConfigError for a schedule that has none."""
    from muster.spec.schedules import find_schedule

    if args.name is None or not find_schedule(args.name).skips_stages:
        if args.skip is not None:
            raise ConfigError("--skip is for skippipe, whose micro-batches may skip stages")
        return 0.0
    ratio = _USUAL_SKIP_RATIO if args.skip is None else _number("--skip", args.skip)
    if ratio >= 1:
        raise ConfigError(f"--skip: expected a share of the stages below 1, got '{args.skip}'")
    return ratio


def _pair_share(args: argparse.Namespace) -> float | None:
    """Return the time of a forward and a backward that run as one, as a share of both one after another."""
    if args.pair_time is None:
        return None
    if args.name not in ("dualpipe", "dualpipe-v") and not args.compare and not args.file:
        raise ConfigError(f"--pair-time is for dualpipe and dualpipe-v, not for {args.name}")
    if args.vocab_parallel is not None:
        raise ConfigError("--vocab-parallel has passes between those of a pair: leave out --pair-time")
    return _number("--pair-time", args.pair_time) / sum(args.times)


# ----------------------------------------------------------------------------------------------------------------------
# One schedule


def _make(args: argparse.Namespace) -> "tuple[Schedule, Timing, OptimalityGap | None]":
    """Return the schedule, its timing and, where known, its distance from the optimum."""
    from dataclasses import replace

    from muster.schedule.auto import optimality_gap
    from muster.schedule.compare import make_with_best_chunks, time_within_limit
    from muster.schedule.registry import solve_exact
    from muster.spec.schedules import find_schedule

    entry = find_schedule(args.name)
    if args.fill and not args.name.startswith("2bp-"):
        raise ConfigError(f"--fill is for 2bp-gpipe and 2bp-1f1b, not for {args.name}")
    request = _request(args)
    if args.vocab_parallel is not None:
        return *_with_vocab_parallel(args, request), None
    if args.name == "exact":
        setting = request.spec(entry)
        proof = solve_exact(setting)
        return *time_within_limit(proof.schedule, setting), proof.gap
    schedule, timing = make_with_best_chunks(args.name, request)
    if args.name != "auto" or schedule.replicas > 1:
        return schedule, timing, None
    setting = replace(request, chunks=schedule.chunks).spec(entry)
    return schedule, timing, optimality_gap(setting, timing.makespan_s)


def _with_vocab_parallel(args: argparse.Namespace, request: "CompareRequest") -> "tuple[Schedule, Timing]":
    """Return the schedule with the passes of a vocabulary over its ranks, and its timing."""
    from dataclasses import replace

    from muster.schedule.compare import make_with_best_chunks
    from muster.schedule.vocab_passes import VocabTimes, time_with_vocab_passes
    from muster.spec.schedules import find_schedule

    score = _number("--vocab-parallel", args.vocab_parallel)
    if not args.times[0]:
        raise ConfigError(
            "--vocab-parallel needs forwards that take time: expected --times F,I,W with F above 0, got F = 0"
        )
    schedule, _ = make_with_best_chunks(args.name, request)
    setting = replace(request, chunks=schedule.chunks).spec(find_schedule(args.name))
    unit = score / args.times[0]
    return time_with_vocab_passes(schedule, VocabTimes(unit / 10, unit, unit / 2), setting)


def _read(args: argparse.Namespace) -> "tuple[Schedule, Timing, float | None]":
    """Return the schedule in a file, timed with the flags, and the time of its pairs as a share of both passes."""
    from muster.schedule.compare import time_within_limit
    from muster.schedule.schedule_spec import ScheduleSpec
    from muster.schedule.serialization import pair_share_from_json, schedule_from_json

    for flag in ("ranks", "microbatches", "vpp", "replicas", "skip", "steps"):
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag} is set by the file and can't be given too")
    if args.fill:
        raise ConfigError("--fill is set by the file and can't be given too")
    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
        data = json.loads(text)
        schedule, pair_share = schedule_from_json(data), pair_share_from_json(data)
    except OSError as error:
        raise ConfigError(f"can't read {args.file}: {error.strerror}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{args.file} is not a schedule: {error}") from None
    if (size := schedule.num_micro_batches * len(schedule.placement)) > _MAX_SIZE:
        raise ConfigError(f"{args.file} has {size:,} stages × micro-batches: expected at most {_MAX_SIZE:,}")
    if args.pair_time is not None:
        if not schedule.pairs:
            raise ConfigError(
                f"--pair-time: {args.file} has no pairs; 'muster schedule dualpipe --pair-time T' makes them"
            )
        pair_share = _pair_share(args)
    if args.slices > 1:
        raise ConfigError("--slices is set by the file and can't be given too")
    chunks = len(schedule.placement) / max(1, len(schedule.ranks))
    if chunks != int(chunks):
        raise ConfigError(
            f"{args.file} has {schedule.num_stages} stages, which can't be divided evenly among its ranks"
        )
    setting = ScheduleSpec.uniform(
        len(schedule.ranks),
        schedule.num_micro_batches // schedule.num_steps,
        args.times,
        int(chunks),
        p2p_s=args.p2p_time,
        memory_limit=args.memory_limit,
        replicas=schedule.replicas,
        num_slices=schedule.num_slices,
        num_steps=schedule.num_steps,
        pair_share=pair_share,
    )
    return *time_within_limit(schedule, setting), pair_share


def _show(
    args: argparse.Namespace,
    schedule: "Schedule",
    timing: "Timing",
    gap: "OptimalityGap | None",
    pair_share: float | None,
) -> None:
    """Print one schedule, and write its files."""
    from muster.config.file_writer import write_output
    from muster.schedule.serialization import schedule_to_json

    if args.json:
        print(json.dumps(schedule_to_json(schedule, timing, gap, pair_share)))
    else:
        from muster.report.console import table_console, text_width
        from muster.report.schedule_grid import grid_text, schedule_summary

        console = table_console()
        console.print(schedule_summary(schedule, timing), soft_wrap=True)
        if gap is not None:
            console.print(str(gap), soft_wrap=True)
        console.print(grid_text(schedule, timing, text_width()))
    if args.svg is not None:
        from muster.report.schedule_svg import schedule_svg

        write_output(args.svg, schedule_svg(schedule, timing), "the picture")
    if args.trace is not None:
        from muster.report.trace import chrome_trace
        from muster.simulate.timeline import schedule_timeline

        trace = chrome_trace(schedule_timeline(schedule, timing), schedule.name)
        write_output(args.trace, json.dumps(trace), "the trace")


# ----------------------------------------------------------------------------------------------------------------------
# All of them


def _list() -> None:
    from muster.spec.schedules import SCHEDULES

    width = max(map(len, SCHEDULES))
    for name, entry in SCHEDULES.items():
        print(f"{name:{width}}  {entry.explanation}")


def _compare(request: "CompareRequest") -> None:
    from muster.report.console import table_console
    from muster.report.schedule_grid import schedule_comparison
    from muster.schedule.compare import compare_schedules

    made, refused = compare_schedules(request)
    table_console().print(schedule_comparison(made), soft_wrap=True)
    for name, reason in refused:
        print(f"{name} is left out: {reason}")
