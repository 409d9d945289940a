"""Seconds of each instruction of a Program on a machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from muster.schedule.action import HOST_LANE_UPDATES, HOST_UPDATE_KINDS, Action, Kind
from muster.schedule.timing import PassTimes


class P2PTime(NamedTuple):
    """Time of one p2p transfer between two stages."""

    total_s: float
    """Seconds from its start until the receiver may continue."""
    send_busy_s: float = 0.0
    """Seconds for which it occupies the sender's link, which a rank's transfers use one after another."""


_TIMES_BY_SIZE = frozenset(HOST_UPDATE_KINDS)


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Seconds by kind and stage, for a rank that doesn't share its compute with another.

    `cores` is the number of CPU cores that all ranks of a machine share, None where each rank has a device of its own.
    `processes_per_rank` is the number of ranks on a machine that each pipeline rank of the Program stands for (empty:
    one each); all of them compete for the cores.
    """

    seconds: Mapping[tuple[str, int], float]
    """(kind, stage) → s. A kind without stages has stage −1, and (kind, −1) holds for every stage without an entry."""
    p2p_s: float = 0.0
    """Seconds of a transfer between stages that `p2p_times` doesn't name."""
    cores: int | None = None
    processes_per_rank: tuple[int, ...] = ()
    machines: tuple[int, ...] = ()
    """Machine, or kind of machine, of each pipeline rank; empty: one for all."""
    p2p_times: Mapping[tuple[int, int], P2PTime] = field(default_factory=dict)
    """(sender's stage, receiver's stage) → transfer of one micro-batch between them."""
    exposed_s: Mapping[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)
    """(kind, stage) → axis → the part of `seconds` in which the rank waits for communication on that axis within the
    instruction; the axes are tp, cp, ep and dp."""
    pairs_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(stage of a forward, stage of a backward) → s of both as one (`Program.pairs`); else as long as one after the
    other."""
    data_s: float = 0.0
    """Seconds until a step's data has arrived, before its first instruction."""
    part_sizes: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """Stage → size of each part that host and device share the updates of (`relative_part_sizes`), which takes so many
    times the `seconds` of its instructions."""
    bucket_s: Mapping[tuple[str, int], tuple[float, ...]] = field(default_factory=dict)
    """(kind, stage) → s of each bucket of its parameters, where these are updated one after another."""
    overlap_slowdown: float = 0.0
    """Share by which compute is slower while parameters are gathered or gradients reduced beside it, in instructions of
    their own; what is hidden within a pass, `seconds` have."""
    slices: tuple["OpTimes", ...] = ()
    """Times of the passes, copies and transfers of each slice of sequences, where they are cut; empty: those above."""

    def duration_s(self, action: Action) -> float:
        """Return the seconds of one action; an action that was never timed takes none."""
        if self.slices and action.micro_batch >= 0:
            return self.slices[action.slice].duration_s(action)
        if action.kind in HOST_LANE_UPDATES:  # the same work in another lane
            action = action._replace(kind=Kind.UPDATE)
        elif action.kind == Kind.GRAD_NORM_BESIDE:
            action = action._replace(kind=Kind.GRAD_NORM)
        if (buckets := self.bucket_s.get((action.kind, action.stage))) is not None:
            return buckets[action.slice]
        found = self.seconds.get((action.kind, action.stage))
        if found is not None and self.part_sizes and action.kind in _TIMES_BY_SIZE:
            return found * self.part_sizes[action.stage][action.slice]
        return self.seconds.get((action.kind, -1), 0.0) if found is None else found

    def pair_share(self, forward: Action, backward: Action) -> float:
        """Return the time of a forward and a backward that run as one, as a share of both one after the other."""
        alone_s = self.duration_s(forward) + self.duration_s(backward)
        together_s = self.pairs_s.get((forward.stage, backward.stage), alone_s)
        return together_s / alone_s if alone_s else 1.0

    def exposed_in(self, action: Action) -> Mapping[str, float]:
        """Return axis → seconds of exposed communication within one action."""
        if self.slices and action.micro_batch >= 0:
            return self.slices[action.slice].exposed_in(action)
        return self.exposed_s.get((action.kind, action.stage)) or self.exposed_s.get((action.kind, -1), {})

    def p2p_time(self, source: int, target: int, part: int = 0) -> P2PTime:
        """Return the time of a transfer of a slice, or of a micro-batch, from one stage to another."""
        if self.slices:
            return self.slices[part].p2p_time(source, target)
        return self.p2p_times.get((source, target)) or P2PTime(self.p2p_s)

    def pass_times(self, num_stages: int) -> PassTimes:
        """Return F, I and W of each stage for a schedule search; I and W are half of B each where only B was timed."""
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
