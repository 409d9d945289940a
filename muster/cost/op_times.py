"""How long each instruction of a Program takes on the machine at hand."""

from collections.abc import Mapping
from dataclasses import dataclass

from muster.schedule.action import Action


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Seconds by kind and stage, as one rank takes them when it has what it needs for itself.

    `cores`: the CPU cores that all ranks of the machine share, None where each rank has a device of its own.
    `processes`: the ranks that each pipeline rank of the Program stands for (empty: one each); all want cores at once.
    """

    seconds: Mapping[tuple[str, int], float]
    """(kind, stage) → s; a kind without stages has stage −1, and (kind, −1) serves every stage without an own entry."""
    hop_s: float = 0.0
    """From a send's start until its receiver may go on."""
    cores: int | None = None
    processes: tuple[int, ...] = ()

    def of(self, action: Action) -> float:
        """Seconds for one action; what was never timed takes none."""
        found = self.seconds.get((action.kind, action.stage))
        return self.seconds.get((action.kind, -1), 0.0) if found is None else found
