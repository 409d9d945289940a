"""Ranks that only all-reduce and probe their devices and links, to check that processes can be started and reach each
other, how fast, and that all compute alike.

`python -m muster.probe.all_reduce_check N` starts N of them and prints their result as one line of JSON.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
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
from muster.parallel.device_clock import synchronize
from muster.parallel.machines import machine_of_each_rank
from muster.parallel.rank_probes import probe_product, time_messages
from muster.parallel.world import World, open_world
from muster.simulate.stragglers import RankTimes, shorter_links
from muster.spec.errors import MusterError
from muster.spec.plan import Plan

MESSAGE_BYTES, ROUNDS = 1 << 24, 5
_FOUND = "found.json"


def all_reduce_on_rank(folder: Path, store: dist.Store, rank: int, world_size: int) -> int:
    """All-reduce with the other ranks a few times, and probe device and links; rank 0 writes down what was found."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with open_world(store, rank, world_size, Plan(pp=world_size)) as world:
        times = time_all_reduces(world)
        probes = world.all_gather_object(_probe(world))
        machines = machine_of_each_rank(world)
        cores = min(world.all_gather_object(len(os.sched_getaffinity(0))))
        if rank == 0:
            found = {
                "bytes_per_s": MESSAGE_BYTES / median(times[1:]),
                "device": world.device.type,
                "ranks": list(map(asdict, probes)),
                "machines": machines,
                "shares_cores": world.device.type == "cpu" and max(Counter(machines).values()) > cores,
            }
            (folder / _FOUND).write_text(json.dumps(found))
    return 0


def _probe(world: World) -> RankTimes:
    """Return the times of this rank's device and links, the shorter of two of each link."""
    product = probe_product(world.device)
    link_s = shorter_links(time_messages(world), time_messages(world))
    return RankTimes(0.0, 0.0, 0.0, product.seconds, 0.0, link_s, product.wrong_share)


def time_all_reduces(world: World) -> list[float]:
    """Return the seconds of each all-reduce of `MESSAGE_BYTES`. Raises MusterError where a sum is wrong."""
    values = torch.empty(MESSAGE_BYTES // 4, device=world.device)
    times = []
    for _ in range(ROUNDS + 1):
        values.fill_(1.0)  # anew: sums of sums outgrow the integers that float32 can hold
        world.barrier()
        synchronize(world.device)
        begin = time.perf_counter()
        world.all_reduce(values)
        synchronize(world.device)
        times.append(time.perf_counter() - begin)
        if len(wrong := values[values != world.size]):
            raise MusterError(
                f"an all-reduce of ones over {world.size} ranks gave {wrong[0]:g} in {len(wrong):,} of"
                f" {len(values):,} places: expected {world.size}; check the network, and the versions of its drivers"
                " and libraries"
            )
    return times


def check_across_nodes(team: LauncherGroup, num_ranks: int, limit_s: float) -> tuple[ExitStatus, dict[str, Any]]:
    """Run `num_ranks` ranks on each node; all launchers must call it.

    Returns the outcome and, on node 0, the results: bytes_per_s, device, seconds, ranks (`RankTimes`), machines (the
    number of each rank's), shares_cores (more ranks than cores on one).
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
