"""Steps whose sequences are assigned to groups of context-parallel ranks (`cpdyn`): this rank's part of each.

The assignment is a pure function of the lengths, so that all ranks find the same one; the thread that reads the next
batch makes it while the step before computes. A rank that has no group in a micro-batch computes one position that
doesn't count, since under z2 and z3 all ranks gather and reduce together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from muster.config.run_config import RunConfig
from muster.data.dataset import IGNORE_INDEX, Batch, SampleStream, require_known_ids
from muster.layout.context_parallel import kept_positions
from muster.model.documents import Documents
from muster.planner.sequence_groups.assignment import SequenceGroup, StepAssignment, check_assignment
from muster.planner.sequence_groups.sequence_costs import flops_costs
from muster.planner.sequence_groups.solve import assign_sequences
from muster.spec.plan import Plan


class GroupMicroBatch(NamedTuple):
    """One micro-batch of this rank: its positions of the documents that its group shares."""

    num_shards: int
    """Ranks of the group."""
    tokens_S: NDArray[np.int64]
    labels_S: NDArray[np.int64]
    positions_S: NDArray[np.int64]
    """Position of each token in its document."""
    lengths: tuple[int, ...]
    """Positions of each document on all ranks of the group, with padding."""
    samples: tuple[int, ...] = ()
    """Number of each document in the step."""
    index: int = 0
    """Index of this rank in the group."""

    def held_positions(self) -> Iterator[tuple[int, int, range]]:
        """Yield the runs of positions that this rank holds of each sample: its number, the place of the first position
        in the micro-batch, the positions."""
        start = 0
        for sample, length in zip(self.samples, self.lengths, strict=False):
            for run in kept_positions(length, self.num_shards, self.index):
                yield sample, start, run
                start += len(run)

    def documents(self, device: torch.device) -> Documents:
        """Return its documents."""
        starts = torch.tensor([0, *np.cumsum(self.lengths)], dtype=torch.int32, device=device)
        return Documents(torch.from_numpy(self.positions_S[None]).to(device), self.lengths, starts, self.num_shards)


@dataclass(frozen=True, eq=False)
class GroupedStep:
    """This rank's micro-batches of one step."""

    micro_batches: tuple[GroupMicroBatch, ...]
    led_samples: tuple[tuple[int, NDArray[np.int64]], ...]
    """Number in the step and tokens of each sample of the groups whose first rank this is."""
    num_valid: int
    """Labels that count, of this rank's positions."""

    def tensors(self, name: str, device: torch.device) -> tuple[Tensor, ...]:
        """Return the field of this name of every micro-batch, (1, S) each."""
        return tuple(torch.from_numpy(getattr(one, name)[None]).to(device) for one in self.micro_batches)


_IDLE = GroupMicroBatch(1, np.zeros(1, np.int64), np.full(1, IGNORE_INDEX), np.zeros(1, np.int64), (1,))


class GroupReader:
    """Assigns the samples of each step to groups, and reads those of one rank."""

    def __init__(self, config: RunConfig, plan: Plan, rank: int) -> None:
        self._plan, self._rank, self._vocab_size = plan, rank, config.model.vocab_size
        self._costs = flops_costs(config.model, plan, config.train.seq_len)
        self._lockstep = plan.default_strategy.zero != "z1"

    def assign(self, lengths_B: NDArray[np.int64]) -> StepAssignment:
        """Return the groups of samples of these lengths, which are proven to run."""
        lengths = lengths_B.tolist()
        found = assign_sequences(lengths, self._costs, self._plan.cp, self._lockstep)
        check_assignment(found, lengths, self._costs)
        return found

    def read(
        self, dataset: SampleStream, index_B: NDArray[np.int64], lengths_B: NDArray[np.int64], validation: bool
    ) -> GroupedStep:
        """Read this rank's micro-batches of a step of the samples `index_B`."""
        groups = self.assign(lengths_B).groups_of(self._rank)
        numbers = sorted({number for group in groups if group is not None for number in group.sequences})
        batch = dataset.rows(index_B[numbers] if numbers else index_B[:0], validation)
        require_known_ids(batch, self._vocab_size)
        row_of = {number: row for row, number in enumerate(numbers)}
        micro_batches = tuple(
            _IDLE if group is None else self._cut(batch, group, lengths_B, row_of) for group in groups
        )
        led = (number for group in groups if group is not None and group.first == self._rank for number in group[2])
        samples = ((number, batch.tokens_BS[row_of[number], : lengths_B[number]]) for number in led)
        count = sum(int((one.labels_S != IGNORE_INDEX).sum()) for one in micro_batches)
        return GroupedStep(micro_batches, tuple(samples), count)

    def _cut(
        self, batch: Batch, group: SequenceGroup, lengths_B: NDArray[np.int64], row_of: dict[int, int]
    ) -> GroupMicroBatch:
        """Return this rank's chunks of each sequence of a group, one behind another."""
        held = self._costs.positions(lengths_B)[self._costs.degrees.index(group.degree)]
        lengths = tuple(int(held[number]) * group.degree for number in group.sequences)
        rows = [row_of[number] for number in group.sequences]
        kept = [self._kept(length, group) for length in lengths]
        parts = list(zip(rows, kept, strict=True))
        return GroupMicroBatch(
            group.degree,
            np.concatenate([batch.tokens_BS[row, at] for row, at in parts]),
            np.concatenate([batch.labels_BS[row, at] for row, at in parts]),
            np.concatenate(kept),
            lengths,
            group.sequences,
            self._rank - group.first,
        )

    def _kept(self, length: int, group: SequenceGroup) -> NDArray[np.int64]:
        runs = kept_positions(length, group.degree, self._rank - group.first)
        return np.concatenate([np.arange(run.start, run.stop) for run in runs])
