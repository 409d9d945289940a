"""What `muster profile` finds on a machine: seconds of kernels, collectives and bookkeeping, as one rank takes them.

Where several ranks share a core, a time is that of the core: what passes while others have it is left out.
"""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from muster.spec.base import Frozen
from muster.spec.plan import Precision

MatmulPass = Literal["forward", "input", "weight"]
"""Of a linear layer: x·Wᵀ, the gradient of x, and that of W added to what is there."""

Curve = tuple[tuple[NonNegativeInt, PositiveFloat], ...]
"""(numbers that a kernel works on, seconds), by size."""


class KernelRates(Frozen):
    """Kernels in one precision."""

    matmuls: dict[MatmulPass, tuple[tuple[PositiveInt, PositiveInt, PositiveInt, PositiveFloat], ...]] = {}
    """(tokens, input width, output width, seconds) on a grid of the three, of which the largest may be missing."""
    attention: dict[Literal["forward", "backward"], tuple[tuple[PositiveInt, PositiveInt, PositiveFloat], ...]] = {}
    """(positions, width of a head, seconds of one head of one sequence), on a grid."""
    curves: dict[str, Curve] = {}
    """Kernel and direction, such as `norm forward` → by numbers in its largest tensor."""


class MachineRates(Frozen):
    """Everything that was measured."""

    version: Literal[2] = 2
    ranks: PositiveInt
    """That worked at once while kernels were timed."""
    cores: NonNegativeInt
    """That they shared; 0 where each had a device of its own."""
    kernels: dict[Precision, KernelRates]
    collectives: dict[str, tuple[tuple[PositiveInt, PositiveInt, PositiveFloat], ...]]
    """all_reduce, all_gather, reduce_scatter and send → (ranks, bytes, seconds), by ranks and bytes: bytes as the call
    is given them (of all_gather, one rank's part)."""
    overheads: dict[str, NonNegativeFloat] = {}
    """Seconds of what is done beside kernels and collectives: see `muster.cost.time.profiled_times`."""
    contention: dict[str, PositiveFloat] = {}
    """Way to hold a stage → how many times as long as its parts a whole step takes, since ranks that train together
    take cores and caches from each other."""
