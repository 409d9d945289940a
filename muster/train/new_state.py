"""Optimizer state that a resumed run begins, as its checkpoint was saved without it and rightly so."""

from collections.abc import Iterable
from typing import NamedTuple

from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import Manifest
from muster.config.freezing import newly_trained
from muster.config.optimizer_state import EMA_STATE
from muster.config.run_config import RunConfig
from muster.spec.units import pluralize


class NewState(NamedTuple):
    """State of the whole model that the run keeps now, and that the run that saved did not keep."""

    parameters: frozenset[str] = frozenset()
    """Parameters that were frozen and are trained now."""
    average: bool = False
    """True where the average of the weights begins."""

    def stored(self, shards: Iterable[LocalShard]) -> list[LocalShard]:
        """Return the shards that the checkpoint has to hold."""
        return [shard for shard in shards if not self._begins(shard)]

    def _begins(self, shard: LocalShard) -> bool:
        parameter = shard.layout.name
        if not shard.name.startswith("optim/"):
            return False
        return parameter in self.parameters or (self.average and shard.name == f"optim/{parameter}.{EMA_STATE}")

    def lines(self, step: int) -> list[str]:
        """Return a line for each key whose state begins after `step`."""
        lines = [f"optim.ema_decay: the average begins at step {step}"] if self.average else []
        if count := len(self.parameters):
            state = f"the optimizer state of {pluralize(count, 'newly trained parameter')}"
            lines.append(f"optim.freeze: {state} begins at step {step}")
        return lines


def find_new_state(manifest: Manifest, config: RunConfig) -> NewState:
    """Find the state that begins where a run with this configuration resumes from a checkpoint.

    It follows from the configuration alone with which the checkpoint was saved, so that a tensor that is missing there
    for another reason is an error.
    """
    before = manifest.run.get("optim")
    if before is None:
        return NewState()
    parameters = frozenset(newly_trained(before.get("freeze", ()), config.optim, config.model))
    return NewState(parameters, bool(config.optim.ema_decay) and not before.get("ema_decay"))
