"""Fork server: a process that has imported the module of ranks, and forks them from itself in milliseconds.

An interpreter needs seconds of a core to import PyTorch. With more ranks than cores these add up, when a job starts and
whenever it starts again, and on a cluster every rank reads thousands of small files. A fork has all of it and shares
its memory. The idea is that of `multiprocessing`'s forkserver, whose processes are its own children, though: a launcher
waits for its ranks and kills their groups, so these become the launcher's.

A process with threads can't be forked, nor one that has opened a GPU, since CUDA doesn't survive it. Such a server
ends, and ranks are interpreters of their own, as they are on systems other than Linux. Free of torch.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

RANK_PYTHON = (sys.executable, "-X", "faulthandler", "-m", "muster.launch.rank_module")
"""First words of a rank's command, before its module and that module's arguments."""
_SPARE_BYTES = 1024
"""Room in the server's command line for those of ranks, which replace it."""
_ANSWER_TIMEOUT_S = 10.0
"""Longest wait for a fork, which takes milliseconds."""
_MESSAGE_BYTES = 1 << 16
_SET_CHILD_SUBREAPER = 36
"""Linux's PR_SET_CHILD_SUBREAPER, which makes orphans below a process its children."""
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


class ForkedProcess:
    """Child process that a fork server has forked, as `subprocess.Popen` is one that this process has started."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid, self.stdin = pid, stdin

    def wait(self) -> int:
        """Reap the process; returns its exit code, or minus the signal that killed it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkServer:
    """Fork server of a launcher, for ranks of one module; ends when it is closed and when its launcher ends."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        """Start to import `module`. Raises OSError where no process can be started."""
        self.module, self.environment = module, dict(environment)
        self._connection, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*RANK_PYTHON[:-1], "muster.launch.fork_server", module, " " * _SPARE_BYTES],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self.environment,
                start_new_session=True,
            )
        except OSError:
            self._connection.close()
            raise
        finally:
            theirs.close()
        self._connection.settimeout(_ANSWER_TIMEOUT_S)
        self._has_answered = False

    def is_waiting(self, wait_s: float) -> bool:
        """Return whether the server is done with its imports, or has ended; wait up to `wait_s` for it."""
        return self._has_answered or bool(select.select([self._connection], [], [], wait_s)[0])

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        outputs: Sequence[int],
        files: Mapping[str, Sequence[int]],
    ) -> ForkedProcess | None:
        """Fork a process in a session of its own that does what `command`, which begins with `RANK_PYTHON`, would do.

        `outputs` are the descriptors of its standard output and error; `files` are those that it inherits, by the
        variable with their numbers. None where this server can't fork. Raises OSError where there can be no more
        processes.
        """
        sizes = {variable: len(descriptors) for variable, descriptors in files.items()}
        request = {"command": [*command], "environment": dict(environment), "files": sizes}
        passed = [*outputs, *(one for descriptors in files.values() for one in descriptors)]
        reading, writing = os.pipe()
        try:
            if not self._has_answered:  # its first line says that it is ready
                self._has_answered = "ready" in self._read_answer()
            with _adopted_orphans():
                socket.send_fds(self._connection, [json.dumps(request).encode() + b"\n"], [reading, *passed])
                answer = self._read_answer()
        except OSError:  # the server has ended or is stuck, or an output of this process is closed
            answer = {}
        finally:
            os.close(reading)
        if "pid" in answer:
            return ForkedProcess(answer["pid"], open(writing, "wb"))
        os.close(writing)
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]), command[0])
        return None

    def _read_answer(self) -> dict[str, Any]:
        """Read a line; nothing where the server has ended."""
        with self._connection.makefile("rb") as lines:
            return json.loads(lines.readline() or b"{}")

    def close(self) -> None:
        """End the server. What it has forked goes on."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def _adopted_orphans() -> Iterator[None]:
    """Make orphans below this process its children meanwhile. Raises OSError where the system can't."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None or prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("no subreapers")
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# ----------------------------------------------------------------------------------------------------------------------
# In the server


def serve(module: str) -> None:
    """Import `module`, then fork a process for each request that comes in over standard input, until that ends."""
    gc.disable()  # as `rank_module` does
    importlib.import_module(module)
    gc.freeze()
    if not _can_fork():
        return
    with socket.socket(fileno=0) as connection:
        connection.sendall(b'{"ready": true}\n')
        while received := _receive(connection):
            request, files = received
            answer = _fork(connection, request, files)
            for file in files:
                os.close(file)
            connection.sendall(json.dumps(answer).encode() + b"\n")


def _can_fork() -> bool:
    """Return whether this process has one thread and no GPU."""
    folder = Path("/proc/self")
    targets = []
    for link in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the folder
            targets.append(os.readlink(link))
    return len([*(folder / "task").iterdir()]) == 1 and not any(one.startswith(_GPU_DEVICES) for one in targets)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next request and the files that come with it; None at the end."""
    data, files, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 16)
    while data and not data.endswith(b"\n"):
        more = connection.recv(_MESSAGE_BYTES)
        data = more and data + more
    return (json.loads(data), files) if data else None


