"""Moments of a backward when a norm is differentiated in float32: the fullest ones where tensor parallelism leaves a
rank little of the MLP and the logits but, without sequence parallelism, the norms of all positions."""

from muster.cost.activations import mlp_inner_bytes, mlp_matrix_numels, saved_mlp_bytes
from muster.cost.memory.native_storage import NativeStorage


def last_norm_workspace(stage: NativeStorage, norm_workspace: int) -> int:
    """Return the temporary bytes in the backward of the last norm, whose output is freed, and of whose gradients in the
    compute dtype only those of output and result are there."""
    cast = stage.sizes.hidden_bytes * (stage.compute_size < stage.master_size)
    return norm_workspace - 2 * stage.sizes.hidden_bytes + cast


def mlp_norm_workspace(stage: NativeStorage, layer: int, norm_workspace: int, adds_in_place: bool) -> tuple[int, int]:
    """Return the temporary bytes at that moment, and those of the MLP's gradients that have just come into being where
    they are accumulated; nothing for experts, or without a norm.

    `norm_workspace`: bytes of the norm alone; its result is cast. Of what is recomputed attention's part is there,
    what the MLP has saved is not.
    """
    spec, sizes, how = stage.spec, stage.sizes, stage.plan.strategy(layer).recompute
    if spec.has_experts(layer) or not spec.has_pre_norms:
        return 0, 0
    again = 0
    if how == "full":  # without the norm's output, which nothing else saves
        again = stage.layer_activation_bytes(layer, "none") - stage.layer_activation_bytes(layer) - sizes.hidden_bytes
    freed = saved_mlp_bytes(sizes, layer)
    freed += -mlp_inner_bytes(sizes, layer) if how == "elementwise" else sizes.hidden_bytes * (how != "full")
    numel = sum(mlp_matrix_numels(sizes).values())
    cast = sizes.hidden_bytes * (stage.compute_size < stage.master_size)
    waiting = 0 if adds_in_place else numel * stage.compute_size
    return norm_workspace + cast + again + waiting - freed, numel * stage.master_size * adds_in_place
