"""Stragglers: ranks, links, data loaders and disks that are slower than the others, from the times of a few steps, and
devices that compute wrongly.

A rank's passes are held against the prediction for its stages, and that ratio against the other ranks': a stage with
more layers isn't slow. A process that others interrupt now and then isn't either. Of the steps of a check the shortest
counts, since noise only adds, and so does the median: in the shortest one the passes of a rank that is stopped again
and again may have fitted between the stops. What changes from check to check is noise, above which a straggler has to
be, and what three checks in a row find is one. Where ranks have to wait for a core of a CPU, twelve have to.

Transfers form a matrix, a row for each sender and a column for each receiver, as in C4 (arXiv:2406.04594): one slow
cell is a link, a slow row a sender, a slow column a receiver. Links within a machine are held against one another, and
so are those between machines. What half of them or more have in common, as a slow network card of one of three machines
has, isn't slow.
"""

from collections import Counter, deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, log, sqrt
from statistics import fmean, median_low, quantiles
from typing import Literal, NamedTuple

from muster.spec.units import numbered

StragglerKind = Literal["compute", "data", "disk", "link", "sender", "receiver", "result", "gradient"]
StragglerKey = tuple[StragglerKind, tuple[int, ...]]
"""Kind and ranks, by which a straggler is known again."""

