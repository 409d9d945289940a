"""Comparison of several runs: final figures, and differences of their configurations and plans."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from muster.report.curves import Point, finite_values, metric_points, smooth
from muster.report.run_files import RunRecord
from muster.spec.dotted_keys import flatten
from muster.spec.plan_name import format_plan_name


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Final figures of a run; None where unknown."""

    loss: float | None
    """Training loss of the last logged step; None where it was not finite."""
    loss_at_common_tokens: float | None
    """Smoothed training loss at the largest token count that all runs have reached."""
    validation_loss: float | None
    """Validation loss at the end, or the last one before it."""
    tokens_per_s: float | None
    """Median over the steps, all ranks together."""
    step_s: float | None
    """Median over the steps."""
    memory_bytes: float | None
    """Memory of the fullest rank at the end: parameters, gradients, optimizer state and activations."""
    tokens: int | None
    """Tokens that were trained on."""
    steps: int
    skipped: int | None
    ranks: int


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """Key of configuration or plan that differs between runs; a value of None where a run has none."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Runs, their figures in the same order, and their differences."""

    runs: tuple[RunRecord, ...]
    figures: tuple[RunFigures, ...]
    differences: tuple[ConfigDifference, ...]
    common_tokens: float | None
    """Largest token count that all runs have reached."""

    def to_json(self) -> dict[str, Any]:
        """Return the object printed by `muster report --json`."""
        runs = [
            {"name": run.name, "directory": str(run.directory), "plan": format_plan_name(run.plan), **asdict(figures)}
            for run, figures in zip(self.runs, self.figures, strict=True)
        ]
        differences = [{"key": one.key, "values": list(one.values)} for one in self.differences]
        return {"version": 1, "common_tokens": _whole(self.common_tokens), "runs": runs, "differences": differences}


def compare_runs(runs: Sequence[RunRecord]) -> RunComparison:
    """Compare at least one run."""
    ends = [last.step for run in runs if (last := next(reversed(loss_by_tokens(run)), None)) is not None]
    common = min(ends) if len(ends) == len(runs) else None
    return RunComparison(tuple(runs), tuple(_figures(run, common) for run in runs), differences(runs), common)


def loss_by_tokens(run: RunRecord) -> list[Point]:
    """Return the training loss by tokens seen instead of steps."""
    tokens = {point.step: point.value for point in metric_points(run.metrics, "train/tokens")}
    return [Point(at, p.value) for p in metric_points(run.metrics, "train/loss") if (at := tokens[p.step]) is not None]


def differences(runs: Sequence[RunRecord]) -> tuple[ConfigDifference, ...]:
    """Return the keys of configuration and plan that differ, in file order."""
    trees = [{**run.config, **_plan_values(run)} for run in runs]
    found = []
    for key in dict.fromkeys(key for tree in trees for key in tree):
        values = tuple(tree.get(key) for tree in trees)
        if any(value != values[0] for value in values):
            found.append(ConfigDifference(key, values))
    return tuple(found)


def _plan_values(run: RunRecord) -> dict[str, Any]:
    """Return a plan by dotted key, without the pinned schedule: it follows from the rest and is nobody's choice."""
    tree = run.plan.model_dump(mode="json", exclude={"pinned_schedule"})
    return dict(flatten(tree, "parallel."))


def _figures(run: RunRecord, common_tokens: float | None) -> RunFigures:
    steps = [point.step for point in metric_points(run.metrics, "train/loss")]
    losses = metric_points(run.metrics, "train/loss")
    return RunFigures(
        loss=next(iter(finite_values(losses[-1:])), None),
        loss_at_common_tokens=None if common_tokens is None else _loss_at(run, common_tokens),
        validation_loss=_validation_loss(run),
        tokens_per_s=_median(run, "perf/tokens_per_s"),
        step_s=_median(run, "time/step"),
        memory_bytes=_memory(run.result),
        tokens=_whole(_last(run, "train/tokens")),
        steps=int(max(steps, default=0)),
        skipped=_whole(_last(run, "train/skipped")),
        ranks=run.plan.world_size,
    )


def _loss_at(run: RunRecord, tokens: float) -> float | None:
    return next((p.value for p in reversed(smooth(loss_by_tokens(run))) if p.step <= tokens), None)


def _validation_loss(run: RunRecord) -> float | None:
    """Return the loss in result.json, or else the last one in the metrics."""
    ended: Mapping[str, Any] = run.result.get("metrics", {})
    return ended["eval/loss"] if "eval/loss" in ended else _last(run, "eval/loss")


def _memory(result: Mapping[str, Any]) -> float | None:
    """Return the most memory that tensors took, else the sum of the measured terms; None where one is unknown."""
    table: Mapping[str, Any] = result.get("comparison", {})
    if (row := table.get("memory: allocated")) is not None:
        return row["measured"]
    parts = [row["measured"] for label, row in table.items() if label.startswith("memory: ")]
    return sum(parts) if parts and all(part is not None for part in parts) else None


def _last(run: RunRecord, key: str) -> float | None:
    values = finite_values(metric_points(run.metrics, key))
    return values[-1] if values else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _median(run: RunRecord, key: str) -> float | None:
    values = finite_values(metric_points(run.metrics, key))
    return median(values) if values else None
