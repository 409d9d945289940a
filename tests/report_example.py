"""Synthetic runs: data for reports of every size, with realistic shapes."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.config.load_config import load_run_config, write_run_files
from muster.report.report_data import PredictedVsMeasured, ReportData, RunInfo
from muster.schedule.action import Action
from muster.simulate.timeline import Event, Timeline
from muster.spec.plan_name import parse_plan_name

MIB = 2**20
_FORWARD_S, _BACKWARD_S, _HOP_S = 0.012, 0.024, 0.001


def metrics(steps: int) -> list[dict[str, Any]]:
    """Return rows as in metrics.jsonl, with a falling loss and a jittering norm."""
    return [
        {
            "step": step,
            "train/loss": 1.6 + 4 * math.exp(-9 * step / steps) + 0.05 * math.sin(step * 12.9898),
            "train/grad_norm": 0.5 + 3 * math.exp(-12 * step / steps) + 0.2 * math.sin(step * 78.233),
            "train/lr": 3e-4 * min(1.0, 10 * step / steps) * (1.1 - step / steps),
            "train/tokens": 8192 * step,
            "perf/tokens_per_s": 41_000 + 900 * math.sin(step * 37.719),
            "perf/mfu": None,
            "time/step": 0.2,
            "time/data": 0.001,
        }
        for step in range(1, steps + 1)
    ]


def pipeline(pp: int, micro_batches: int, copies: int = 1, slower: float = 1.0) -> tuple[Event, ...]:
    """Return all forwards, then all backwards, on a pipeline of `pp` ranks with `copies` ranks each."""
    events = []
    last_forward_s = slower * (pp + micro_batches) * (_FORWARD_S + _HOP_S)
    for rank in range(pp * copies):
        stage = rank // copies
        events.append(Event(rank, "collective", Action("UNSHARD", stage), 0.0, 0.008))
        for mb in range(micro_batches):
            start_s = 0.01 + slower * (stage + mb) * (_FORWARD_S + _HOP_S)
            back_s = last_forward_s + slower * (pp - 1 - stage + mb) * (_BACKWARD_S + _HOP_S)
            for kind, begin_s, length_s in (("F", start_s, _FORWARD_S), ("B", back_s, _BACKWARD_S)):
                end_s = begin_s + slower * length_s
                events.append(Event(rank, "compute", Action(kind, stage, mb), begin_s, end_s))
                events.append(Event(rank, "p2p", Action("S" + kind, stage, mb), end_s, end_s + _HOP_S))
                events.append(Event(rank, "p2p", Action("R" + kind, stage, mb), begin_s - 2 * _HOP_S, begin_s))
        end_s = last_forward_s + slower * (pp + micro_batches) * (_BACKWARD_S + _HOP_S)
        events.append(Event(rank, "collective", Action("GRAD_NORM"), end_s, end_s + 0.004))
        events.append(Event(rank, "compute", Action("STEP"), end_s + 0.004, end_s + 0.012))
    return tuple(events)


def report(steps: int = 200, pp: int = 2, micro_batches: int = 8, copies: int = 2, **changes: Any) -> ReportData:
    """Return a whole report; `changes` replace its fields."""
    data = ReportData(
        title="demo",
        plan_name="dp2-pp2-mb4-fp32",
        facts=RunInfo(4_980_000, pp * copies, 8192 * steps, "CPU", 0, "2026-01-02 03:04 UTC", None, "0.1.0", 1.25),
        metrics=metrics(steps),
        predicted=Timeline("predicted", pp, pipeline(pp, micro_batches)),
        measured=Timeline("measured", pp * copies, pipeline(pp, micro_batches, copies, slower=1.1)),
        comparison=(
            PredictedVsMeasured("step", 0.21, 0.2, "s"),
            PredictedVsMeasured("send", 6e-4, 9e-4, "s"),
            PredictedVsMeasured("bubble", 0.14, 0.16, "fraction"),
            PredictedVsMeasured("memory: activations", 61.2 * 2**20, 64.9 * 2**20, "bytes"),
            PredictedVsMeasured("memory: peak", None, 412 * 2**20, "bytes"),
        ),
        validation_loss=1.62,
        sample_prompt="def ",
        sample_text="f(self, x):\n    return self.y[x]\n",
        notes=("MFU: n/a, because the peak of this CPU is not in the catalogue.",),
    )
    return replace(data, **changes)


def write_run(
    folder: Path, rows: list[dict[str, Any]], plan: str = "dp2-fp32", lr: str = "3e-3", ended: bool = True
) -> Path:
    """Write a run directory as a training of these rows leaves it."""
    write_run_files(load_run_config("tiny", None, [("optim.lr", lr)]), parse_plan_name(plan), folder)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if ended:
        memory = {f"memory: {part}": {"measured": 3 * MIB} for part in ("parameters", "activations")}
        result = {"version": 1, "metrics": {"eval/loss": 1.7}, "comparison": {"step": {"measured": 0.2}, **memory}}
        result["machine"] = {"device": "cpu (x86_64)", "devices_per_node": 2, "muster": "0.1.0"}
        (folder / "result.json").write_text(json.dumps(result))
    return folder
