"""`muster memory-check`: the memory forecast of a plan compared with PyTorch's accounting."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.api.torch_import import import_torch_module
from muster.cli.parser import Parser, positive_int, sequence_length
from muster.spec.errors import ConfigError, InfeasibleError

if TYPE_CHECKING:
    from muster.config.optim_config import OptimConfig
    from muster.cost.memory.forecast import MemoryForecast
    from muster.spec.model import ModelSpec
    from muster.spec.plan import Plan
    from muster.spec.workload import Workload

TOLERANCE = 0.03
"""Allowed relative difference."""
DEFAULT_SEQ_LEN = 2048
DEFAULT_MICRO_BATCHES = 2
"""Micro-batches per pipeline rank, if not given."""


@dataclass(frozen=True, slots=True)
class RankComparison:
    """Forecast and count of one rank."""

    rank: int
    at: str
    forecast_bytes: int
    counted_bytes: int

    @property
    def difference(self) -> float:
        """Relative difference of the forecast from the count."""
        return self.forecast_bytes / self.counted_bytes - 1


def run(arguments: list[str]) -> int:
    """Compare. Returns the exit code: 1 when a rank differs by more than the tolerance."""
    args = _parse(arguments)
    from muster.api.inputs import resolve_plan_input, resolve_planned_model
    from muster.spec.nearest_plans import require_runnable
    from muster.spec.workload import Workload

    given = resolve_plan_input(args.plan)
    model, plan = resolve_planned_model(args.model, args.plan, given), given.plan
    if given.is_auto:
        raise ConfigError(f"--plan {args.plan} leaves its plan open (auto): name a plan in it, or give another")
    count = args.micro_batches or DEFAULT_MICRO_BATCHES * plan.pp
    batch = plan.mesh(0).dp_size * plan.micro_batch_size * count
    if args.micro_batches is None and given.global_batch_size is not None:
        batch = given.global_batch_size
    workload = Workload(seq_len=args.seq_len or given.seq_len or DEFAULT_SEQ_LEN, global_batch_size=batch)
    require_runnable(plan, model, workload, plan.world_size)
    if plan.schedule_entry.is_asynchronous:
        raise InfeasibleError(
            f"muster memory-check counts one step, but schedule {plan.schedule} holds what several steps need:"
            " 'muster predict' has its forecast, and a plan with schedule 1f1b can be counted"
        )
    found = list(_compare(model, plan, workload, args.on_device, given.optim))
    _print(found, model.name, workload.seq_len, plan, args)
    return 0 if all(abs(one.difference) <= TOLERANCE for one in found) else 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        "memory-check",
        "Compare the forecast of a plan's memory, on the first rank of each pipeline rank, with PyTorch's accounting of"
        " a step: of one process that simulates the rank on fake tensors, or of real processes. Exit code 1:"
        f" they differ by more than {TOLERANCE:.0%}.",
        usage="muster memory-check --model M --plan PLAN [flags]",
    )
    add = parser.add_argument
    add("--model", metavar="M", help="model: a name such as llama3-8b, or a file")
    add(
        "--plan",
        metavar="PLAN",
        help="plan: a name such as dp8-tp4-pp2, a plan file, or a run file, with its model, step and optimizer",
    )
    add(
        "--seq-len",
        type=sequence_length,
        metavar="S",
        help=f"tokens per sequence (default: the run file's, else {DEFAULT_SEQ_LEN})",
    )
    add(
        "--micro-batches",
        type=positive_int,
        metavar="N",
        help=f"micro-batches per step (default: the run file's, else {DEFAULT_MICRO_BATCHES} per pipeline rank)",
    )
    add("--on-device", action="store_true", help="run the plan's ranks as real processes on this machine")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse(arguments)
    if args.plan is None:
        raise ConfigError("--plan is missing: expected for example --plan dp8-tp4-pp2, or a run file")
    return args


def _compare(
    model: "ModelSpec", plan: "Plan", workload: "Workload", real: bool, optim: "OptimConfig | None"
) -> Iterator[RankComparison]:
    """Yield each pipeline rank's forecast and count."""
    check = import_torch_module("muster.train.memory_check")
    found = _forecast(model, plan, workload, None if real else check.FAKE_KERNELS, optim)
    counted = check.measure_real_ranks(model, plan, workload, optim) if real else []
    for one in found.ranks:
        accounting = counted[one.rank] if real else check.measure_fake_rank(model, plan, workload, one.rank, optim)
        yield RankComparison(one.rank, one.peak_instruction, one.terms.total, accounting.peak_bytes)


def _forecast(
    model: "ModelSpec", plan: "Plan", workload: "Workload", kernels: object, optim: "OptimConfig | None"
) -> "MemoryForecast":
    """Return the forecast for CPU ranks; `kernels` replaces the workspace of kernels, which fake tensors don't have."""
    from muster.cost.memory.forecast import forecast_memory
    from muster.schedule.build import build_program
    from muster.spec.cluster import single_node_cluster
    from muster.spec.device import DeviceSpec

    cluster = single_node_cluster(DeviceSpec(name="cpu", kind="cpu"), plan.world_size)
    program = build_program(plan, model, workload, optim=optim)
    own = model, plan, workload, cluster, program
    return forecast_memory(*own, kernel_workspace=kernels, optim=optim)  # type: ignore[arg-type]


def _print(found: list[RankComparison], model: str, seq_len: int, plan: "Plan", args: argparse.Namespace) -> None:
    from muster.spec.formatting import format_bytes
    from muster.spec.plan_name import format_plan_name

    if args.json:
        ranks = [
            {
                "rank": one.rank,
                "at": one.at,
                "forecast_bytes": one.forecast_bytes,
                "counted_bytes": one.counted_bytes,
                "difference": one.difference,
            }
            for one in found
        ]
        print(json.dumps({"version": 1, "plan": format_plan_name(plan), "real": args.on_device, "ranks": ranks}))
        return
    how = "real processes" if args.on_device else f"one process that simulates {plan.world_size} ranks"
    print(f"{model}, plan {format_plan_name(plan)}, sequences of {seq_len:,} tokens, counted with {how}")
    for one in found:
        print(
            f"rank {one.rank:<5} forecast {format_bytes(one.forecast_bytes):>9}, PyTorch counts"
            f" {format_bytes(one.counted_bytes):>9}: {one.difference:+.1%}; most at {one.at}"
        )
