"""Fork server: a process that has imported the module of ranks, and forks them from itself in milliseconds.

An interpreter needs seconds of a core to import PyTorch. With more ranks than cores these add up, when a job starts and
whenever it starts again, and on a cluster every rank reads thousands of small files. A fork has all of it and shares
its memory. The idea is that of `multiprocessing`'s forkserver, whose processes are its own children, though, while a
launcher has to wait for its ranks. So the server forks a process that forks the rank and ends, and the launcher adopts
the orphan.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

RANK_PYTHON = (sys.executable, "-X", "faulthandler", "-m", "muster.launch.rank_module")
"""First words of a rank's command, before its module and that module's arguments."""
_SPARE_BYTES = 1024
"""Room in the server's command line for those of ranks, which replace it."""
_ANSWER_TIMEOUT_S = 10.0
"""Longest wait for a fork, which takes milliseconds, and for the end of a server that was killed."""
_MESSAGE_BYTES = 1 << 16
_SET_CHILD_SUBREAPER = 36
"""Linux's PR_SET_CHILD_SUBREAPER, which makes orphans below a process its children."""
_GET_CHILD_SUBREAPER = 37
_GPU_DEVICES = ("/dev/nvidia", "/dev/nvhost", "/dev/nvmap", "/dev/dxg", "/dev/kfd", "/dev/dri")


class ForkedProcess:
    """Child process that a fork server has forked; stands in for `subprocess.Popen`."""

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
                # OpenBLAS would start its threads when NumPy is imported, and nothing of Muster multiplies with it.
                env={"OPENBLAS_NUM_THREADS": "1", **self.environment},
                start_new_session=True,
            )
        except OSError:
            self._connection.close()
            raise
        finally:
            theirs.close()
        self._connection.settimeout(_ANSWER_TIMEOUT_S)
        self._is_ready = False

    def await_imports(self, wait_s: float) -> bool | None:
        """Return True once the server can fork, False where it has ended, None where neither comes within `wait_s`."""
        if not self._is_ready:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            if not poll.poll(1000 * wait_s):
                return None
            with contextlib.suppress(OSError):  # the connection of a process that was killed may be reset
                self._is_ready = "ready" in self._read_answer()
        return self._is_ready and self._process.poll() is None

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        outputs: Sequence[int],
        files: Mapping[str, Sequence[int]],
    ) -> ForkedProcess | None:
        """Fork a process in a session of its own that does what `command`, which begins with `RANK_PYTHON`, would do.

        `outputs` are the descriptors of its standard output and error; `files` are those that it inherits, keyed by the
        environment variable that lists them. None where this server can't fork. Raises OSError where there can be no
        more processes.
        """
        sizes = {variable: len(descriptors) for variable, descriptors in files.items()}
        request = {"command": [*command], "environment": dict(environment), "files": sizes}
        passed = [*outputs, *(one for descriptors in files.values() for one in descriptors)]
        stdin, to_rank = os.pipe()
        try:
            with _adopted_orphans():
                message = json.dumps(request).encode() + b"\n"
                sent = socket.send_fds(self._connection, [message], [stdin, *passed])
                self._connection.sendall(message[sent:])
                answer = self._read_answer()
        except (OSError, ValueError):  # the server has ended or is stuck, or an output of this process is closed
            answer = {}
        finally:
            os.close(stdin)
        if "pid" in answer and _is_child(answer["pid"]):
            return ForkedProcess(answer["pid"], open(to_rank, "wb"))
        os.close(to_rank)  # at which a rank ends of which nobody knows
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
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, as on a file system that is gone
            self._process.wait(_ANSWER_TIMEOUT_S)


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@contextlib.contextmanager
def _adopted_orphans() -> Iterator[None]:
    """Make orphans below this process its children meanwhile. Raises OSError where the system can't."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    if prctl(_GET_CHILD_SUBREAPER, ctypes.byref(before)) or prctl(_SET_CHILD_SUBREAPER, 1):
        raise OSError("no subreapers")
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, before.value)


# ----------------------------------------------------------------------------------------------------------------------
# In the server


def serve(module: str) -> None:
    """Import `module`, then fork a process for each request that comes in over standard input, until that ends."""
    _set_command_line(sys.orig_argv[:-1])
    gc.disable()  # as `rank_module` does
    variables = [*os.environ]
    importlib.import_module(module)
    gc.freeze()
    if not _can_fork():
        return
    with socket.socket(fileno=0) as connection:
        connection.sendall(b'{"ready": true}\n')
        while received := _receive(connection):
            request, files = received
            answer = _fork(connection, request | {"variables": variables}, files)
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
    ours, theirs = socket.socketpair()
    try:
        between = os.fork()
    except OSError as error:
        ours.close()
        theirs.close()
        return {"errno": error.errno or 0}
    if between == 0:
        try:
            if os.fork() == 0:
                connection.detach()
                ours.close()
                os.setsid()
                theirs.sendall(json.dumps({"pid": os.getpid()}).encode())
                theirs.recv(1)  # ends once the launcher is the parent
                theirs.close()
                run_and_exit(partial(_become_rank, request, files))
        except OSError as error:
            theirs.sendall(json.dumps({"errno": error.errno}).encode())
        finally:
            os._exit(0)
    theirs.close()
    answer = ours.recv(_MESSAGE_BYTES)
    os.waitpid(between, 0)
    ours.close()
    return json.loads(answer or b"{}")


# ----------------------------------------------------------------------------------------------------------------------
# In a rank


def _become_rank(request: dict[str, Any], files: list[int]) -> int:
    """Do what the command of a request would do in an interpreter of its own; returns its exit code."""
    stdin, stdout, stderr, *inherited = files
    for number, file in enumerate((stdin, stdout, stderr)):
        os.dup2(file, number)
        os.close(file)
    environment = request["environment"]
    for variable, count in request["files"].items():
        environment[variable] = ",".join(map(str, inherited[:count]))
        del inherited[:count]
    for variable in request["variables"]:  # what imports have set stays
        os.environ.pop(variable, None)
    os.environ.update(environment)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()  # `random` does so by itself
    _open_standard_streams()
    faulthandler.enable()
    _set_command_line(request["command"])
    sys.orig_argv, sys.argv = request["command"], request["command"][len(RANK_PYTHON) :]
    del sys.modules[sys.argv[0]]  # it is `__main__` alone, as in an interpreter
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    return 0


def run_and_exit(run: Callable[[], int]) -> NoReturn:
    """Do `run` in a forked process and end that with the exit code that it gives, as an interpreter would."""
    code = 1
    try:
        code = run()
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
