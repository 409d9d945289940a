"""Choice of the peer that gets a micro-batch, and of the stage that a peer serves, from measured times."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Literal

Method = Literal["throughput", "round_robin"]
_NEW_SHARE = 0.2
"""Share of the last measurement in a peer's mean time of a pass."""
GAIN = 1.1
"""Factor by which a move has to raise the throughput of the slowest stage."""


@dataclass
class PeerTimes:
    """Mean times of a peer's passes, by kind, in seconds; empty before any was measured."""

    by_kind: dict[str, float] = field(default_factory=dict)

    def measure(self, kind: str, time_s: float) -> None:
        """Add a measurement to an exponential moving average."""
        before = self.by_kind.get(kind, time_s)
        self.by_kind[kind] = before + _NEW_SHARE * (time_s - before)

    @property
    def micro_batch_s(self) -> float | None:
        """Time of a micro-batch, forward and backward; None while it isn't known."""
        return sum(self.by_kind.values()) if len(self.by_kind) == 2 else None


@dataclass
class StageWiring:
    """Interleaved weighted round-robin among the peers of one stage (SWARM, arXiv:2301.11913 §3.2): the peer with the
    least expected work so far gets the next micro-batch, and the expected time of that is added to its work. `method`
    round_robin: one after another, however fast they are."""

    method: Method = "throughput"
    chance: Random = field(default_factory=Random)
    times: dict[str, PeerTimes] = field(default_factory=dict)
    """Measured times by peer."""
    _work_s: dict[str, float] = field(default_factory=dict)

    def add(self, name: str) -> None:
        """Let a peer take part, with as much work behind it as the peer with the least."""
        self._work_s[name] = min(self._work_s.values(), default=0.0)
        self.times.setdefault(name, PeerTimes())

    def remove(self, name: str) -> None:
        """Leave a peer out from now on."""
        self._work_s.pop(name, None)
        self.times.pop(name, None)

    def begin_step(self) -> None:
        """Forget the work of the step before, at whose end all peers have waited for one another."""
        self._work_s = dict.fromkeys(self._work_s, 0.0)

    def choose(self, among: Collection[str]) -> str:
        """Return the peer that gets a micro-batch, of those in `among`."""
        if self.method == "round_robin":
            cost_s = dict.fromkeys(among, 1.0)
        else:
            cost_s = {name: self.cost_s(name) for name in among}
        # Who would end it first: as published, but that the own time counts, so that no slow peer begins a last one.
        name = min(among, key=lambda one: (self._work_s[one] + cost_s[one], self.chance.random()))
        self._work_s[name] += cost_s[name]
        return name

    def cost_s(self, name: str) -> float:
        """Return the expected time of a micro-batch on a peer; the mean of the others where it isn't known."""
        known = [one for times in self.times.values() if (one := times.micro_batch_s) is not None]
        own = self.times[name].micro_batch_s
        return own if own is not None else sum(known) / len(known) if known else 1.0

    @property
    def rate(self) -> float:
        """Micro-batches a second that all peers together can do."""
        return sum(1 / max(self.cost_s(name), 1e-9) for name in self._work_s)


def stage_for(counts: Mapping[int, int], rates: Mapping[int, float]) -> int:
    """Return the stage that a new peer serves: one without peers, else the slowest."""
    return min(counts, key=lambda stage: (counts[stage] > 0, rates[stage], counts[stage], stage))


def choose_move(
    wirings: Mapping[int, StageWiring], queues: Mapping[int, float], movable: Callable[[str], bool]
) -> tuple[str, int] | None:
    """Return the peer that moves and the stage that it moves to; None where all stay.

    It moves from the stage with the shortest queue of micro-batches to the one with the longest (SWARM §3.2), the
    slowest peer that raises the throughput of the slowest stage by a tenth, where one does; a stage keeps a peer.
    """
    shortest, longest = min(queues, key=queues.__getitem__), max(queues, key=queues.__getitem__)
    if shortest == longest:
        return None
    source, target = wirings[shortest], wirings[longest]
    names = [name for name in source.times if movable(name)]
    if len(source.times) < 2:
        return None
    before = min(source.rate, target.rate)
    for name in sorted(names, key=source.cost_s, reverse=True):
        own = 1 / max(source.cost_s(name), 1e-9)
        if min(source.rate - own, target.rate + own) > GAIN * before:
            return name, longest
    return None
