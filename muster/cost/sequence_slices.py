"""Slices of sequences in costs: the workload of one slice, and the bytes of the keys and values that slices leave."""

from muster.cost.activations import PassSizes
from muster.cost.precision_bytes import compute_bytes
from muster.layout.sequence_slices import sequence_slices
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload


def slice_workloads(model: ModelSpec, plan: Plan, workload: Workload) -> list[Workload]:
    """Return the workload of each slice: its positions alone, with the number of those before it. The workload itself
    where sequences aren't cut."""
    if plan.sequence_slices == 1:
        return [workload]
    return [
        workload.model_copy(update={"seq_len": len(positions), "earlier_positions": positions.start})
        for positions in sequence_slices(model, plan, workload.seq_len)
    ]


def kept_bytes(sizes: PassSizes, num_layers: int, whole_length: int) -> int:
    """Return the bytes of the keys and values that some layers keep of a micro-batch's whole sequences, from the
    forward of its first slice to the backward of that; `sizes`: of any slice."""
    own = sizes.local_model
    positions = sizes.tokens // sizes.seq_len * whole_length
    return 2 * num_layers * positions * own.num_kv_heads * own.head_dim * compute_bytes(sizes.precision)
