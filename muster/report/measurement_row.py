"""A run as a row of a table of measurements, which `muster validate --csv` predicts."""

import csv
from io import StringIO
from math import inf
from statistics import median
from typing import Any

from muster.report.run_files import RunRecord, read_metrics
from muster.report.wall_time import ATTEMPTS_FILE
from muster.spec.errors import ConfigError
from muster.spec.plan_name import format_plan_name, settings_beyond_name
from muster.validate.columns import COLUMNS

WARM_UP_STEPS = 2
"""First steps of each attempt that the median leaves out: they compile, fill caches and connect."""


def measurement_csv(run: RunRecord) -> str:
    """Return a table with a row for the run: the median of its steps' seconds, and what `muster validate` needs to
    predict it. Raises ConfigError for a run that has not ended, or whose plan no name expresses."""
    row = _row(run)
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerow(row)
    return text.getvalue()


def _step_times(run: RunRecord) -> list[float]:
    """Return the seconds of the steps that the run made under its last plan, without each attempt's first ones."""
    attempts = read_metrics(run.directory / ATTEMPTS_FILE) or [{"step": 0}]
    last = attempts[-1]
    found, all_steps, end = [], [], inf
    for attempt in reversed(attempts):  # later ones have made anew what follows their begin
        if attempt is last or (attempt.get("plan") and attempt["plan"] == last.get("plan")):
            rows = [row for row in run.metrics if attempt["step"] < row["step"] <= end]
            all_steps += [float(row["time/step"]) for row in rows]
            found += [float(row["time/step"]) for row in rows if row["step"] > attempt["step"] + WARM_UP_STEPS]
        end = min(end, attempt["step"])
    if not all_steps:
        raise ConfigError(f"{run.directory} made no step under its last plan, {format_plan_name(run.plan)}")
    return found or all_steps


def _row(run: RunRecord) -> dict[str, Any]:
    machine, plan, config = run.result.get("machine"), run.plan, run.config
    if not isinstance(machine, dict):
        raise ConfigError(f"{run.directory} doesn't say on what it ran: expected a run that this version ended")
    if "swarm.stages" in config:
        raise ConfigError(f"{run.directory} ran on peers that come and go, of which no plan says how many there were")
    if beyond := settings_beyond_name(plan):
        raise ConfigError(f"no row of a table can say all of the run's plan, {format_plan_name(plan)}: {beyond[0]}")
    times = _step_times(run)
    peak = _measured(run, "memory: allocated")
    experts = {"n_experts": "num_experts", "top_k": "top_k"}
    widths = {
        "layers": "num_layers",
        "hidden": "hidden_size",
        "ffn_hidden": "intermediate_size",
        "heads": "num_heads",
        "kv_heads": "num_kv_heads",
        "vocab": "vocab_size",
    }
    found = {column: config.get(f"model.{field}") for column, field in widths.items()}
    found |= {column: config.get(f"model.moe.{field}") for column, field in experts.items()}
    if found["n_experts"]:
        found["ffn_hidden"] = f"{found['ffn_hidden']} dense / {config.get('model.moe.expert_size')} per expert"
    found |= {
        "source": "Muster",
        "software": f"muster {machine.get('muster')}",
        "model_name": config.get("model.name"),
        "seq_len": config.get("train.seq_len"),
        "global_batch": config.get("train.global_batch_size"),
        "gpu": str(machine.get("device")).split(" (")[0],
        "n_gpus": plan.world_size,
        "gpus_per_node": machine.get("devices_per_node"),
        "plan": format_plan_name(plan),
        "metric": "iteration_time_s",
        "value": f"{median(times):.6g}",
        "peak_mem_gb": "" if peak is None else f"{peak / 2**30:.4g}",
        "notes": f"median of {len(times)} steps",
    }
    return {column: value for column, value in found.items() if value is not None}


def _measured(run: RunRecord, label: str) -> float | None:
    """Return a measured value of the report's comparison; None where there is none."""
    entry = run.result.get("comparison", {}).get(label)
    value = entry.get("measured") if isinstance(entry, dict) else None
    return None if value is None else float(value)
