"""What memory is counted in: bytes by what they are for, and how wide a number is."""

from dataclasses import dataclass, fields
from operator import add, attrgetter

from muster.spec.plan import Precision

_COMPUTE_BYTES: dict[Precision, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """Bytes on one rank, by what they are for."""

    parameters: int = 0
    """The rank's own, as the optimizer changes them."""
    gathered_parameters: int = 0
    """As the passes use them, with the buffers of their all-gathers."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """What forwards keep for backwards."""
    logits: int = 0
    """Logits, and what is made of them for the loss and kept."""
    communication: int = 0
    """Buffers of sends, receives, reductions and communicators."""
    workspace: int = 0
    """What lives within a pass only: gradients that are not reduced yet, intermediate results, what is made again."""
    fragmentation: int = 0
    """What the allocator holds and can't use."""
    context: int = 0
    """The device's driver, the framework's kernels and libraries."""

    @property
    def total(self) -> int:
        return sum(_ALL(self))

    def by_name(self) -> dict[str, int]:
        """Term → bytes, in the order above."""
        return {name: getattr(self, name) for name in TERMS}

    def __add__(self, other: "MemoryTerms") -> "MemoryTerms":
        return MemoryTerms(*map(add, _ALL(self), _ALL(other)))

    def scaled(self, count: int) -> "MemoryTerms":
        """As much, `count` times."""
        return MemoryTerms(*(count * size for size in _ALL(self)))


TERMS = tuple(field.name for field in fields(MemoryTerms))
_ALL = attrgetter(*TERMS)


def compute_bytes(precision: Precision) -> int:
    """Bytes of one number in the forward and backward passes; fp8 is for matrix products alone, around them is bf16."""
    return _COMPUTE_BYTES[precision]


def master_bytes(precision: Precision) -> int:
    """Bytes of one number where sums are kept: master weights, gradients, moments, statistics, the loss."""
    return max(4, compute_bytes(precision))
