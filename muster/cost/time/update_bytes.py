"""Bytes that an optimizer step moves for each element, counted for fp32 master weights and bf16 passes."""

from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import mean_state_bytes, mean_update_bytes
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan import Plan

ADAMW_UPDATE_BYTES = 30
"""AdamW reads and writes master weight and two moments in float32, reads the gradient, and writes the weight that the
passes use: 3 · 8 + 4 + 2 for each number (arXiv:1711.05101, algorithm 2)."""
PREDICTED_WEIGHT_BYTES = 32
"""Bytes per element of weight prediction: the weights are copied before an update (8), their change is taken (12) and
added to them (12)."""
NEXT_MEAN_BYTES = 20
"""Bytes per element of AdamW with `nesterov`: the mean gradient is updated (12), and a copy of it made (8), which the
update then has in its place."""
_MASTER_BYTES, _PASS_BYTES = 4, 2


def update_bytes_per_element(plan: Plan, model: ModelSpec, optim: OptimConfig | None) -> float:
    """Return the bytes that a step moves: those of the update, and of what is kept before it."""
    return optimizer_bytes_per_element(model, optim) + _kept_bytes(plan, model, optim)


def optimizer_bytes_per_element(model: ModelSpec, optim: OptimConfig | None) -> float:
    """Return the bytes of the update alone, as the optimizer's entry in `muster.config.optimizers` declares them."""
    if optim is None:
        return ADAMW_UPDATE_BYTES
    predicted = PREDICTED_WEIGHT_BYTES if optim.delay_compensation == "predict" else 0
    ahead = NEXT_MEAN_BYTES if optim.name == "adamw" and optim.nesterov else 0
    return mean_update_bytes(optim, dict(parameter_shapes(model)), _MASTER_BYTES, _PASS_BYTES) + predicted + ahead


def _kept_bytes(plan: Plan, model: ModelSpec, optim: OptimConfig | None) -> float:
    """Return the bytes read and written for copies of parameters and optimizer state under post-validation, or of the
    weights that micro-batches in flight still need."""
    if plan.post_validation:
        return 2 * (_MASTER_BYTES + mean_state_bytes(optim, dict(parameter_shapes(model)), _MASTER_BYTES))
    entry = plan.schedule_entry
    if entry.is_asynchronous and entry.stashes_weights and plan.flush_every > 1:
        return 2 * (_PASS_BYTES if plan.precision == "bf16" else _MASTER_BYTES)
    return 0.0
