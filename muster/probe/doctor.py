"""`muster doctor`: whether this machine can train, check by check, each within a time limit; free of torch.

A check that needs PyTorch says that it is missing.
"""

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from muster.checkpoint.in_memory.directory import find_orphaned

GIB, MIB = 1 << 30, 1 << 20
MIN_FREE_BYTES = GIB
"""Bytes of memory and of disk below which even a small model is in danger."""
CLOCK_TOLERANCE_S = 2.0
MIN_OPEN_FILES = 1024
_DISK_BYTES = 32 * MIB
IN_MEMORY_CHECKPOINT_DIR = Path("/dev/shm")
"""Where runs put their copies, if they aren't told otherwise."""

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class CheckResult:
    """What one check found, in one sentence, which of a problem says what to do."""

    check: str
    level: Level
    sentence: str


@dataclass(frozen=True)
class DoctorRequest:
    """What is to be looked at."""

    run_dir: Path
    """Where runs will be written; it need not be there yet."""
    ranks: int = 2
    limit_s: float = 60.0
    """For each check."""


Check = Callable[[DoctorRequest], Iterator[CheckResult]]


def run_checks(request: DoctorRequest, names: Collection[str] | None = None) -> Iterator[CheckResult]:
    """Does the checks of these names (None: all), one after the other. One that takes longer than the limit is a
    problem of its own."""
    for name, check in CHECKS.items():
        if names is not None and name not in names:
            continue
        found: list[CheckResult] = []
        worker = threading.Thread(target=_collect, args=(name, check, request, found), daemon=True)
        worker.start()
        worker.join(request.limit_s + (_RANKS_EXTRA_S if name == "ranks" else 0))
        if not worker.is_alive():
            yield from found
        else:
            sentence = f"no answer within {request.limit_s:g} s: {_TOO_SLOW.get(name, 'try again on an idle machine')}"
            yield CheckResult(name, "problem", sentence)


def _collect(name: str, check: Check, request: DoctorRequest, found: list[CheckResult]) -> None:
    try:
        found.extend(check(request))
    except Exception as error:
        found.append(CheckResult(name, "problem", f"the check failed ({type(error).__name__}: {error})"))


_RANKS_EXTRA_S = 5.0
"""The check of ranks has its own clock, and says more when that runs out."""
_TOO_SLOW = {
    "disk": "the file system hangs; choose another with --run",
    "ports": "the name service hangs; put this host's name into /etc/hosts",
}


# ----------------------------------------------------------------------------------------------------------------------
# Checks


def _versions(request: DoctorRequest) -> Iterator[CheckResult]:
    python = platform.python_version()
    try:
        torch = version("torch")
    except PackageNotFoundError:
        yield CheckResult("versions", "note", f"Python {python}, {platform.system()} {platform.release()}")
        yield CheckResult("versions", "problem", "PyTorch is not installed: pip install 'muster-llm[train]'")
        return
    yield CheckResult("versions", "ok", f"Python {python}, PyTorch {torch}, {platform.system()} {platform.release()}")


def _memory(request: DoctorRequest) -> Iterator[CheckResult]:
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit = _cgroup_memory_limit()
    if limit is not None and limit < total:
        total, free = limit, min(free, limit)
    said = f"{free / GIB:.1f} of {total / GIB:.1f} GiB of memory are free"
    if free < MIN_FREE_BYTES:
        yield CheckResult("memory", "problem", f"{said}: end other programs, or use a machine with more")
    else:
        yield CheckResult("memory", "ok", said)


