"""Probes that a rank makes of its device, its links and its disk: a product of matrices, messages, a small file.

The matrices hold small integers, whose product float32 and TF32 hold exactly whatever the order of additions. So any
device of any make must give the same bits, and wrong ones show that it is broken (MegaScale, arXiv:2402.15627, checks
devices before and during training).
"""

import os
import tempfile
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from muster.parallel.device_clock import synchronize
from muster.parallel.world import World

PRODUCT_SIZE = 384
"""Rows and columns of the matrices of the product that all ranks time: about a millisecond on a core of a CPU."""
LARGEST_FACTOR = 15
"""Largest number in these matrices: sums of their products are below 2^24."""
MESSAGE_BYTES = 1 << 20
FILE_BYTES = 1 << 18
PROBES = 8
"""Repetitions of a product or message, of which the shortest counts."""
SWEEPS = 4
"""Turns through all pairs of ranks, over which a pair's messages are spread: a rank that others keep from its core for
some milliseconds is late in one of them only."""
MOST_RANKS_IN_PAIRS = 16
"""Most ranks of which each sends to every other; of more, to those whose number differs in one binary digit."""


class ProductProbe(NamedTuple):
    """Products of matrices of one size on a rank's device."""

    seconds: float
    """Shortest of a few."""
    wrong_share: float
    """Share of the elements of all of them that are wrong."""


def probe_product(device: torch.device, repeats: int = PROBES) -> ProductProbe:
    """Multiply two matrices a few times, time that, and compare with the true product."""
    left, right, expected = (one.to(device) for one in _matrices())
    times_s, wrong = [], 0
    for _ in range(repeats):
        synchronize(device)
        begin_s = perf_counter()
        product = torch.mm(left, right)
        synchronize(device)
        times_s.append(perf_counter() - begin_s)
        wrong += int((product != expected).sum())
    return ProductProbe(min(times_s), wrong / (repeats * expected.numel()))


@cache
def _matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two matrices and their product, each float32 [PRODUCT_SIZE, PRODUCT_SIZE]."""
    count = PRODUCT_SIZE * PRODUCT_SIZE
    left = (torch.arange(count) * 7919 % 4099 % (LARGEST_FACTOR + 1)).view(PRODUCT_SIZE, -1)
    right = (torch.arange(count) * 104729 % 8191 % (LARGEST_FACTOR + 1)).view(PRODUCT_SIZE, -1)
    return left.float(), right.float(), (left @ right).float()


def time_file(folder: Path) -> float | None:
    """Return the seconds of writing a small file to disk; None where that can't be done."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            begin_s = perf_counter()
            file.write(bytes(FILE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            return perf_counter() - begin_s
    except OSError:
        return None


def waited_for_core_s() -> float:
    """Return the seconds for which this thread could run and had no core, since others had it or the processes of its
    container had used up theirs; 0.0 where no kernel counts them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def time_messages(world: World) -> tuple[float | None, ...]:
    """Return the seconds of a message to each other rank and of its acknowledgement, the shortest of a few; pairs of
    ranks do it at the same time, round by round."""
    found: dict[int, float] = {}
    message = torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device=world.device)
    word = torch.empty(1, dtype=torch.uint8, device=world.device)
    rounds = range(1, 1 << (world.size - 1).bit_length())
    if world.size > MOST_RANKS_IN_PAIRS:
        rounds = [one for one in rounds if one.bit_count() == 1]
    others = [other for number in rounds if (other := world.rank ^ number) < world.size]
    for other in others * SWEEPS:
        for sender in sorted((world.rank, other)):
            for _ in range(PROBES // SWEEPS):
                if sender == world.rank:
                    time_s = _time_message(message, word, other, world.device)
                    found[other] = min(found.get(other, time_s), time_s)
                else:
                    dist.recv(message, other)
                    dist.send(word, other)
    return tuple(found.get(other) for other in range(world.size))


def _time_message(message: torch.Tensor, word: torch.Tensor, other: int, device: torch.device) -> float:
    synchronize(device)
    begin_s = perf_counter()
    dist.send(message, other)
    dist.recv(word, other)
    synchronize(device)
    return perf_counter() - begin_s
