"""Rows of a table together with their predictions."""

import gc
import signal
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing import get_context
from operator import ge, le
from typing import Literal, get_args

from muster.cost.time.cost_cache import CostCache
from muster.schedule.build import build_program, program_key
from muster.schedule.program import Program
from muster.simulate.predict import predict
from muster.spec.device import DeviceSpec
from muster.spec.errors import MusterError
from muster.spec.gc_pause import gc_paused
from muster.spec.layer_strategy import Recompute
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload
from muster.validate.case import RowCase, RowInputs, row_inputs
from muster.validate.columns import THROUGHPUT
from muster.validate.errors import UnpredictableRowError
from muster.validate.formulas import (
    FLOP_METRICS,
    OTHER_METRICS,
    TIME_METRICS,
    UNTIMED_METRICS,
    causal_flops,
    step_time_s,
)
from muster.validate.rounds import rounds_time_s
from muster.validate.sources import MeasurementSource, source_of_row, unusable, with_facts
from muster.validate.table import MeasurementRow, is_out_of_memory
from muster.validate.term_parsing import parse_precision

NEAR_CAPACITY = 0.05
"""Relative distance from the memory capacity within which the outcome is open: details beyond the plan decide."""
ASSUMED_COLUMNS = ("sp",)
"""Columns whose default choice is certain enough to decide if a run fits."""
MIN_MFU, MAX_MFU = 0.002, 1.0
"""Plausible range of MFU. A measured time outside it has another unit or belongs to another job."""

_RECOMPUTES = get_args(Recompute)
"""Kinds of recompute, from the least to the most."""


@dataclass(frozen=True)
class CasePrediction:
    """Prediction of one case."""

    step_time_s: float
    capacity_bytes: float | None
    forecast: Callable[[], tuple[float, bool | None]]
    """Return the peak memory of the fullest rank in bytes, and if all ranks fit. It takes as long as the time's
    prediction, and most cases' memory interests nobody."""

    @cached_property
    def _memory(self) -> tuple[float, bool | None]:
        return self.forecast()

    @property
    def peak_bytes(self) -> float:
        """Peak memory of the fullest rank."""
        return self._memory[0]

    @property
    def fits(self) -> bool | None:
        """True if every rank fits; None if the capacity is unknown."""
        return self._memory[1]

    def settled(self, is_needed: bool = True) -> "CasePrediction":
        """Return the same prediction without what its forecast needs, such as a Program; without its memory where that
        isn't needed."""
        return replace(self, forecast=partial(tuple, self._memory if is_needed else (0.0, None)))


Predictor = Callable[[RowInputs, RowCase], CasePrediction]
"""Function that predicts a case."""


@dataclass(frozen=True)
class RowPrediction:
    """Predictions of a row's cases."""

    chosen: int
    """Index of the case that represents the row."""
    of_chosen: CasePrediction
    interval_s: tuple[float, float]
    """Shortest and longest predicted step time over the choices that the row leaves open."""
    is_fit_open: bool
    """True where the open choices decide if the run fits the memory."""


