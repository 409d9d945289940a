"""Values of a source that are multiples of a part of a step, which the digits of the values say."""

from muster.simulate.predict import predict
from muster.spec.workload import Workload
from muster.validate.case import RowCase, RowInputs
from muster.validate.sources import sequences_of_round
from muster.validate.table import MeasurementRow

_OUTSIDE_ROUNDS = ("dp", "world")
"""Axes whose communication belongs to the step, not to its rounds: gradients, parameters and the gradient norm."""


def rounds_time_s(row: MeasurementRow, inputs: RowInputs, case: RowCase) -> float | None:
    """Return the predicted value of a row that its source seems to have timed in rounds of fewer sequences: as many
    times as they make up the batch what the passes of one round take, on a pipeline that is empty before and after;
    None for other rows."""
    size = sequences_of_round(row)
    if size is None:
        return None
    workload = Workload(seq_len=inputs.workload.seq_len, global_batch_size=size)
    found = predict(case.model, case.plan, workload, inputs.cluster, framework=case.software)
    parts = found.parts
    beside_s = parts.optimizer_s + sum(parts.communication_s.get(axis, 0.0) for axis in _OUTSIDE_ROUNDS)
    return inputs.workload.global_batch_size / size * (found.step_time_s - beside_s)
