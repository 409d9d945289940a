"""Rows of a table together with their predictions."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from muster.schedule.build import build_program
from muster.schedule.program import Program
from muster.simulate.predict import predict
from muster.spec.device import DeviceSpec
from muster.spec.errors import MusterError
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload
from muster.validate.case import RowCase, RowInputs, row_inputs
from muster.validate.errors import UnpredictableRowError
from muster.validate.formulas import FLOP_METRICS, OTHER_METRICS, TIME_METRICS, UNTIMED_METRICS, step_time_s
from muster.validate.sources import MeasurementSource, source_of_row, with_facts
from muster.validate.table import OUT_OF_MEMORY, MeasurementRow

NEAR_CAPACITY = 0.05
"""Relative distance from the memory capacity within which the outcome is open: details beyond the plan decide."""
MIN_MFU, MAX_MFU = 0.002, 1.0
"""Plausible range of MFU. A measured time outside it has another unit or belongs to another job."""


@dataclass(frozen=True)
class CasePrediction:
    """Prediction of one case."""

    step_time_s: float
    peak_bytes: float
    """Peak memory of the fullest rank."""
    capacity_bytes: float | None
    fits: bool | None


Predictor = Callable[[RowInputs, RowCase], CasePrediction]
"""Function that predicts a case."""


@dataclass(frozen=True)
class RowResult:
    """A row with its inputs and predictions, as far as it could be read."""

    row: MeasurementRow
    reason: str = ""
    """Reason why the row isn't predicted or scored; empty where it is."""
    inputs: RowInputs | None = None
    measured_s: float | None = None
    """Measured step time; None for outcomes and memory."""
    predictions: tuple[CasePrediction, ...] = ()
    """Predictions, one for each case."""
    chosen: int = 0
    """Index of the case that represents the row."""

    @property
    def is_timed(self) -> bool:
        """True for a step time, a throughput, or FLOP/s that a shipped formula turns into a time."""
        metric = self.row.metric
        if metric in FLOP_METRICS:
            return source_of_row(self.row).formula is not None
        return metric in TIME_METRICS or metric not in (*OTHER_METRICS, *UNTIMED_METRICS)

    @property
    def prediction(self) -> CasePrediction | None:
        """Prediction of the representative case."""
        return self.predictions[self.chosen] if self.predictions else None

    @property
    def is_predicted(self) -> bool:
        """True where both a measured and a predicted step time exist."""
        return self.is_timed and self.measured_s is not None and bool(self.predictions)

    @property
    def predicted_s(self) -> float:
        """Predicted step time of the representative case."""
        assert self.predictions
        return self.predictions[self.chosen].step_time_s

    @property
    def error(self) -> float:
        """(predicted − measured) / measured step time."""
        assert self.measured_s is not None
        return self.predicted_s / self.measured_s - 1

    @property
    def interval_s(self) -> tuple[float, float]:
        """Shortest and longest predicted step time over the choices that the row leaves open."""
        times = [answer.step_time_s for answer in self.predictions]
        return min(times), max(times)

    @property
    def is_fully_specified(self) -> bool:
        """True where the row leaves no choice open."""
        return self.inputs is not None and not self.inputs.unstated

    @property
    def succeeded(self) -> bool | None:
        """True if the run worked (a row with a time did), False if it failed, None if unknown."""
        if self.row.metric == "outcome":
            return None if self.row.problem else not OUT_OF_MEMORY.search(self.row.outcome)
        return True if self.is_timed and self.row.value is not None else None


def predict_rows(
    rows: Iterable[MeasurementRow], predictor: Predictor | None = None, uncalibrated: bool = False
) -> list[RowResult]:
    """Predict each row; identical rows are read once, identical configurations predicted once.

    With `uncalibrated`, constants are used as they were before the row's own source contributed to them.
    """
    predictor = predictor or predict_case
    cache: dict[str, CasePrediction | str] = {}
    seen: dict[MeasurementRow, RowResult] = {}
    results = []
    for row in rows:
        alike = replace(row, line=0, number=0)
        if alike not in seen:
            seen[alike] = _result(row, predictor, cache, uncalibrated)
        results.append(replace(seen[alike], row=row))
    return results


def _result(
    row: MeasurementRow, predictor: Predictor, cache: dict[str, CasePrediction | str], left_out: bool
) -> RowResult:
    """Predict one row; `cache` keeps predictions of equal cases."""
    try:
        if row.problem:
            raise UnpredictableRowError(row.problem)
        if row.metric in OTHER_METRICS:
            raise UnpredictableRowError(f"{row.metric} is of a part of a step: not scored")
        if row.metric not in (*TIME_METRICS, *FLOP_METRICS, *UNTIMED_METRICS):
            raise UnpredictableRowError(
                f"metric '{row.metric}' is none of {', '.join((*TIME_METRICS, *FLOP_METRICS, 'outcome'))}"
            )
        inputs = row_inputs(row)
        if left_out:
            inputs = _uncalibrated(inputs, source_of_row(row))
        measured_s = _measured_s(row, inputs) if row.metric in (*TIME_METRICS, *FLOP_METRICS) else None
        answers = tuple(_predict_once(inputs, case, predictor, cache) for case in inputs.cases)
    except UnpredictableRowError as error:
        return RowResult(row, reason=str(error))
    return RowResult(row, "", inputs, measured_s, answers, _representative_case(inputs, answers))


