"""Exit status of a job: from the ends of all its ranks to one sentence and one exit code. Free of torch."""

import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from muster.launch.hang_diagnosis import RankFault
from muster.launch.rank_errors import EXIT_STOPPED, RankError, log_path, read_rank_error, write_exit_file
from muster.spec.errors import MusterError

_NO_RANK = -1
OBSERVED_BY_LAUNCHER = "ended"
"""Kind of an error that a launcher observed, because the rank could report nothing itself."""


@dataclass(frozen=True)
class RankExit:
    """End of one rank's process."""

    rank: int
    host: str
    code: int
    """Exit code, or minus the signal that killed it."""
    killed: bool
    """True when its launcher killed it."""
    reported: RankError | None
    """Error that the rank reported."""
    observed: RankError | None
    """Error that its launcher observed, where the rank reported none."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data, which `rank_exit_from_json` reads."""
        return asdict(self)


def rank_exit_from_json(row: dict[str, Any], clock_offset_s: float = 0.0) -> RankExit:
    """Read the RankExit of a node whose clock is ahead of this one's by `clock_offset_s`."""
    errors = {key: row[key] and RankError(**row[key]) for key in ("reported", "observed")}
    moved = {key: error and replace(error, time=error.time - clock_offset_s) for key, error in errors.items()}
    return RankExit(**{**row, **moved})


def collect_rank_exit(
    run_dir: Path,
    rank: int,
    code: int,
    killed: bool,
    last_alive: float,
    stop_requested: bool,
    ran_out_of_memory: bool | None = False,
) -> RankExit:
    """Return the end of a rank on this machine, which was last known to run at the time `last_alive`.

    `ran_out_of_memory`: the kernel has killed a process meanwhile because memory ran out; None: nobody knows.
    """
    reported = read_rank_error(run_dir, rank)
    failed_alone = code not in (0, EXIT_STOPPED) and not killed and not (code == -signal.SIGTERM and stop_requested)
    observed = None
    if failed_alone and reported is None:
        if code < 0:
            name = next((known.name for known in signal.Signals if known == -code), signal.strsignal(-code))
            sentence = f"was killed by signal {-code} ({name})"
            if code == -signal.SIGKILL and ran_out_of_memory is not False:
                sentence += ": the kernel ran out of memory" if ran_out_of_memory else "; out of memory?"
        else:
            log = f"; {log_path(run_dir, rank)} may say more" if rank else ""
            sentence = f"ended with exit code {code} and no reason{log}"
        # It died after it was last known to run, and before any other rank could notice: that time orders the causes.
        # An abort is seldom the first cause, since the C++ runtime aborts when a connection breaks at a bad moment.
        observed = make_observed_error(rank, socket.gethostname(), sentence, last_alive, code != -signal.SIGABRT)
    if code in (0, EXIT_STOPPED):
        reported = None
    return RankExit(rank, socket.gethostname(), code, killed, reported, observed)


def launcher_exit(error: MusterError | OSError, at: float) -> RankExit:
    """Return the end of ranks whose launcher, on this machine, has failed beside them `at` a time in seconds since
    1970: errors of theirs may have come before."""
    host = socket.gethostname()
    observed = RankError(_NO_RANK, host, type(error).__name__, str(error), "", at, primary=True, exit_code=1)
    return RankExit(_NO_RANK, host, 1, killed=False, reported=None, observed=observed)


def make_observed_error(rank: int, host: str, sentence: str, at: float = 0.0, primary: bool = True) -> RankError:
    """Return the error that a launcher reports in place of a rank."""
    return RankError(rank, host, OBSERVED_BY_LAUNCHER, sentence, "", at, primary, exit_code=1)


def root_cause(
    rank_exits: Sequence[RankExit], stop_requested: bool, hang_fault: RankFault | None = None
) -> RankError | None:
    """Return the first error of any rank; errors that only follow from another rank's end count when there is no
    other."""
    if hang_fault is not None:
        return make_observed_error(hang_fault.rank, hang_fault.host, hang_fault.sentence)
    found = [error for end in rank_exits if (error := end.reported or end.observed) is not None]
    first = min(found, key=lambda error: (not error.primary, error.time), default=None)
    # A rank that was asked to stop before it handled signals has died of it, and the others may have noticed.
    stopped_early = stop_requested and any(end.code == -signal.SIGTERM for end in rank_exits)
    if first is None or (stopped_early and not first.primary):
        return None
    silent = [end for end in rank_exits if end.killed and end.reported is None]
    if first.primary or len(silent) != 1:
        return first
    sentence = f"stopped responding, according to rank {first.rank}: {first.sentence}"
    return replace(first, rank=silent[0].rank, host=silent[0].host, kind=OBSERVED_BY_LAUNCHER, sentence=sentence)


@dataclass(frozen=True)
class ExitStatus:
    """Exit code and reason of a job, with the rank and host to blame."""

    code: int
    reason: str
    rank: int | None = None
    host: str | None = None
    restartable: bool = False
    """True where another attempt may go on: a rank was lost, hung, or met an error that isn't one of the request."""
    is_untold: bool = False
    """True where the ranks were stopped on request before they could tell of it, as those of a training do."""
    step: int = 0
    """Last step that all ranks had finished, as far as they had told their launcher, that of node 0; 0: none."""

    def report(self) -> int:
        """Print the reason of a failure; returns the exit code."""
        if self.code not in (0, EXIT_STOPPED):
            print(f"error: {self.reason}", file=sys.stderr, flush=True)
        return self.code

    def report_training(self) -> int:
        """Print the reason of a failure, and of a stop of which no rank told; returns the exit code."""
        if self.is_untold:
            print(self.reason, flush=True)
        return self.report()

    def write(self, run_dir: Path) -> None:
        """Write `exit.json`."""
        write_exit_file(run_dir, self.code, self.reason, self.rank, self.host)


def determine_exit_status(
    rank_exits: Sequence[RankExit], stop_requested: bool, kill_requested: bool, hang_fault: RankFault | None = None
) -> ExitStatus:
    """Determine the exit status of a job from the ends of its ranks."""
    if kill_requested and any(end.killed for end in rank_exits):
        return ExitStatus(1, "killed on request: the steps since the last checkpoint are lost")
    cause = root_cause(rank_exits, stop_requested, hang_fault)
    if cause is not None:
        joint = " " if cause.kind == OBSERVED_BY_LAUNCHER else ": "
        rank = None if cause.rank == _NO_RANK else cause.rank
        who = "the launcher" if rank is None else f"rank {rank}"
        reason = f"{who} on {cause.host}{joint}{cause.sentence}"
        return ExitStatus(cause.exit_code, reason, rank, cause.host, not stop_requested and not cause.is_lasting)
    if any(end.rank == 0 and end.code == -signal.SIGTERM for end in rank_exits):
        reason = "stopped on request while its ranks started; the same command goes on"
        return ExitStatus(EXIT_STOPPED, reason, is_untold=True)
    if any(end.code != 0 for end in rank_exits):
        return ExitStatus(EXIT_STOPPED, "stopped on request; the same command continues the run")
    return ExitStatus(0, "finished")
