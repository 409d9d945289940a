"""Facts about sources of measurements that their tables lack (`catalog/measurements/sources.yaml`)."""

import re
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from pydantic import ValidationError

from muster.spec.base import Frozen
from muster.spec.plan import Float8Recipe
from muster.validate.table import MeasurementRow

NUMBER_COLUMNS = ("tp", "pp", "vpp", "ep", "dp", "micro_batch", "gpus_per_node")
"""Columns whose facts are numbers."""


TraitValue = bool | int | float | str | list[str] | None
"""Value of a property of the training program."""


class RowFacts(Frozen):
    """Facts of the rows of a source whose cells match patterns."""

    where: dict[str, str]
    """Column → pattern that its whole text matches."""
    facts: dict[str, str] = {}
    software: dict[str, TraitValue] = {}
    corrected: dict[str, str] = {}
    """Columns whose cells are wrong, and what stands there in truth."""
    unusable: str = ""
    """Reason why the source itself says not to take the row as it is; empty where it doesn't."""
    sequences_of_round: int | None = None
    """Sequences of the part of a step of which the values are multiples, as their digits say; the scores don't use it,
    and the ranking of sweeps is shown with and without."""
    offloads_activations: bool = False
    """True where activations of some layers were kept in the host's memory, which no plan with pp 1 says: their memory
    and outcome aren't scored."""

    def match(self, row: MeasurementRow) -> bool:
        """Return True if these are facts of the row."""
        return all(re.fullmatch(pattern, str(getattr(row, column))) for column, pattern in self.where.items())


class MeasurementSource(Frozen):
    """Facts, default choices and framework of one source; the first lines of the file explain each key."""

    match: str = ""
    also: str = ""
    """Pattern that identifies the source in rows of other sources: in `source`, `url_or_repo` or `software`."""
    title: str = ""
    facts: dict[str, str] = {}
    some: tuple[RowFacts, ...] = ()
    """Facts of some of its rows, which go before those of all."""
    usual: dict[str, str] = {}
    framework: str | None = None
    """Framework of `--framework` whose traits `software` changes."""
    software: dict[str, TraitValue] = {}
    formula: str | None = None
    device: dict[str, str] = {}
    """Catalogue device for values of `gpu` that name no memory or form factor."""
    fp8_recipe: Float8Recipe = "tensorwise"
    """Scales of fp8 in rows that name none."""
    tied: bool | None = None
    """True where embedding and head share one weight, False where not; None: as usual for the model's family."""
    stages: dict[str, dict[int, tuple[int, ...]]] = {}
    """Layers of each stage, by placement and size of the vocabulary."""
    deals_ends: bool = False
    """True where embedding, last norm and head count as layers when stages are cut, the first stages taking the
    remainder; False: stages have equal numbers of layers."""
    why: str = ""
    errs: str = ""
    """Reason why predictions of its rows are off, where they are."""
    calibrated: str = ""
    without: dict[str, dict[str, dict[str, Any]]] = {}
    """Device → field → entries as they would be without this source's contribution to the constants."""


@cache
def sources() -> tuple[MeasurementSource, ...]:
    """Return all sources of the catalogue."""
    text = (files("muster.catalog") / "measurements" / "sources.yaml").read_text(encoding="utf-8")
    try:
        return tuple(MeasurementSource.model_validate(entry) for entry in yaml.safe_load(text)["sources"])
    except ValidationError as error:
        raise AssertionError(f"sources.yaml: {error}") from None


@cache
def source_of(name: str) -> MeasurementSource:
    """Return the entry for a row's `source`; where there is none, one that only says how FLOPs are usually counted."""
    return next((source for source in sources() if re.match(source.match, name)), MeasurementSource(formula="model"))


def source_of_row(row: MeasurementRow) -> MeasurementSource:
    """Return the entry for a row: that of its `source`, or else the first whose program or publication it names."""
    return _source_of(row.source, row.url_or_repo, row.software)


@cache
def _source_of(name: str, *words: str) -> MeasurementSource:
    found = source_of(name)
    text = " ".join((name, *words))
    if found.match:
        return found
    named = (source for source in sources() if source.also and re.search(source.also, text, re.IGNORECASE))
    return next(named, found)


def with_facts(row: MeasurementRow) -> MeasurementRow:
    """Return the row with empty columns filled from the source's facts."""
    source = source_of_row(row)
    facts, corrected = dict(source.facts), dict[str, str]()
    for some in source.some:
        if some.match(row):
            facts |= some.facts
            corrected |= some.corrected
    said = {column: text for column, text in facts.items() if getattr(row, column) in ("", None)} | corrected
    return replace(row, **{column: _cell(column, text) for column, text in said.items()})


def _cell(column: str, text: str) -> str | int | None:
    return (int(text) if text else None) if column in NUMBER_COLUMNS else text


def unusable(row: MeasurementRow) -> str:
    """Return the reason why the source itself says not to take the row as it is, or an empty text."""
    return next((some.unusable for some in source_of_row(row).some if some.unusable and some.match(row)), "")


def sequences_of_round(row: MeasurementRow) -> int | None:
    """Return the sequences of the part of a step of which the row's value is a multiple; None where it's the step's."""
    found = (some.sequences_of_round for some in source_of_row(row).some if some.match(row))
    return next((size for size in found if size is not None), None)


def offloads_activations(row: MeasurementRow) -> bool:
    """Return True if the row's run kept activations of some layers in the host's memory."""
    return any(some.offloads_activations and some.match(row) for some in source_of_row(row).some)


def software_of_row(row: MeasurementRow) -> dict[str, TraitValue]:
    """Return the properties of the training program of a row."""
    source = source_of_row(row)
    found = dict(source.software)
    for some in source.some:
        if some.match(row):
            found |= some.software
    return found
