"""Result of `muster verify`: a plan's training compared with the reference, as numbers and sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from muster.spec.formatting import NOT_AVAILABLE

Phase = Literal["forward", "loss", "backward", "norm", "update", "later"]
"""Part of a step that differs first; `later`: after the first step."""


@dataclass(frozen=True)
class FirstDifference:
    """First place where a plan differs from the reference."""

    phase: Phase
    step: int
    """Number of the step, from 1."""
    where: str
    """Part of the model, or parameter."""
    size: float
    """Difference relative to the reference."""
    factor: float | None = None
    """Common factor of all gradients, where they differ by that alone."""
    copy: str | None = None
    """Copy of the parameter that differs, where the others are right."""


@dataclass(frozen=True)
class ParityResult:
    """Comparison of one plan with the reference. All differences are relative; those of tensors in the Euclidean
    norm."""

    plan: str
    precision: str
    tolerance: float
    losses: Sequence[float] = ()
    reference_losses: Sequence[float] = ()
    grad_norms: Sequence[float] = ()
    reference_grad_norms: Sequence[float] = ()
    hidden: Mapping[str, float] = field(default_factory=dict)
    """Differences of the first forward's outputs, by part of the model in its order."""
    gradients: Mapping[str, float] = field(default_factory=dict)
    """Differences of the first step's gradients before clipping, by parameter; of several copies the worst."""
    updates: Mapping[str, float] = field(default_factory=dict)
    """Differences of the parameters after the first step from the optimizer's update with the plan's own gradients."""
    first: FirstDifference | None = None
    failure: str | None = None
    """Reason why the plan could not be run to the end."""

    @property
    def agrees(self) -> bool:
        """True where nothing differs by more than the tolerance."""
        return self.first is None and self.failure is None

    @property
    def loss_difference(self) -> float | None:
        """Largest difference of a loss over all steps."""
        return _worst(self.losses, self.reference_losses)

    @property
    def norm_difference(self) -> float | None:
        """Difference of the first gradient norm; later ones magnify rounding."""
        return _worst(self.grad_norms[:1], self.reference_grad_norms[:1])

    @property
    def worst_parameter(self) -> tuple[str, float] | None:
        """Parameter whose gradient or update differs most, and its difference."""
        found = [(name, size) for sizes in (self.gradients, self.updates) for name, size in sizes.items()]
        return max(found, key=lambda pair: _sort_key(pair[1]), default=None)


def parity_table(verdicts: Sequence[ParityResult]) -> Table:
    """Return a table with a row for each plan; values beyond the tolerance are bold."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("plan", overflow="fold")
    for name in ("loss", "grad norm"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("worst parameter", overflow="fold")
    table.add_column("")
    for verdict in verdicts:
        limit = verdict.tolerance
        name, size = verdict.worst_parameter or ("", None)
        worst = Text.assemble(_table_cell(size, limit), " ", name)
        end = Text("same") if verdict.agrees else Text("failed" if verdict.failure else "differs", "bold")
        numbers = (_table_cell(verdict.loss_difference, limit), _table_cell(verdict.norm_difference, limit))
        table.add_row(verdict.plan, *numbers, worst, end)
    return table


def parity_sentence(verdict: ParityResult) -> str:
    """Return a sentence on the first place where the plan differs."""
    plan = verdict.plan
    first = verdict.first
    if verdict.failure is not None:
        return f"{plan} could not be run: {verdict.failure}"
    if first is None:
        return f"{plan} trains as one process does (to {verdict.tolerance:.0e})"
    size = f"by {_number(first.size)}"
    where = first.where + (f" ({first.copy})" if first.copy else "")
    if first.phase == "forward":
        return f"{plan} differs in the forward: {first.where} is the first part with another output ({size})"
    if first.phase == "loss":
        return (
            f"{plan} differs in the loss ({size}), though the logits agree:"
            " the selection of labels or the divisor of their sum is wrong"
        )
    if first.phase == "backward":
        factor = f"; all gradients are {first.factor:.4g} times the reference" if first.factor else ""
        return (
            f"{plan} differs in the backward: the forward agrees, and going back from the loss"
            f" {where} is the first with another gradient ({size}){factor}"
        )
    if first.phase == "norm":
        return f"{plan} differs in the gradients' norm ({size}), though all gradients agree"
    if first.phase == "update":
        return f"{plan} differs in the update: gradients agree, but {where} differs after it ({size})"
    return (
        f"{plan} differs in the loss of step {first.step} ({size}), though step 1 agrees:"
        f" {first.where} is the first part that differs"
    )


def parity_json(verdict: ParityResult) -> dict[str, Any]:
    """Return plain data for JSON; a non-finite number becomes null."""
    fields = {name: getattr(verdict, name) for name in verdict.__dataclass_fields__ if name != "first"}
    first = None if verdict.first is None else vars(verdict.first)
    return _json_value({"agrees": verdict.agrees, **fields, "first": first})


def _json_value(value: Any) -> Any:
    """Return the value for JSON, null in place of non-finite numbers."""
    if isinstance(value, Mapping):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _table_cell(size: float | None, limit: float) -> Text:
    if size is None:
        return Text(NOT_AVAILABLE)
    return Text(_number(size), "" if size <= limit else "bold")


def _number(size: float) -> str:
    return f"{size:.1e}" if isfinite(size) else NOT_AVAILABLE


def _worst(ours: Sequence[float], reference: Sequence[float]) -> float | None:
    """Return the largest relative difference of two series."""
    sizes = [relative_difference(a, b) for a, b in zip(ours, reference, strict=True)]
    return max(sizes, key=_sort_key, default=None)


def _sort_key(size: float) -> float:
    """Return the size as a sort key, NaN as the largest."""
    return size if isfinite(size) else inf


def relative_difference(value: float, reference: float) -> float:
    """Return the difference relative to the reference."""
    return 0.0 if value == reference else abs(value - reference) / abs(reference) if reference else inf