WRONG: frozenset[StragglerKind] = frozenset(("result", "gradient"))
"""Kinds of ranks that compute wrongly, which count at once."""
SLOW_COMPUTE = 1.2
"""Ratio to the other ranks from which passes, or a product of matrices, are slow."""
SLOW_ON_SHARED_CORES = 2.0
"""The same for ranks that share cores: what each gets of them at a moment is chance, and varies by a factor of 1.5."""
SLOW_LINK = 2.0
"""The same, for a transfer from rank to rank."""
SLOW_DISK = 3.0
"""The same, for a file."""
SLOW_DATA = 0.1
"""Share of a step that a rank may wait for its samples."""
LEAST_EXCESS_S = {"compute": 1e-3, "product": 1e-4, "data": 1e-3, "disk": 0.05, "link": 1e-4}
"""Time by which something must be slower than the others, so that the clock's resolution isn't taken for slowness."""
SPREADS = 4.0
"""Median absolute deviations by which the time of a slow link must be above the median of all links."""
NOISE_SIGMAS = 2.5
"""Standard deviations of the noise by which a time must be above the others'."""
NOISE_SIGMAS_OF_MEDIAN = 4.0
"""The same for a median of a few steps, whose noise has a longer tail than that of the shortest."""
NOISE_CHECKS = 40
"""Checks from which the noise is known."""
QUARTILE_CHECKS = 8
"""Checks from which the upper quartile of the changes counts, too."""
CONFIRMING_CHECKS = 3
"""Checks in a row that have to find a straggler: with one every 5 steps it is named within 20 of its first."""
CONFIRMING_CHECKS_OF_WAITS = 12
"""The same where ranks wait for a core: other programs come and go."""
BUSY_CORES = 0.05
"""Share of a step for which a rank waits for a core, above which cores are taken to be short on its machine."""
MOST_OF = 0.6
"""Share of a row's or column's cells above which not the links are slow, but their sender or receiver is."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Times of one rank in the steps of a check, in seconds."""

    compute_s: float
    """Passes of a step, the shortest."""
    step_s: float
    """The shortest step."""
    data_s: float
    """Wait of a step for its samples, the shortest."""
    product_s: float
    """A product of matrices of one size on all ranks."""
    disk_s: float | None
    """A small file, written to disk; None where it couldn't be."""
    link_s: tuple[float | None, ...]
    """A message to each rank and its acknowledgement; None where there was none."""
    wrong_share: float = 0.0
    """Share of the elements of products of matrices that are wrong."""
    median_compute_s: float = 0.0
    """Passes of a step, the median."""
    core_wait_s: float = 0.0
    """Time of a step for which the rank could run and had no core of a CPU, the median."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """Something that is slower than its like, or a rank whose results are wrong."""

    kind: StragglerKind
    ranks: tuple[int, ...]
    """The slow ranks, or those that wait for a slow one within their passes; of a link the sender and the receiver."""
    ratio: float
    """Time over that of the others; of data the share of a step, of results the share of wrong ones, of gradients the
    share of the ranks that agree on others."""
    in_median: bool = False
    """True for passes that are slow in the median of the steps only, not in the shortest."""
    waits_for_core: bool = False
    """True where that may be because the rank has to wait for a core."""

    @property
    def key(self) -> StragglerKey:
        """Kind and ranks, by which a straggler is known again."""
        return self.kind, self.ranks

    @property
    def subject(self) -> str:
        """Short name: `compute of rank 3`."""
        if self.kind == "link":
            return f"link from rank {self.ranks[0]} to rank {self.ranks[1]}"
        return f"{self.kind} of {numbered('rank', self.ranks)}"

    @property
    def fault(self) -> str:
        """The same with what is wrong about it: `slow disk of rank 3`."""
        words = {"result": "wrong results", "gradient": "other gradients", "data": "slow data loading"}
        if (word := words.get(self.kind)) is not None:
            return f"{word} of {numbered('rank', self.ranks)}"
        return f"slow {self.subject}"

    def __str__(self) -> str:
        if self.kind == "link":
            return f"the {self.subject} takes {self.ratio:.2f} times as long as the others"
        who = numbered("rank", self.ranks)
        if self.kind == "result":
            return f"{who} computes {self.ratio:.2g} of a product of matrices wrongly: take its device out of service"
        if self.kind == "gradient" and len(self.ranks) == 1:
            return f"{who} gets other gradients from a micro-batch than the others: take its device out of service"
        if self.kind == "gradient":
            return f"{who} get different gradients from a micro-batch: one of their devices computes wrongly"
        takes = "takes" if len(self.ranks) == 1 else "take"
        times = f"{self.ratio:.2f} times as long as the others"
        if self.kind == "compute":
            within = ", whose passes wait for one another," if len(self.ranks) > 1 else ""
            why = ", while cores are short" if self.waits_for_core else ""
            return f"{who}{within} {takes} {times} to compute{why}"
        if self.kind == "data":
            return f"{who} {'waits' if len(self.ranks) == 1 else 'wait'} for samples for {self.ratio:.0%} of a step"
        if self.kind == "disk":
            return f"{who} {takes} {times} to write a file"
        return f"what rank {self.ranks[0]} {'sends' if self.kind == 'sender' else 'receives'} takes {times}"


Unit = tuple[int, ...]
"""Ranks whose passes wait for one another."""


class Comparable(NamedTuple):
    """Units whose times over the predicted ones are alike unless one is slow."""

    units: list[Unit]
    factor: float = SLOW_COMPUTE
    """Ratio from which one is slow."""


@dataclass
class NoiseEstimate:
    """Noise of times that are compared check by check: how much the ratios between them change from one check to the
    next. What is slow for long hardly counts, since its ratio changes once only."""

    _before: dict[Hashable, list[float]] = field(default_factory=dict)
    """Logarithms of the last check's times, less their mean, by what was timed."""
    _changes: dict[Hashable, deque[float]] = field(default_factory=dict)

    def factor(self, subject: Hashable, times_s: Sequence[float], sigmas: float = NOISE_SIGMAS) -> float:
        """Take the times of the next check; return the ratio to the others from which one is more than noise, by so
        many standard deviations.

        The standard deviation is 1.4826 times the median of absolute deviations, or their upper quartile over 1.1503,
        as for a normal distribution: the larger, since noise of other programs has a longer tail. A difference of two
        times has √2 of one's, and the mean of n takes its n-th part away.
        """
        if len(times_s) < 2 or min(times_s) <= 0:
            return 1.0
        logs = [log(one) for one in times_s]
        mean = fmean(logs)
        now = [one - mean for one in logs]
        changes = self._changes.setdefault(subject, deque(maxlen=NOISE_CHECKS * len(now)))
        before = self._before.get(subject, ())
        self._before[subject] = now
        if len(before) != len(now):
            return 1.0
        changes.extend(abs(a - b) for a, b in zip(now, before, strict=True))
        _, middle, upper = quantiles(changes, method="inclusive")
        if len(changes) < QUARTILE_CHECKS * len(now):  # of so few one that has just become slow would be the quartile
            upper = 0.0
        sigma = max(1.4826 * middle, upper / 1.1503) / sqrt(2) * sqrt(len(now) / (len(now) - 1))
        return exp(sigmas * sigma)


