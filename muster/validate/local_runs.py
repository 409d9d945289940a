"""Errors of predictions of one's own runs on a profiled machine, kept in its file for later predictions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from muster.config.file_writer import write_output
from muster.config.local_machine import catalog_device_name, cluster_text, with_num_ranks
from muster.simulate.predict import predict
from muster.spec.cluster import ClusterSpec
from muster.spec.device import DeviceSpec
from muster.spec.errors import ConfigError, MusterError
from muster.spec.formatting import format_seconds
from muster.spec.units import pluralize
from muster.validate.case import row_inputs
from muster.validate.cluster_from_row import parse_device
from muster.validate.errors import UnpredictableRowError
from muster.validate.formulas import TIME_METRICS, step_time_s
from muster.validate.table import MeasurementRow, read_table

MAX_RATIO = 10
"""Largest ratio of predicted and measured times that counts as an error: beyond it a row has another unit, or is of
another job."""


@dataclass(frozen=True)
class LocalRun:
    """One row of a table of runs: the error of its prediction, or the reason why it has none."""

    row: MeasurementRow
    error: float | None = None
    """(predicted − measured) / measured step time."""
    why: str = ""


def keep_run_errors(table: Path, output: Path, machine: ClusterSpec) -> list[LocalRun]:
    """Predict each run of a table on the machine, and write the errors into its file; those of a former table go.

    Raises ConfigError where the table can't be read or none of its rows can be predicted, MusterError where the file
    can't be written.
    """
    runs = [_local_run(row, machine) for row in read_table(table)]
    errors = tuple(round(run.error, 4) for run in runs if run.error is not None)
    if not errors:
        raise ConfigError(f"{table}: none of the {pluralize(len(runs), 'run')} can be predicted: {runs[0].why}")
    group = machine.groups[0]
    assert group.device.rates is not None
    rates = group.device.rates.model_copy(update={"run_errors": errors})
    device = group.device.model_copy(update={"rates": rates})
    changed = machine.model_copy(update={"groups": (group.model_copy(update={"device": device}),)})
    write_output(output, cluster_text(changed), "the profile")
    return runs


def _local_run(row: MeasurementRow, machine: ClusterSpec) -> LocalRun:
    """Return a row with the error of its prediction on the machine."""
    try:
        if row.problem:
            raise UnpredictableRowError(row.problem)
        if row.metric not in TIME_METRICS:
            raise UnpredictableRowError(f"{row.metric} is no step time and no throughput")
        require_own_run(row, machine.groups[0].device)
        inputs = row_inputs(row)
        case = inputs.cases[0]
        measured_s = step_time_s(row, case.model, inputs.workload, None, 0.0)
        cluster = with_num_ranks(machine, case.plan.world_size)
        ratio = predict(case.model, case.plan, inputs.workload, cluster).step_time_s / measured_s
        if not 1 / MAX_RATIO <= ratio <= MAX_RATIO:
            raise UnpredictableRowError(
                f"a step of {format_seconds(measured_s)} is predicted to take {format_seconds(ratio * measured_s)}:"
                f" expected a run whose time is within a factor of {MAX_RATIO}"
            )
    except (UnpredictableRowError, MusterError) as error:
        return LocalRun(row, why=f"{row.location}: {error}")
    return LocalRun(row, ratio - 1)


def require_own_run(row: MeasurementRow, device: DeviceSpec) -> None:
    """Raise UnpredictableRowError for a run of another program than Muster, or on another device than this one."""
    if row.software and not re.match(r"muster\b", row.software, re.IGNORECASE):
        raise UnpredictableRowError(f"software '{row.software}' isn't Muster, whose predictions are held to runs")
    if device.kind == "cpu":
        is_here = "cpu" in row.gpu.lower()
    else:
        known = catalog_device_name(device.name)
        is_here = row.gpu.lower() == device.name.lower() or (known is not None and parse_device(row.gpu).name == known)
    if not is_here:
        raise UnpredictableRowError(f"gpu '{row.gpu}' isn't {device.name}, on which the machine's profile was measured")


def runs_summary(runs: Sequence[LocalRun]) -> str:
    """Return a line on the errors, and one for each run without."""
    errors = [run.error for run in runs if run.error is not None]
    bias = mean(errors)
    said = f"err by {100 * mean(map(abs, errors)):.0f} % on average, {100 * abs(bias):.0f} % too {_side(bias)}"
    lines = [f"predictions of {pluralize(len(errors), 'run')} on this machine {said}"]
    return "\n".join(lines + [f"left out     {run.why}" for run in runs if run.why])


def _side(bias: float) -> str:
    return "fast" if bias < 0 else "slow"
