"""Memory terms (bytes by purpose) and bytes per element of a precision."""

from dataclasses import dataclass, fields
from operator import add, attrgetter

from muster.spec.plan import Precision

_COMPUTE_BYTES: dict[Precision, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


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


def compute_bytes(precision: Precision) -> int:
    """Return the bytes of an element in forward and backward; under fp8 2, since only matmuls run in fp8, the rest in
    bf16."""
    return _COMPUTE_BYTES[precision]


def master_bytes(precision: Precision) -> int:
    """Return the bytes of an element of master weights, gradients, moments, statistics and the loss."""
    return max(4, compute_bytes(precision))
