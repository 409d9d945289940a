"""Comparison of schedules, each made, timed and held to the memory limit."""

from dataclasses import dataclass, replace

from muster.schedule.registry import best_auto_schedule, make_schedule, require_runs
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import PathLimits, ScheduleSpec
from muster.schedule.timing import Timing, time_schedule
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.schedules import SCHEDULES, ScheduleEntry, find_schedule


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """Inputs of a comparison; chunks and replicas may be None, for the default of each schedule."""

    num_ranks: int
    num_micro_batches: int
    chunks: int | None
    times_s: tuple[float, float, float]
    """Seconds of forward, backward for inputs and backward for weights of one rank's whole share."""
    p2p_s: float
    memory_limit: float
    replicas: int | None
    fill: bool
    num_slices: int = 1
    pair_share: float | None = None
    num_steps: int = 1
    skip_ratio: float = 0.0

    def spec(self, entry: ScheduleEntry) -> ScheduleSpec:
        """Return the spec for one schedule. Raises InfeasibleError for impossible numbers."""
        return ScheduleSpec.uniform(
            self.num_ranks,
            self.num_micro_batches,
            self.times_s,
            self.chunks or entry.default_chunks,
            p2p_s=self.p2p_s,
            memory_limit=self.memory_limit,
            replicas=self.replicas or entry.default_replicas,
            fill=self.fill,
            num_slices=self.num_slices,
            pair_share=self.pair_share,
            num_steps=self.num_steps,
            paths=PathLimits(self.skip_ratio),
        )


def time_within_limit(schedule: Schedule, spec: ScheduleSpec) -> tuple[Schedule, Timing]:
    """Return the schedule with its timing. Raises ProgramError if no rank could follow it, InfeasibleError above the
    memory limit."""
    timing = time_schedule(schedule, spec)
    peak = max(timing.peak_activation)
    if peak > spec.memory_limit * (1 + 1e-9):
        raise InfeasibleError(
            f"{schedule.name} keeps the activations of {peak:g} micro-batches on rank"
            f" {timing.peak_activation.index(peak)}, more than the limit of {spec.memory_limit:g}"
        )
    return schedule, timing


def make_and_time(name: str, spec: ScheduleSpec) -> tuple[Schedule, Timing]:
    """Return the registered schedule `name` with its timing. Raises ConfigError, InfeasibleError if it refuses."""
    return time_within_limit(make_schedule(name, spec), spec)


def make_with_best_chunks(name: str, request: CompareRequest) -> tuple[Schedule, Timing]:
    """Return the schedule `name` with its timing, at its best number of chunks if the request leaves them open. Raises
    as `make_and_time`."""
    entry = find_schedule(name)
    spec = request.spec(entry)
    if request.chunks is not None or not entry.compared_chunks:
        return make_and_time(name, spec)
    require_runs(name, spec)
    tried = chunks_to_compare(entry, spec.replicas)
    return best_auto_schedule([replace(request, chunks=chunks).spec(entry) for chunks in tried])


def chunks_to_compare(entry: ScheduleEntry, replicas: int) -> list[int]:
    """Return the stages per rank that a searched schedule compares: its own, and those that others fix."""
    fixed = (other.chunks for other in SCHEDULES.values() if other.replicas == replicas and not other.searched)
    return sorted({chunks for chunks in (*entry.compared_chunks, *fixed) if chunks and chunks % replicas == 0})


def compare_schedules(request: CompareRequest) -> tuple[list[tuple[Schedule, Timing]], list[tuple[str, str]]]:
    """Return all registered schedules, shortest first, then those that refuse, by name and reason.

    Of equally short schedules the one with the least memory comes first.
    """
    made: list[tuple[Schedule, Timing]] = []
    refused: list[tuple[str, str]] = []
    for name, entry in SCHEDULES.items():
        if entry.slow:
            refused.append((name, "it may take a minute; ask for it by its name"))
            continue
        if entry.is_asynchronous:
            refused.append((name, "it changes what is trained, on older weights; ask for it by its name"))
            continue
        if entry.has_paths:
            stages = "fewer stages" if entry.skips_stages else "stages in another order"
            refused.append((name, f"it changes what is trained, on {stages}; ask for it by its name"))
            continue
        try:
            made.append(make_with_best_chunks(name, request))
        except MusterError as error:
            refused.append((name, str(error)))
    made.sort(key=lambda one: one[1].sort_key)
    return made, refused
