"""Measurement of collectives and messages between ranks, by size, while all ranks work."""

import os
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, process_time

import torch
import torch.distributed as dist

from muster.parallel.axis import all_gather_into_tensor, reduce_scatter_tensor
from muster.parallel.device_clock import synchronize
from muster.parallel.world import World

BYTES = {"cpu": tuple(4**power for power in range(4, 13)), "cuda": tuple(4**power for power in range(4, 15))}
"""Sizes by device type."""
QUICK_BYTES = (256, 65_536, 1_048_576)
MAX_GATHERED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 31}
"""Largest result of an all-gather that is timed, by device type."""
REPEATS = 12

CollectiveTimes = dict[str, list[tuple[int, int, float]]]


def time_collectives(world: World, ranks_per_core: float, sizes: Sequence[int]) -> CollectiveTimes:
    """Return collective → (ranks, bytes, seconds) on this rank, over groups of 2, 4, … neighbours and over all ranks.

    All ranks must call it together. Where `ranks_per_core` ranks share each core, a time is the larger of the rank's
    CPU time and its share of the wall-clock time; the latter is larger for latency.
    """
    found: CollectiveTimes = {}
    groups = sorted({size for size in (2, 4, 8, 16) if size < world.size and world.size % size == 0} | {world.size})
    for size in groups:
        local_group = None
        for first in range(0, world.size, size):
            group = dist.new_group(list(range(first, first + size)))
            local_group = group if first <= world.rank < first + size else local_group
        assert isinstance(local_group, dist.ProcessGroup)
        for count in sizes:
            for name, call in _calls(local_group, size, count, world):
                found.setdefault(name, []).append((size, count, _time(call, world, ranks_per_core)))
    return found


def _calls(group: dist.ProcessGroup, size: int, count: int, world: World) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the collectives by name; `count` is the size in bytes of the tensor that a call is given."""
    x = torch.ones(count // 4, device=world.device)
    yield "all_reduce", lambda: dist.all_reduce(x, group=group)
    if count * size <= MAX_GATHERED_BYTES[world.device.type]:
        gathered = x.new_empty(size * len(x))
        yield "all_gather", lambda: all_gather_into_tensor(gathered, x, group=group)
    part = x.new_empty(max(1, len(x) // size))
    whole = x.new_ones(len(part) * size)
    yield "reduce_scatter", lambda: reduce_scatter_tensor(part, whole, group=group)
    if size == 2:
        yield "send", lambda: _round_trip(x, group)


def _round_trip(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    index = dist.get_rank(group)
    for sender in (0, 1):
        if index == sender:
            dist.send(x, group=group, group_dst=1 - index)
        else:
            dist.recv(x, group=group, group_src=1 - index)


def _time(call: Callable[[], object], world: World, ranks_per_core: float) -> float:
    wall_s: list[float] = []
    cpu_s: list[float] = []
    for _ in range(REPEATS):
        world.barrier()
        synchronize(world.device)
        start_s, start_cpu_s = perf_counter(), process_time()
        call()
        synchronize(world.device)
        wall_s.append(perf_counter() - start_s)
        cpu_s.append(process_time() - start_cpu_s)
    # The faster quarter's end: disturbances are rare and always make a call slower.
    quartile = REPEATS // 4
    share_s = sorted(wall_s)[quartile] / ranks_per_core
    return share_s if ranks_per_core == 1 else max(share_s, sorted(cpu_s)[quartile])


def ranks_per_core_of(world: World) -> float:
    """Return the ranks of this machine that share each core; 1 if each has a device of its own."""
    if world.device.type != "cpu":
        return 1.0
    return max(1.0, world.size / len(os.sched_getaffinity(0)))
