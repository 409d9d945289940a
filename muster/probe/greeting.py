"""Ranks that only meet: they show that processes can be started and reach each other, and how fast.

`python -m muster.probe.greeting N` starts them and prints what they found, as one line of JSON.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from muster.parallel.world import open_world
from muster.spec.plan import Plan
from muster.train.errors import log_path
from muster.train.launch import launch, rank_command
from muster.train.nodes.team import Team
from muster.train.outcome import Outcome
from muster.train.worker import leave, main

NBYTES, ROUNDS = 1 << 24, 5
_FOUND = "found.json"


def greet(folder: Path, store: dist.Store, rank: int, world_size: int) -> int:
    """Adds up with the others, a few times. Rank 0 leaves what it took."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with open_world(store, rank, world_size, Plan(pp=world_size)) as world:
        values = torch.ones(NBYTES // 4, device=world.device)
        times = []
        for _ in range(ROUNDS + 1):
            world.barrier()
            begin = time.perf_counter()
            world.add_up(values)
            values[:1].cpu()
            times.append(time.perf_counter() - begin)
        if values[0].item() != float(world_size) ** (ROUNDS + 1):
            raise RuntimeError("the ranks' sum is wrong")
        if rank == 0:
            found = {"bytes_per_s": NBYTES / median(times[1:]), "device": world.device.type}
            (folder / _FOUND).write_text(json.dumps(found))
    return 0


def meet_others(team: Team, num_ranks: int, limit_s: float) -> tuple[Outcome, dict[str, Any]]:
    """Lets `num_ranks` ranks of each node meet; all launchers call it. Returns how that ended and, on node 0, what was
    found: bytes_per_s, device, seconds."""
    with tempfile.TemporaryDirectory(prefix="muster-doctor-") as place:
        folder, begin = Path(place), time.perf_counter()
        log_path(folder, 0).parent.mkdir()  # each node has a folder of its own here, not the one that a run shares
        command = rank_command("muster.probe.greeting", folder, num_ranks * team.count)
        outcome = launch(command, num_ranks, folder, team=team, limit_s=limit_s)
        path = folder / _FOUND
        found = json.loads(path.read_text()) | {"seconds": time.perf_counter() - begin} if path.exists() else {}
        return outcome, found


def start(num_ranks: int) -> int:
    """Starts the ranks, prints what they found, returns how they ended."""
    with tempfile.TemporaryDirectory(prefix="muster-doctor-") as place:
        folder, begin = Path(place), time.perf_counter()
        command = rank_command("muster.probe.greeting", folder, num_ranks)
        if code := launch(command, num_ranks, folder).tell():
            return code
        found = json.loads((folder / _FOUND).read_text())
        print(json.dumps({**found, "seconds": time.perf_counter() - begin}), flush=True)
        return 0


if __name__ == "__main__":
    leave(start(int(sys.argv[1])) if len(sys.argv) == 2 else main(greet))
