"""Errors of ranks, recorded so that the launcher can name one cause; free of torch.

In the run directory: `logs/rank-R.txt` (output and tracebacks), `logs/rank-R.error.json` (reason of rank R's end),
`logs/hang.txt` (activity of each rank when a hang was found), `exit.json` (exit status of the whole job).
"""

import contextlib
import json
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from muster.config.file_writer import write_durably
from muster.report.recoveries import LossCause
from muster.spec.errors import MusterError, UnreachableError

EXIT_STOPPED = 75
"""Exit code of a job that saved and stopped on request (EX_TEMPFAIL: run it again)."""

_PEER_ERROR_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_PEER_ERROR_TEXTS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "pair closure")


class StragglerError(MusterError):
    """End of a rank that is slow, or computes wrongly, so that a spare takes its place."""

    def __init__(self, sentence: str, cause: LossCause) -> None:
        super().__init__(sentence)
        self.cause: LossCause = cause


@dataclass(frozen=True)
class RankError:
    """Reason of one rank's end."""

    rank: int
    host: str
    kind: str
    """Class of the exception."""
    sentence: str
    traceback: str
    time: float
    """Seconds since the epoch."""
    primary: bool
    """False for an error that only says that another rank is gone or silent."""
    exit_code: int
    is_lasting: bool = False
    """True for an error that another attempt would meet again, such as one of the request."""
    cause: LossCause = "dead"
    """Cause of the loss."""


def run_guarded(run_dir: Path, number: Callable[[], int], body: Callable[[], int], announce: bool = False) -> int:
    """Run a rank's `body` and return its exit code; an exception becomes an error file and an exit code.

    `number` returns the rank's number, which may change while it runs. The full traceback goes to the rank's log.
    `announce` also prints the sentence, for ranks that Muster's launcher did not start.
    """
    try:
        return body()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # extensions written in Rust panic with a BaseException
        rank = number()
        found = make_rank_error(error, rank)
        problem = _write_rank_error(run_dir, found)
        if announce or problem is not None:
            print(f"error: rank {rank} on {found.host}: {found.sentence}", file=sys.stderr, flush=True)
        return found.exit_code


def make_rank_error(error: BaseException, rank: int) -> RankError:
    """Return the error of this process's rank in the words that a person will read."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, MusterError):
        sentence = str(error)
    elif _is_peer_error(error):
        sentence = f"lost the connection to another rank ({first_line})"
    else:
        what = f"{type(error).__name__}: {first_line}".removesuffix(": ")
        sentence = f"{what} (traceback in {log_path(Path(), rank)})"
    return RankError(
        rank=rank,
        host=socket.gethostname(),
        kind=type(error).__name__,
        sentence=sentence,
        traceback="".join(traceback.format_exception(error)),
        time=time.time(),
        primary=not says_only_that_a_rank_is_lost(error),
        exit_code=error.exit_code if isinstance(error, MusterError) else 1,
        is_lasting=isinstance(error, MusterError) and not isinstance(error, (StragglerError, UnreachableError)),
        cause=error.cause if isinstance(error, StragglerError) else "dead",
    )


def says_only_that_a_rank_is_lost(error: BaseException) -> bool:
    """Return whether an error only follows from the end or the silence of another rank."""
    return any(_is_peer_error(link) for link in _cause_chain(error))


def log_path(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank's output and tracebacks."""
    return run_dir / "logs" / f"rank-{rank}.txt"


def error_path(run_dir: Path, rank: int) -> Path:
    """Return the file with the reason of a rank's failure."""
    return run_dir / "logs" / f"rank-{rank}.error.json"


def hang_path(run_dir: Path) -> Path:
    """Return the file with the activity of each rank when a hang was found."""
    return run_dir / "logs" / "hang.txt"


def read_rank_error(run_dir: Path, rank: int) -> RankError | None:
    """Return the error that a rank has recorded; None without one."""
    try:
        return RankError(**json.loads(error_path(run_dir, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_exit_file(run_dir: Path, code: int, reason: str, rank: int | None = None, host: str | None = None) -> None:
    """Write `exit.json`: exit code, reason, and the rank and host to blame. A full disk is ignored."""
    content = {"code": code, "reason": reason, "rank": rank, "host": host, "time": time.time()}
    with contextlib.suppress(OSError):
        write_durably(run_dir / "exit.json", json.dumps(content) + "\n")


def _write_rank_error(run_dir: Path, error: RankError) -> OSError | None:
    """Write the error file, from which the launcher prints the sentence, and the traceback; return why the file
    couldn't be written. A disk may be full after the first of both."""
    try:
        log_path(run_dir, error.rank).parent.mkdir(parents=True, exist_ok=True)
        write_durably(error_path(run_dir, error.rank), json.dumps(asdict(error)))
    except OSError as problem:
        return problem
    with contextlib.suppress(OSError), open(log_path(run_dir, error.rank), "a") as log:
        log.write(error.traceback)
    return None


def _cause_chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_peer_error(error: BaseException) -> bool:
    if any(kind.__name__ in _PEER_ERROR_TYPES for kind in type(error).__mro__):
        return True
    if isinstance(error, (ConnectionError, UnreachableError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _PEER_ERROR_TEXTS)
