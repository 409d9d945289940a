"""FlexSP's integer program for the groups of one micro-batch (arXiv:2412.01523 §4.1), by OR-tools (extra `solver`).

Possible groups of each size are given numbers of sequences of each bucket, so that the slowest group is as fast as can
be: A[q, p] sequences of bucket q in group p, which is used or not (m[p]);

    minimize C   with   Σ_q A[q, p] · time[q, d_p] + fixed[d_p] · m[p] ≤ C          for each p
                        Σ_q A[q, p] · positions[q, d_p] ≤ capacity · m[p]            for each p
                        Σ_p d_p · m[p] ≤ ranks,   Σ_p A[q, p] = sequences of bucket q.

A sequence counts as the longest of its bucket. The solver's limit is counted work, not seconds, so that all ranks of a
run find the same groups.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.planner.sequence_groups.assignment import SequenceGroup
from muster.planner.sequence_groups.balance import Sequences, aligned_groups
from muster.planner.sequence_groups.flexsp import bucket_lengths
from muster.planner.sequence_groups.sequence_costs import SequenceCosts

BUCKETS = 16
"""Buckets of lengths of a micro-batch (§4.3)."""
UNITS = 1_000_000
"""Steps into which the time of a known solution is divided: the solver counts in integers."""


def has_integer_solver() -> bool:
    """Return True if OR-tools is installed."""
    return find_spec("ortools") is not None


def solve_micro_batch(
    sequences: Sequences,
    costs: SequenceCosts,
    num_ranks: int,
    chosen: NDArray[np.intp],
    known: tuple[SequenceGroup, ...],
    work: float,
    buckets: int = BUCKETS,
) -> tuple[SequenceGroup, ...]:
    """Return the fastest groups for the chosen sequences that the solver finds within `work` of its units (about
    seconds); `known` where it finds none."""
    cp_model: Any = import_module("ortools.sat.python.cp_model")
    members = [chosen[one] for one in bucket_lengths(sequences.lengths_B[chosen].tolist(), buckets)]
    longest = np.array([one[-1] for one in members])
    known_s = max(_known_s(sequences, costs, group) for group in known)
    ticks = np.ceil(sequences.share_s[:, longest] / known_s * UNITS)
    fixed = np.ceil(np.array(costs.fixed_s) / known_s * UNITS).astype(int)
    model = cp_model.CpModel()
    limit = model.new_int_var(0, 2 * UNITS, "C")
    groups: list[tuple[int, Any, list[Any]]] = []
    for row, degree in enumerate(costs.degrees):
        usable = [q for q in range(len(members)) if np.isfinite(ticks[row, q])]
        before = None
        for _ in range(min(num_ranks // degree, sum(len(members[q]) for q in usable))):
            used = model.new_bool_var("")
            counts = [model.new_int_var(0, len(one) if q in usable else 0, "") for q, one in enumerate(members)]
            spent = sum(int(ticks[row, q]) * counts[q] for q in usable)
            model.add(spent + int(fixed[row]) * used <= limit)
            held = sum(int(sequences.positions[row, longest[q]]) * counts[q] for q in usable)
            model.add(held <= costs.capacity * used)
            if before is not None:  # groups of one size can change places: the first ones are used
                model.add_implication(used, before)
            before = used
            groups.append((degree, used, counts))
    model.add(sum(degree * used for degree, used, _ in groups) <= num_ranks)
    for q, one in enumerate(members):
        model.add(sum(counts[q] for *_, counts in groups) == len(one))
    model.minimize(limit)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = work
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return known
    return _faster(sequences, costs, known, _read(solver, groups, members))


def _read(solver: Any, groups: list[tuple[int, Any, list[Any]]], members: list[Any]) -> tuple[SequenceGroup, ...]:
    """Return the solution's groups, with sequences taken from the buckets one after another."""
    left = [one.tolist() for one in members]
    found = []
    for degree, _, counts in groups:
        taken = [left[q].pop() for q, count in enumerate(counts) for _ in range(solver.value(count))]
        if taken:
            found.append((degree, taken))
    return tuple(aligned_groups(found))


def _known_s(sequences: Sequences, costs: SequenceCosts, group: SequenceGroup) -> float:
    row = costs.degrees.index(group.degree)
    return costs.fixed_s[row] + float(sequences.share_s[row, list(group.sequences)].sum())


def _faster(
    sequences: Sequences, costs: SequenceCosts, *solutions: tuple[SequenceGroup, ...]
) -> tuple[SequenceGroup, ...]:
    return min(solutions, key=lambda groups: max(_known_s(sequences, costs, group) for group in groups))
