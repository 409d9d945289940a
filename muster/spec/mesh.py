"""Degrees of the axes of a pipeline stage."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING

from pydantic import PositiveInt

from muster.spec.base import Frozen
from muster.spec.mesh_axes import (
    BATCH_AXES,
    EXPERT_RANK_AXES,
    GRAD_SUM_AXES,
    SEQUENCE_AXES,
    STAGE_AXES,
    STATE_SHARD_AXES,
)


class Mesh(Frozen):
    """Degrees of the axes within one pipeline stage."""

    if TYPE_CHECKING:

        def __hash__(self) -> int: ...

    dp_replicate: PositiveInt = 1
    dp_shard: PositiveInt = 1
    cp: PositiveInt = 1
    tp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of one stage; the experts' axes fold into the others."""
        return prod(_STAGE_DEGREES(self))

    @property
    def dp_size(self) -> int:
        """Ranks that read different sequences."""
        return prod(_BATCH_DEGREES(self))

    @property
    def sequence_shards(self) -> int:
        """Parts that a sequence is cut into by the axes whose ranks read different positions."""
        return prod(_SEQUENCE_DEGREES(self))

    @property
    def grad_sum_size(self) -> int:
        """Ranks that every parameter's gradient is summed over."""
        return prod(_GRAD_SUM_DEGREES(self))

    @property
    def state_shards(self) -> int:
        """Parts that optimizer state is sharded into."""
        return prod(_STATE_SHARD_DEGREES(self))

    @property
    def expert_ranks(self) -> int:
        """Ranks that share one copy of a layer's experts; ep × etp divides them."""
        return prod(_EXPERT_RANK_DEGREES(self))

    @property
    def expert_state_shards(self) -> int:
        """Parts that the optimizer state of a rank's experts is sharded into (edp): the ranks with the same experts."""
        return max(1, self.expert_ranks // (self.ep * self.etp))


def _degrees_of(axes: Sequence[str]) -> Callable[[Mesh], tuple[int, ...]]:
    first, *others = axes
    return attrgetter(first, *others) if others else lambda mesh: (getattr(mesh, first),)


_STAGE_DEGREES = _degrees_of(STAGE_AXES)
_BATCH_DEGREES = _degrees_of(BATCH_AXES)
_SEQUENCE_DEGREES = _degrees_of(SEQUENCE_AXES)
_GRAD_SUM_DEGREES = _degrees_of(GRAD_SUM_AXES)
_STATE_SHARD_DEGREES = _degrees_of(STATE_SHARD_AXES)
_EXPERT_RANK_DEGREES = _degrees_of(EXPERT_RANK_AXES)


_MESH_DEGREES = attrgetter(*Mesh.model_fields)


@lru_cache(maxsize=4096)
def _mesh_of(*degrees: int) -> Mesh:
    return Mesh(**dict(zip(Mesh.model_fields, degrees, strict=True)))


def default_mesh(plan: object) -> Mesh:
    """Return the mesh of the stages of a plan that have none of their own; equal ones are one object."""
    return _mesh_of(*_MESH_DEGREES(plan))
