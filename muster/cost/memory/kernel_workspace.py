"""Temporary memory of the runtime's kernels on each kind of device."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelWorkspace:
    """Temporary memory of the runtime's kernels on a kind of device."""

    fused_norm: bool
    """True if norms make no float32 copies of their input."""
    loss_chunk_logits: int
    """Logits that the loss processes at once (`muster.model.loss`)."""
    attention_chunk_scores: int = 1 << 25
    """Scores that piecewise attention processes at once (`muster.model.piecewise_attention`)."""
    dropout_chunk_numbers: int = 1 << 22
    """Random numbers of 64 bits that dropout draws at once (`muster.model.dropout`)."""
    dequantized_numbers: int = 1 << 24
    """Elements of a weight in 4 bits that plain PyTorch makes at once (`muster.model.four_bit`)."""
    fused_bands: bool = True
    """True if a fused kernel takes blocks of attention with a window (`muster.model.block_kernels`)."""
    overlaps_data_parallel: bool = True
    """True if z1's gathers and reductions run beside passes (`Plan.overlaps_data_parallel`)."""
    stages_collectives: bool = False
    """True if collectives copy their data to one more buffer, as gloo does."""


GPU_LOSS_CHUNK_LOGITS = 1 << 26
CPU_LOSS_CHUNK_LOGITS = 1 << 17
KERNEL_WORKSPACES = {
    "cpu": KernelWorkspace(
        fused_norm=False,
        loss_chunk_logits=CPU_LOSS_CHUNK_LOGITS,
        attention_chunk_scores=1 << 20,
        dropout_chunk_numbers=1 << 15,
        dequantized_numbers=1 << 18,
        fused_bands=False,
        overlaps_data_parallel=False,
        stages_collectives=True,
    )
}
DEFAULT_KERNEL_WORKSPACE = KernelWorkspace(fused_norm=True, loss_chunk_logits=GPU_LOSS_CHUNK_LOGITS)
