"""How long each instruction of a Program takes on the machine at hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from muster.schedule.action import Action, Kind
from muster.schedule.timing import PassTimes


class P2PTime(NamedTuple):
    """One transfer between two stages."""

    total_s: float
    """From its start until its receiver may go on."""
    send_busy_s: float = 0.0
    """Of that, how long it keeps the sender's way out, which a rank's transfers use one after another."""


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Seconds by kind and stage, as one rank takes them when it has what it needs for itself.

    `cores`: the CPU cores that all ranks of a machine share, None where each rank has a device of its own.
    `processes`: the ranks on a machine that each pipeline rank of the Program stands for (empty: one each); all want
    cores at once.
    """

    seconds: Mapping[tuple[str, int], float]
    """(kind, stage) → s; a kind without stages has stage −1, and (kind, −1) serves every stage without an own entry."""
    p2p_s: float = 0.0
    """From a send's start until its receiver may go on, between stages that `hops` doesn't name."""
    cores: int | None = None
    processes_per_rank: tuple[int, ...] = ()
    machines: tuple[int, ...] = ()
    """The machine, or kind of machine, that each pipeline rank is on; empty: one for all."""
    p2p_times: Mapping[tuple[int, int], P2PTime] = field(default_factory=dict)
    """(sender's stage, receiver's stage) → the transfer of one micro-batch between them."""
    exposed_s: Mapping[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)
    """(kind, stage) → axis → the part of `seconds` in which the rank stands still for what travels on that axis within
    the instruction; the axes are tp, cp, ep and dp."""
    data_s: float = 0.0
    """Until a step's data is there, before its first instruction."""

    def duration_s(self, action: Action) -> float:
        """Seconds for one action; what was never timed takes none."""
        found = self.seconds.get((action.kind, action.stage))
        return self.seconds.get((action.kind, -1), 0.0) if found is None else found

    def exposed_in(self, action: Action) -> Mapping[str, float]:
        """Axis → seconds within one action."""
        return self.exposed_s.get((action.kind, action.stage)) or self.exposed_s.get((action.kind, -1), {})

    def p2p_time(self, source: int, target: int) -> P2PTime:
        """The transfer from one stage to another."""
        return self.p2p_times.get((source, target)) or P2PTime(self.p2p_s)

    def pass_times(self, num_stages: int) -> PassTimes:
        """What a schedule is searched for: of each stage F, I and W, each half of B where only that was timed."""
        forward, whole, inputs, weights = (
            [self.duration_s(Action(kind, stage)) for stage in range(num_stages)]
            for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
        )
        split = [i > 0 or w > 0 for i, w in zip(inputs, weights, strict=True)]
        rows = list(zip(split, whole, inputs, weights, strict=True))
        inputs = [i if both else b / 2 for both, b, i, _ in rows]
        weights = [w if both else b / 2 for both, b, _, w in rows]
        hops_s = [hop.total_s for hop in self.p2p_times.values()] or [self.p2p_s]
        return PassTimes(forward, inputs, weights, sum(hops_s) / len(hops_s))
