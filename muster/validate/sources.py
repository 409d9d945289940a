"""What is known of a source of measurements beside its table (`catalog/measurements/sources.yaml`)."""

import re
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from pydantic import ValidationError

from muster.spec.base import Frozen
from muster.validate.table import MeasurementRow

NUMBER_COLUMNS = ("vpp", "micro_batch", "gpus_per_node")


class MeasurementSource(Frozen):
    """Facts, usual choices and the software of one source; the file's first lines say what each key means."""

    match: str = ""
    also: str = ""
    """Words that tell it in a row of another source: in `source`, `url_or_repo` or `software`."""
    title: str = ""
    facts: dict[str, str] = {}
    usual: dict[str, str] = {}
    software: dict[str, bool | int | str] = {}
    formula: str | None = None
    device: dict[str, str] = {}
    """What `gpu` means, where it names no memory or form."""
    tied: bool | None = None
    """Whether embedding and head are one weight, where that isn't the family's habit."""
    stages: dict[str, dict[int, tuple[int, ...]]] = {}
    """Layers of each stage, by how the vocabulary lies and how large it is."""
    deals_ends: bool = False
    """Whether embedding, last norm and head are dealt to the stages as layers are, the first stages taking what is
    over; else stages have as many layers each."""
    why: str = ""
    errs: str = ""
    """Why predictions of its rows are off, where they are."""
    calibrated: str = ""
    without: dict[str, dict[str, dict[str, Any]]] = {}
    """Device → field → entries, as they would stand if nothing had been set with this source's help."""


@cache
def sources() -> tuple[MeasurementSource, ...]:
    """All that the catalogue knows."""
    text = (files("muster.catalog") / "measurements" / "sources.yaml").read_text(encoding="utf-8")
    try:
        return tuple(MeasurementSource.model_validate(entry) for entry in yaml.safe_load(text)["sources"])
    except ValidationError as error:
        raise AssertionError(f"sources.yaml: {error}") from None


@cache
def source_of(name: str) -> MeasurementSource:
    """The entry that serves a row's `source`; an empty one where there is none."""
    return next((source for source in sources() if re.match(source.match, name)), MeasurementSource())


def source_of_row(row: MeasurementRow) -> MeasurementSource:
    """The entry that serves a row: that of its `source`, else the first whose program or publication it names."""
    return _source_of(row.source, row.url_or_repo, row.software)


@cache
def _source_of(name: str, *words: str) -> MeasurementSource:
    found, text = source_of(name), " ".join((name, *words))
    if found.match:
        return found
    named = (source for source in sources() if source.also and re.search(source.also, text, re.IGNORECASE))
    return next(named, found)


def with_facts(row: MeasurementRow) -> MeasurementRow:
    """The row with the columns filled that its source states elsewhere."""
    source = source_of_row(row)
    empty = {column: text for column, text in source.facts.items() if getattr(row, column) in ("", None)}
    return replace(row, **{column: int(text) if column in NUMBER_COLUMNS else text for column, text in empty.items()})
