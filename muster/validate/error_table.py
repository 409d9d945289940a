"""Errors on measured configurations as a file, from which predictions take their uncertainty
(`muster.cost.uncertainty`)."""

import json
from collections import defaultdict
from collections.abc import Hashable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from muster.config.file_writer import write_output
from muster.spec.plan import SCALED_PRECISIONS
from muster.validate.comparison import RowResult
from muster.validate.score import configuration_of
from muster.validate.summary import Summary


def error_table(summary: Summary) -> list[dict[str, Any]]:
    """Return the errors of all predicted configurations by source, device, precision and kind of model."""
    found, without = _by_class(summary.results), _by_class(summary.uncalibrated)
    return [
        {
            **dict(zip(("source", "device", "fp8", "experts"), kind, strict=True)),
            "most_devices": max(result.inputs.cluster.num_devices for result in results if result.inputs),
            "errors": _errors(results),
            "uncalibrated": _errors(without.get(kind, results)),
        }
        for kind, results in sorted(found.items(), key=lambda pair: str(pair[0]))
    ]


def _by_class(results: Iterable[RowResult]) -> dict[tuple[Hashable, ...], list[RowResult]]:
    found: dict[tuple[Hashable, ...], list[RowResult]] = defaultdict(list)
    for result in results:
        if result.is_predicted and result.inputs is not None:
            plan, device = result.case.plan, result.inputs.cluster.device
            experts = result.inputs.model.moe is not None
            found[result.row.source, device.name, plan.precision in SCALED_PRECISIONS, experts].append(result)
    return found


def _errors(results: Iterable[RowResult]) -> list[float]:
    """Return the error of each configuration, ascending; releases that measured the same one count once."""
    configurations: dict[object, list[float]] = defaultdict(list)
    for result in results:
        configurations[configuration_of(result.row)].append(result.error)
    return sorted(round(mean(errors), 3) for errors in configurations.values())


def write_error_table(path: Path, summary: Summary) -> None:
    """Write the table as JSON with a line for each class. Raises MusterError where it can't be written."""
    rows = ",\n".join(json.dumps(row) for row in error_table(summary))
    write_output(path, f'{{"version": 1, "errors": [\n{rows}\n]}}\n', "the errors")
