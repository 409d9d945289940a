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
    """Scores that soft-capped attention processes at once (`muster.model.soft_capped_attention`)."""
    stages_collectives: bool = False
    """True if collectives copy their data to one more buffer, as gloo does."""


GPU_LOSS_CHUNK_LOGITS = 1 << 26
CPU_LOSS_CHUNK_LOGITS = 1 << 17
KERNEL_WORKSPACES = {
    "cpu": KernelWorkspace(
        fused_norm=False,
        loss_chunk_logits=CPU_LOSS_CHUNK_LOGITS,
        attention_chunk_scores=1 << 20,
        stages_collectives=True,
    )
}
DEFAULT_KERNEL_WORKSPACE = KernelWorkspace(fused_norm=True, loss_chunk_logits=GPU_LOSS_CHUNK_LOGITS)