@dataclass(frozen=True)
class RowResult:
    """A row with its inputs and predictions, as far as it could be read."""

    row: MeasurementRow
    reason: str = ""
    """Reason why the row isn't predicted or scored; empty where it is."""
    inputs: RowInputs | None = None
    measured_s: float | None = None
    """Measured step time; None for outcomes and memory."""
    predicted: RowPrediction | None = None
    rounds_s: float | None = None
    """Predicted value as a multiple of a part of a step, where the source seems to have measured that."""

    @property
    def is_timed(self) -> bool:
        """True for a step time, a throughput, or FLOP/s that a shipped formula turns into a time."""
        metric = self.row.metric
        if metric in FLOP_METRICS:
            return source_of_row(self.row).formula is not None
        return metric in TIME_METRICS or metric not in (*OTHER_METRICS, *UNTIMED_METRICS)

    @property
    def case(self) -> RowCase:
        """Case that represents the row."""
        assert self.inputs is not None
        assert self.predicted is not None
        return self.inputs.cases[self.predicted.chosen]

    @property
    def prediction(self) -> CasePrediction | None:
        """Prediction of the representative case."""
        return self.predicted and self.predicted.of_chosen

    @property
    def is_predicted(self) -> bool:
        """True where both a measured and a predicted step time exist."""
        return self.is_timed and self.measured_s is not None and self.predicted is not None

    @property
    def predicted_s(self) -> float:
        """Predicted step time of the representative case."""
        assert self.predicted is not None
        return self.predicted.of_chosen.step_time_s

    @property
    def error(self) -> float:
        """(predicted − measured) / measured step time."""
        assert self.measured_s is not None
        return self.predicted_s / self.measured_s - 1

    @property
    def measured_memory_gib(self) -> float | None:
        """Measured peak memory in GiB; None where the row doesn't state it."""
        return self.row.peak_mem_gb or (self.row.value if self.row.metric == "peak_memory_gb" else None)

    @property
    def interval_s(self) -> tuple[float, float]:
        """Shortest and longest predicted step time over the choices that the row leaves open."""
        assert self.predicted is not None
        return self.predicted.interval_s

    @property
    def is_fully_specified(self) -> bool:
        """True where the row leaves no choice open."""
        return self.inputs is not None and not self.inputs.unstated

    @property
    def succeeded(self) -> bool | None:
        """True if the run worked (a row with a time or a peak of memory did), False if it failed, None if unknown."""
        if self.row.metric == "outcome":
            return None if self.row.problem else not is_out_of_memory(self.row.outcome)
        is_of_run = self.is_timed or self.row.metric == "peak_memory_gb"
        return True if is_of_run and self.row.value is not None else None


def predict_rows(
    rows: Iterable[MeasurementRow],
    predictor: Predictor | None = None,
    uncalibrated: bool = False,
    processes: int = 1,
    on_row: Callable[[], None] | None = None,
) -> list[RowResult]:
    """Predict each row; identical rows are read once, identical configurations predicted once by each process.

    With `uncalibrated`, constants are used as they were before the row's own source contributed to them. `processes`
    above 1 are forked. `on_row` is called for each row once it is predicted.
    """
    return _predict(list(rows), predictor, ("without",) if uncalibrated else ("stated",), processes, on_row)[0]


def predict_rows_both_ways(
    rows: Iterable[MeasurementRow],
    predictor: Predictor | None = None,
    processes: int = 1,
    on_row: Callable[[], None] | None = None,
) -> tuple[list[RowResult], list[RowResult]]:
    """Predict each row, and those whose source contributed to constants also without its contribution, which shares the
    row's Programs."""
    stated, without = _predict(list(rows), predictor, ("stated", "without"), processes, on_row)
    return stated, [result for result in without if source_of_row(result.row).without]


_Way = Literal["stated", "without"]
"""Constants of a prediction: as the catalogue states them, or without the contribution of the row's source."""


def _predict(
    rows: Sequence[MeasurementRow],
    predictor: Predictor | None,
    ways: tuple[_Way, ...],
    processes: int,
    on_row: Callable[[], None] | None,
) -> list[list[RowResult]]:
    """Return the results of all rows for each of the ways."""
    alike = [replace(row, line=0, number=0) for row in rows]
    count = Counter(alike)
    found: dict[MeasurementRow, list[RowResult]] = {}
    for results in _distinct_results(list(count), predictor, ways, processes):
        found[results[0].row] = results
        for _ in range(count[results[0].row] if on_row else 0):
            on_row()  # type: ignore[misc]
    return [
        [replace(found[key][way], row=row) for key, row in zip(alike, rows, strict=True)] for way in range(len(ways))
    ]


def _distinct_results(
    rows: Sequence[MeasurementRow], predictor: Predictor | None, ways: tuple[_Way, ...], processes: int
) -> Iterator[list[RowResult]]:
    """Yield the results of distinct rows."""
    if processes < 2 or predictor is not None or len(rows) <= _CHUNK:
        cache: dict[str, RowPrediction | str] = {}
        with gc_paused():  # which would walk over the Programs that are kept, again and again
            yield from (_results(row, predictor or predict_case, cache, ways) for row in rows)
        return
    chunks = [rows[begin : begin + _CHUNK] for begin in range(0, len(rows), _CHUNK)]
    with get_context("fork").Pool(min(processes, len(chunks)), _begin_process) as pool:
        for results in pool.imap_unordered(partial(_chunk_results, ways), chunks):
            yield from results


