"""What a plan is searched for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from muster.spec.cluster import ClusterSpec
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, Precision
from muster.spec.workload import Workload

Objective = Literal["time", "cost", "energy", "memory"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True, slots=True)
class Request:
    """A model, the devices that it is trained on, and what is wanted."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    objective: Objective = "time"
    precision: Precision = "bf16"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a plan, or of its default strategy, that must have these values."""
    asked: str = ""
    """The same as people said it."""
    memory_limit_bytes: int | None = None
    """Of each device, where less than all of it may be used."""
    axes: frozenset[str] | None = None
    """Of tp, pp, cp and ep exactly those that must be in use; None: any."""
    runnable: bool = False
    """Whether only plans are wanted that `muster train` runs today."""
    template: Plan | None = None
    """What all candidates have where it isn't searched for: compile, buckets and the like."""

    @property
    def base(self) -> Plan:
        """What all candidates share."""
        return self.template or Plan(precision=self.precision)

    def admits(self, name: str, value: object) -> bool:
        """Whether a field may have this value."""
        return self.fixed.get(name, value) == value
