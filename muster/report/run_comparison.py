"""Several runs side by side: their final figures, and what differs in their configurations and plans."""

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
    """What a run came to; None where it is not known."""

    loss: float | None
    """Of the last logged step; None where it was not finite."""
    loss_at_common_tokens: float | None
    """Smoothed, after the most tokens that all the runs have seen."""
    validation_loss: float | None
    """At the end, or the last one before."""
    tokens_per_s: float | None
    """Median over the steps, all ranks."""
    step_s: float | None
    """Median over the steps."""
    memory_bytes: float | None
    """Of the fullest rank: parameters, gradients, optimizer and activations as counted at the end."""
    tokens: int | None
    """Trained on."""
    steps: int
    skipped: int | None
    ranks: int


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """A key of config or plan that not all runs have the same value of; None where a run has none."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Runs, their figures in the same order, and what differs."""

    runs: tuple[RunRecord, ...]
    figures: tuple[RunFigures, ...]
    differences: tuple[ConfigDifference, ...]
    common_tokens: float | None
    """The most tokens that all runs have seen."""

    def to_json(self) -> dict[str, Any]:
        """What `muster report --json` prints."""
        runs = [
            {"name": run.name, "directory": str(run.directory), "plan": format_plan_name(run.plan), **asdict(figures)}
            for run, figures in zip(self.runs, self.figures, strict=True)
        ]
        differences = [{"key": one.key, "values": list(one.values)} for one in self.differences]
        return {"version": 1, "common_tokens": _whole(self.common_tokens), "runs": runs, "differences": differences}


def compare_runs(runs: Sequence[RunRecord]) -> RunComparison:
    """Compares runs, of which there is at least one."""
    ends = [last.step for run in runs if (last := next(reversed(loss_by_tokens(run)), None)) is not None]
    common = min(ends) if len(ends) == len(runs) else None
    return RunComparison(tuple(runs), tuple(_figures(run, common) for run in runs), differences(runs), common)


def loss_by_tokens(run: RunRecord) -> list[Point]:
    """The training loss over the tokens seen, in place of the steps made."""
    tokens = {point.step: point.value for point in metric_points(run.metrics, "train/tokens")}
    return [Point(at, p.value) for p in metric_points(run.metrics, "train/loss") if (at := tokens[p.step]) is not None]


def differences(runs: Sequence[RunRecord]) -> tuple[ConfigDifference, ...]:
    """The keys of configuration and plan in which the runs differ, in the order of the files."""
    trees = [{**run.config, **_plan_values(run)} for run in runs]
    found = []
    for key in dict.fromkeys(key for tree in trees for key in tree):
        values = tuple(tree.get(key) for tree in trees)
        if any(value != values[0] for value in values):
            found.append(ConfigDifference(key, values))
    return tuple(found)


def _plan_values(run: RunRecord) -> dict[str, Any]:
    """A plan by dotted key. What was searched for follows from the rest, and is no choice of anybody's."""
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
    """result.json says that of the end; before it there may be one in the metrics."""
    ended: Mapping[str, Any] = run.result.get("metrics", {})
    return ended["eval/loss"] if "eval/loss" in ended else _last(run, "eval/loss")


def _memory(result: Mapping[str, Any]) -> float | None:
    table: Mapping[str, Any] = result.get("comparison", {})
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