def find_stragglers(
    times: Sequence[RankTimes],
    expected_s: Sequence[float],
    comparable: Sequence[Comparable],
    slow_product: float = SLOW_COMPUTE,
    noise: NoiseEstimate | None = None,
    machines: Sequence[int] = (),
) -> list[Straggler]:
    """Return what is slow in one check.

    `expected_s`: predicted time of each rank's passes in a step; `slow_product`: ratio to the other ranks from which a
    product of matrices is slow; `noise`: that of the checks before; `machines`: number of the machine of each rank
    (empty: one for all).
    """
    noise = noise or NoiseEstimate()
    machines = machines or (0,) * len(times)
    found = _slow_compute(times, expected_s, comparable, slow_product, noise, machines)
    for rank, one in enumerate(times):
        if one.data_s > max(SLOW_DATA * one.step_s, LEAST_EXCESS_S["data"]):
            found.append(Straggler("data", (rank,), one.data_s / one.step_s))
    disk_s = {rank: one.disk_s for rank, one in enumerate(times) if one.disk_s is not None}
    files_s = list(disk_s.values())
    found += [
        Straggler("disk", (list(disk_s)[at],), ratio)
        for at, ratio in _slower(files_s, max(SLOW_DISK, noise.factor("disk", files_s)), LEAST_EXCESS_S["disk"])
    ]
    found += [Straggler("result", (rank,), one.wrong_share) for rank, one in enumerate(times) if one.wrong_share]
    return found + _slow_links([one.link_s for one in times], machines, noise)


def _slow_compute(
    times: Sequence[RankTimes],
    expected_s: Sequence[float],
    comparable: Sequence[Comparable],
    slow_product: float,
    noise: NoiseEstimate,
    machines: Sequence[int],
) -> list[Straggler]:
    """Return the units whose passes are slow, and the ranks whose product of matrices is. What the passes of a rank
    alone say of it, no product says better. Of several findings one that no wait for a core explains counts."""
    known = {unit[0] for units, _ in comparable if len(units) > 1 for unit in units if len(unit) == 1}
    busy: set[int] = set()
    """Machines on which cores are short, where ranks don't share them anyway."""
    if slow_product < SLOW_ON_SHARED_CORES:
        waiting = (rank for rank, one in enumerate(times) if one.core_wait_s > BUSY_CORES * one.step_s)
        busy.update(machines[rank] for rank in waiting)
    product_s = [one.product_s for one in times]
    least = max(slow_product, noise.factor("product", product_s))
    slow: dict[Unit, Straggler] = {
        (rank,): Straggler(
            "compute", (rank,), ratio, waits_for_core=ratio < SLOW_ON_SHARED_CORES and machines[rank] in busy
        )
        for rank, ratio in _slower(product_s, least, LEAST_EXCESS_S["product"])
        if rank not in known
    }
    for number, (units, factor) in enumerate(comparable):
        usual_s = median_low(expected_s[unit[0]] for unit in units)
        scales = [usual_s / expected_s[unit[0]] for unit in units]
        waits_s = [max(times[rank].core_wait_s for rank in unit) for unit in units]
        usual_wait_s = median_low(waits_s)
        for which, sigmas in (("compute_s", NOISE_SIGMAS), ("median_compute_s", NOISE_SIGMAS_OF_MEDIAN)):
            of_unit_s = (min(getattr(times[rank], which) for rank in unit) for unit in units)
            passes_s = [one * scale for one, scale in zip(of_unit_s, scales, strict=True)]
            least = max(factor, noise.factor((which, number), passes_s, sigmas))
            for at, ratio in _slower(passes_s, least, LEAST_EXCESS_S["compute"]):
                without_wait = ratio * (1 - (waits_s[at] - usual_wait_s) * scales[at] / passes_s[at])
                waits = without_wait <= least
                found = Straggler("compute", units[at], ratio, which == "median_compute_s", waits)
                if found.ranks not in slow or (slow[found.ranks].waits_for_core and not waits):
                    slow[found.ranks] = found
    return list(slow.values())


def _slow_links(
    link_s: Sequence[Sequence[float | None]], machines: Sequence[int], noise: NoiseEstimate
) -> list[Straggler]:
    """Return the slow senders, receivers and links of a matrix with a row for each sender: those within machines, and
    those between them."""
    found: dict[StragglerKey, Straggler] = {}
    for is_within in (True, False):
        cells = {
            (a, b): seconds
            for a, row in enumerate(link_s)
            for b, seconds in enumerate(row)
            if seconds is not None and (machines[a] == machines[b]) == is_within
        }
        for one in _slow_cells(cells, noise.factor(("link", is_within), list(cells.values()))):
            found.setdefault(one.key, one)
    return list(found.values())


