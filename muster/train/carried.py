"""State that a rank carries from one generation of ranks to the next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.cost.time.op_times import OpTimes
from muster.parallel.op_profile import StageProfile
from muster.spec.plan import Plan
from muster.train.checkfree import KeptState
from muster.train.metrics import MetricsLog


@dataclass
class Carried:
    """State that a rank carries from one generation of ranks to the next, beside its copies in memory."""

    stop_requested: bool = False
    started_at: float = 0.0
    """Time at which the first generation was ready, in seconds since 1970; 0 before."""
    profiles: dict[str, list[StageProfile]] = field(default_factory=dict)
    """Profiles of all ranks, by rank, for each plan that there has been, by its hash without a pinned order."""
    leave_requested: Callable[[], bool] = lambda: False
    """True once another generation follows at the end of a step."""
    usual_times: tuple[Plan, OpTimes] | None = None
    """A plan and the times of its passes where no rank is slow: of the run's first profile, corrected since."""
    usual_plan: Plan | None = None
    """Plan for as many ranks where none is slow; None where ranks don't change."""
    plan_refined: Callable[[Plan], None] = lambda plan: None
    """Receiver of the plan once its schedule has been refined."""
    num_plan_changes: int = 0
    """Changes of the plan because of slow ranks that this process has asked for, as rank 0."""
    ask_for_plan: Callable[[Plan], None] = lambda plan: None
    """Asks for another generation under this plan, on rank 0."""
    kept: Sequence[KeptState] = ()
    """State of this rank's stage when its last generation ended, and the copy of another stage that it had, under
    `train.recovery` checkfree."""
    logs: dict[Path, MetricsLog] = field(default_factory=dict)
    """Logs by path, with the rows that a full disk did not take yet."""

    def log(self, path: Path) -> MetricsLog:
        """Return the log in a file."""
        return self.logs.setdefault(path, MetricsLog(path))

    def request_stop(self, *_: object) -> None:
        """Stop after the present step, as on SIGTERM."""
        self.stop_requested = True
