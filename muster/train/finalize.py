"""Beginning and end of a run on the console: the plan, then prediction against measurement, a sample, and the
report."""

import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from operator import mul
from pathlib import Path
from statistics import median
from time import time
from typing import Any

from rich.console import Console

from muster.config.local_machine import detect_machine
from muster.config.run_config import RunConfig
from muster.cost.memory.device_overhead import device_overhead
from muster.cost.memory.forecast import forecast_memory
from muster.cost.memory.kernel_workspace import DEFAULT_KERNEL_WORKSPACE, KERNEL_WORKSPACES
from muster.cost.memory.rank_memory import peak_slices, rank_memory
from muster.model.float8 import float8_note
from muster.parallel.compile import eager_note
from muster.parallel.cuda_graphs import graphs_note
from muster.parallel.op_profile import StageProfile
from muster.parallel.stage import DecoderStage
from muster.planner.slow_ranks import fixed_plan_note
from muster.report.console import table_console
from muster.report.islands import meetings_note
from muster.report.page import write_report
from muster.report.recoveries import recoveries_note
from muster.report.report_data import PredictedVsMeasured, ReportData, RunInfo
from muster.report.run_files import MEETINGS_FILE, STRAGGLERS_FILE, SWARM_FILE, read_metrics, restarts_note
from muster.report.stragglers import straggler_note
from muster.report.swarm import swarm_note
from muster.report.terminal import comparison_table, paths_text, plan_lines
from muster.report.wall_time import split_wall_time, wall_time_note
from muster.schedule.build import build_program
from muster.simulate.breakdown import breakdown
from muster.simulate.timeline import Event, Timeline, timeline_to_json
from muster.spec.formatting import format_seconds
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.text_generation import SamplingParams
from muster.train.data import run_tokenizer
from muster.train.device_metrics import DeviceMemory, DeviceMetrics
from muster.train.metrics import null_non_finite, write_text
from muster.train.text_generation import GenerationRequest, find_trained_model, generate_texts, sample_prompt
from muster.train.trainer import Trainer
from muster.train.validation_loss import ALL_DATA, validation_metrics, validation_text
from muster.version import __version__

MAX_SAMPLED_PARAMETERS = 1_000_000_000
"""Most parameters of a model that a run ends with a sample of."""


def print_plan(trainer: Trainer, predicted: Timeline | None) -> None:
    """Print the plan and its predicted step time, if there is a prediction."""
    config, plan = trainer.config, trainer.plan
    print(plan_lines(plan, config.model, config.workload, plan.num_micro_batches(config.workload)))
    if note := eager_note(plan, config.model, trainer.world.device):
        print(note)
    if note := graphs_note(plan, trainer.world.device):
        print(note)
    if plan.precision == "fp8" and (note := float8_note(trainer.world.device, plan.fp8_recipe)):
        print(note)
    if note := fixed_plan_note(config.train, plan):
        print(note)
    if trainer.swarm is not None:
        stages, peers = trainer.swarm.plan.num_stages, len(trainer.swarm.driver.peers)
        print(f"swarm     stages: {stages}, peers so far: {peers}")
    if predicted is None:
        return
    parts = breakdown(predicted)
    step, idle = format_seconds(parts.step_s), parts.bubble_fraction
    print(f"predicted step: {step}, {idle:.0%} of it idle, from passes timed on this machine")


