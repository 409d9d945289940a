"""Beginning and end of a run on the console: the plan, then prediction against measurement, a sample, and the
report."""

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import time
from typing import Any

import torch
from rich.console import Console

from muster.cost.memory.rank_memory import rank_memory
from muster.parallel.op_profile import StageProfile
from muster.report.console import table_console
from muster.report.formatting import format_seconds
from muster.report.page import write_report
from muster.report.report_data import PredictedVsMeasured, ReportData, RunInfo
from muster.report.run_files import read_metrics
from muster.report.terminal import comparison_table, plan_lines
from muster.simulate.breakdown import breakdown
from muster.simulate.timeline import Event, Timeline, timeline_to_json
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.text_generation import SamplingParams
from muster.train.data import run_tokenizer
from muster.train.metrics import null_non_finite, write_text
from muster.train.text_generation import GenerationRequest, find_trained_model, generate_texts, sample_prompt
from muster.train.trainer import Trainer
from muster.train.validation_loss import ALL_DATA, validation_losses, validation_metrics, validation_text
from muster.version import __version__

MFU_NOTE = "MFU: N/A, because the peak arithmetic rate of this device is not in the catalogue"


def print_plan(trainer: Trainer, predicted: Timeline) -> None:
    """Print the plan and its predicted step time."""
    config, plan = trainer.config, trainer.plan
    print(plan_lines(plan, config.model, config.workload, plan.num_micro_batches(config.workload)))
    step, idle = format_seconds(predicted.makespan_s), breakdown(predicted).bubble_fraction
    print(f"predicted step: {step}, {idle:.0%} of it idle, from passes timed on this machine")
    print(MFU_NOTE)


def finalize(
    trainer: Trainer, run_dir: Path, predicted: Timeline, profile: StageProfile, started_at: float, first_step: int
) -> dict[str, float]:
    """Evaluate, compare prediction with measurement, and write a text sample and the report.

    All ranks call it, and all get the validation losses by source. Only the steps from `first_step` on ran under this
    plan.
    """
    config, world = trainer.config, trainer.world
    losses = validation_losses(trainer, config.eval.batches)
    measured = _measured_timeline(trainer)
    memory = world.all_gather_object(_memory_terms(trainer, profile))
    if world.rank != 0:
        return losses
    metrics = read_metrics(run_dir / "metrics.jsonl")
    rows = _comparison(predicted, measured, [row for row in metrics if row["step"] >= first_step], memory)
    timelines = {"version": 1, "predicted": timeline_to_json(predicted), "measured": timeline_to_json(measured)}
    write_text(run_dir / "timeline.json", json.dumps(timelines))
    write_text(run_dir / "result.json", json.dumps(_result(losses, rows)))
    prompt, sample = _generate_sample(trainer, run_dir)
    notes = [data_wait_text(metrics)] if metrics else []
    if ALL_DATA in losses:
        notes.append(validation_text(losses))
    data = ReportData(
        title=run_dir.name,
        plan_name=format_plan_name(trainer.plan),
        facts=_run_facts(trainer, metrics, started_at),
        metrics=metrics,
        predicted=predicted,
        measured=measured,
        comparison=rows,
        validation_loss=losses.get(ALL_DATA),
        sample_prompt=prompt,
        sample_text=sample,
        notes=[MFU_NOTE, *notes],
    )
    write_report(run_dir / "report.html", data)
    table_console().print(comparison_table(rows))
    console = Console(highlight=False)
    for note in notes:
        console.print(note, soft_wrap=True)
    if sample:
        console.print("sample:", style="bold")
        console.print(prompt + sample, markup=False)
    console.print(f"report: {run_dir / 'report.html'}", soft_wrap=True)
    return losses


def _result(losses: Mapping[str, float], rows: Sequence[PredictedVsMeasured]) -> dict[str, Any]:
    """Return the content of result.json: validation losses, predicted and measured seconds and bytes; null where
    unknown."""
    table = {row.label: {"unit": row.unit, "predicted": row.predicted, "measured": row.measured} for row in rows}
    return {"version": 1, "metrics": null_non_finite(validation_metrics(losses)), "comparison": table}


def data_wait_text(metrics: Sequence[dict]) -> str:
    """Describe the share of the steps' time that was spent waiting for data."""
    part = sum(row["time/data"] for row in metrics) / sum(row["time/step"] for row in metrics)
    return f"waiting for data: {part:.2%} of the steps"


def _measured_timeline(trainer: Trainer) -> Timeline:
    """Return all ranks' events of the step that took rank 0 the median time, from the first start on any rank."""
    rounds = trainer.step_events()
    spans = {step: max(e.end_s for e in events) - min(e.start_s for e in events) for step, events in rounds.items()}
    steps = sorted(spans, key=spans.__getitem__)
    chosen = trainer.world.broadcast_object(steps[len(steps) // 2] if steps else 0)
    everyone = trainer.world.all_gather_object(rounds.get(chosen, []))
    begin_s = min((event.start_s for events in everyone for event in events), default=0.0)
    events = [
        Event(e.rank, e.lane, e.action, e.start_s - begin_s, e.end_s - begin_s) for events in everyone for e in events
    ]
    return Timeline("measured", trainer.world.size, tuple(events))


# ----------------------------------------------------------------------------------------------------------------------
# Prediction beside measurement


def _memory_terms(trainer: Trainer, profile: StageProfile) -> dict[str, tuple[int, int]]:
    """Return this rank's bytes by term: (predicted, counted)."""
    live, config = trainer.peak_by_stage, trainer.config
    rank, words = trainer.world.rank, trainer.peak_logits
    terms = rank_memory(config.model, trainer.plan, config.workload, rank, live, config.optim, words)
    counted = {
        "parameters": sum(local.nbytes for stage in trainer.stages.values() for local in stage.parameters.values()),
        "gradients": profile.gradients_bytes,
        "optimizer": sum(tensor.nbytes for _, tensor in trainer.updater.optimizer.state().values()),
        "activations": sum(size * live[stage] for stage, size in profile.saved_bytes.items())
        + words * profile.vocab_bytes,
    }
    return {term: (getattr(terms, term), count) for term, count in counted.items()}


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


def _generate_sample(trainer: Trainer, run_dir: Path) -> tuple[str, str]:
    """Return a prompt, and the continuation by the trained model, read from the last checkpoint as one whole model."""
    config = trainer.config
    if not config.train.sample_tokens:
        return "", ""
    prompt = sample_prompt(trainer.dataset, run_tokenizer(config.data), config.train.seq_len)
    request = GenerationRequest(
        trained_model=find_trained_model(run_dir),
        plan=Plan(precision="fp32"),
        prompts=(prompt,),
        max_new_tokens=config.train.sample_tokens,
        sampling=SamplingParams(seed=config.seed),
    )
    return prompt, generate_texts(request, torch.device("cpu"))[0]


def _run_facts(trainer: Trainer, metrics: Sequence[dict], started_at: float) -> RunInfo:
    config = trainer.config
    return RunInfo(
        num_parameters=config.model.num_parameters,
        num_ranks=trainer.world.size,
        num_epochs=trainer.batch_loader.num_epochs(trainer.samples_consumed),
        num_tokens=metrics[-1]["train/tokens"] if metrics else None,
        device=f"{trainer.world.device.type} ({platform.machine()})",
        seed=config.seed,
        started=_format_time(started_at),
        finished=_format_time(time()),
        muster_version=__version__,
    )


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
