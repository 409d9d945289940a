"""Checks of `muster doctor`: versions, memory, disk, leftover checkpoints, clocks, ports, file limits, GPUs, ranks, and
what a plan needs.

Each check runs within a time limit. This module needs no torch; a check that needs PyTorch reports that it is missing.
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
from math import inf
from pathlib import Path

from muster.checkpoint.in_memory.directory import find_orphaned
from muster.probe.check_result import CheckResult, note, ok, problem
from muster.probe.doctor_gpus import check_gpus
from muster.probe.doctor_plan import PlanNeed, check_plan
from muster.probe.doctor_ranks import check_rank_probes
from muster.spec.formatting import format_bytes

GIB, MIB = 1 << 30, 1 << 20
MIN_FREE_BYTES = GIB
"""Free bytes of memory and of disk below which even a small model may not fit."""
CLOCK_TOLERANCE_S = 2.0
MIN_OPEN_FILES = 1024
_DISK_BYTES = 32 * MIB
_CGROUP = Path("/sys/fs/cgroup")
IN_MEMORY_CHECKPOINT_DIR = Path("/dev/shm")
"""Default directory of in-memory checkpoints."""


@dataclass(frozen=True)
class DoctorRequest:
    """Parameters of the checks."""

    run_dir: Path
    """Directory for runs; it need not exist yet."""
    ranks: int = 2
    limit_s: float = 60.0
    """Seconds for each check."""
    plan: PlanNeed | None = None
    """Plan that is to fit; None: none was given."""


Check = Callable[[DoctorRequest], Iterator[CheckResult]]


def run_checks(request: DoctorRequest, names: Collection[str] | None = None) -> Iterator[CheckResult]:
    """Run the checks of these names (None: all) one after the other; one that exceeds the time limit is a problem."""
    for name, check in {**CHECKS, **({"plan": _plan} if request.plan is not None else {})}.items():
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
"""Extra seconds for the check of ranks, which has a timeout of its own and a better message."""
_TOO_SLOW = {
    "disk": "the file system hangs; choose another directory with --run",
    "ports": "name resolution hangs; add this host's name to /etc/hosts",
}


# ----------------------------------------------------------------------------------------------------------------------
# Checks


def _versions(request: DoctorRequest) -> Iterator[CheckResult]:
    python = platform.python_version()
    try:
        torch = version("torch")
    except PackageNotFoundError:
        yield note("versions", f"Python {python}, {platform.system()} {platform.release()}")
        yield problem("versions", "PyTorch is not installed: pip install 'muster-llm[train]'")
        return
    yield ok("versions", f"Python {python}, PyTorch {torch}, {platform.system()} {platform.release()}")


def _memory(request: DoctorRequest) -> Iterator[CheckResult]:
    total, free = _memory_bytes()
    sentence = f"{free / GIB:.1f} of {total / GIB:.1f} GiB of memory are free"
    if free < MIN_FREE_BYTES:
        yield problem("memory", f"{sentence}: end other programs, or use a machine with more memory")
    else:
        yield ok("memory", sentence)


def _plan(request: DoctorRequest) -> Iterator[CheckResult]:
    if request.plan is not None:
        yield from check_plan(request.plan, _memory_bytes()[1], _existing_parent(request.run_dir))


def _memory_bytes() -> tuple[int, int]:
    """Return the bytes of the machine's memory, or of the container's, and those that are free."""
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit, left = _cgroup_memory_bytes()
    return int(min(total, limit)), int(min(free, left))


def _cgroup_memory_bytes() -> tuple[float, float]:
    """Return the memory limit of the control group (such as a container's) in bytes, and what it leaves, to which pages
    of files that nobody has read again lately belong; infinite without a limit."""
    try:
        text = (_CGROUP / "memory.max").read_text().strip()
        if not text.isdecimal():
            return inf, inf
        used = int((_CGROUP / "memory.current").read_text())
        rows = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return inf, inf
    return int(text), max(0, int(text) - used + int(rows.get("inactive_file", 0)))


def _disk(request: DoctorRequest) -> Iterator[CheckResult]:
    folder = _existing_parent(request.run_dir)
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES + _DISK_BYTES:
        yield problem(
            "disk",
            f"only {free / GIB:.1f} GiB are free in {folder}: free some disk space, or choose another directory"
            " with --run",
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
        yield problem("disk", f"can't write to {folder} ({error.strerror}): choose another directory with --run")
        return
    yield ok("disk", f"{free / GIB:.0f} GiB are free in {folder}, written at {rate / MIB:.0f} MiB/s")


def _existing_parent(folder: Path) -> Path:
    """Return the folder itself if it exists, else the first of its parents that does."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _copies(request: DoctorRequest) -> Iterator[CheckResult]:
    found = list(find_orphaned(IN_MEMORY_CHECKPOINT_DIR))
    for orphan in found:
        size = f"{format_bytes(orphan.nbytes)} in {orphan.path} are in-memory checkpoints of {orphan.run_dir}"
        advice = "no run can resume from them: delete them" if orphan.is_stale else "start it again to resume from them"
        yield note("copies", f"{size}, which is not running: {advice}")
    if not found:
        yield ok("copies", f"no killed run has left in-memory checkpoints in {IN_MEMORY_CHECKPOINT_DIR}")


def _clocks(request: DoctorRequest) -> Iterator[CheckResult]:
    folder = _existing_parent(request.run_dir)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".muster-doctor-") as file:
            before = time.time()
            os.utime(file.name)
            file_time = os.stat(file.name).st_mtime
            after = time.time()
            # On a slow machine or disk seconds may pass in between: any file time between the two is right.
            offset_s = file_time - min(max(file_time, before), after)
    except OSError as error:
        yield note("clocks", f"can't compare this clock with that of the disk of {folder} ({error.strerror})")
        return
    if abs(offset_s) > CLOCK_TOLERANCE_S:
        yield problem("clocks", f"the clock of the disk of {folder} differs by {offset_s:+.1f} s: start NTP on both")
    else:
        yield ok("clocks", f"this clock and that of the disk of {folder} agree within {CLOCK_TOLERANCE_S:g} s")


