"""Times of collectives and of messages between ranks, by size, while all ranks work."""

import os
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, process_time

import torch
import torch.distributed as dist

from muster.parallel.axis import all_gather_into_tensor, reduce_scatter_tensor
from muster.parallel.world import World

BYTES = tuple(4**power for power in range(4, 13))
QUICK_BYTES = (256, 65_536, 1_048_576)
MAX_BYTES = 1 << 24
REPEATS = 12

CollectiveTimes = dict[str, list[tuple[int, int, float]]]


def time_collectives(world: World, ranks_per_core: float, sizes: Sequence[int] = BYTES) -> CollectiveTimes:
    """Collective → (ranks, bytes, seconds) on this rank, over groups of 2, 4, … neighbours and over all ranks.

    All ranks must call it together. Where `crowding` ranks share each core, a time is the CPU time of the rank or its
    share of the time that passed, whichever is more: the rest is latency.
    """
    found: CollectiveTimes = {}
    groups = sorted({size for size in (2, 4, 8, 16) if size < world.size and world.size % size == 0} | {world.size})
    for size in groups:
        own = None
        for first in range(0, world.size, size):
            group = dist.new_group(list(range(first, first + size)))
            own = group if first <= world.rank < first + size else own
        assert isinstance(own, dist.ProcessGroup)
        for count in sizes:
            for name, call in _calls(own, size, count, world):
                found.setdefault(name, []).append((size, count, _time(call, world, ranks_per_core)))
    return found


def _calls(group: dist.ProcessGroup, size: int, count: int, world: World) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each moves `count` bytes, as the call is given them."""
    x = torch.ones(count // 4, device=world.device)
    yield "all_reduce", lambda: dist.all_reduce(x, group=group)
    if count * size <= 4 * MAX_BYTES:
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
    passed_s, cpu_s = [], []
    for _ in range(REPEATS):
        world.barrier()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        start_s, start_cpu_s = perf_counter(), process_time()
        call()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        passed_s.append(perf_counter() - start_s)
        cpu_s.append(process_time() - start_cpu_s)
    # The faster ones: what disturbs is seldom there, and always makes it slower.
    place = REPEATS // 4
    share_s = sorted(passed_s)[place] / ranks_per_core
    return share_s if ranks_per_core == 1 else max(share_s, sorted(cpu_s)[place])


def ranks_per_core_of(world: World) -> float:
    """Ranks of this machine that want each core; 1 where each has a device of its own."""
    if world.device.type != "cpu":
        return 1.0
    return max(1.0, world.size / len(os.sched_getaffinity(0)))