def finalize(
    trainer: Trainer,
    run_dir: Path,
    predicted: Timeline | None,
    profile: StageProfile | None,
    devices: DeviceMetrics,
    started_at: float,
    first_step: int,
    losses: Mapping[str, float],
    further_notes: Sequence[str] = (),
) -> None:
    """Compare prediction with measurement, and write a text sample and the report; all ranks call it.

    Only the steps from `first_step` on ran under this plan. `losses` are the validation losses by source. Without a
    `profile`, as with a swarm of peers, there is no prediction.
    """
    config, world = trainer.config, trainer.world
    measured = _measured_timeline(trainer)
    memory = [] if profile is None else world.all_gather_object(_memory_terms(trainer, profile))
    used = [found for found in world.all_gather_object(devices.memory()) if found is not None]
    if world.rank != 0:
        return
    metrics = read_metrics(run_dir / "metrics.jsonl")
    rows: list[PredictedVsMeasured] = []
    timelines = {"version": 1, "measured": timeline_to_json(measured)}
    if predicted is not None:
        rows = _comparison(predicted, measured, [row for row in metrics if row["step"] >= first_step], memory)
        rows += _device_memory_rows(trainer, used)
        timelines["predicted"] = timeline_to_json(predicted)
    write_text(run_dir / "timeline.json", json.dumps(timelines))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    machine = {"device": _device_text(trainer, devices), "devices_per_node": per_node}
    ended = time()
    result = _result(losses, rows, machine) | {"wall_time": _wall_time(run_dir, ended)}
    write_text(run_dir / "result.json", json.dumps(result))
    prompt, sample = _generate_sample(trainer, run_dir)
    notes = [data_wait_text(metrics)] if metrics else []
    if ALL_DATA in losses:
        notes.append(validation_text(losses))
    notes += further_notes
    meetings = read_metrics(run_dir / MEETINGS_FILE)
    disturbances = [restarts_note(run_dir), recoveries_note(run_dir), wall_time_note(run_dir, ended)]
    checks = read_metrics(run_dir / STRAGGLERS_FILE)
    swarm_rows = read_metrics(run_dir / SWARM_FILE)
    notes += [paths_text(trainer.plan)] if trainer.plan.schedule_entry.has_paths else []
    notes += filter(None, [meetings_note(meetings), swarm_note(swarm_rows), straggler_note(checks), *disturbances])
    notes += _sample_notes(config, run_dir)
    data = ReportData(
        title=run_dir.name,
        plan_name=format_plan_name(trainer.plan),
        facts=_run_facts(trainer, devices, metrics, started_at),
        metrics=metrics,
        predicted=predicted,
        measured=measured,
        comparison=rows,
        validation_loss=losses.get(ALL_DATA),
        sample_prompt=prompt,
        sample_text=sample,
        notes=[devices.note, *notes],
        meetings=meetings,
        swarm=swarm_rows,
        straggler_checks=checks,
    )
    write_report(run_dir / "report.html", data)
    if rows:
        table_console().print(comparison_table(rows))
    console = Console(highlight=False)
    for note in notes:
        console.print(note, soft_wrap=True)
    if sample:
        console.print("sample:", style="bold")
        console.print(prompt + sample, markup=False)
    console.print(f"report: {run_dir / 'report.html'}", soft_wrap=True)


