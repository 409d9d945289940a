"""Metrics of a run: metrics.jsonl, one object per logged step."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.spec.errors import MusterError
from muster.train.device_metrics import DeviceMemory
from muster.train.step_result import StepResult


def metrics_row(
    result: StepResult, tokens_seen: int, epoch: float, mfu: float | None, memory: DeviceMemory | None
) -> dict[str, Any]:
    """Return one line of metrics.jsonl. Times are seconds; a number that is not finite becomes null.

    `memory`: rank 0's, where its device counts it.
    """
    row = {
        "step": result.step,
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/lr": result.learning_rate,
        "train/tokens": tokens_seen,
        "train/epoch": epoch,
        "train/skipped": result.total_skips,
        "perf/tokens_per_s": result.num_tokens / result.time_s,
        "perf/mfu": mfu,
        "time/step": result.time_s,
        "time/data": result.data_s,
    }
    if memory is not None:
        row["memory/allocated_bytes"] = memory.allocated_bytes
        if memory.reserved_bytes is not None:
            row["memory/reserved_bytes"] = memory.reserved_bytes
    if result.z_loss:
        row["train/z_loss"] = result.z_loss
    if result.load_balancing_loss:
        row["train/load_balancing_loss"] = result.load_balancing_loss
    if result.router_z_loss:
        row["train/router_z_loss"] = result.router_z_loss
    if result.mtp_loss:
        row["train/mtp_loss"] = result.mtp_loss
    for load in result.expert_load:
        row[f"experts/max_over_mean/{load.layer}"] = load.max_over_mean
        row[f"experts/entropy/{load.layer}"] = load.entropy
        if load.dropped:
            row[f"experts/dropped/{load.layer}"] = load.dropped
    if (moves := result.expert_moves) is not None:
        row["experts/moved"] = moves.num_experts
        row["experts/moved_bytes"] = moves.num_bytes
        row["experts/moved_s"] = moves.time_s
        if moves.predicted_s is not None:
            row["experts/moved_predicted_s"] = moves.predicted_s
        row["experts/ranks_max_over_mean"] = moves.max_over_mean_before
        row["experts/ranks_max_over_mean_moved"] = moves.max_over_mean_after
    if result.skip_reason:
        row["skipped"] = result.skip_reason
    return null_non_finite(row)


def null_non_finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with null for each number that is not finite, since JSON has no other word for it."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


class MetricsLog:
    """Appends rows to a file, line by line, so that a killed run loses at most the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []
        """Lines that could not be written yet."""

    def truncate_after(self, step: int) -> None:
        """Drop the rows of steps that a resumed run repeats, and a last line that was cut short by a kill.

        They are the end of the file, which is cut off: that goes on a full disk, too.
        """
        self._waiting = [line for line in self._waiting if json.loads(line)["step"] <= step]
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        kept = b"".join(line + b"\n" for line in content.splitlines() if _step_of(line) <= step)
        try:
            if content.startswith(kept):
                os.truncate(self.path, len(kept))
            else:  # a line in between is damaged, or the last lacks its end
                beside = self.path.with_suffix(".tmp")
                beside.write_bytes(kept)
                beside.replace(self.path)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def append(self, row: dict[str, Any]) -> str | None:
        """Append a row. One that can't be written waits for the next; the first time, a sentence is returned."""
        first = not self._waiting
        self._waiting.append(json.dumps(row) + "\n")
        try:
            self._write()
        except OSError as error:
            return f"can't write {self.path} ({error.strerror}); training continues" if first else None
        return None

    def flush(self) -> None:
        """Write the waiting lines. Raises MusterError where that can't be done."""
        try:
            self._write()
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def _write(self) -> None:
        """Write all waiting lines, or none of them."""
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.write("".join(self._waiting))
        except OSError:
            if self.path.is_file():
                os.truncate(self.path, size)
            raise
        self._waiting = []


def _step_of(line: bytes) -> float:
    """Return the step of a row; infinity for a line that is none."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def write_text(path: Path, text: str, mode: str = "w") -> None:
    """Write a file or, with mode `a`, append to it. Raises MusterError where that can't be done."""
    try:
        with path.open(mode) as file:
            file.write(text)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> MusterError:
    return MusterError(
        f"can't write {path} ({error.strerror}); when that is fixed, the same command resumes from the last checkpoint"
    )
