"""Ranks that only all-reduce, to check that processes can be started and reach each other, and how fast.

`python -m muster.probe.all_reduce_check N` starts N of them and prints their result as one line of JSON.
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

from muster.launch.exit_status import ExitStatus
from muster.launch.launcher import launch, rank_command
from muster.launch.nodes.launcher_group import LauncherGroup
from muster.launch.rank_errors import log_path
from muster.launch.rank_process import exit_process, rank_main
from muster.parallel.world import open_world
from muster.spec.plan import Plan

MESSAGE_BYTES, ROUNDS = 1 << 24, 5
_FOUND = "found.json"


def all_reduce_on_rank(folder: Path, store: dist.Store, rank: int, world_size: int) -> int:
    """All-reduce with the other ranks a few times; rank 0 writes the bandwidth to a file."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with open_world(store, rank, world_size, Plan(pp=world_size)) as world:
        values = torch.ones(MESSAGE_BYTES // 4, device=world.device)
        times = []
        for _ in range(ROUNDS + 1):
            world.barrier()
            begin = time.perf_counter()
            world.all_reduce(values)
            values[:1].cpu()
            times.append(time.perf_counter() - begin)
        if values[0].item() != float(world_size) ** (ROUNDS + 1):
            raise RuntimeError("the ranks' sum is wrong")
        if rank == 0:
            found = {"bytes_per_s": MESSAGE_BYTES / median(times[1:]), "device": world.device.type}
            (folder / _FOUND).write_text(json.dumps(found))
    return 0


def check_across_nodes(team: LauncherGroup, num_ranks: int, limit_s: float) -> tuple[ExitStatus, dict[str, Any]]:
    """Run `num_ranks` ranks on each node; all launchers must call it.

    Returns the outcome and, on node 0, the results: bytes_per_s, device, seconds.
    """
    with tempfile.TemporaryDirectory(prefix="muster-doctor-") as place:
        folder, begin = Path(place), time.perf_counter()
        log_path(folder, 0).parent.mkdir()  # each node has a folder of its own here, not the one that a run shares
        command = rank_command("muster.probe.all_reduce_check", folder, num_ranks * team.num_nodes)
        outcome = launch(command, num_ranks, folder, group=team, timeout_s=limit_s)
        path = folder / _FOUND
        found = json.loads(path.read_text()) | {"seconds": time.perf_counter() - begin} if path.exists() else {}
        return outcome, found


def check_on_this_node(num_ranks: int) -> int:
    """Start the ranks, print their results and return their exit code."""
    with tempfile.TemporaryDirectory(prefix="muster-doctor-") as place:
        folder, begin = Path(place), time.perf_counter()
        command = rank_command("muster.probe.all_reduce_check", folder, num_ranks)
        if code := launch(command, num_ranks, folder).report():
            return code
        found = json.loads((folder / _FOUND).read_text())
        print(json.dumps({**found, "seconds": time.perf_counter() - begin}), flush=True)
        return 0


if __name__ == "__main__":
    exit_process(check_on_this_node(int(sys.argv[1])) if len(sys.argv) == 2 else rank_main(all_reduce_on_rank))