def _cgroup_memory_limit() -> int | None:
    """What the control group (a container's, say) allows in bytes; None without a limit."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _disk(request: DoctorRequest) -> Iterator[CheckResult]:
    folder = request.run_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES + _DISK_BYTES:
        yield CheckResult(
            "disk", "problem", f"{free / GIB:.1f} GiB are free in {folder}: make room, or choose another --run"
        )
        return
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".muster-doctor-") as file:
            begin = time.perf_counter()
            file.write(os.urandom(MIB) * (_DISK_BYTES // MIB))
            file.flush()
            os.fsync(file.fileno())
            rate = _DISK_BYTES / (time.perf_counter() - begin)
    except OSError as error:
        yield CheckResult("disk", "problem", f"can't write in {folder} ({error.strerror}): choose another with --run")
        return
    yield CheckResult("disk", "ok", f"{free / GIB:.0f} GiB are free in {folder}, written at {rate / MIB:.0f} MiB/s")


def _copies(request: DoctorRequest) -> Iterator[CheckResult]:
    found = list(find_orphaned(IN_MEMORY_CHECKPOINT_DIR))
    for left in found:
        size = f"{left.nbytes / GIB:.1f} GiB in {left.path} are copies of {left.run_dir}"
        fate = "nobody can go on from them: remove them" if left.is_stale else "it goes on from them by its own command"
        yield CheckResult("copies", "note", f"{size}, which does not run, and {fate}")
    if not found:
        yield CheckResult("copies", "ok", f"no run that was killed has left copies in {IN_MEMORY_CHECKPOINT_DIR}")


def _clocks(request: DoctorRequest) -> Iterator[CheckResult]:
    folder = request.run_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".muster-doctor-") as file:
            before = time.time()
            os.utime(file.name)
            said, after = os.stat(file.name).st_mtime, time.time()
            off = said - min(max(said, before), after)  # on a slow machine or disk there may be seconds between
    except OSError as error:
        yield CheckResult("clocks", "note", f"can't compare this clock with that of {folder} ({error.strerror})")
        return
    if abs(off) > CLOCK_TOLERANCE_S:
        yield CheckResult(
            "clocks", "problem", f"the disk of {folder} is {off:+.1f} s off this clock: start NTP on both"
        )
    else:
        yield CheckResult(
            "clocks", "ok", f"this clock and that of the disk of {folder} agree within {CLOCK_TOLERANCE_S:g} s"
        )


def _ports(request: DoctorRequest) -> Iterator[CheckResult]:
    name = socket.gethostname()
    interface, known = os.environ.get("GLOO_SOCKET_IFNAME"), [name for _, name in socket.if_nameindex()]
    if interface and interface not in known:
        there = ", ".join(known)
        yield CheckResult(
            "ports",
            "problem",
            f"GLOO_SOCKET_IFNAME is {interface}, but the interfaces here are {there}: choose one of them, or unset it",
        )
        return
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield CheckResult("ports", "problem", f"the name of this host, {name}, has no address: add it to /etc/hosts")
        return
    for host in dict.fromkeys(("127.0.0.1", address)):
        try:
            with socket.create_server((host, 0)) as server:
                socket.create_connection(server.getsockname(), timeout=5).close()
        except OSError as error:
            yield CheckResult(
                "ports",
                "problem",
                f"no connection to {host} from this machine itself ({error.strerror or error}): check its firewall,"
                f" and what /etc/hosts says of {name}",
            )
            return
    yield CheckResult("ports", "ok", f"connections to 127.0.0.1 and to {name} ({address}) open")


def _files(request: DoctorRequest) -> Iterator[CheckResult]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        yield CheckResult(
            "files", "problem", f"a process may open {soft} files: raise it by `ulimit -n {MIN_OPEN_FILES}`"
        )
    else:
        yield CheckResult("files", "ok", f"a process may open {soft:,} files")


def _ranks(request: DoctorRequest) -> Iterator[CheckResult]:
    try:
        version("torch")
    except PackageNotFoundError:
        yield CheckResult("ranks", "note", "without PyTorch no ranks can be started")
        return
    n, cores = request.ranks, len(os.sched_getaffinity(0))
    if n == 1:
        yield CheckResult("ranks", "note", "one rank meets nobody, so none was started")
        return
    command = [sys.executable, "-m", "muster.probe.all_reduce_check", str(n)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=request.limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks end with it
        process.communicate()
        sentence = f"{n} ranks didn't meet within {request.limit_s:g} s: try fewer with --ranks, or an idle machine"
        yield CheckResult("ranks", "problem", sentence)
        return
    if process.returncode:
        last = (err.strip().splitlines() or ["no reason given"])[-1].removeprefix("error: ")
        yield CheckResult(
            "ranks", "problem", f"{n} ranks could not meet ({last}): 'muster doctor --ranks 1' leaves them out"
        )
        return
    found = json.loads(out.splitlines()[-1])
    yield CheckResult("ranks", "ok", f"{n} ranks met and added up in {found['seconds']:.1f} s on {found['device']}")
    if n > cores and found["device"] == "cpu":
        yield CheckResult(
            "ranks", "note", f"{n} ranks share {cores} cores here: the processes will wait for each other"
        )
    rate = found["bytes_per_s"] / GIB
    yield CheckResult("bandwidth", "ok", f"an all-reduce of 16 MiB over {n} ranks goes at {rate:.2f} GiB/s")


CHECKS: dict[str, Check] = {
    "versions": _versions,
    "memory": _memory,
    "disk": _disk,
    "copies": _copies,
    "clocks": _clocks,
    "ports": _ports,
    "files": _files,
    "ranks": _ranks,
}
