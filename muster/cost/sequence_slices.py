"""Slices of sequences in costs: the workload of one slice, and the bytes of the keys and values that slices leave."""

from muster.cost.activations import PassSizes, offloaded_activation_bytes
from muster.cost.precision_bytes import compute_bytes
from muster.layout.sequence_slices import sequence_slices
from muster.spec.layer_strategy import Tier
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload


def slice_workloads(model: ModelSpec, plan: Plan, workload: Workload) -> list[Workload]:
    """Return the workload of each slice: its positions alone, with the number of those before it. The workload itself
    where sequences aren't cut."""
    if plan.sequence_slices == 1:
        return [workload]
    slices = sequence_slices(model, plan, workload.seq_len)
    following = (*map(len, slices[1:]), 0)
    return [
        workload.model_copy(
            update={"seq_len": len(positions), "earlier_positions": positions.start, "next_positions": after}
        )
        for positions, after in zip(slices, following, strict=True)
    ]


def offloaded_bytes_of_slices(
    model: ModelSpec, plan: Plan, workload: Workload, stage: int, tier: Tier = "host", tp_index: int = 0
) -> tuple[int, ...]:
    """Return the bytes of each slice, or of the whole sequences, of one micro-batch that a stage's first rank, or that
    of a tensor-parallel index, offloads to host memory or keeps on disk."""
    parts = slice_workloads(model, plan, workload)
    return tuple(offloaded_activation_bytes(model, plan, part, stage, tier, tp_index) for part in parts)


def kept_bytes(sizes: PassSizes, num_layers: int, whole_length: int) -> int:
    """Return the bytes of the keys and values that some layers keep of a micro-batch's whole sequences, from the
    forward of its first slice to the backward of that; `sizes`: of any slice."""
    own = sizes.local_model
    positions = sizes.tokens // sizes.seq_len * whole_length
    return 2 * num_layers * positions * own.num_kv_heads * own.head_dim * compute_bytes(sizes.precision)
