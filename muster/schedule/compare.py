"""Schedules beside each other, each made, timed and held to the memory limit."""

from dataclasses import dataclass, replace

from muster.schedule.registry import best_auto_schedule, make_schedule
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.timing import Timing, time_schedule
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.schedules import SCHEDULES, ScheduleEntry, find_schedule

_MAX_COMPARED_PASSES = 70_000
"""Ranks × micro-batches × chunks beyond which no further chunks are tried."""


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """A setting in which chunks and replicas may be left (None) to what each schedule usually has."""

    num_ranks: int
    num_micro_batches: int
    chunks: int | None
    times_s: tuple[float, float, float]
    """Forward, backward for inputs and backward for weights of one rank's whole share."""
    p2p_s: float
    memory_limit: float
    replicas: int | None
    fill: bool

    def spec(self, entry: ScheduleEntry) -> ScheduleSpec:
        """For one schedule. Raises InfeasibleError where the numbers can't hold."""
        return ScheduleSpec.uniform(
            self.num_ranks,
            self.num_micro_batches,
            self.times_s,
            self.chunks or entry.default_chunks,
            p2p_s=self.p2p_s,
            memory_limit=self.memory_limit,
            replicas=self.replicas or entry.default_replicas,
            fill=self.fill,
        )


def time_within_limit(schedule: Schedule, spec: ScheduleSpec) -> tuple[Schedule, Timing]:
    """The schedule with its timing. Raises ProgramError where its order can't be followed, InfeasibleError where it
    keeps more than the memory limit."""
    timing = time_schedule(schedule, spec)
    peak = max(timing.peak_activation)
    if peak > spec.memory_limit * (1 + 1e-9):
        raise InfeasibleError(
            f"{schedule.name} keeps the activations of {peak:g} micro-batches on rank"
            f" {timing.peak_activation.index(peak)}, more than the limit of {spec.memory_limit:g}"
        )
    return schedule, timing


def make_and_time(name: str, spec: ScheduleSpec) -> tuple[Schedule, Timing]:
    """The registered schedule `name` with its timing. Raises ConfigError, InfeasibleError where it refuses."""
    return time_within_limit(make_schedule(name, spec), spec)


def make_with_best_chunks(name: str, request: CompareRequest) -> tuple[Schedule, Timing]:
    """As `make_timed`; where the request leaves the chunks open and the schedule is one that compares several, the
    best of them."""
    entry = find_schedule(name)
    if request.chunks is not None or not entry.compared_chunks or (request.replicas or 1) > 1:
        return make_and_time(name, request.spec(entry))
    size, (fewest, *more) = request.num_ranks * request.num_micro_batches, entry.compared_chunks
    tried = [fewest, *(chunks for chunks in more if size * chunks <= _MAX_COMPARED_PASSES)]
    return best_auto_schedule([replace(request, chunks=chunks).spec(entry) for chunks in tried])


def _sort_key(made: tuple[Schedule, Timing]) -> tuple[float, float]:
    return round(made[1].makespan_s, 9), max(made[1].peak_activation)


def compare_schedules(request: CompareRequest) -> tuple[list[tuple[Schedule, Timing]], list[tuple[str, str]]]:
    """All registered schedules, the shortest first and of equal ones the one with the least memory; then the names of
    those that refuse, with their reasons."""
    made: list[tuple[Schedule, Timing]] = []
    refused: list[tuple[str, str]] = []
    for name, entry in SCHEDULES.items():
        if entry.slow:
            refused.append((name, "it may take a minute; ask for it by its name"))
            continue
        try:
            made.append(make_with_best_chunks(name, request))
        except MusterError as error:
            refused.append((name, str(error)))
    made.sort(key=_sort_key)
    return made, refused
