"""Training loss as a sum over labels, so that shards of a batch add up to the same value however it is sharded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muster.model.chunk_sizes import chunk_elements
from muster.model.kernels import accumulation_dtype, soft_cap_, soft_cap_slope_
from muster.plugins.loader import error_location
from muster.spec.errors import ConfigError, MusterError

IGNORE_INDEX = -100
"""Label of a position that does not count."""


class LossSums(NamedTuple):
    """Sums over the labels that count: scalars in float32 at least. Only `total` can be differentiated."""

    total: Tensor
    """Loss that training minimizes: the sum of the two below."""
    cross_entropy: Tensor
    z_loss: Tensor
    """The coefficient times log²(Z), where Z is the sum of the exponentials of a position's logits.

    It keeps log Z near zero, where low precisions are exact (PaLM, arXiv:2204.02311 §5, with a coefficient of 1e-4).
    """


def masked_sums(nll: Tensor, log_z: Tensor | None, valid: Tensor, z_loss_coefficient: float) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy and the z-loss, summed over the positions where `valid` is 1 (elsewhere it is 0).

    `nll` is minus the log-probability of the label, `log_z` the log-sum-exp of the logits, which a coefficient of 0
    doesn't need; all have the shape of the positions.
    """
    cross_entropy = (nll * valid).sum()
    if log_z is None or not z_loss_coefficient:
        return cross_entropy, torch.zeros_like(cross_entropy)
    return cross_entropy, z_loss_coefficient * (log_z.square() * valid).sum()


def z_loss_factor(log_z: Tensor, z_loss_coefficient: float) -> Tensor:
    """Return the factor of the softmax in the gradient of cross-entropy plus z-loss.

    d(−log p[label]) / d logits = p − onehot(label), and d(log Z) / d logits = p.
    """
    return 1 + 2 * z_loss_coefficient * log_z


def softmax_gradient_(p_NV: Tensor, factor_N: Tensor | None, row_N: Tensor, label_weight_N: Tensor) -> Tensor:
    """Turn p into factor · p − label_weight · onehot(row), in place: the gradient of the logits.

    p is the softmax, or another multiple of exp(logits) whose `factor_N` makes up for it; None stands for 1.
    """
    if factor_N is not None:
        p_NV *= factor_N.unsqueeze(1)
    return p_NV.scatter_add_(1, row_N.unsqueeze(1), -label_weight_N.unsqueeze(1))


class _LossSums(torch.autograd.Function):
    """Loss in one pass over the logits, some rows at a time, that replaces them by their gradient (of the unscaled
    loss).

    That gradient, in the dtype of the logits, is the only large tensor, and it is saved. PyTorch's own function makes
    four: float32 logits, log-probabilities, and a gradient of each. The backward scales the saved tensor in place, so
    autograd refuses to run it twice.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, z_loss_coefficient: float, softcap: float | None
    ) -> LossSums:
        dtype = accumulation_dtype(logits_NV.dtype)
        device = logits_NV.device
        valid_N = (labels_N != IGNORE_INDEX).to(dtype)
        target_N = labels_N.clamp(min=0)
        grad_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        loss = torch.zeros((), dtype=dtype, device=device)
        z_loss = torch.zeros((), dtype=dtype, device=device)
        rows = max(1, chunk_elements("loss", device.type) // logits_NV.shape[1])
        for start in range(0, len(logits_NV), rows):
            chunk = slice(start, start + rows)
            target_R, valid_R = target_N[chunk], valid_N[chunk]
            x_RV = logits_NV[chunk]
            if softcap is not None:
                x_RV = soft_cap_(x_RV.to(dtype, copy=True), softcap)
            log_p_RV = torch.log_softmax(x_RV, dim=-1, dtype=dtype)
            nll_R = -log_p_RV.gather(1, target_R.unsqueeze(1)).squeeze(1)
            log_z_R = None
            if z_loss_coefficient:
                log_z_R = x_RV.gather(1, target_R.unsqueeze(1)).squeeze(1) + nll_R
            chunk_loss, chunk_z_loss = masked_sums(nll_R, log_z_R, valid_R, z_loss_coefficient)
            loss += chunk_loss
            z_loss += chunk_z_loss
            if grad_NV is not None:
                factor_R = None if log_z_R is None else z_loss_factor(log_z_R, z_loss_coefficient)
                softmax_gradient_(log_p_RV.exp_(), factor_R, target_R, torch.ones_like(valid_R))
                if softcap is not None:
                    log_p_RV *= soft_cap_slope_(x_RV, softcap)
                torch.mul(log_p_RV, valid_R.unsqueeze(1), out=grad_NV[chunk])
        ctx.save_for_backward(grad_NV)
        ctx.mark_non_differentiable(loss, z_loss)
        return LossSums(loss + z_loss, loss, z_loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad_NV,) = ctx.saved_tensors
        return grad_NV.mul_(grads[0]), None, None, None


def loss_sums(
    logits_BSV: Tensor, labels_BS: Tensor, z_loss_coefficient: float = 0.0, softcap: float | None = None
) -> LossSums:
    """Return cross-entropy and z-loss of logits (B, S, V), each summed over the labels (B, S) other than −100.

    Logits are soft-capped here, chunk by chunk: capped before, they would have to be saved for their derivative.
    """
    sums = _LossSums.apply(logits_BSV.flatten(0, 1), labels_BS.flatten(), z_loss_coefficient, softcap)
    return LossSums(*sums)  # type: ignore[misc]


def cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return minus the log-probability of each label, summed over the labels other than −100: a scalar, float32 at
    least."""
    return loss_sums(logits_BSV, labels_BS).total


def plugin_loss_sums(loss: Callable[[Tensor, Tensor], Tensor], logits_BSV: Tensor, labels_BS: Tensor) -> LossSums:
    """Return a plugin's loss of all logits at once; it is reported in place of the cross-entropy.

    Raises ConfigError, with file and line, if the loss fails, or isn't one number that can be differentiated.
    """
    try:
        total = loss(logits_BSV.flatten(0, 1), labels_BS.flatten())
    except MusterError:
        raise
    except Exception as error:
        code = getattr(loss, "__code__", None)
        where = error_location(Path(code.co_filename), error) if code is not None else repr(loss)
        raise ConfigError(f"train.loss: {where}: {type(error).__name__}: {error}") from error
    if not isinstance(total, Tensor) or total.numel() != 1:
        shape = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise ConfigError(f"train.loss: expected one number, the sum over the labels other than -100, got {shape}")
    if logits_BSV.requires_grad and not total.requires_grad:
        raise ConfigError(
            "train.loss: expected a number that can be differentiated, got one that doesn't depend on the logits"
        )
    total = total.reshape(())
    return LossSums(total, total.detach(), torch.zeros_like(total))
