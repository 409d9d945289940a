"""Memory terms: bytes on one rank, by purpose."""

from dataclasses import dataclass, fields
from operator import add, attrgetter


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """Bytes on one rank, by purpose."""

    parameters: int = 0
    """Shards of the master weights that the rank's optimizer updates."""
    gathered_parameters: int = 0
    """Parameters in the compute dtype, unsharded for the passes, with the buffers of their all-gathers."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Activations saved by forwards for backwards."""
    logits: int = 0
    """Logits, and their gradient or softmax saved for the backward."""
    communication: int = 0
    """Buffers of sends, receives, reductions and communicators."""
    workspace: int = 0
    """Tensors that live within a pass only: unreduced gradients, intermediate results, recomputed activations."""
    fragmentation: int = 0
    """Memory that the allocator has reserved and can't use."""
    context: int = 0
    """Device context: driver, kernels and libraries of the framework."""

    @property
    def total(self) -> int:
        return sum(_ALL(self))

    def by_name(self) -> dict[str, int]:
        """Return term → bytes, in the order of the fields."""
        return {name: getattr(self, name) for name in TERMS}

    def __add__(self, other: "MemoryTerms") -> "MemoryTerms":
        return MemoryTerms(*map(add, _ALL(self), _ALL(other)))

    def scaled(self, count: int) -> "MemoryTerms":
        """Return every term times `count`."""
        return MemoryTerms(*(count * size for size in _ALL(self)))


TERMS = tuple(field.name for field in fields(MemoryTerms))
_ALL = attrgetter(*TERMS)
