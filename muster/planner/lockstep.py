"""Coroutines in lockstep, on one process or on several that are forked.

Each coroutine is resumed with a message and answers with a report. All of a step's reports are awaited before the next
step begins, so that nothing depends on which is done first, and the number of processes changes no result.
"""

import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
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


def run_in_lockstep(
    coroutines: Sequence[Generator[Report, Message, None]], processes: int
) -> "Lockstep[Message, Report]":
    """Return coroutines that are ready for their first message, on as many processes as are wanted and can be had."""
    processes = min(processes, len(coroutines))
    return _OwnProcess(coroutines) if processes < 2 or not can_fork() else _Forked(coroutines, processes)


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
