"""Check of `muster doctor` that this machine's memory, host memory and disk hold a plan or run."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from muster.cost.memory.forecast import MemoryForecast
from muster.probe.check_result import CheckResult, ok, problem
from muster.spec.formatting import format_bytes


@dataclass(frozen=True)
class PlanNeed:
    """A plan whose memory is to fit on this machine."""

    name: str
    forecast: MemoryForecast
    shares_memory: bool
    """True if ranks compute on the machine's cores, so that their memory is the host's."""
    nodes: int = 1


def check_plan(need: PlanNeed, free_bytes: int, folder: Path) -> Iterator[CheckResult]:
    """Yield what a plan needs of `free_bytes` of the machine's memory, of its devices, and of the disk of a folder."""
    ranks = need.forecast.ranks
    on_host = sum(rank.num_ranks * rank.host_bytes for rank in ranks) // need.nodes
    on_disk = sum(rank.num_ranks * rank.disk_bytes for rank in ranks) // need.nodes
    on_devices = sum(rank.num_ranks * rank.terms.total for rank in ranks) // need.nodes
    memory = on_host + (on_devices if need.shares_memory else 0)
    free_disk = shutil.disk_usage(folder).free
    for size, free, what, advice in (
        (memory, free_bytes, "memory", "take oopt0.5 or ooptd, fewer processes or more recompute"),
        (on_disk, free_disk, f"disk in {folder}", "make room, or choose another directory with --run"),
    ):
        if size > free:
            text = f"{need.name} needs {format_bytes(size)} of {what}, of which {format_bytes(free)} are free: {advice}"
            yield problem("plan", text)
        elif size:
            yield ok(
                "plan", f"{need.name} needs {format_bytes(size)} of {what}, of which {format_bytes(free)} are free"
            )
    fullest = need.forecast.fullest
    if need.shares_memory or fullest.capacity_bytes is None:
        return
    held, limit = format_bytes(fullest.terms.total), format_bytes(fullest.capacity_bytes)
    if fullest.terms.total > fullest.capacity_bytes:
        yield problem("plan", f"{need.name} needs {held} on a device that has {limit}: ask muster plan for another")
    else:
        yield ok("plan", f"{need.name} needs {held} on a device that has {limit}")
