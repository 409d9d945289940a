"""Schedules beside each other, each made, timed and held to the memory limit."""

from dataclasses import dataclass, replace

from muster.schedule.registry import best_among, make_schedule
from muster.schedule.schedule import Schedule
from muster.schedule.setting import Setting
from muster.schedule.timing import Timing, time_schedule
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.schedules import SCHEDULES, Entry, entry_of

_MOST_TRIED = 70_000
"""Ranks × micro-batches × chunks beyond which no further chunks are tried."""


@dataclass(frozen=True, slots=True)
class Request:
    """A setting in which chunks and replicas may be left (None) to what each schedule usually has."""

    num_ranks: int
    num_micro_batches: int
    chunks: int | None
    times_s: tuple[float, float, float]
    """Forward, backward for inputs and backward for weights of one rank's whole share."""
    hop_s: float
    memory_limit: float
    replicas: int | None
    fill: bool

    def setting(self, entry: Entry) -> Setting:
        """For one schedule. Raises InfeasibleError where the numbers can't hold."""
        return Setting.of_shares(
            self.num_ranks,
            self.num_micro_batches,
            self.times_s,
            self.chunks or entry.default_chunks,
            hop_s=self.hop_s,
            memory_limit=self.memory_limit,
            replicas=self.replicas or entry.default_replicas,
            fill=self.fill,
        )


def timed(schedule: Schedule, setting: Setting) -> tuple[Schedule, Timing]:
    """The schedule with its timing. Raises ProgramError where its order can't be followed, InfeasibleError where it
    keeps more than the memory limit."""
    timing = time_schedule(schedule, setting)
    peak = max(timing.peak_activation)
    if peak > setting.memory_limit * (1 + 1e-9):
        raise InfeasibleError(
            f"{schedule.name} keeps the activations of {peak:g} micro-batches on rank"
            f" {timing.peak_activation.index(peak)}, more than the limit of {setting.memory_limit:g}"
        )
    return schedule, timing


def make_timed(name: str, setting: Setting) -> tuple[Schedule, Timing]:
    """The registered schedule `name` with its timing. Raises ConfigError, InfeasibleError where it refuses."""
    return timed(make_schedule(name, setting), setting)


def make_best(name: str, request: Request) -> tuple[Schedule, Timing]:
    """As `make_timed`; where the request leaves the chunks open and the schedule is one that compares several, the
    best of them."""
    entry = entry_of(name)
    if request.chunks is not None or not entry.tried_chunks or (request.replicas or 1) > 1:
        return make_timed(name, request.setting(entry))
    size, (fewest, *more) = request.num_ranks * request.num_micro_batches, entry.tried_chunks
    tried = [fewest, *(chunks for chunks in more if size * chunks <= _MOST_TRIED)]
    return best_among([replace(request, chunks=chunks).setting(entry) for chunks in tried])


def _merit(made: tuple[Schedule, Timing]) -> tuple[float, float]:
    return round(made[1].makespan_s, 9), max(made[1].peak_activation)


def compare(request: Request) -> tuple[list[tuple[Schedule, Timing]], list[tuple[str, str]]]:
    """All registered schedules, the shortest first and of equal ones the one with the least memory; then the names of
    those that refuse, with their reasons."""
    made: list[tuple[Schedule, Timing]] = []
    refused: list[tuple[str, str]] = []
    for name, entry in SCHEDULES.items():
        if entry.slow:
            refused.append((name, "it may take a minute; ask for it by its name"))
            continue
        try:
            made.append(make_best(name, request))
        except MusterError as error:
            refused.append((name, str(error)))
    made.sort(key=_merit)
    return made, refused
