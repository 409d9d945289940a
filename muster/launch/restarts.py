"""Restarts of a job that lost ranks: when another attempt may help, how long to wait before it, and their record.

Free of torch. A node's loss, a broken link or a kernel that ran out of memory is over once the ranks start again from
the newest state; an error in the request would only come again. Attempts that get no further wait twice as long each
time, so that a machine that needs a minute is given it, and are limited, so that a job that can't go on ends.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from muster.launch.exit_status import ExitStatus
from muster.report.run_files import RESTARTS_FILE, append_row
from muster.spec.units import pluralize

_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
"""Seconds before the second restart in a row without progress, doubled for each further one, and their limit."""
_LAUNCH_TIME_VARIABLE = "MUSTER_LAUNCH_TIME"
"""Environment variable, which ranks inherit, with the time at which a person started their launcher."""


def note_launch_time() -> None:
    """Note that a person has started this launcher now."""
    os.environ[_LAUNCH_TIME_VARIABLE] = str(time.time())


def launch_time() -> float | None:
    """Return when a person started this process's launcher, in seconds since 1970; None where nobody noted it."""
    noted = os.environ.get(_LAUNCH_TIME_VARIABLE)
    return None if noted is None else float(noted)


def wait_before(attempt: int) -> float:
    """Return the seconds to wait before an attempt in a row without progress, from 1: 0, 1, 2, 4, … up to 60."""
    return 0.0 if attempt == 1 else min(_FIRST_WAIT_S * 2 ** (attempt - 2), _LONGEST_WAIT_S)


@dataclass
class Restarts:
    """Restarts of one job; `last_step` returns the last step that it has logged, 0 before the first.

    Ranks may have got further than that, as node 0 tells all launchers. Each of several counts by itself, so that all
    have to know the same: what was logged, on a disk that they share, where node 0 is gone and tells none.
    """

    run_dir: Path
    limit: int
    """Most restarts in a row without a new step."""
    last_step: Callable[[], int]
    writes_file: bool = True
    """False on nodes that leave the run's record to node 0."""
    in_a_row: int = 0
    furthest_step: int = 0

    def wait_for_next(self, status: ExitStatus) -> bool:
        """Announce, record and await the next attempt; False where there is none: the job has ended by itself or on
        request, would fail in the same way, or has come to the limit."""
        if not status.restartable or not self.limit:
            return False
        step = max(status.step, self.last_step())
        if step > self.furthest_step:
            self.in_a_row, self.furthest_step = 0, step
        if self.in_a_row == self.limit:
            return False
        self.in_a_row += 1
        wait_s = wait_before(self.in_a_row)
        later = f" in {wait_s:g} s" if wait_s else ""
        print(f"restart {self.in_a_row} of {self.limit}{later}, after step {step}: {status.reason}", flush=True)
        if self.writes_file:
            self._record(status, step)
        time.sleep(wait_s)
        return True

    def explained(self, status: ExitStatus) -> ExitStatus:
        """Return the status of the last attempt, with the attempts before it that got no further."""
        if not status.restartable or not self.in_a_row:
            return status
        return replace(status, reason=f"{status.reason}; {pluralize(self.in_a_row, 'restart')} got no further")

    def _record(self, status: ExitStatus, step: int) -> None:
        row = {"time": time.time(), "step": step, "reason": status.reason, "rank": status.rank, "host": status.host}
        row["launched"] = launch_time()
        try:
            append_row(self.run_dir / RESTARTS_FILE, row)
        except OSError as error:
            print(f"{self.run_dir / RESTARTS_FILE} can't be written ({error.strerror})", flush=True)