def _fork(connection: socket.socket, request: dict[str, Any], files: list[int]) -> dict[str, int]:
    """Fork a process that leaves the server, as an orphan; return its number, or why there is none."""
    reading, writing = os.pipe()
    try:
        parent = os.fork()
    except OSError as error:
        os.close(writing)
        os.close(reading)
        return {"errno": error.errno or 0}
    if parent == 0:
        try:
            if os.fork() == 0:
                connection.detach()
                os.close(reading)
                os.setsid()
                os.write(writing, json.dumps({"pid": os.getpid()}).encode())
                os.close(writing)
                _become_rank(request, files)
        except OSError as error:
            os.write(writing, json.dumps({"errno": error.errno}).encode())
        finally:
            os._exit(0)
    os.close(writing)
    answer = os.read(reading, _MESSAGE_BYTES)
    os.close(reading)
    os.waitpid(parent, 0)
    return json.loads(answer or b"{}")


# ----------------------------------------------------------------------------------------------------------------------
# In a rank


def _become_rank(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Do what the command of a request would do in an interpreter of its own, and end as that would."""
    code = 1
    try:
        stdin, stdout, stderr, *inherited = files
        for number, file in enumerate((stdin, stdout, stderr)):
            os.dup2(file, number)
            os.close(file)
        environment = request["environment"]
        for variable, count in request["files"].items():
            environment[variable] = ",".join(map(str, inherited[:count]))
            del inherited[:count]
        os.environ.clear()
        os.environ.update(environment)
        _open_standard_streams()
        faulthandler.enable()
        _set_command_line(request["command"])
        sys.orig_argv, sys.argv = request["command"], request["command"][len(RANK_PYTHON) :]
        del sys.modules[sys.argv[0]]  # it is `__main__` alone, as in an interpreter
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and end.code != code:
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _open_standard_streams() -> None:
    """Open the standard streams as an interpreter does for what the descriptors 0, 1 and 2 are now."""
    sys.stdin = os.fdopen(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False)
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        file = os.fdopen(number, "wb", 0 if old.write_through else -1, closefd=False)
        lines = old.line_buffering or (os.isatty(number) and not old.write_through)
        setattr(sys, name, io.TextIOWrapper(file, old.encoding, old.errors, None, lines, old.write_through))


def _set_command_line(words: Sequence[str]) -> None:
    """Let `ps` and `/proc/PID/cmdline` show `words` for this process, as far as there is room.

    Linux reads the memory between `arg_start` and `arg_end` (fields 48 and 49 of proc_pid_stat(5)), in which it had put
    the arguments of the server.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    serve(sys.argv[1])
