"""Coroutines in lockstep, on one process or on several that are forked.

Each coroutine is resumed with a message and answers with a report. All of a step's reports are awaited before the next
step begins, so that nothing depends on which is done first, and the number of processes changes no result.

Within `kept_processes` the children live on from one job to the next, with what they have computed: a job is then sent
to them as data, of which they make their coroutines. Else they are forked for each job, and end with it.
"""

import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

Message = TypeVar("Message", contravariant=True)
Report = TypeVar("Report")


class Lockstep(Protocol[Message, Report]):
    """Coroutines that are resumed together."""

    def step(self, messages: Sequence[Message]) -> list[Report]:
        """Resume every coroutine with its message, and return their reports in order."""
        ...

    def close(self) -> None:
        """End all coroutines and their processes."""
        ...


class Job(Protocol):
    """Work for coroutines, as data that another process can read."""

    def coroutines(self, numbers: Sequence[int]) -> list[Generator[Any, Any, None]]:
        """Return some of the coroutines, by number."""
        ...


def run_in_lockstep(
    coroutines: Sequence[Generator[Report, Message, None]], processes: int, job: Job | None = None
) -> "Lockstep[Message, Report]":
    """Return coroutines that are ready for their first message, on as many processes as are wanted and can be had.
    `job`: makes the same ones in another process."""
    processes = min(processes, len(coroutines))
    if processes < 2 or not can_fork():
        return _OwnProcess(coroutines)
    if _scopes and job is not None:
        return _OnKept(coroutines, _scopes[-1].of(processes), job)
    return _Forked(coroutines, processes)


def usable_processes() -> int:
    """Return the number of processes that searches may use: the cores of this process."""
    return len(os.sched_getaffinity(0)) if can_fork() else 1


def can_fork() -> bool:
    """Return True if a fork of this process is safe: no other threads, and no PyTorch, whose threads may hold locks."""
    return sys.platform == "linux" and "torch" not in sys.modules and threading.active_count() == 1


class _OwnProcess:
    """Coroutines that take turns in this process."""

    def __init__(self, coroutines: Sequence[Generator[Any, Any, None]]) -> None:
        self.coroutines = coroutines
        for coroutine in coroutines:
            next(coroutine)

    def step(self, messages: Sequence[Any]) -> list[Any]:
        return [coroutine.send(message) for coroutine, message in zip(self.coroutines, messages, strict=True)]

    def close(self) -> None:
        for coroutine in self.coroutines:
            coroutine.close()


class _Forked:
    """Coroutines on this process and on children of it, dealt out in turn.

    A child ends when its pipe is closed, so that none outlives this process, however that ends.
    """

    def __init__(self, coroutines: Sequence[Generator[Any, Any, None]], processes: int) -> None:
        self.processes = processes
        self.children: list[tuple[Any, Connection]] = []
        context = get_context("fork")
        for number in range(1, processes):
            mine, its = context.Pipe()
            inherited = [mine, *(connection for _, connection in self.children)]
            child = context.Process(target=_serve, args=(coroutines[number::processes], its, inherited), daemon=True)
            child.start()
            its.close()
            self.children.append((child, mine))
        self.own = _OwnProcess(coroutines[::processes])

    def step(self, messages: Sequence[Any]) -> list[Any]:
        for number, (_, connection) in enumerate(self.children, 1):
            connection.send(messages[number :: self.processes])
        reports: list[Any] = [None] * len(messages)
        reports[:: self.processes] = self.own.step(messages[:: self.processes])
        for number, (_, connection) in enumerate(self.children, 1):
            found = connection.recv()
            if isinstance(found, BaseException):
                raise found
            reports[number :: self.processes] = found
        return reports

    def close(self) -> None:
        self.own.close()
        for child, connection in self.children:
            connection.close()
            child.terminate()
            child.join()


# ----------------------------------------------------------------------------------------------------------------------
# Processes that are kept


class _Kept:
    """Children of this process that wait for jobs; each ends when its pipe is closed."""

    def __init__(self) -> None:
        self.children: list[tuple[Any, Connection]] = []

    def of(self, processes: int) -> list[Connection]:
        """Return pipes to all processes but this one, of so many."""
        context = get_context("fork")
        while len(self.children) < processes - 1:
            mine, its = context.Pipe()
            inherited = [mine, *(connection for _, connection in self.children)]
            child = context.Process(target=_serve_jobs, args=(its, inherited), daemon=True)
            child.start()
            its.close()
            self.children.append((child, mine))
        return [connection for _, connection in self.children[: processes - 1]]

    def close(self) -> None:
        for child, connection in self.children:
            connection.close()
            child.terminate()
            child.join()


_scopes: list[_Kept] = []
_job_numbers = count()


@contextmanager
def kept_processes() -> Iterator[None]:
    """Keep the processes that jobs are given to, until the end of the block."""
    if _scopes:
        yield
        return
    _scopes.append(_Kept())
    try:
        yield
    finally:
        _scopes.pop().close()


class _OnKept:
    """Coroutines on this process and on kept ones, dealt out in turn."""

    def __init__(
        self, coroutines: Sequence[Generator[Any, Any, None]], connections: Sequence[Connection], job: Job
    ) -> None:
        self.connections = connections
        self.processes = len(connections) + 1
        self.number = next(_job_numbers)
        for number, connection in enumerate(connections, 1):
            connection.send((self.number, job, range(number, len(coroutines), self.processes)))
        self.own = _OwnProcess(coroutines[:: self.processes])

    def step(self, messages: Sequence[Any]) -> list[Any]:
        for number, connection in enumerate(self.connections, 1):
            connection.send((self.number, None, messages[number :: self.processes]))
        reports: list[Any] = [None] * len(messages)
        reports[:: self.processes] = self.own.step(messages[:: self.processes])
        for number, of_process in enumerate(map(self._receive, self.connections), 1):
            if isinstance(of_process, BaseException):
                raise of_process
            reports[number :: self.processes] = of_process
        return reports

    def _receive(self, connection: Connection) -> Any:
        """Return the answer to this job's last message; those to a job that was broken off are passed over."""
        while True:
            number, answer = connection.recv()
            if number == self.number:
                return answer

    def close(self) -> None:
        self.own.close()


def _serve_jobs(connection: Connection, inherited: Sequence[Connection]) -> None:
    """Take jobs and answer messages until the other end of the pipe is closed; exceptions are answers, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _scopes.clear()
    for other in inherited:
        other.close()
    own: _OwnProcess | Exception | None = None
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            number, job, content = connection.recv()
            answer: Any = own
            try:
                if job is not None:
                    own = None
                    own = _OwnProcess(job.coroutines(content))
                elif isinstance(own, _OwnProcess):
                    answer = own.step(content)
            except Exception as error:
                answer = own = error
            if job is None:
                connection.send((number, answer))


# ----------------------------------------------------------------------------------------------------------------------


def _serve(
    coroutines: Sequence[Generator[Any, Any, None]], connection: Connection, inherited: Sequence[Connection]
) -> None:
    """Answer messages until the other end of the pipe is closed; exceptions are answers, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted as well, and closes the pipe
    for other in inherited:
        other.close()
    with suppress(EOFError, BrokenPipeError):
        try:
            own = _OwnProcess(coroutines)
            while True:
                connection.send(own.step(connection.recv()))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:
            connection.send(error)
