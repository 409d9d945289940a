"""Assignments of a step's sequences to groups of context-parallel ranks, their time, and the proof that they run.

A group is 2^k neighbouring ranks, the first of them a multiple of 2^k, which share the sequences that it is given. A
micro-batch has groups without common ranks; ranks that are in none compute nothing in it. Each rank goes through its
groups in the order of the micro-batches.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from muster.planner.sequence_groups.sequence_costs import SequenceCosts
from muster.spec.errors import MusterError


class SequenceGroup(NamedTuple):
    """Neighbouring ranks and the sequences that they share in one micro-batch."""

    first: int
    """First rank."""
    degree: int
    """Number of ranks."""
    sequences: tuple[int, ...]
    """Indices of the sequences among those of the step."""

    @property
    def ranks(self) -> range:
        """Ranks of the group."""
        return range(self.first, self.first + self.degree)


@dataclass(frozen=True)
class StepAssignment:
    """Groups of a step by micro-batch."""

    num_ranks: int
    micro_batches: tuple[tuple[SequenceGroup, ...], ...]

    def groups_of(self, rank: int) -> list[SequenceGroup | None]:
        """Return a rank's group in each micro-batch; None where it is in none."""
        return [next((group for group in one if rank in group.ranks), None) for one in self.micro_batches]


def makespan_s(assignment: StepAssignment, lengths: Sequence[int], costs: SequenceCosts, lockstep: bool) -> float:
    """Return the seconds until the last rank has computed all of its groups.

    With `lockstep` all ranks begin a micro-batch together, as they do where each pass gathers parameters or reduces
    gradients (z2, z3). Else a group begins as soon as its ranks have ended what they had before (z1).
    """
    shares_s = costs.share_s(np.asarray(lengths))
    ready_s = np.zeros(assignment.num_ranks)
    for groups in assignment.micro_batches:
        for group in groups:
            row = costs.degrees.index(group.degree)
            ranks = slice(group.first, group.first + group.degree)
            ready_s[ranks] = ready_s[ranks].max() + costs.fixed_s[row] + shares_s[row, list(group.sequences)].sum()
        if lockstep:
            ready_s[:] = ready_s.max()
    return float(ready_s.max())


def lower_bound_s(lengths: Sequence[int], costs: SequenceCosts, num_ranks: int) -> float:
    """Return a time that no assignment goes below: the work of all sequences, each at the degree where it is least, and
    of as many micro-batches as the positions fill, spread evenly; or the sequence that takes longest where it is
    fastest."""
    shares_s = costs.share_s(np.asarray(lengths))
    work_s = (shares_s * np.array(costs.degrees)[:, None]).min(0)
    alone_s = (np.array(costs.fixed_s)[:, None] + shares_s).min(0)
    filled = sum(lengths) / costs.capacity
    return float(max((work_s.sum() + filled * min(costs.fixed_s)) / num_ranks, alone_s.max(initial=0.0)))


# ----------------------------------------------------------------------------------------------------------------------
# Proof


def check_assignment(assignment: StepAssignment, lengths: Sequence[int], costs: SequenceCosts) -> None:
    """Raise MusterError unless each sequence is in exactly one group, no group holds more positions than its ranks may,
    and the ranks can go through their groups without waiting for each other in a circle."""
    groups = [group for one in assignment.micro_batches for group in one]
    times = Counter(index for group in groups for index in group.sequences)
    if times != Counter(range(len(lengths))):
        odd = next(index for index in {*times, *range(len(lengths))} if times[index] != 1 or index >= len(lengths))
        raise MusterError(f"sequence {odd} of {len(lengths)} is in {times[odd]} groups; each must be in one")
    positions = costs.positions(np.asarray(lengths))
    for group in groups:
        row = costs.degrees.index(group.degree)
        held = int(positions[row, list(group.sequences)].sum())
        if held > costs.capacity:
            raise MusterError(f"{group} holds {held} positions on a rank, which has memory for {costs.capacity}")
        if group.first % group.degree or group.ranks.stop > assignment.num_ranks:
            raise MusterError(f"{group} is no aligned group of {assignment.num_ranks} ranks")
    require_progress(
        [[group for group in assignment.groups_of(rank) if group is not None] for rank in range(assignment.num_ranks)]
    )


def require_progress(queues: Sequence[Sequence[SequenceGroup]]) -> None:
    """Raise MusterError unless ranks that go through their groups in these orders all come to the end.

    The ranks of a group exchange messages, so that it begins when it is next on all of them.
    """
    left = [deque(queue) for queue in queues]
    waiting = deque(range(len(left)))
    while waiting:
        rank = waiting.popleft()
        if not left[rank]:
            continue
        group = left[rank][0]
        if all(left[other] and left[other][0] == group for other in group.ranks):
            for other in group.ranks:
                left[other].popleft()
            waiting.extend(group.ranks)
    stuck = [rank for rank, queue in enumerate(left) if queue]
    if stuck:
        group = left[stuck[0]][0]
        other = next(rank for rank in group.ranks if not left[rank] or left[rank][0] != group)
        found = left[other][0] if left[other] else "has ended"
        raise MusterError(f"rank {stuck[0]} waits in {group} for rank {other}, whose next group is {found}")
