"""Measurements by `muster profile`: seconds of kernels, collectives and runtime overhead, for one rank.

Where several ranks share a core, a time is that of the core: time in which others have it is excluded.
"""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from muster.spec.base import Frozen
from muster.spec.plan import Precision

PROFILED_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
"""Precisions that `muster profile` measures; with --quick one of them."""

MatmulPass = Literal["forward", "input", "weight"]
"""Matmul of a linear layer: x·Wᵀ, the gradient of x, or the gradient of W accumulated onto the existing one."""

GroupedKernel = Literal["segments", "padded", "grouped_mm"]
"""Way to multiply rows that are sorted by expert by their experts' matrices. segments: a matmul for each expert's rows.
padded: one batched matmul, of as many rows for each expert as the fullest one has. grouped_mm: PyTorch's own kernel."""

GroupedMatmuls = dict[
    GroupedKernel, dict[MatmulPass, tuple[tuple[PositiveInt, PositiveInt, PositiveInt, PositiveFloat], ...]]
]
"""Grouped matmuls by kernel and pass: (rows of each expert, input width, output width, seconds of one expert), on a
grid of the three."""

Curve = tuple[tuple[NonNegativeInt, PositiveFloat], ...]
"""(Elements that a kernel works on, seconds), by size."""


class KernelRates(Frozen):
    """Kernel times in one precision."""

    matmuls: dict[MatmulPass, tuple[tuple[PositiveInt, PositiveInt, PositiveInt, PositiveFloat], ...]] = {}
    """Matmuls: (tokens, input width, output width, seconds) on a grid of the three, whose largest points may be
    missing."""
    attention: dict[Literal["forward", "backward"], tuple[tuple[PositiveInt, PositiveInt, PositiveFloat], ...]] = {}
    """Attention: (positions, head width, seconds of one head of one sequence), on a grid."""
    grouped_matmuls: GroupedMatmuls = {}
    """Matmuls of experts, by each kernel that this machine has; empty in profiles that are older than these."""
    curves: dict[str, Curve] = {}
    """Kernel and direction, such as `norm forward` → time by elements of its largest tensor."""


class MachineRates(Frozen):
    """Everything measured on one machine."""

    version: Literal[2] = 2
    ranks: PositiveInt
    """Ranks that worked at once while kernels were timed."""
    cores: NonNegativeInt
    """Cores that those ranks shared; 0 where each had a device of its own."""
    kernels: dict[Precision, KernelRates]
    collectives: dict[str, tuple[tuple[PositiveInt, PositiveInt, PositiveFloat], ...]]
    """all_reduce, all_gather, reduce_scatter and send → (ranks, bytes, seconds), by ranks and bytes: bytes as passed to
    the call (for all_gather, one rank's part)."""
    host_bytes_per_s: PositiveFloat | None = None
    """Rate of copies between a device and pinned host memory while all devices copy, the slower way; None where the
    devices are the host's cores."""
    disk_read_bytes_per_s: PositiveFloat | None = None
    """Rate of long reads from the disk of the working directory, past the page cache; None where it wasn't measured."""
    disk_write_bytes_per_s: PositiveFloat | None = None
    """Rate of long writes to it, until they are on the disk."""
    overheads: dict[str, NonNegativeFloat] = {}
    """Seconds of work beside kernels and collectives: see `muster.cost.time.profiled_times`."""
    run_errors: tuple[float, ...] = ()
    """(predicted − measured) / measured step time of runs of one's own on this machine, from which predictions take
    their interval, too (`muster profile --runs`)."""
    contention: dict[str, PositiveFloat] = {}
    """Storage of a stage → factor of a whole step's time over the sum of its parts, since ranks that train together
    take cores and caches from each other."""
