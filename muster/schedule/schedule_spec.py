"""Inputs of a schedule: ranks, micro-batches, and the times and memory known beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from muster.spec.errors import InfeasibleError
from muster.spec.schedules import DEFAULT_MIN_VISITS


@dataclass(frozen=True, slots=True)
class PathLimits:
    """Limits of the paths that micro-batches take through the stages of a pipeline."""

    skip_ratio: float = 0.0
    """Share of the stages that each micro-batch skips; the first and the last one are never skipped."""
    min_visits: float = DEFAULT_MIN_VISITS
    """Least share of the micro-batches that each stage sees, and never less than one of them."""
    swaps: bool = False
    """True if two neighbours of a path may be in the other order than in the model."""


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """Inputs that a schedule is a pure function of. Raises InfeasibleError for impossible numbers.

    Most schedules only use ranks, micro-batches and chunks; searched ones use times and memory too.
    """

    num_ranks: int
    """Number of pipeline ranks."""
    num_micro_batches: int
    """Micro-batches of one step, over all replicas."""
    chunks: int = 1
    """Stages per rank, over all replicas."""
    forward_s: tuple[float, ...] = ()
    """Seconds of each stage's forward, from the model's first stage to its last. Empty: each takes 1 / (stages of one
    replica per rank), so that a rank's whole share takes 1."""
    input_backward_s: tuple[float, ...] = ()
    weight_backward_s: tuple[float, ...] = ()
    p2p_s: float = 0.0
    """Seconds of a p2p transfer: from the end of a pass until its result is on another rank."""
    memory_limit: float = inf
    """Most activations saved on a rank; 1 is one micro-batch on a rank's whole share of a replica."""
    replicas: int = 1
    """Copies of the model that run through the ranks in opposite directions (2), or the one model (1)."""
    placement: tuple[int, ...] = ()
    """Rank of each stage, if a search must keep to it; empty: free."""
    fill: bool = False
    """True (2BP only): weight backwards fill idle slots. False: they come last."""
    num_slices: int = 1
    """Slices of each sequence, of equal work: each takes 1 / num_slices of its micro-batch's times and activations."""
    pair_share: float | None = None
    """Time of a forward and a backward of two micro-batches that run as one, as a share of both one after another,
    where a schedule has such pairs; None: passes run one after another."""
    num_steps: int = 1
    """Optimizer steps between two flushes, of `num_micro_batches` each, in an asynchronous schedule."""
    link_s: tuple[tuple[float, ...], ...] = ()
    """Seconds of a p2p transfer from each pipeline rank to each, for schedules that choose paths and places by them;
    empty: `p2p_s`."""
    link_busy_s: tuple[tuple[float, ...], ...] = ()
    """Seconds for which such a transfer occupies the sender's outgoing link, which has one at a time; empty: none."""
    paths: PathLimits | None = None
    """Limits of the paths of micro-batches that skip stages, in a schedule that has such; None: its defaults."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_micro_batches", "chunks", "replicas", "num_slices", "num_steps"):
            if getattr(self, name) < 1:
                raise InfeasibleError(f"a schedule needs {name} of at least 1, got {getattr(self, name)}")
        if self.chunks % self.replicas:
            raise InfeasibleError(
                f"stages per rank (chunks) is {self.chunks}, which {self.replicas} replicas can't share:"
                f" expected a multiple of {self.replicas}"
            )
        for name in ("forward_s", "input_backward_s", "weight_backward_s"):
            times: tuple[float, ...] = getattr(self, name) or (self.replicas / self.chunks,) * self.depth
            if len(times) != self.depth:
                raise InfeasibleError(f"{name} has {len(times)} times, but there are {self.depth} stages")
            if min(times) < 0:
                raise InfeasibleError(f"{name} of stage {times.index(min(times))} is {min(times)}, below 0")
            object.__setattr__(self, name, times)
        if self.p2p_s < 0:
            raise InfeasibleError(f"p2p_s is {self.p2p_s:g}, expected 0 or more")
        if self.pair_share is not None and self.pair_share < 0:
            raise InfeasibleError(f"pair_share is {self.pair_share:g}, expected 0 or more")
        if self.memory_limit <= 0:
            raise InfeasibleError(f"memory_limit is {self.memory_limit:g}, expected more than 0")

    @property
    def depth(self) -> int:
        """Number of stages of one replica."""
        return self.num_ranks * self.chunks // self.replicas

    @property
    def stage_activation(self) -> float:
        """Activations of one micro-batch on one stage, in the unit of `memory_limit`."""
        return self.replicas / self.chunks

    @staticmethod
    def uniform(
        num_ranks: int,
        num_micro_batches: int,
        times_s: Sequence[float] = (1.0, 1.0, 1.0),
        chunks: int = 1,
        **more: Any,
    ) -> "ScheduleSpec":
        """Return a spec in which each rank's whole share takes `times_s` (forward, input backward, weight backward)."""
        replicas = int(more.get("replicas") or 1)
        depth = num_ranks * chunks // replicas
        part = replicas / chunks
        forward_s, input_s, weight_s = ((time_s * part,) * depth for time_s in times_s)
        return ScheduleSpec(num_ranks, num_micro_batches, chunks, forward_s, input_s, weight_s, **more)