_CHUNK = 8
"""Rows that one process predicts at a time: neighbours, which often share their model and cluster."""
_cache_of_process: dict[str, RowPrediction | str] = {}


def _begin_process() -> None:
    """Prepare a forked process: it makes no cycles that a collector had to find, and leaves Ctrl-C to the parent, which
    ends it."""
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _chunk_results(ways: tuple[_Way, ...], rows: Sequence[MeasurementRow]) -> list[list[RowResult]]:
    return [_results(row, predict_case, _cache_of_process, ways) for row in rows]


def _results(
    row: MeasurementRow, predictor: Predictor, cache: dict[str, RowPrediction | str], ways: tuple[_Way, ...]
) -> list[RowResult]:
    """Predict one row in each way that says something new: without a contribution only where there was one."""
    wanted: tuple[_Way, ...] = ways if source_of_row(row).without else ("stated",)
    found = [_result(row, predictor, cache, way == "without") for way in wanted]
    return found * len(ways) if len(found) < len(ways) else found


def _result(
    row: MeasurementRow, predictor: Predictor, cache: dict[str, RowPrediction | str], left_out: bool
) -> RowResult:
    """Predict one row; `cache` keeps predictions of equal configurations."""
    try:
        if row.problem:
            raise UnpredictableRowError(row.problem)
        if why := unusable(row):
            raise UnpredictableRowError(why)
        if row.metric in OTHER_METRICS:
            raise UnpredictableRowError(f"{row.metric} is of a part of a step: not scored")
        if row.metric == THROUGHPUT:
            raise UnpredictableRowError("throughput has no unit: expected one in the header or cell, such as tok/s/GPU")
        if row.metric not in (*TIME_METRICS, *FLOP_METRICS, *UNTIMED_METRICS):
            raise UnpredictableRowError(
                f"metric '{row.metric}' is none of {', '.join((*TIME_METRICS, *FLOP_METRICS, 'outcome'))}"
            )
        inputs = row_inputs(row)
        if left_out:
            inputs = _uncalibrated(inputs, source_of_row(row))
        measured_s = _measured_s(row, inputs) if row.metric in (*TIME_METRICS, *FLOP_METRICS) else None
        found = _predict_once(inputs, predictor, cache, not left_out)
    except UnpredictableRowError as error:
        return RowResult(row, reason=str(error))
    rounds_s = None if measured_s is None or left_out else rounds_time_s(row, inputs, inputs.cases[found.chosen])
    return RowResult(row, "", inputs, measured_s, found, rounds_s)


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
    inputs: RowInputs, predictor: Predictor, cache: dict[str, RowPrediction | str], with_memory: bool
) -> RowPrediction:
    """Return the predictions of a row's cases, from `cache` where they were made before. Raises
    UnpredictableRowError."""
    cases = [(case.model, case.plan, case.software) for case in inputs.cases]
    key = repr((inputs.cluster.name, inputs.cluster.groups, inputs.workload, cases))
    if key not in cache:
        try:
            cache[key] = _predict_cases(inputs, predictor, with_memory)
        except MusterError as error:
            cache[key] = str(error)
    answer = cache[key]
    if isinstance(answer, str):
        raise UnpredictableRowError(answer)
    return answer


def _predict_cases(inputs: RowInputs, predictor: Predictor, with_memory: bool) -> RowPrediction:
    """Predict those of a row's cases that its results need; whether they fit, only `with_memory`."""
    answers: dict[int, CasePrediction] = {}

    def answer(index: int) -> CasePrediction:
        if index not in answers:
            answers[index] = predictor(inputs, inputs.cases[index])
        return answers[index]

    chosen = _representative_case(inputs, answer)
    times_s = [answer(index).step_time_s for index in {chosen, *_time_extremes(inputs.cases)}]
    if not with_memory:
        return RowPrediction(chosen, answer(chosen).settled(False), (min(times_s), max(times_s)), False)
    fits = {answer(chosen).fits}
    if any(column not in ASSUMED_COLUMNS for column in inputs.unstated):
        fits |= {answer(index).fits for index in _memory_extremes(inputs.cases)}
    return RowPrediction(chosen, answer(chosen).settled(), (min(times_s), max(times_s)), len(fits) > 1)


