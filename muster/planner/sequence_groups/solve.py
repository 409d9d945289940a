"""Assignment of a step's sequences to groups of ranks: the best of several ways, by predicted time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from muster.planner.sequence_groups.assignment import SequenceGroup, StepAssignment, makespan_s
from muster.planner.sequence_groups.balance import LIMITS, Sequences, balanced_step, packed_micro_batch
from muster.planner.sequence_groups.flexsp import cut_by_positions
from muster.planner.sequence_groups.integer_program import has_integer_solver, solve_micro_batch
from muster.planner.sequence_groups.sequence_costs import SequenceCosts
from muster.spec.errors import InfeasibleError
from muster.spec.units import pluralize

MORE_MICRO_BATCHES = 5
"""Numbers of micro-batches that are tried from the least on (arXiv:2412.01523 §4.2)."""


def assign_sequences(
    lengths: Sequence[int], costs: SequenceCosts, num_ranks: int, lockstep: bool, solver_work: float = 0.0
) -> StepAssignment:
    """Return the groups of a step: a pure function of the lengths, equal on all ranks.

    `lockstep` as in `makespan_s`. `solver_work` is the integer program's limit for a micro-batch, in units of about a
    second; with 0, or without OR-tools, balance alone decides.

    Raises InfeasibleError for a sequence that all ranks together can't hold.
    """
    sequences = Sequences.of(np.asarray(lengths, np.int64), costs)
    (unheld,) = np.nonzero(np.isinf(sequences.share_s).all(0))
    if len(unheld):
        raise InfeasibleError(
            f"a sequence has {lengths[unheld[0]]} positions, but {pluralize(costs.degrees[-1], 'rank')} with memory for"
            f" {costs.capacity} each are the largest group"
        )
    ways = [balanced_step(sequences, costs, num_ranks, limit) for limit in LIMITS]
    for own in (costs, *_single_degrees(sequences, costs)) if lockstep else ():
        ways += _packed_steps(Sequences.of(sequences.lengths_B, own), own, num_ranks)
    best = min(ways, key=lambda one: makespan_s(one, lengths, costs, lockstep))
    if not lockstep or not solver_work or not has_integer_solver():
        return best
    solved = tuple(
        solve_micro_batch(sequences, costs, num_ranks, _members(groups), groups, solver_work)
        for groups in best.micro_batches
    )
    return StepAssignment(num_ranks, solved)


def _members(groups: tuple[SequenceGroup, ...]) -> NDArray[np.intp]:
    return np.array(sorted(index for group in groups for index in group.sequences))


def _single_degrees(sequences: Sequences, costs: SequenceCosts) -> Iterator[SequenceCosts]:
    """Yield the costs of groups of one size, for each that holds all sequences."""
    for row, degree in enumerate(costs.degrees):
        if np.isfinite(sequences.share_s[row]).all():
            yield replace(costs, degrees=(degree,), fixed_s=(costs.fixed_s[row],))


def _packed_steps(sequences: Sequences, costs: SequenceCosts, num_ranks: int) -> Iterator[StepAssignment]:
    """Yield assignments with few micro-batches, each of sequences of similar length."""
    order = np.argsort(-sequences.lengths_B, kind="stable")
    sizes = sequences.lengths_B[order].tolist()
    least = -(-sum(sizes) // (num_ranks * costs.capacity))
    for count in range(least, least + MORE_MICRO_BATCHES):
        runs = cut_by_positions(sizes, count)
        found = [packed_micro_batch(sequences, costs, num_ranks, order[run.start : run.stop]) for run in runs]
        if all(groups is not None for groups in found):
            yield StepAssignment(num_ranks, tuple(groups for groups in found if groups is not None))
