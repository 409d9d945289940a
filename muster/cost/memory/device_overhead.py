"""Device memory besides tensors: context (driver, kernels, libraries), communicators, and fragmentation."""

from muster.cost.memory.terms import MemoryTerms
from muster.spec.device import DeviceSpec
from muster.spec.plan import Plan

_MIB = 2**20

CONTEXT_BYTES = {"gpu": 560 * _MIB, "tpu": 512 * _MIB, "cpu": 0}
"""GPU: the CUDA context with PyTorch's kernels and cuBLAS's workspaces (about 500 MiB and 8 to 32 MiB:
docs.pytorch.org/docs/stable/notes/cuda.html)."""
COMMUNICATOR_BYTES = 544 * _MIB
"""Bytes of an NCCL communicator of two devices over NVLink, measured on A100 (github NVIDIA/nccl#964)."""
LARGE_COMMUNICATOR_BYTES = 688 * _MIB
"""Bytes of an NCCL communicator of more than two devices (same source)."""
FRAGMENTATION_SHARE = 0.03
"""Fragmentation as a share of the memory that is allocated and freed within a step, with expandable segments, which
ranks set (`muster/parallel/gpu_settings.py`): an assumption, since no source measures it separately."""


def device_overhead(device: DeviceSpec, plan: Plan, pp_rank: int, transient_bytes: int) -> MemoryTerms:
    """Return the overhead of a rank that holds up to `transient_bytes` besides its resident memory."""
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
    """Return the sizes of a rank's process groups of more than one rank: dp_replicate, sharded data parallelism, tp,
    cp, ep, pp, and both replicas of a bidirectional pipeline."""
    mesh = plan.mesh(pp_rank)
    sizes = [mesh.dp_replicate, mesh.state_shards, mesh.tp, mesh.cp, mesh.ep, plan.pp, plan.pipeline_replicas]
    return [size for size in sizes if size > 1]