def _time_extremes(cases: Sequence[RowCase]) -> set[int]:
    """Return the indices of cases among which the fastest and the slowest are.

    More recompute, another attention kernel than the fastest, or a larger vocabulary is never faster, all else equal.
    """
    alike: dict[tuple[object, ...], dict[tuple[int, bool, int], int]] = defaultdict(dict)
    for index, case in enumerate(cases):
        chosen = {column: value for column, value in case.chosen if column not in ("recompute", "attn_kernel", "vocab")}
        recompute = _RECOMPUTES.index(case.plan.default_strategy.recompute)
        work = recompute, case.software.attention is not None, case.model.vocab_size
        alike[tuple(chosen.items())][work] = index
    found: set[int] = set()
    for indices in alike.values():
        for work, index in indices.items():
            is_less = [other != work and all(map(le, other, work)) for other in indices]
            is_more = [other != work and all(map(ge, other, work)) for other in indices]
            if not any(is_less) or not any(is_more):
                found.add(index)
    return found


def _memory_extremes(cases: Sequence[RowCase]) -> tuple[int, int]:
    """Return the indices of the cases that take the least and the most memory: with and without recompute and sequence
    parallelism, with short and long micro-batches, few and many chunks, kernels that write the scores or don't."""

    def size(index: int) -> tuple[float, ...]:
        plan, strategy = cases[index].plan, cases[index].plan.default_strategy
        widths = plan.micro_batch_size, strategy.attention == "unfused", not strategy.sp, plan.vpp
        return -_RECOMPUTES.index(strategy.recompute), *widths, cases[index].model.vocab_size

    order = sorted(range(len(cases)), key=size)
    return order[0], order[-1]


def _representative_case(inputs: RowInputs, answer: Callable[[int], CasePrediction]) -> int:
    """Return the index of the representative case: with default choices, the least recompute that fits the memory."""
    usual = _without_recompute(inputs.cases[0])
    candidates = [index for index, case in enumerate(inputs.cases) if _without_recompute(case) == usual]
    return next((index for index in candidates[:-1] if _may_fit(answer(index))), candidates[-1])


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
    peak = device.flops_per_s(parse_precision(row.precision) or "bf16") or max(peaks.values())
    mfu = causal_flops(inputs.model, inputs.workload) / (found_s * peak * inputs.cluster.num_devices)
    if not MIN_MFU <= mfu <= MAX_MFU:
        raise UnpredictableRowError(
            f"{row.metric} {row.value:g} would be {100 * mfu:.3g} % of the devices' peak: expected seconds, tokens or"
            " samples per second, or 10¹² FLOP/s"
        )
    return found_s


_COSTS = CostCache()
"""Costs that the cases of a row share."""


_MOST_KEPT_PASSES = 100_000
"""Most passes of Programs that are kept, about 60 MB: rows of one table often share theirs."""
_programs: OrderedDict[Hashable, Program] = OrderedDict()
"""Programs by `program_key`, the one used last at the end."""


def _program(plan: Plan, model: ModelSpec, workload: Workload) -> Program:
    """Return a plan's program, from those kept where it was built before."""
    key = program_key(plan, model, workload)
    if key not in _programs:
        _programs[key] = build_program(plan, model, workload)
        while len(_programs) > 1 and sum(map(_num_passes, _programs.values())) > _MOST_KEPT_PASSES:
            _programs.popitem(last=False)
    _programs.move_to_end(key)
    return _programs[key]


def _num_passes(program: Program) -> int:
    return sum(len(lanes.get("compute", ())) for lanes in program.ranks)


def predict_case(inputs: RowInputs, case: RowCase) -> CasePrediction:
    """Predict a case as `muster predict` does."""
    program = _program(case.plan, case.model, inputs.workload)
    own = case.model, case.plan, inputs.workload, inputs.cluster
    found = predict(*own, program, framework=case.software, cache=_COSTS)

    def memory() -> tuple[float, bool | None]:
        return max((rank.total for rank in found.memory), default=0), found.fits

    return CasePrediction(found.step_time_s, inputs.cluster.device.memory_bytes, memory)
