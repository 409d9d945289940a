"""How much is trained at once."""

from pydantic import PositiveInt

from muster.spec.base import Frozen


class Workload(Frozen):
    """The sequences of one optimizer step, whatever the plan."""

    seq_len: PositiveInt
    global_batch_size: PositiveInt
    """Sequences per optimizer step, over all ranks."""

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.global_batch_size
