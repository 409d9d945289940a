"""`muster` commands without the seconds that an interpreter needs to import PyTorch, for tests of what they do.

A server, forked from the nursery of ranks, which has imported all of it, forks one process for each command; so do the
commands for what they start with `python -m muster.…`: ranks, and the processes that write their checkpoints. Each is a
process like any other, with its own number, session, streams and environment. Only its command line says nothing, but
for those of ranks; so tests that look for that, or are about how commands start, start interpreters:
`interpreter_words()`.

Where PyTorch finds a GPU all commands start interpreters: CUDA doesn't survive a fork.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import muster.cli
from muster.launch.fork_server import run_and_exit
from tests.ranks import nursery

_CLIENT = Path(__file__).with_name("fork_client.py")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


# ----------------------------------------------------------------------------------------------------------------------
# In the tests


def run(*words: str | Path, program: str | Path = "muster", timeout_s: float = 600, **more: Any) -> Any:
    """A command that ends by itself: `subprocess.CompletedProcess`, with what it said as texts."""
    command = [*words_of(program), *map(str, words)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout_s, **more
    )


def words_of(program: str | Path = "muster") -> list[str]:
    """The words that the command line of `muster`, or of a Python script, begins with."""
    if torch.cuda.is_available():
        return interpreter_words() if program == "muster" else [sys.executable, str(program)]
    return [sys.executable, "-I", "-S", str(_CLIENT), _server(), str(program)]


def interpreter_words() -> list[str]:
    """The same, for an interpreter as a person would start it."""
    return [sys.executable, "-m", "muster"]


@functools.cache
def _server() -> str:
    """Address of this test process's fork server."""
    folder = tempfile.TemporaryDirectory(prefix="forks-")
    _KEPT.append(folder)
    place = str(Path(folder.name) / "socket")
    nursery().serve_commands(place)
    return place


_KEPT: list[tempfile.TemporaryDirectory] = []
"""Folders that go with this process."""


# ----------------------------------------------------------------------------------------------------------------------
# The server


def serve(place: str, ready: int) -> int:
    """Forks a process for each command that is asked for at the socket `place`; closes `ready` once it listens."""
    _die_with_parent()
    import_all()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen(64)
        os.close(ready)
        while True:
            asking, _ = listener.accept()
            if os.fork() == 0:
                run_and_exit(partial(_see_through, asking, listener))
            asking.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def import_all() -> None:
    """Imports what commands need, so that none has to that is forked from here."""
    for module in pkgutil.iter_modules(muster.cli.__path__, "muster.cli."):
        importlib.import_module(module.name)
    parts = ("muster.train.worker", "muster.train.verify.rank", "muster.checkpoint.writer_process", "torch._dynamo")
    for name in parts:  # PyTorch imports the last with the first tensor that it initializes
        importlib.import_module(name)
    gc.freeze()


def _see_through(asking: socket.socket, listener: socket.socket) -> int:
    """One command, from what is asked to its exit code, which is told; whoever asked takes it along when he goes."""
    _die_with_parent()
    listener.close()
    said, streams, _, _ = socket.recv_fds(asking, 2**16, 3)
    while not said.endswith(b"\n"):
        said += asking.recv(2**16)
    command = os.fork()
    if command == 0:
        run_and_exit(partial(_be_command, json.loads(said), streams))
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(OSError):
        asking.sendall(b"%d\n" % command)
    end = os.pidfd_open(command)
    ready, _, _ = select.select([end, asking], [], [])
    if end not in ready:
        os.killpg(command, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    with contextlib.suppress(OSError):
        asking.sendall(json.dumps(code).encode())
    return 0


def _be_command(asked: dict[str, Any], streams: list[int]) -> int:
    os.setpgid(0, 0)
    _die_with_parent()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(asked["cwd"])
    program, *words = asked["words"]
    return _run(program, words, asked["environment"], keep=())


# ----------------------------------------------------------------------------------------------------------------------
# In the forked processes


class ForkingPopen(subprocess.Popen):
    """Forks where an interpreter would be started for one of Muster's modules."""

    def __init__(self, args: Any, *others: Any, **more: Any) -> None:
        words = [] if isinstance(args, str | bytes | os.PathLike) else [str(word) for word in args]
        at = words.index("-m") if "-m" in words else len(words)
        if words[:1] == [sys.executable] and at < 4 and "".join(words[at + 1 : at + 2]).startswith("muster."):
            module, rest = words[at + 1], words[at + 2 :]
            environment = more.get("env")
            environment = dict(os.environ) if environment is None else environment
            sys.stdout.flush()
            sys.stderr.flush()
            more["preexec_fn"] = partial(
                run_and_exit, partial(_run, module, rest, environment, tuple(more.get("pass_fds", ())))
            )
        super().__init__(args, *others, **more)


def _run(program: str, words: Sequence[str], environment: Mapping[str, str], keep: tuple[int, ...]) -> int:
    """`python -m program words`, or a script, in this process; it closes all files but its streams and `keep`."""
    for low, high in zip((2, *sorted(keep)), (*sorted(keep), os.sysconf("SC_OPEN_MAX")), strict=True):
        os.closerange(low + 1, high)
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as an interpreter does when it starts
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("HELD_AFTER"):
        importlib.import_module("tests.held.sitecustomize").listen()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    sys.argv = [program, *words]
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
        return 0
    sys.path[0] = os.getcwd()
    if program != "muster":
        for module in (program, *words[:1]):  # as in a new interpreter, they are `__main__` only
            sys.modules.pop(module, None)
    runpy.run_module(program, run_name="__main__", alter_sys=True)
    return 0


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
