"""`muster verify`: a few steps under several plans, each on its own processes, compared with one process."""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from muster.config.load_config import ResolvedConfig, write_run_files
from muster.config.run_config import RunConfig
from muster.launch.launcher import launch, rank_command
from muster.launch.rank_errors import EXIT_STOPPED, read_rank_error
from muster.report.parity import ParityResult
from muster.schedule.resolve import resolve_schedule
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.plan import Float8Recipe, Plan, Precision
from muster.spec.plan_name import format_plan_name
from muster.train.data import open_dataset
from muster.train.memory_preflight import require_memory
from muster.train.preflight import require_device
from muster.train.verify.compare import compare
from muster.train.verify.padded import PaddedDataset
from muster.train.verify.reference import Reference

TOLERANCES: dict[Precision, float] = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 3e-2, "fp8": 1e-1}
"""Relative change of an element that another order of additions may cause, by precision."""

Progress = Callable[[str], None]
"""Receives a line when a plan begins."""


def verify(
    config: RunConfig,
    plans: Sequence[Plan],
    run_dir: Path,
    steps: int,
    tolerance: float | None,
    progress: Progress,
) -> list[ParityResult]:
    """Compare the first `steps` steps of a run under each of the (supported) plans with those on one process.

    `run_dir` is the run's own directory, whose token store is used. The learning rate is the run's highest from the
    first step on, so that every step changes something. `tolerance` None stands for that of each plan's precision.
    Raises InfeasibleError for a precision that can't be compared, KeyboardInterrupt when the ranks were asked to stop.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("muster verify starts the processes of each plan itself: run it without torchrun")
    if config.train.training_step is not None:
        raise InfeasibleError(
            f"muster verify can't compare train.training_step {config.train.training_step}, which its reference lacks"
        )
    if config.swarm is not None:
        raise ConfigError(
            "muster verify compares plans on ranks that it starts itself: leave the section swarm out (gradients of"
            " swarms are compared with one process by tests/test_swarm.py)"
        )
    if config.outer is not None and config.outer.coordinator is not None:
        raise ConfigError(
            "muster verify compares plans on ranks that it starts itself: leave outer.coordinator out (two peers are"
            " compared with the islands of one plan by tests/test_peer_runs.py)"
        )
    plans = [
        resolve_schedule(plan, config.model, config.workload) for plan in {plan.hash: plan for plan in plans}.values()
    ]
    for plan in plans:
        if plan.precision not in TOLERANCES:
            raise InfeasibleError(
                f"muster verify can't compare {plan.precision}, as its reference doesn't scale the loss;"
                f" give one of {', '.join(TOLERANCES)} with --precision"
            )
        if plan.islands > 1:
            raise InfeasibleError(
                f"plan {format_plan_name(plan)} has islands, whose steps are not those of one process: verify the plan"
                " of one of them, without isl"
            )
        require_device(plan)
        require_memory(config, plan)
    config = comparison_config(config, steps, run_dir)
    dataset = PaddedDataset(open_dataset(config, run_dir))
    references: dict[tuple[Precision, Float8Recipe, int, str, str], Reference] = {}
    verdicts = []
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_STOPPED))
    try:
        for number, plan in enumerate(plans, 1):
            stale = plan if plan.schedule_entry.is_asynchronous else None
            skips = plan if plan.paths else None
            kind = plan.precision, plan.fp8_recipe, plan.micro_batch_size
            kind = *kind, stale.hash if stale else "", skips.hash if skips else ""
            if kind not in references:
                of = "" if stale is None else f", with the delays of schedule {plan.schedule}"
                of += "" if skips is None else ", with the paths of its micro-batches"
                size = plan.micro_batch_size
                progress(f"the reference: one process in {plan.precision}, micro-batches of {size}{of}")
                references[kind] = Reference(config, *kind[:3], dataset, stale, skips)
            progress(f"plan {number} of {len(plans)}: {format_plan_name(plan)}, processes: {plan.world_size}")
            limit = TOLERANCES[plan.precision] if tolerance is None else tolerance
            verdicts.append(_verify_plan(config, plan, references[kind], limit))
    finally:
        signal.signal(signal.SIGTERM, former)
    return verdicts


def comparison_config(config: RunConfig, steps: int, run_dir: Path) -> RunConfig:
    """Return the configuration shortened to `steps`, with the highest learning rate throughout and no skipping of
    spikes.

    Its token store is that of the run.
    """
    cache = Path(config.data.cache) if config.data.cache else run_dir.resolve().parent / ".data"
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"cache": str(cache.resolve())}),
            "train": config.train.model_copy(update={"steps": steps, "spike_sigmas": 0.0}),
            "optim": config.optim.model_copy(update={"warmup_steps": 0, "min_lr_ratio": 1.0}),
        }
    )


def _verify_plan(config: RunConfig, plan: Plan, reference: Reference, tolerance: float) -> ParityResult:
    name = format_plan_name(plan)
    with tempfile.TemporaryDirectory(prefix="muster-verify-") as place:
        folder = Path(place)
        write_run_files(
            ResolvedConfig(config.model_copy(update={"parallel": plan}), {}, plan_is_auto=False), plan, folder
        )
        if (failure := _run(folder, plan.world_size)) is not None:
            return ParityResult(name, plan.precision, tolerance, failure=failure)
        return compare(name, folder, reference, tolerance)


def _run(folder: Path, num_ranks: int) -> str | None:
    """Run the plan in `folder`; returns the reason of a failure, or None. A rank's traceback goes to standard error."""
    command = rank_command("muster.train.verify.rank", folder, num_ranks)
    outcome = launch(command, num_ranks, folder)
    if outcome.report() == 0:
        return None
    if outcome.rank is None:
        raise KeyboardInterrupt  # no rank is the cause of the end: it was asked for
    if (error := read_rank_error(folder, outcome.rank)) is not None:
        print(error.traceback, end="", file=sys.stderr)
    return outcome.reason
