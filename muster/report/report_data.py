"""What a report is made of: plain data, gathered by whoever ran the training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.report.formatting import Unit
from muster.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class PredictedVsMeasured:
    """One quantity, predicted and measured, in the same unit; None where it is not known."""

    label: str
    predicted: float | None
    measured: float | None
    unit: Unit


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What ran, where and when; None leaves a fact out."""

    num_parameters: int | None = None
    num_ranks: int | None = None
    num_tokens: int | None = None
    """Tokens trained on."""
    device: str | None = None
    seed: int | None = None
    started: str | None = None
    finished: str | None = None
    muster_version: str | None = None
    num_epochs: float | None = None
    """How often the training samples were gone through."""


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything that the page of one run shows."""

    title: str
    plan_name: str
    facts: RunInfo
    metrics: Sequence[Mapping[str, Any]]
    """The rows of metrics.jsonl; where a resumed run wrote a step again, the later row counts."""
    predicted: Timeline
    measured: Timeline
    comparison: Sequence[PredictedVsMeasured] = ()
    validation_loss: float | None = None
    sample_prompt: str = ""
    sample_text: str = ""
    notes: Sequence[str] = ()

    @property
    def validation_perplexity(self) -> float | None:
        """exp of the loss, None without one."""
        if self.validation_loss is None:
            return None
        return math.inf if self.validation_loss > 700 else math.exp(self.validation_loss)
