"""Stragglers: ranks, links, data loaders and disks that are slower than the others, from the times of a few steps, and
devices that compute wrongly.

A rank's passes are held against the prediction for its stages, and that ratio against the other ranks': a stage with
more layers isn't slow. A process that others interrupt now and then isn't either: of the steps of a check the shortest
counts, since noise only adds. What two checks in a row find is a straggler.

Transfers form a matrix, a row for each sender and a column for each receiver, as in C4 (arXiv:2406.04594): one slow
cell is a link, a slow row a sender, a slow column a receiver.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median, median_low
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
SLOW_LINK = 1.8
"""The same, for a transfer from rank to rank."""
SLOW_DISK = 3.0
"""The same, for a file."""
SLOW_DATA = 0.1
"""Share of a step that a rank may wait for its samples."""
LEAST_EXCESS_S = {"compute": 1e-3, "product": 1e-4, "data": 1e-3, "disk": 0.05, "link": 1e-4}
"""Time by which something must be slower than the others, so that the clock's resolution isn't taken for slowness."""
SPREADS = 4.0
"""Median absolute deviations by which the time of a slow link must be above the median of all links."""
MOST_OF = 0.6
"""Share of a row's or column's cells above which not the links are slow, but their sender or receiver is."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Shortest times of one rank in the steps of a check, in seconds."""

    compute_s: float
    """Passes of a step."""
    step_s: float
    data_s: float
    """Wait of a step for its samples."""
    product_s: float
    """A product of matrices of one size on all ranks."""
    disk_s: float
    """A small file, written to disk."""
    link_s: tuple[float | None, ...]
    """A message to each rank and its acknowledgement; None where there was none."""
    wrong_share: float = 0.0
    """Share of the elements of products of matrices that are wrong."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """Something that is slower than its like, or a rank whose results are wrong."""

    kind: StragglerKind
    ranks: tuple[int, ...]
    """The slow ranks, or those that wait for a slow one within their passes; of a link the sender and the receiver."""
    ratio: float
    """Time over that of the others; of data the share of a step, of results the share of wrong ones, of gradients the
    share of the ranks that agree on others."""

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
            return f"{who}{within} {takes} {times} to compute"
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


def find_stragglers(
    times: Sequence[RankTimes],
    expected_s: Sequence[float],
    comparable: Sequence[Comparable],
    slow_product: float = SLOW_COMPUTE,
) -> list[Straggler]:
    """Return what is slow in one check.

    `expected_s`: predicted time of each rank's passes in a step; `slow_product`: ratio to the other ranks from which a
    product of matrices is slow.
    """
    found = _slow_compute(times, expected_s, comparable, slow_product)
    for rank, one in enumerate(times):
        if one.data_s > max(SLOW_DATA * one.step_s, LEAST_EXCESS_S["data"]):
            found.append(Straggler("data", (rank,), one.data_s / one.step_s))
    found += [
        Straggler("disk", (rank,), ratio)
        for rank, ratio in _slower([one.disk_s for one in times], SLOW_DISK, LEAST_EXCESS_S["disk"])
    ]
    found += [Straggler("result", (rank,), one.wrong_share) for rank, one in enumerate(times) if one.wrong_share]
    return found + _slow_links([one.link_s for one in times])


def _slow_compute(
    times: Sequence[RankTimes], expected_s: Sequence[float], comparable: Sequence[Comparable], slow_product: float
) -> list[Straggler]:
    """Return the units whose passes are slow, and the ranks whose product of matrices is. What the passes of a rank
    alone say of it, no product says better."""
    known = {unit[0] for units, _ in comparable if len(units) > 1 for unit in units if len(unit) == 1}
    alone = _slower([one.product_s for one in times], slow_product, LEAST_EXCESS_S["product"])
    slow: dict[Unit, float] = {(rank,): ratio for rank, ratio in alone if rank not in known}
    for units, factor in comparable:
        usual_s = median_low(expected_s[unit[0]] for unit in units)
        passes_s = [min(times[rank].compute_s for rank in unit) * usual_s / expected_s[unit[0]] for unit in units]
        for at, ratio in _slower(passes_s, factor, LEAST_EXCESS_S["compute"]):
            slow.setdefault(units[at], ratio)
    return [Straggler("compute", unit, ratio) for unit, ratio in slow.items()]


def _slow_links(link_s: Sequence[Sequence[float | None]]) -> list[Straggler]:
    """Return the slow senders, receivers and links of a matrix with a row for each sender."""
    cells = {(a, b): seconds for a, row in enumerate(link_s) for b, seconds in enumerate(row) if seconds is not None}
    if len(cells) < 2:
        return []
    seconds = list(cells.values())
    usual_s = median_low(seconds)
    spread_s = median(abs(one - usual_s) for one in seconds)  # of noise, since most links aren't slow
    excess_s = max(LEAST_EXCESS_S["link"], SPREADS * spread_s)
    slow = {list(cells)[at]: ratio for at, ratio in _slower(seconds, SLOW_LINK, excess_s)}
    found: list[Straggler] = []
    explained: set[tuple[int, int]] = set()
    sides: tuple[tuple[StragglerKind, int], ...] = (("sender", 0), ("receiver", 1))
    for kind, side in sides:
        for rank in range(len(link_s)):
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
    """Stragglers that two checks, one after another, have found; what is wrong counts at once.

    A unit is named where its passes are slow and none of its ranks is known to be the cause. That is decided of what
    two checks have found: within one, noise in a member's product would hide a slow unit.
    """

    def __init__(self) -> None:
        self._before: dict[StragglerKey, Straggler] = {}
        self.confirmed: dict[StragglerKey, Straggler] = {}

    def update(self, found: Sequence[Straggler]) -> tuple[list[Straggler], list[Straggler]]:
        """Take what a check has found; return the stragglers that it has confirmed, and those that are over."""
        now = {one.key: one for one in found}
        over = [one for key, one in self.confirmed.items() if key not in now and key not in self._before]
        for one in over:
            del self.confirmed[one.key]
        before = set(self.confirmed)
        known = {key for key, one in now.items() if key in before or key in self._before or one.kind in WRONG}
        self.confirmed |= {key: now[key] for key in known}
        for key in _explained_units(self.confirmed):
            del self.confirmed[key]
        self._before = now
        return [one for key, one in self.confirmed.items() if key not in before], over


def _explained_units(slow: Collection[StragglerKey]) -> list[StragglerKey]:
    """Return the units of several ranks of which one alone is slow, too."""
    alone = {ranks[0] for kind, ranks in slow if kind == "compute" and len(ranks) == 1}
    return [(kind, ranks) for kind, ranks in slow if kind == "compute" and len(ranks) > 1 and alone.intersection(ranks)]


def shorter_links(one: Sequence[float | None], other: Sequence[float | None]) -> tuple[float | None, ...]:
    """Return the shorter of two times of each message. A busy receiver answers late at one moment, and a slow link at
    both."""
    return tuple(a if b is None else b if a is None else min(a, b) for a, b in zip(one, other, strict=True))
