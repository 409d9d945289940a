"""Data of a run's report, gathered by the program that ran the training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.simulate.timeline import Timeline
from muster.spec.formatting import Unit


@dataclass(frozen=True, slots=True)
class PredictedVsMeasured:
    """Predicted and measured value of one quantity, in the same unit; None where unknown."""

    label: str
    predicted: float | None
    measured: float | None
    unit: Unit


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Subject, place and time of a run; None leaves a fact out."""

    num_parameters: int | None = None
    num_ranks: int | None = None
    num_tokens: int | None = None
    """Tokens that were trained on."""
    device: str | None = None
    seed: int | None = None
    started: str | None = None
    finished: str | None = None
    muster_version: str | None = None
    num_epochs: float | None = None
    """Passes over the training samples."""


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything on the page of one run."""

    title: str
    plan_name: str
    facts: RunInfo
    metrics: Sequence[Mapping[str, Any]]
    """Rows of metrics.jsonl. Where a resumed run wrote a step again, the later row counts."""
    predicted: Timeline | None = None
    measured: Timeline | None = None
    """One step of every rank; None before the training has ended."""
    comparison: Sequence[PredictedVsMeasured] = ()
    validation_loss: float | None = None
    sample_prompt: str = ""
    sample_text: str = ""
    notes: Sequence[str] = ()
    meetings: Sequence[Mapping[str, Any]] = ()
    """Rows of islands.jsonl."""
    swarm: Sequence[Mapping[str, Any]] = ()
    """Rows of swarm.jsonl."""
    straggler_checks: Sequence[Mapping[str, Any]] = ()
    """Rows of stragglers.jsonl."""
    status: str = ""
    """State of a run that has not finished."""

    @property
    def validation_perplexity(self) -> float | None:
        """exp of the loss; None without one."""
        if self.validation_loss is None:
            return None
        return math.inf if self.validation_loss > 700 else math.exp(self.validation_loss)
