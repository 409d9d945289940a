"""Start of ranks' processes: forks of a process that has imported their module, or interpreters of their own."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Protocol, Self

from muster.launch.fork_server import RANK_PYTHON, ForkServer

_CHECK_INTERVAL_S = 0.05
_IMPORT_TIMEOUT_S = 60.0
"""Longest wait for a fork server: imports take seconds, on a busy machine or file system a multiple."""


class Process(Protocol):
    """Child process of this one."""

    pid: int

    @property
    def stdin(self) -> IO[bytes] | None:
        """The writer's end of its standard input."""
        ...

    def wait(self) -> int:
        """Reap the process; returns its exit code, or minus the signal that killed it."""
        ...


class RankStarter:
    """Starts processes of ranks, and keeps the fork server between the attempts of a job."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._unforkable: set[str] = set()
        """Modules whose server has ended instead."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Begin to have ready to be forked what ranks import whose command begins as `command`. Where there can be no
        fork server, they are interpreters."""
        if sys.platform != "linux" or not _is_forkable(command):
            return
        module, variables = command[len(RANK_PYTHON)], _complete(environment)
        if self._server is not None and not self._serves(self._server, module, variables):
            self.close()
        if self._server is None and module not in self._unforkable:
            with contextlib.suppress(OSError):  # of which the ranks tell, too
                self._server = ForkServer(module, variables)

    def await_imports(self, goes_on: Callable[[], bool]) -> None:
        """Wait for what was begun while `goes_on`, a minute at most."""
        limit = time.monotonic() + _IMPORT_TIMEOUT_S
        while self._server is not None and goes_on() and time.monotonic() < limit:
            is_ready = self._server.await_imports(_CHECK_INTERVAL_S)
            if is_ready:
                return
            if is_ready is False:
                self._unforkable.add(self._server.module)
                self.close()

    @staticmethod
    def _serves(server: ForkServer, module: str, variables: Mapping[str, str]) -> bool:
        """Return whether a server is alive and has imported this module in this environment, or is about to."""
        return (server.module, server.environment) == (module, variables) and server.await_imports(0) is not False

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        files: Mapping[str, Sequence[int]],
        output: int | None = None,
    ) -> Process:
        """Start a process in a session, and so a process group, of its own, whose standard input is a pipe.

        It inherits `files`: descriptors, keyed by the environment variable that lists them. It writes to the descriptor
        `output`; None: to this process's outputs. Raises OSError where no process can be started.
        """
        variables = _complete(environment)
        if self._server is not None and _is_forkable(command) and self._server.await_imports(0):
            outputs = (1, 2) if output is None else (output, output)
            process = self._server.fork(command, variables, outputs, files)
            if process is not None:
                return process
            self.close()
        numbers = {variable: ",".join(map(str, descriptors)) for variable, descriptors in files.items()}
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**variables, **numbers},
            pass_fds=[one for descriptors in files.values() for one in descriptors],
            start_new_session=True,
        )

    def close(self) -> None:
        """End the fork server. Ranks go on."""
        if self._server is not None:
            self._server.close()
        self._server = None


def _is_forkable(command: Sequence[str]) -> bool:
    return tuple(command[: len(RANK_PYTHON)]) == RANK_PYTHON


def _complete(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank: that of this process, with one thread for each operator by default."""
    return {"OMP_NUM_THREADS": "1", **os.environ, **environment}


def quiet_pytorch(is_elastic: bool) -> None:
    """Have PyTorch keep warnings to itself, here and in ranks.

    It warns, with a stack of its own, of each connection that a lost process leaves and of nameless addresses. Where
    others go on without a lost rank, gloo's errors are such warnings, too: of groups that break while they are made,
    and are made anew. A rank that fails for one has it in its exception.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL" if is_elastic else "ERROR")
