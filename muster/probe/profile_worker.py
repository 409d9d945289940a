"""One rank of a profile: it measures together with the others, and rank 0 writes the results."""

import os
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from muster.config.file_writer import write_atomically
from muster.launch.rank_process import exit_process, rank_main
from muster.parallel.world import open_world
from muster.probe.collectives import BYTES, QUICK_BYTES, CollectiveTimes, ranks_per_core_of, time_collectives
from muster.probe.contention import contention_factors, contention_runs, time_steps
from muster.probe.disk_rates import BYTES as BYTES_ON_DISK
from muster.probe.disk_rates import QUICK_BYTES as QUICK_BYTES_ON_DISK
from muster.probe.disk_rates import measure_disk
from muster.probe.host_link import time_host_copies
from muster.probe.kernels import QUICK, SIZES, time_kernels
from muster.probe.runtime_overhead import profile_run, runtime_overheads, tiny_runs
from muster.probe.timer import KernelTimer
from muster.spec.machine_rates import PROFILED_PRECISIONS, KernelRates, MachineRates
from muster.spec.plan import Plan, Precision

RATES_FILE, QUICK_FILE = "rates.json", "quick"
QUICK_RUNS = 2
"""Ways to store a stage whose runtime overhead a quick profile measures: unsharded, and z1."""
PRECISIONS: dict[str, tuple[Precision, ...]] = {"cpu": PROFILED_PRECISIONS, "cuda": PROFILED_PRECISIONS[::-1]}


def profile_rank(folder: Path, store: dist.Store, rank: int, world_size: int) -> int:
    """Measure kernels, collectives and runtime overhead on this rank among `world_size`. Returns exit code 0."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    begin_s = perf_counter()
    quick = (folder / QUICK_FILE).exists()

    def report(progress: str) -> None:
        if rank == 0:
            print(f"{perf_counter() - begin_s:5.1f} s  {progress}", flush=True)

    with open_world(store, rank, world_size, Plan(pp=world_size)) as world:
        cores = len(os.sched_getaffinity(0)) if world.device.type == "cpu" else 0
        clock = KernelTimer(world.device, shared=0 < cores < world_size)
        kernels: dict[Precision, list[KernelRates]] = {}
        for precision in PRECISIONS[world.device.type][: 1 if quick else None]:
            sizes = (QUICK if quick else SIZES)[world.device.type]
            local = time_kernels(
                clock, precision, sizes, lambda progress, precision=precision: report(f"{precision}: {progress}")
            )
            kernels[precision] = world.all_gather_object(local)
        report(f"collectives over {world_size} ranks")
        collectives: list[CollectiveTimes] = []
        if world_size > 1:
            collectives = world.all_gather_object(
                time_collectives(world, ranks_per_core_of(world), QUICK_BYTES if quick else BYTES[world.device.type])
            )
        report("copies to host memory and back")
        host_links = world.all_gather_object(time_host_copies(world.device))
    report("reads and writes of the disk")
    disk = measure_disk(folder, QUICK_BYTES_ON_DISK if quick else BYTES_ON_DISK) if rank == 0 else None
    machine = MachineRates(
        ranks=world_size,
        cores=cores,
        kernels={precision: _mean_kernels(found) for precision, found in kernels.items()},
        collectives={name: tuple(points) for name, points in _mean_collectives(collectives).items()},
        host_bytes_per_s=min((rate for rate in host_links if rate is not None), default=None),
        disk_read_bytes_per_s=disk and disk[0],
        disk_write_bytes_per_s=disk and disk[1],
    )
    runs = []
    for generation, config in enumerate(islice(tiny_runs(world_size), QUICK_RUNS if quick else None), start=1):
        report(f"runtime overhead of {config.parallel.default_strategy.zero}, tp {config.parallel.tp}")
        runs.append((config, profile_run(config, store, rank, generation)))
    steps = []
    for generation, config in enumerate(islice(contention_runs(world_size), 1 if quick else None), start=len(runs) + 1):
        report(f"whole steps of {config.parallel.default_strategy.zero}, tp {config.parallel.tp}")
        steps.append((config, time_steps(config, store, rank, generation)))
    if rank == 0:
        machine = machine.model_copy(update={"overheads": runtime_overheads(runs, machine)})
        machine = machine.model_copy(update={"contention": contention_factors(steps, machine)})
        write_atomically(folder / RATES_FILE, machine.model_dump_json())
        report("done")
    return 0


def _mean_kernels(ranks: list[KernelRates]) -> KernelRates:
    """Return the medians over the ranks, which all timed the same kernels."""
    return KernelRates.model_validate(_medians([one.model_dump() for one in ranks]))


def _medians(tables: list[Any]) -> Any:
    """Return equal tables of points, or of such tables by name, with the median of each point's last number."""
    first = tables[0]
    if isinstance(first, dict):
        return {name: _medians([table[name] for table in tables]) for name in first}
    return [(*point[:-1], median(table[place][-1] for table in tables)) for place, point in enumerate(first)]


def _mean_collectives(ranks: list[CollectiveTimes]) -> CollectiveTimes:
    return {
        name: [
            (*point[:-1], sum(other[name][place][-1] for other in ranks) / len(ranks))
            for place, point in enumerate(points)
        ]
        for name, points in (ranks[0] if ranks else {}).items()
    }


if __name__ == "__main__":
    exit_process(rank_main(profile_rank))
