"""Comparison of the ranks' times every few steps, which names stragglers while a run goes on."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from muster.cost.time.op_times import OpTimes
from muster.launch.rank_errors import StragglerError
from muster.layout.mesh import coordinates_of, dp_index_of
from muster.parallel.machines import machine_of_each_rank
from muster.parallel.rank_probes import ProductProbe, probe_product, time_file, time_messages
from muster.parallel.world import World
from muster.planner.slow_ranks import MeasuredPasses
from muster.report.recoveries import loss_causes
from muster.schedule.action import Kind
from muster.simulate.stragglers import (
    CONFIRMING_CHECKS,
    SLOW_COMPUTE,
    SLOW_ON_SHARED_CORES,
    WRONG,
    Comparable,
    RankTimes,
    Straggler,
    StragglerDetector,
    find_stragglers,
    shorter_links,
)
from muster.spec.plan import Plan
from muster.train.step_result import StepResult
from muster.train.trainer import Trainer

PASSES = frozenset((Kind.F, Kind.B, Kind.I, Kind.W, Kind.S, Kind.T))

PRODUCTS_IN_CHECK = 5
"""Steps of a check, evenly spread, after which a CPU multiplies, at most: others use its cores now and then."""
REPEATS_ON_CPU = 3
"""Products after each of them; the first finds cold caches."""
MOST_DOUBLINGS = 6
"""Changes of the plan after which the wait before the next one doesn't double any more."""


class StragglerCheck(NamedTuple):
    """Comparison of all ranks' times."""

    row: dict[str, Any]
    """Row of stragglers.jsonl."""
    sentences: list[str]
    """Sentences for people, about stragglers that are new and those that are over."""
    new: list[Straggler]
    measured: MeasuredPasses | None = None
    """Times of the ranks' passes; None where they weren't compared."""


class StragglerMonitor:
    """Times of this rank's last steps, and, on every rank, the stragglers among all ranks; all call it alike."""

    def __init__(self, trainer: Trainer, times: OpTimes, every: int, folder: Path) -> None:
        """`times`: predicted times of the instructions; `folder`: where the file that tells the disk's speed is
        written."""
        self.trainer, self.every, self.folder = trainer, every, folder
        self.world: World = trainer.world
        self.detector = StragglerDetector()
        self._results: deque[StepResult] = deque(maxlen=every)
        self._products: list[ProductProbe] = []
        """Products since the last check, on a CPU."""
        self._num_checks = 0
        self._messages: tuple[float | None, ...] = ()
        """Times of the messages of the comparison before."""
        actions = (item.action for item in trainer.program.ranks[self.world.at.pp].get("compute", ()))
        keys = [(action.kind, action.stage) for action in actions if action.kind in PASSES]
        self._times = times
        self._factors = [1.0] * trainer.plan.pp
        """Least time of each pipeline rank's passes so far, over that by `times`."""
        own_s = sum(times.seconds.get(key, times.seconds.get((key[0], -1), 0.0)) for key in keys)
        self._expected_s: list[float] = self.world.all_gather_object(float(own_s))  # not NumPy's, for rows of JSON
        self._machines = machine_of_each_rank(self.world)
        most_ranks = max(Counter(self._machines).values())
        shares_cores = times.cores is not None and most_ranks > times.cores
        self._comparable = comparable_units(trainer.plan, self._expected_s, shares_cores)
        self._slow_product = SLOW_ON_SHARED_CORES if shares_cores else SLOW_COMPUTE

    def after_step(self, result: StepResult) -> StragglerCheck | None:
        """Take a step's times and, every few steps, compare those of all ranks; None where that isn't due."""
        self._results.append(result)
        if self.world.device.type == "cpu" and result.step % ceil(self.every / PRODUCTS_IN_CHECK) == 0:
            self._products.append(probe_product(self.world.device, REPEATS_ON_CPU))
        if result.step % self.every or len(self._results) < self.every:
            return None
        times = self.world.all_gather_object(self._own_times())
        self._correct_expected(times)
        new, over = self.detector.update(self._find(times))
        told = [f"step {result.step}: straggler: {one}" for one in new]
        told += [f"step {result.step}: no straggler any more: {one.subject}" for one in over]
        self._num_checks += 1
        return StragglerCheck(self._row(result.step, times), told, new, self._measured(times))

    def metrics(self) -> dict[str, int]:
        """Return the number of what is known to be slow, for the metrics of a step."""
        return {"perf/stragglers": len(self.detector.confirmed)}

    def _find(self, times: list[RankTimes]) -> list[Straggler]:
        own = self._expected_s, self._comparable, self._slow_product
        return find_stragglers(times, *own, self.detector.noise, self._machines)

    def _correct_expected(self, times: list[RankTimes]) -> None:
        """Expect of a stage no more than the least that its ranks have needed so far: what slows it only adds, and may
        have done so in the profile. All ranks compute the same."""
        plan = self.trainer.plan
        pp_ranks = [coordinates_of(plan, rank).pp for rank in range(plan.world_size)]
        for pp_rank in range(plan.pp):
            own = [rank for rank, at in enumerate(pp_ranks) if at == pp_rank and self._expected_s[rank]]
            shown = [times[rank].compute_s / self._expected_s[rank] for rank in own if times[rank].compute_s]
            if (factor := min(shown, default=1.0)) < 1:
                for rank in own:
                    self._expected_s[rank] *= factor
                self._factors[pp_rank] *= factor

    def usual_times(self) -> OpTimes:
        """Return the times of the passes where no rank is slow, as far as is known by now."""
        placement = self.trainer.plan.placement
        seconds = {
            (kind, stage): one_s * (self._factors[placement[stage]] if kind in PASSES and stage >= 0 else 1.0)
            for (kind, stage), one_s in self._times.seconds.items()
        }
        return replace(self._times, seconds=seconds)

    def may_replan(self, num_changes: int) -> bool:
        """Return whether another plan may be looked for, after this many changes of the plan: where a rank computes
        slowly, or one did before.

        The second change waits for three comparisons, the third for four, and each further one for twice as many as the
        one before: noise that comes and goes costs little so. All ranks count as fast only once none of them could
        still be named.
        """
        is_slow = any(one.kind == "compute" for one in self.detector.confirmed.values())
        least = max(CONFIRMING_CHECKS, 2 ** min(num_changes, MOST_DOUBLINGS))
        is_fast_again = num_changes > 0 and not self.detector.suspects_compute
        return (is_slow or is_fast_again) and self._num_checks >= least

    def _measured(self, times: list[RankTimes]) -> MeasuredPasses | None:
        """Return the times of the ranks' passes, of each as that which shows how slow it is; None where this comparison
        didn't find a rank that those before did."""
        if not self.detector.ratios_are_new:
            return None
        slowness, shown_s = [1.0] * len(times), [one.compute_s for one in times]
        for one in self.detector.confirmed.values():
            for rank in one.ranks if one.kind == "compute" else ():
                slowness[rank] = max(slowness[rank], one.ratio)
                if one.in_median:
                    shown_s[rank] = times[rank].median_compute_s
        return MeasuredPasses(self.usual_times(), self._expected_s, shown_s, slowness)

    def _own_times(self) -> RankTimes:
        steps = self.trainer.step_events()
        sums_s = [
            sum(event.duration_s for event in steps[one.step] if event.action.kind in PASSES)
            for one in self._results
            if one.step in steps
        ]
        messages = time_messages(self.world)
        products, self._products = self._products or [probe_product(self.world.device)], []
        link_s, self._messages = shorter_links(messages, self._messages or messages), messages
        return RankTimes(
            min(sums_s, default=0.0),
            min(one.time_s for one in self._results),
            min(one.data_s for one in self._results),
            min(one.seconds for one in products),
            time_file(self.folder),
            link_s,
            fmean(one.wrong_share for one in products),
            median(sums_s) if sums_s else 0.0,
            median(one.core_wait_s for one in self._results),
        )

    def _row(self, step: int, times: list[RankTimes]) -> dict[str, Any]:
        found = [asdict(one) | {"text": str(one)} for one in self.detector.confirmed.values()]
        return {
            "step": step,
            "expected_s": list(self._expected_s),
            "ranks": list(map(asdict, times)),
            "machines": self._machines,
            "stragglers": found,
        }


