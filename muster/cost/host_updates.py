"""Updates by the host, for layers whose optimizer state it keeps (ZeRO-Offload, arXiv:2101.06840): work and copies."""

from muster.config.optim_config import OptimConfig
from muster.cost.memory.param_shards import NO_PARAMS, stage_param_shards
from muster.cost.precision_bytes import master_bytes
from muster.layout.host_updates import device_updates
from muster.spec.cluster import NodeGroup
from muster.spec.device import DiskSpec
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan

HOST_UPDATE_BYTES_PER_S = 112e9
"""Bytes that the cores of a node stream in updates: 0.25 s for the 28 bytes each of AdamW on a billion parameters, as
DeepSpeed's CPUAdam takes on the two processors of a DGX-2 (arXiv:2101.06840, table 4). An assumption for other
machines; a measured one has its own rate."""

DISK_BYTES_PER_S = 3e9
"""Bytes a second that a node reads from its disk, and writes to it: an NVMe drive behind PCI Express 4 (an assumption;
data sheets say 5 to 7 GB/s of reads and 3 to 5 GB/s of lasting writes)."""


def disk_rates(group: NodeGroup) -> tuple[float, float]:
    """Return the bytes a second that a node reads from its disks, and writes to them."""
    disk = group.disk or DiskSpec()
    return disk.read_bytes_per_s or DISK_BYTES_PER_S, disk.write_bytes_per_s or DISK_BYTES_PER_S


def host_updated_numels(spec: ModelSpec, plan: Plan, stage: int, optim: OptimConfig | None = None) -> list[int]:
    """Return the elements of each part of a stage whose optimizer state is off the device, on its first rank."""
    if not plan.num_host_updates(stage, spec.num_layers):
        return []
    held = stage_param_shards(spec, plan, stage, optim)
    layers = plan.layers(stage, spec.num_layers)
    further = sum(held.layers[len(layers) :], start=NO_PARAMS)  # for multi-token prediction: outside the plan's layers
    parts = [part for layer, part in zip(layers, held.layers, strict=False) if plan.offloads_optimizer(layer)]
    if len(parts) < plan.num_host_updates(stage, spec.num_layers):
        has_copy = spec.embeds_on_last_stage and plan.is_last(stage) and not plan.is_first(stage)
        first = stage - stage % plan.stages_per_replica
        is_here = has_copy and not plan.vocab_parallel and plan.pp_rank(first) == plan.pp_rank(stage)
        # Where a rank has both copies of a tied weight, the first stage's has the state.
        parts.append(held.root + further - (held.vocab if is_here else NO_PARAMS))
    return [part.shard_numel - part.frozen_shard_numel for part in parts]


def shared_update_numels(
    spec: ModelSpec, plan: Plan, stage: int, optim: OptimConfig | None = None
) -> tuple[list[int], list[int]]:
    """Return `host_updated_numels` of the parts that the host updates, and of those that the device updates with state
    that comes from there."""
    parts = host_updated_numels(spec, plan, stage, optim)
    on_device = device_updates(plan, spec.num_layers, stage) or (False,) * len(parts)
    by_host, by_device = ([n for n, own in zip(parts, on_device, strict=True) if own is here] for here in (False, True))
    return by_host, by_device


def host_part_copies(spec: ModelSpec, plan: Plan, stage: int, optim: OptimConfig | None = None) -> tuple[float, float]:
    """Return the bytes that go to the host for the mean part that it updates of a stage, gradients and parameters, and
    that come back; 0 where the parameters of all parts are there."""
    parts, _ = shared_update_numels(spec, plan, stage, optim)
    if tiers := plan.param_tiers(spec.num_layers):
        parts = [numel for numel, tier in zip(parts, tiers[stage], strict=True) if tier == "none"]
    each = sum(parts) / max(1, len(parts)) * master_bytes(plan.precision)
    return 2 * each, each