def _uncalibrated(inputs: RowInputs, source: MeasurementSource) -> RowInputs:
    """Return the inputs with the devices' constants as they would be without the source's contribution."""
    groups = []
    for group in inputs.cluster.groups:
        fields = source.without.get(group.device.name, {})
        device = group.device.model_dump()
        changed = {field: device[field] | entries for field, entries in fields.items()}
        groups.append(group.model_copy(update={"device": DeviceSpec.model_validate(device | changed)}))
    return replace(inputs, cluster=inputs.cluster.model_copy(update={"groups": tuple(groups)}))


def _predict_once(
    inputs: RowInputs, case: RowCase, predictor: Predictor, cache: dict[str, CasePrediction | str]
) -> CasePrediction:
    """Return the prediction of a case, from `cache` where it was predicted before. Raises UnpredictableRowError."""
    key = repr((case.model, inputs.cluster.name, inputs.cluster.groups, inputs.workload, case.plan, case.software))
    if key not in cache:
        try:
            cache[key] = predictor(inputs, case)
        except MusterError as error:
            cache[key] = str(error)
    answer = cache[key]
    if isinstance(answer, str):
        raise UnpredictableRowError(answer)
    return answer


def _representative_case(inputs: RowInputs, answers: tuple[CasePrediction, ...]) -> int:
    """Return the index of the representative case: with default choices, the least recompute that fits the memory."""
    usual = _without_recompute(inputs.cases[0])
    candidates = [index for index, case in enumerate(inputs.cases) if _without_recompute(case) == usual]
    return next((index for index in candidates if _may_fit(answers[index])), candidates[-1])


def _may_fit(answer: CasePrediction) -> bool:
    """Tell if a case fits, or is too close to the capacity to rule it out."""
    if answer.fits is not False or answer.capacity_bytes is None:
        return answer.fits is not False
    return answer.peak_bytes <= (1 + NEAR_CAPACITY) * answer.capacity_bytes


def _without_recompute(case: RowCase) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in case.chosen if pair[0] != "recompute")


def _measured_s(row: MeasurementRow, inputs: RowInputs) -> float:
    """Return the measured step time. Raises UnpredictableRowError where it is implausible for this model and these
    devices."""
    device = inputs.cluster.device
    peaks = device.peak_flops_per_s
    mfu_peak = device.flops_per_s("bf16") or 0.0
    if row.metric == "MFU_pct" and not mfu_peak:
        raise UnpredictableRowError(f"the peak of {device.name} is unknown, of which {row.metric} is a part")
    found_s = step_time_s(with_facts(row), inputs.model, inputs.workload, source_of_row(row).formula, mfu_peak)
    if not peaks:
        return found_s
    mfu = minimum_flops(inputs.model, inputs.workload) / (found_s * max(peaks.values()) * inputs.cluster.num_devices)
    if not MIN_MFU <= mfu <= MAX_MFU:
        raise UnpredictableRowError(
            f"{row.metric} {row.value:g} would be {100 * mfu:.3g} % of the devices' peak: expected seconds, tokens or"
            " samples per second, or 10¹² FLOP/s"
        )
    return found_s


def minimum_flops(model: ModelSpec, workload: Workload) -> float:
    """Return the FLOPs of a step that no implementation can avoid: 6 per parameter that takes part in a token."""
    return 6.0 * (model.num_active_parameters - model.vocab_size * model.hidden_size) * workload.tokens_per_step


@lru_cache(maxsize=4)
def _program(plan: Plan, model: ModelSpec, workload: Workload) -> Program:
    """Return a plan's program; neighbouring cases share it."""
    return build_program(plan, model, workload)


def predict_case(inputs: RowInputs, case: RowCase) -> CasePrediction:
    """Predict a case as `muster predict` does."""
    # The order of work is the same whatever is recomputed, and however attention is computed.
    strategy = case.plan.default_strategy.model_copy(update={"recompute": "none", "attention": "flash"})
    program = _program(
        case.plan.model_copy(update={"default_strategy": strategy}),  # type: ignore[arg-type]
        case.model,  # type: ignore[arg-type]
        inputs.workload,  # type: ignore[arg-type]
    )
    found = predict(case.model, case.plan, inputs.workload, inputs.cluster, program, framework=case.software)
    peak_bytes = max((rank.total for rank in found.memory), default=0)
    return CasePrediction(found.step_time_s, peak_bytes, inputs.cluster.device.memory_bytes, found.fits)