def _result(
    losses: Mapping[str, float], rows: Sequence[PredictedVsMeasured], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of result.json: validation losses, predicted and measured seconds and bytes, null where
    unknown; the device, and the ranks of a node."""
    table = {row.label: {"unit": row.unit, "predicted": row.predicted, "measured": row.measured} for row in rows}
    metrics = null_non_finite(validation_metrics(losses))
    return {"version": 1, "metrics": metrics, "comparison": table, "machine": {**machine, "muster": __version__}}


def _wall_time(run_dir: Path, ended: float) -> dict[str, float] | None:
    found = split_wall_time(run_dir, ended)
    return None if found is None else found.to_json()


def data_wait_text(metrics: Sequence[dict]) -> str:
    """Describe the share of the steps' time that was spent waiting for data."""
    part = sum(row["time/data"] for row in metrics) / sum(row["time/step"] for row in metrics)
    return f"waiting for data: {part:.2%} of the steps"


def _measured_timeline(trainer: Trainer) -> Timeline:
    """Return all ranks' events of the step that took rank 0 the median time, from the first start on any rank."""
    rounds = trainer.step_events()
    lines = {step: Timeline("measured", 1, tuple(events)) for step, events in rounds.items()}
    spans = {step: line.makespan_s / line.num_steps for step, line in lines.items()}
    steps = sorted(spans, key=spans.__getitem__)
    chosen = trainer.world.broadcast_object(steps[len(steps) // 2] if steps else 0)
    everyone = trainer.world.all_gather_object(rounds.get(chosen, []))
    begin_s = min((event.start_s for events in everyone for event in events), default=0.0)
    events = [
        Event(e.rank, e.lane, e.action, e.start_s - begin_s, e.end_s - begin_s) for events in everyone for e in events
    ]
    num_ranks = 1 + max((event.rank for event in events), default=0)  # peers of a swarm are more than ranks
    return Timeline("measured", max(num_ranks, trainer.world.size), tuple(events), trainer.program.pairs)


# ----------------------------------------------------------------------------------------------------------------------
# Prediction beside measurement


def _memory_terms(trainer: Trainer, profile: StageProfile) -> dict[str, tuple[int, int]]:
    """Return this rank's bytes by term: (predicted, counted)."""
    config = trainer.config
    live: Mapping[int, int | tuple[int, ...]] = trainer.peak_by_stage
    away: Mapping[int, tuple[int, ...]] = {}
    if trainer.plan.sequence_slices > 1:
        pp_rank = trainer.world.at.pp
        live, away = peak_slices(trainer.program, pp_rank, profile.saved_bytes, profile.offloaded_bytes)
    rank, words = trainer.world.rank, trainer.peak_logits
    own = config.model, trainer.plan, config.workload, rank, live
    terms = rank_memory(*own, config.optim, words, away, config.outer)
    counted = {
        "parameters": sum(stage.device_parameter_bytes for stage in trainer.stages.values()),
        "gradients": profile.gradients_bytes,
        "optimizer": trainer.updater.optimizer.device_state_bytes()
        + (0 if trainer.outer is None else trainer.outer.state_bytes),
        "activations": sum(
            _live_bytes((sizes[0] - _left_bytes(trainer.stages[stage]), *sizes[1:]), live[stage])
            for stage, sizes in profile.saved_bytes.items()
        )
        - sum(_live_bytes(profile.offloaded_bytes[stage], counts) for stage, counts in away.items())
        + words * profile.vocab_bytes,
    }
    return {term: (getattr(terms, term), count) for term, count in counted.items()}


def _left_bytes(stage: DecoderStage) -> int:
    """Return the bytes of the last micro-batch's activations that have left layer by layer."""
    return sum(one.left_bytes for one in stage.layer_activations.values())


def _live_bytes(sizes: tuple[int, ...], live: int | tuple[int, ...]) -> int:
    """Return the bytes of so many micro-batches, or of so many of each slice."""
    return sum(sizes) * live if isinstance(live, int) else sum(map(mul, sizes, live))


def _comparison(
    predicted: Timeline,
    measured: Timeline,
    metrics: Sequence[dict],
    memory: Sequence[dict[str, tuple[int, int]]],
) -> list[PredictedVsMeasured]:
    """Compare times, as means over ranks, and memory, of the rank that is predicted to hold most.

    Measured times are None in a run that only wrote its report again.
    """
    ours = breakdown(predicted)
    theirs = breakdown(measured) if measured.events else None
    step_s = median(row["time/step"] for row in metrics) if metrics else None
    rows = [PredictedVsMeasured("step", ours.step_s, step_s, "s")]
    for label in ("forward", "backward", "send", "gather", "optimizer"):
        rows.append(PredictedVsMeasured(label, getattr(ours, f"{label}_s"), getattr(theirs, f"{label}_s", None), "s"))
    rows.append(
        PredictedVsMeasured("bubble", ours.bubble_fraction, getattr(theirs, "bubble_fraction", None), "fraction")
    )
    fullest = max(memory, key=lambda terms: sum(planned for planned, _ in terms.values()))
    for term, (planned, counted) in fullest.items():
        rows.append(PredictedVsMeasured(f"memory: {term}", planned, counted, "bytes"))
    return rows


def _device_memory_rows(trainer: Trainer, used: Sequence[DeviceMemory]) -> list[PredictedVsMeasured]:
    """Compare the forecast of the fullest rank with the most that any device held; nothing where devices don't count.

    The context and the communicators lie outside of what PyTorch's allocator counts; of CPU ranks so does what gloo
    copies within a collective.
    """
    if not used:
        return []
    config, plan = trainer.config, trainer.plan
    cluster = detect_machine(trainer.world.size)
    program = build_program(plan, config.model, config.workload, optim=config.optim)
    kernels = KERNEL_WORKSPACES.get(cluster.device.kind, DEFAULT_KERNEL_WORKSPACE)
    own = config.model, plan, config.workload, cluster, program
    counted = replace(kernels, stages_collectives=False)
    fullest = forecast_memory(*own, kernel_workspace=counted, optim=config.optim, outer=config.outer).fullest
    communicators = device_overhead(cluster.device, plan, fullest.pp_rank, 0).communication
    reserved = fullest.terms.total - fullest.terms.context - communicators
    rows = [
        PredictedVsMeasured(
            "memory: allocated",
            reserved - fullest.terms.fragmentation,
            max(one.allocated_bytes for one in used),
            "bytes",
        )
    ]
    if most := [one.reserved_bytes for one in used if one.reserved_bytes is not None]:
        rows.append(PredictedVsMeasured("memory: reserved", reserved, max(most), "bytes"))
    return rows


def _generate_sample(trainer: Trainer, run_dir: Path) -> tuple[str, str]:
    """Return a prompt, and the continuation by the trained model, read from the last checkpoint as one whole model."""
    config, device = trainer.config, trainer.world.device
    if not _is_sampled(config):
        return "", ""
    prompt = sample_prompt(trainer.dataset, run_tokenizer(config.data), config.train.seq_len)
    request = GenerationRequest(
        trained_model=find_trained_model(run_dir),
        plan=Plan(precision="fp32" if device.type == "cpu" else trainer.plan.precision),
        prompts=(prompt,),
        max_new_tokens=config.train.sample_tokens,
        sampling=SamplingParams(seed=config.seed),
    )
    return prompt, generate_texts(request, device)[0]


def _is_sampled(config: RunConfig) -> bool:
    """Return True if the run ends with a sample: a large model would keep all ranks waiting, and not fit on one."""
    return config.train.sample_tokens > 0 and config.model.num_parameters <= MAX_SAMPLED_PARAMETERS


def _sample_notes(config: RunConfig, run_dir: Path) -> list[str]:
    """Tell how to get a sample where one was wanted, and the model is too large for it."""
    if config.train.sample_tokens == 0 or _is_sampled(config):
        return []
    return [f"sample: none, because the model is large; 'muster generate {run_dir}' writes one on devices of its own"]


def _run_facts(trainer: Trainer, devices: DeviceMetrics, metrics: Sequence[dict], started_at: float) -> RunInfo:
    config = trainer.config
    return RunInfo(
        num_parameters=config.model.num_parameters,
        num_ranks=trainer.world.size,
        num_epochs=trainer.batch_loader.num_epochs(trainer.samples_consumed),
        num_tokens=metrics[-1]["train/tokens"] if metrics else None,
        device=_device_text(trainer, devices),
        seed=config.seed,
        started=_format_time(started_at),
        finished=_format_time(time()),
        muster_version=__version__,
    )


def _device_text(trainer: Trainer, devices: DeviceMetrics) -> str:
    """Name the devices: `cpu (x86_64)`, or a GPU's name and, where there are several kinds, each with its number."""
    if trainer.world.device.type == "cpu":
        return f"cpu ({platform.machine()})"
    counts = Counter(devices.devices)
    return ", ".join(f"{count} × {name}" if len(counts) > 1 else name for name, count in counts.items())


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
