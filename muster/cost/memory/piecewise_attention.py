"""Temporary memory of attention that is computed piece by piece."""

from muster.cost.activations import PassSizes
from muster.cost.memory.kernel_workspace import KernelWorkspace


def piece_workspace(
    sizes: PassSizes, kernels: KernelWorkspace, compute_size: int, master_size: int, backward: bool
) -> int:
    """Return the temporary bytes of piecewise attention (`muster.model.piecewise_attention`).

    A piece of the scores has capped ones and their copies in the compute dtype beside it, in the backward also their
    softmax and its gradient, and the gradients of keys and values in the master dtype. Dropout has a mask, and beside
    it some of the numbers that it follows from. `compute_size`, `master_size`: bytes of an element.
    """
    own = sizes.local_model
    scores = min(kernels.attention_chunk_scores, sizes.tokens * own.num_heads * sizes.seq_len)
    converted = compute_size * (compute_size != master_size)
    numbers = min(kernels.dropout_chunk_numbers, scores // 4)
    mask = (scores + 16 * numbers) * bool(own.attention_dropout)
    if not backward:
        return scores * (master_size + converted) + mask
    width = own.num_heads * compute_size + 2 * own.num_kv_heads * (master_size + converted)
    return scores * (3 * master_size + converted) + mask + sizes.tokens * own.head_dim * width
