"""The workload: the amount of data in one step."""

from pydantic import PositiveInt

from muster.spec.base import Frozen

MAX_PROGRAM_MICRO_BATCHES = 2**18
"""Largest product of micro-batches of a step and pipeline ranks: programs of more take minutes to build."""


class Workload(Frozen):
    """Sequences of one optimizer step, independent of the plan."""

    seq_len: PositiveInt
    global_batch_size: PositiveInt
    """Sequences per optimizer step, over all ranks."""

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.global_batch_size