def end_if_replaceable(rank: int, new: Sequence[Straggler], recoveries: Sequence[Mapping[str, Any]]) -> None:
    """Raise StragglerError where this rank alone is slow to compute, or computes wrongly, and its place hasn't been
    given to another process for the same before: a new one is no faster where the place itself is slow.

    `recoveries`: rows of recoveries.jsonl.
    """
    for one in new:
        if is_replaceable(one, recoveries) and one.ranks == (rank,):
            raise StragglerError(str(one).removeprefix(f"rank {rank} "), _cause(one))


def is_replaceable(one: Straggler, recoveries: Sequence[Mapping[str, Any]]) -> bool:
    """Return True for a single slow or wrong rank whose place hasn't been given to another process for the same
    before; one that has to wait for a core has no faster place."""
    if one.kind not in ("compute", *WRONG) or len(one.ranks) != 1 or one.waits_for_core:
        return False
    return not any(loss_causes(row).get(one.ranks[0]) == _cause(one) for row in recoveries)


def _cause(one: Straggler) -> Literal["slow", "wrong results"]:
    return "slow" if one.kind == "compute" else "wrong results"


def comparable_units(plan: Plan, expected_s: list[float], shares_cores: bool) -> list[Comparable]:
    """Return the units of ranks whose passes wait for one another, in groups whose times can be compared: all units,
    or, where ranks share cores, those of one stage, since stages work at different moments. What is much slower than
    the units of all stages is slow all the same."""
    units: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.world_size):
        at = coordinates_of(plan, rank)
        mesh = plan.mesh(at.pp)
        waits_for_data = plan.default_strategy.zero in ("z2", "z3") or mesh.ep > 1
        units.setdefault((at.pp, *(() if waits_for_data else (dp_index_of(plan, at),))), []).append(rank)
    timed = {key: tuple(ranks) for key, ranks in units.items() if all(expected_s[rank] for rank in ranks)}
    if not shares_cores:
        return [Comparable(list(timed.values()))]
    stages = [[unit for (pp_rank, *_), unit in timed.items() if pp_rank == stage] for stage in range(plan.pp)]
    return [*map(Comparable, stages), Comparable(list(timed.values()), SLOW_ON_SHARED_CORES)]
