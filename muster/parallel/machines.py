"""Machines on which the ranks of a run are."""

import socket
from pathlib import Path

from muster.parallel.world import World


def machine_of_each_rank(world: World) -> list[int]:
    """Return the number of each rank's machine, in the order of their first ranks; all ranks must call it.

    Containers on one machine, and several launchers, count as that machine: their ranks share its cores and memory.
    """
    names = world.all_gather_object(_machine_name())
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def _machine_name() -> str:
    """Return what a machine's processes have in common until it is started again, and else its host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
