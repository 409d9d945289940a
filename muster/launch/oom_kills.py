"""Kills by the kernel's out-of-memory killer, as the kernel counts them."""

from collections.abc import Sequence
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def oom_kill_count() -> int | None:
    """Return the number of processes that the kernel has killed so far because memory ran out: in this process's
    control group, or where that doesn't tell, on the machine. None where the kernel doesn't count them."""
    return read_oom_kills([*_control_group_files(), Path("/proc/vmstat")])


def read_oom_kills(files: Sequence[Path]) -> int | None:
    """Return the value of `oom_kill` in the first of these files that has it: lines of a word and a number."""
    for path in files:
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        for line in lines:
            word, _, value = line.partition(" ")
            if word == "oom_kill" and value.isdecimal():
                return int(value)
    return None


def _control_group_files() -> list[Path]:
    """Return the files of this process's control groups that may count kills, of version 2 and of version 1
    (https://docs.kernel.org/admin-guide/cgroup-v2.html, memory.events)."""
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append(_CGROUPS / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return found
