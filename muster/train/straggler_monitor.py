"""Comparison of the ranks' times every few steps, which names stragglers while a run goes on."""

import os
import tempfile
from collections import deque
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from muster.cost.time.op_times import OpTimes
from muster.layout.mesh import coordinates_of, dp_index_of
from muster.parallel.device_clock import synchronize
from muster.parallel.world import World
from muster.schedule.action import Kind
from muster.simulate.stragglers import (
    RankTimes,
    StragglerDetector,
    Unit,
    find_stragglers,
    shorter_links,
)
from muster.spec.plan import Plan
from muster.train.step_result import StepResult
from muster.train.trainer import Trainer

PASSES = frozenset((Kind.F, Kind.B, Kind.I, Kind.W, Kind.S, Kind.T))
PRODUCT_SIZE = 384
"""Rows and columns of the matrices of the product that all ranks time: about a millisecond on a core of a CPU."""
MESSAGE_BYTES = 1 << 20
FILE_BYTES = 1 << 18
PROBES = 8
"""Repetitions of a product or message, of which the shortest counts."""
MOST_RANKS_IN_PAIRS = 16
"""Most ranks of which each sends to every other; of more, to those whose number differs in one binary digit."""


class StragglerCheck(NamedTuple):
    """Comparison of all ranks' times."""

    row: dict[str, Any]
    """Row of stragglers.jsonl."""
    sentences: list[str]
    """New stragglers and former ones, for people."""


class StragglerMonitor:
    """Times of this rank's last steps, and, on every rank, the stragglers among all ranks; all call it alike."""

    def __init__(self, trainer: Trainer, times: OpTimes, every: int, folder: Path) -> None:
        """`times`: predicted times of the instructions; `folder`: where the file that tells the disk's speed is
        written."""
        self.trainer, self.every, self.folder = trainer, every, folder
        self.world: World = trainer.world
        self.detector = StragglerDetector()
        self._results: deque[StepResult] = deque(maxlen=every)
        self._messages: tuple[float | None, ...] = ()
        """Times of the messages of the comparison before."""
        actions = (item.action for item in trainer.program.ranks[self.world.at.pp].get("compute", ()))
        keys = [(action.kind, action.stage) for action in actions if action.kind in PASSES]
        own_s = sum(times.seconds.get(key, times.seconds.get((key[0], -1), 0.0)) for key in keys)
        self._expected_s: list[float] = self.world.all_gather_object(own_s)
        shares_cores = times.cores is not None and self.world.size > times.cores
        self._comparable = comparable_units(trainer.plan, self._expected_s, shares_cores)

    def after_step(self, result: StepResult) -> StragglerCheck | None:
        """Take a step's times and, every few steps, compare those of all ranks; None where that isn't due."""
        self._results.append(result)
        if result.step % self.every or len(self._results) < self.every:
            return None
        times = self.world.all_gather_object(self._own_times())
        new, over = self.detector.update(find_stragglers(times, self._expected_s, self._comparable))
        told = [f"step {result.step}: straggler: {one}" for one in new]
        told += [f"step {result.step}: no straggler any more: {one.subject}" for one in over]
        return StragglerCheck(self._row(result.step, times), told)

    def _own_times(self) -> RankTimes:
        steps = self.trainer.step_events()
        sums_s = [
            sum(event.duration_s for event in steps[one.step] if event.action.kind in PASSES)
            for one in self._results
            if one.step in steps
        ]
        messages = time_messages(self.world)
        link_s, self._messages = shorter_links(messages, self._messages or messages), messages
        return RankTimes(
            min(sums_s, default=0.0),
            min(one.time_s for one in self._results),
            min(one.data_s for one in self._results),
            time_product(self.world.device),
            time_file(self.folder),
            link_s,
        )

    def _row(self, step: int, times: list[RankTimes]) -> dict[str, Any]:
        found = [asdict(one) | {"text": str(one)} for one in self.detector.confirmed.values()]
        return {"step": step, "expected_s": self._expected_s, "ranks": list(map(asdict, times)), "stragglers": found}


def comparable_units(plan: Plan, expected_s: list[float], shares_cores: bool) -> list[list[Unit]]:
    """Return the units of ranks whose passes wait for one another, in groups whose times can be compared: all where
    each rank computes alone, else those of one stage, since stages work at different moments."""
    units: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.world_size):
        at = coordinates_of(plan, rank)
        mesh = plan.mesh(at.pp)
        waits_for_data = plan.default_strategy.zero in ("z2", "z3") or mesh.ep > 1
        units.setdefault((at.pp, *(() if waits_for_data else (dp_index_of(plan, at),))), []).append(rank)
    groups: dict[int, list[Unit]] = {}
    for (pp_rank, *_), ranks in units.items():
        if all(expected_s[rank] for rank in ranks):
            groups.setdefault(pp_rank if shares_cores else 0, []).append(tuple(ranks))
    return list(groups.values())


def time_product(device: torch.device) -> float:
    """Return the seconds of a product of matrices of one size on this rank's device, the shortest of a few."""
    matrix = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, device=device)
    found = []
    for _ in range(PROBES):
        synchronize(device)
        begin_s = perf_counter()
        torch.mm(matrix, matrix)
        synchronize(device)
        found.append(perf_counter() - begin_s)
    return min(found)


def time_file(folder: Path) -> float:
    """Return the seconds of writing a small file to disk; 0 where that can't be done."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            begin_s = perf_counter()
            file.write(bytes(FILE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            return perf_counter() - begin_s
    except OSError:
        return 0.0


def time_messages(world: World) -> tuple[float | None, ...]:
    """Return the seconds of a message to each other rank and of its acknowledgement, the shortest of a few; pairs of
    ranks do it at the same time, round by round."""
    found: list[float | None] = [None] * world.size
    message = torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device=world.device)
    word = torch.empty(1, dtype=torch.uint8, device=world.device)
    rounds = range(1, 1 << (world.size - 1).bit_length())
    for number in rounds if world.size <= MOST_RANKS_IN_PAIRS else (one for one in rounds if one.bit_count() == 1):
        other = world.rank ^ number
        if other >= world.size:
            continue
        for sender in sorted((world.rank, other)):
            if sender == world.rank:
                found[other] = min(_time_message(message, word, other, world.device) for _ in range(PROBES))
                continue
            for _ in range(PROBES):
                dist.recv(message, other)
                dist.send(word, other)
    return tuple(found)


def _time_message(message: torch.Tensor, word: torch.Tensor, other: int, device: torch.device) -> float:
    synchronize(device)
    begin_s = perf_counter()
    dist.send(message, other)
    dist.recv(word, other)
    synchronize(device)
    return perf_counter() - begin_s