def _slow_cells(cells: Mapping[tuple[int, int], float], noise_factor: float) -> list[Straggler]:
    """Return the slow senders, receivers and links among the times of (sender, receiver)."""
    if len(cells) < 2:
        return []
    seconds = list(cells.values())
    usual_s = median_low(seconds)
    spread_s = median_low(abs(one - usual_s) for one in seconds)  # of noise, since most links aren't slow
    excess_s = max(LEAST_EXCESS_S["link"], SPREADS * spread_s)
    pairs = list(cells)
    slow = {pairs[at]: ratio for at, ratio in _slower(seconds, max(SLOW_LINK, noise_factor), excess_s)}
    found: list[Straggler] = []
    explained: set[tuple[int, int]] = set()
    sides: tuple[tuple[StragglerKind, int], ...] = (("sender", 0), ("receiver", 1))
    for kind, side in sides:
        for rank in sorted({pair[side] for pair in slow}):
            line = [pair for pair in cells if pair[side] == rank]
            hot = [pair for pair in line if pair in slow]
            if len(hot) >= 2 and len(hot) > MOST_OF * len(line):
                found.append(Straggler(kind, (rank,), median_low(slow[pair] for pair in hot)))
                explained.update(hot)
    return found + [Straggler("link", pair, ratio) for pair, ratio in slow.items() if pair not in explained]


def _slower(seconds: Sequence[float], factor: float, least_excess_s: float) -> list[tuple[int, float]]:
    """Return the indices of the values above `factor` times the lower median, with their ratios to it."""
    if len(seconds) < 2:
        return []
    usual = median_low(seconds)
    return [
        (at, one / usual if usual else inf)
        for at, one in enumerate(seconds)
        if one > factor * usual and one - usual > least_excess_s
    ]


class StragglerDetector:
    """Stragglers that several checks, one after another, have found; what is wrong counts at once.

    A unit is named where its passes are slow and none of its ranks is known to be the cause. That is decided of what
    several checks have found: within one, noise in a member's product would hide a slow unit.
    """

    def __init__(self) -> None:
        self.noise = NoiseEstimate()
        self._in_a_row: Counter[StragglerKey] = Counter()
        """Last checks in a row that have found each straggler."""
        self._unexplained: Counter[StragglerKey] = Counter()
        """Last checks in a row in which it was slow without waiting for a core."""
        self.confirmed: dict[StragglerKey, Straggler] = {}
        self._missing: Counter[StragglerKey] = Counter()
        """Last checks in a row that haven't found a confirmed straggler."""

    @property
    def suspects_compute(self) -> bool:
        """True where a rank was slow to compute in the last check, but in too few before to be named yet."""
        return any(kind == "compute" for kind, _ in self._in_a_row.keys() - self.confirmed.keys())

    @property
    def ratios_are_new(self) -> bool:
        """True where the last check found all ranks that are confirmed to compute slowly: else the ratio of one is that
        of an earlier check."""
        return not any(kind == "compute" for kind, _ in self._missing.keys() & self.confirmed.keys())

    def update(self, found: Sequence[Straggler]) -> tuple[list[Straggler], list[Straggler]]:
        """Take what a check has found; return the stragglers that it has confirmed, those with a wait for a core again
        once they are slow without, and the stragglers that are over, which two checks haven't found."""
        now = {one.key: one for one in found}
        self._in_a_row = Counter({key: self._in_a_row[key] + 1 for key in now})
        unexplained = [key for key, one in now.items() if not one.waits_for_core]
        self._unexplained = Counter({key: self._unexplained[key] + 1 for key in unexplained})
        self._missing = Counter({key: self._missing[key] + 1 for key in self.confirmed if key not in now})
        over = [self.confirmed.pop(key) for key, count in self._missing.items() if count == 2]
        before = dict(self.confirmed)
        for key, one in now.items():
            is_unexplained = one.kind in WRONG or self._unexplained[key] >= CONFIRMING_CHECKS
            waits = not is_unexplained and (key not in before or before[key].waits_for_core)
            if key in before or is_unexplained or self._in_a_row[key] >= CONFIRMING_CHECKS_OF_WAITS:
                self.confirmed[key] = replace(one, waits_for_core=waits)
        for key in _explained_units(self.confirmed):
            del self.confirmed[key]
        new = (key for key, one in self.confirmed.items() if _says_more(one, before.get(key)))
        return [self.confirmed[key] for key in new], over


def _says_more(now: Straggler, before: Straggler | None) -> bool:
    """Return True for a straggler that is new, or that no wait for a core explains any more."""
    return before is None or (before.waits_for_core and not now.waits_for_core)


def _explained_units(slow: Collection[StragglerKey]) -> list[StragglerKey]:
    """Return the units of several ranks of which one alone is slow, too."""
    alone = {ranks[0] for kind, ranks in slow if kind == "compute" and len(ranks) == 1}
    return [(kind, ranks) for kind, ranks in slow if kind == "compute" and len(ranks) > 1 and alone.intersection(ranks)]


def shorter_links(one: Sequence[float | None], other: Sequence[float | None]) -> tuple[float | None, ...]:
    """Return the shorter of two times of each message. A busy receiver answers late at one moment, and a slow link at
    both."""
    return tuple(a if b is None else b if a is None else min(a, b) for a, b in zip(one, other, strict=True))
