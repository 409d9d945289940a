"""What a device's memory holds beside tensors: driver, kernels, libraries, communicators, and what the allocator can't
use."""

from muster.cost.precision_bytes import MemoryTerms
from muster.spec.device import DeviceSpec
from muster.spec.plan import Plan

_MIB = 2**20

CONTEXT_BYTES = {"gpu": 560 * _MIB, "tpu": 512 * _MIB, "cpu": 0}
"""GPU: the CUDA context with PyTorch's kernels and cuBLAS's workspaces (about 500 MiB and 8 to 32 MiB:
docs.pytorch.org/docs/stable/notes/cuda.html)."""
COMMUNICATOR_BYTES = 544 * _MIB
"""One NCCL communicator over NVLink, as measured on A100 for two devices; 688 MiB for more (github NVIDIA/nccl#964)."""
LARGE_COMMUNICATOR_BYTES = 688 * _MIB
FRAGMENTATION_SHARE = 0.03
"""Of what comes and goes within a step: an assumption, as no source measures it apart."""


def device_overhead(device: DeviceSpec, plan: Plan, pp_rank: int, transient_bytes: int) -> MemoryTerms:
    """On a rank that holds up to `transient_bytes` beside what it always holds."""
    if device.kind == "cpu":
        return MemoryTerms(context=CONTEXT_BYTES["cpu"])
    return MemoryTerms(
        communication=sum(
            COMMUNICATOR_BYTES if size == 2 else LARGE_COMMUNICATOR_BYTES for size in communicator_sizes(plan, pp_rank)
        ),
        fragmentation=int(FRAGMENTATION_SHARE * transient_bytes),
        context=CONTEXT_BYTES[device.kind],
    )


def communicator_sizes(plan: Plan, pp_rank: int) -> list[int]:
    """The sizes of a rank's groups, those alone left out: data, tensor, context and expert ranks, and the world."""
    mesh = plan.mesh(pp_rank)
    sizes = [mesh.dp_replicate, mesh.state_shards, mesh.tp, mesh.cp, mesh.ep, plan.pp]
    return [size for size in sizes if size > 1]