def _ports(request: DoctorRequest) -> Iterator[CheckResult]:
    name = socket.gethostname()
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    known = [interface_name for _, interface_name in socket.if_nameindex()]
    if interface and interface not in known:
        yield problem(
            "ports",
            f"GLOO_SOCKET_IFNAME is {interface}, but this machine's interfaces are {', '.join(known)}: set it to one of"
            " them, or unset it",
        )
        return
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield problem("ports", f"this host's name, {name}, has no address: add it to /etc/hosts")
        return
    for host in dict.fromkeys(("127.0.0.1", address)):
        try:
            with socket.create_server((host, 0)) as server:
                socket.create_connection(server.getsockname(), timeout=5).close()
        except OSError as error:
            yield problem(
                "ports",
                f"this machine can't connect to itself at {host} ({error.strerror or error}): check its firewall and"
                f" the entry of {name} in /etc/hosts",
            )
            return
    yield ok("ports", f"connections to 127.0.0.1 and to {name} ({address}) work")


def _files(request: DoctorRequest) -> Iterator[CheckResult]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        yield problem(
            "files", f"a process may open only {soft} files: raise the limit with `ulimit -n {MIN_OPEN_FILES}`"
        )
    else:
        yield ok("files", f"a process may open {soft:,} files")


def _ranks(request: DoctorRequest) -> Iterator[CheckResult]:
    try:
        version("torch")
    except PackageNotFoundError:
        yield note("ranks", "ranks can't be started without PyTorch")
        return
    n = request.ranks
    cores = len(os.sched_getaffinity(0))
    if n == 1:
        yield note("ranks", "with --ranks 1 there is nothing to connect, so no rank was started")
        return
    command = [sys.executable, "-m", "muster.probe.all_reduce_check", str(n)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=request.limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # which ends its ranks as well
        process.communicate()
        sentence = f"{n} ranks didn't connect within {request.limit_s:g} s: try fewer with --ranks, or an idle machine"
        yield problem("ranks", sentence)
        return
    if process.returncode:
        last = (err.strip().splitlines() or ["no reason given"])[-1].removeprefix("error: ")
        yield problem("ranks", f"{n} ranks could not connect ({last}): 'muster doctor --ranks 1' skips this check")
        return
    found = json.loads(out.splitlines()[-1])
    yield ok("ranks", f"{n} ranks connected and all-reduced in {found['seconds']:.1f} s on {found['device']}")
    if n > cores and found["device"] == "cpu":
        yield note("ranks", f"{n} ranks share {cores} cores here: they will slow each other down")
    rate = found["bytes_per_s"] / GIB
    yield ok("bandwidth", f"an all-reduce of 16 MiB over {n} ranks runs at {rate:.2f} GiB/s")
    yield from check_rank_probes(found["ranks"], [""] * n, found["machines"], found["shares_cores"])


CHECKS: dict[str, Check] = {
    "versions": _versions,
    "memory": _memory,
    "disk": _disk,
    "copies": _copies,
    "clocks": _clocks,
    "ports": _ports,
    "files": _files,
    "gpus": lambda request: check_gpus(request.limit_s),
    "ranks": _ranks,
}
