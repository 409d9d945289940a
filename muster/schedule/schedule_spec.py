"""What a schedule is made for: ranks, micro-batches, and what is known of times and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from muster.spec.errors import InfeasibleError


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """The numbers that a schedule is a pure function of. Raises InfeasibleError where they can't hold.

    Most schedules look at ranks, micro-batches and chunks alone; those that search use times and memory too.
    """

    num_ranks: int
    """Pipeline ranks."""
    num_micro_batches: int
    """Of one step, over all replicas."""
    chunks: int = 1
    """Stages that each rank holds, over all replicas."""
    forward_s: tuple[float, ...] = ()
    """Seconds of a stage's forward by depth, from the model's first stage to its last; empty: 1 / the stages of one
    replica on a rank, so that a rank's share takes 1."""
    input_backward_s: tuple[float, ...] = ()
    weight_backward_s: tuple[float, ...] = ()
    p2p_s: float = 0.0
    """From the end of a pass until its result is on another rank."""
    memory_limit: float = inf
    """Activations that a rank may keep, in units of one micro-batch's activations of one rank's share of a replica."""
    replicas: int = 1
    """Copies of the model that run through the ranks in opposite directions (2), or the one model (1)."""
    placement: tuple[int, ...] = ()
    """What a search is bound to, where it is bound: the rank of each stage."""
    fill: bool = False
    """2BP only: weight backwards fill idle slots instead of standing at the end."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_micro_batches", "chunks", "replicas"):
            if getattr(self, name) < 1:
                raise InfeasibleError(f"a schedule needs {name} of at least 1, got {getattr(self, name)}")
        if self.chunks % self.replicas:
            raise InfeasibleError(
                f"chunks {self.chunks} don't spread over {self.replicas} replicas:"
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
        if self.memory_limit <= 0:
            raise InfeasibleError(f"memory_limit is {self.memory_limit:g}, expected more than 0")

    @property
    def depth(self) -> int:
        """Stages of one replica."""
        return self.num_ranks * self.chunks // self.replicas

    @property
    def stage_activation(self) -> float:
        """What one micro-batch's activations of one stage count in `memory_limit`."""
        return self.replicas / self.chunks

    @staticmethod
    def uniform(
        num_ranks: int,
        num_micro_batches: int,
        times_s: Sequence[float] = (1.0, 1.0, 1.0),
        chunks: int = 1,
        **more: float | int | bool,
    ) -> "ScheduleSpec":
        """Where every rank's whole share of the layers takes the same (forward, input backward, weight backward)."""
        replicas = int(more.get("replicas", 1))
        depth, part = num_ranks * chunks // replicas, replicas / chunks
        forward_s, input_s, weight_s = ((time_s * part,) * depth for time_s in times_s)
        return ScheduleSpec(num_ranks, num_micro_batches, chunks, forward_s, input_s, weight_s, **more)  # type: ignore[arg-type]
