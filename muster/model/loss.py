"""The training loss as a sum, so that any cut of the batch adds up to the same number."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muster.cost.memory.native_memory import CPU_LOSS_CHUNK_LOGITS, GPU_LOSS_CHUNK_LOGITS
from muster.model.kernels import accumulation_dtype
from muster.plugins.loader import error_location
from muster.spec.errors import ConfigError, MusterError

IGNORE_INDEX = -100
"""The label of a position that does not count."""

_CHUNK_ELEMENTS = {"cpu": CPU_LOSS_CHUNK_LOGITS}
_DEFAULT_CHUNK_ELEMENTS = GPU_LOSS_CHUNK_LOGITS
"""Logits that are worked on at once: what stays in a core's cache, and elsewhere enough to fill a device."""


@contextmanager
def large_chunks() -> Iterator[None]:
    """Losses within work on as many logits at once as on a GPU, wherever they run."""
    own = _CHUNK_ELEMENTS.copy()
    _CHUNK_ELEMENTS.clear()
    try:
        yield
    finally:
        _CHUNK_ELEMENTS.update(own)


class LossSums(NamedTuple):
    """Sums over the labels that count: scalars in float32 at least. Only `total` can be differentiated."""

    total: Tensor
    """What training makes small: the two below together."""
    cross_entropy: Tensor
    z_loss: Tensor
    """The coefficient times log²(Z), where Z is the sum of the exponentials of a position's logits. It keeps log Z
    near zero, where low precisions are exact (PaLM, arXiv:2204.02311 §5; there the coefficient is 1e-4)."""


class _LossSums(torch.autograd.Function):
    """Goes over the logits once, some rows at a time, and leaves their gradient (for a loss counted once) behind.

    So the only large tensor is that gradient, in the dtype of the logits; it is what is saved. PyTorch's own function
    makes four: float32 logits, log-probabilities, and a gradient of each. The backward scales the saved tensor in
    place: autograd refuses to run it twice.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, z_coefficient: float) -> LossSums:
        dtype, device = accumulation_dtype(logits_NV.dtype), logits_NV.device
        counts_N1 = (labels_N != IGNORE_INDEX).to(dtype).unsqueeze(1)
        target_N1 = labels_N.clamp(min=0).unsqueeze(1)
        grad_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        loss, z_loss = (torch.zeros((), dtype=dtype, device=device) for _ in range(2))
        rows = max(1, _CHUNK_ELEMENTS.get(device.type, _DEFAULT_CHUNK_ELEMENTS) // logits_NV.shape[1])
        for start in range(0, len(logits_NV), rows):
            part = slice(start, start + rows)
            log_p_RV = torch.log_softmax(logits_NV[part], dim=-1, dtype=dtype)
            log_target_R1 = log_p_RV.gather(1, target_N1[part])
            loss -= (log_target_R1 * counts_N1[part]).sum()
            if z_coefficient:
                log_z_R1 = logits_NV[part].gather(1, target_N1[part]) - log_target_R1
                z_loss += z_coefficient * (log_z_R1.square() * counts_N1[part]).sum()
            if grad_NV is not None:
                # d(−log p[target]) / d logits = p − onehot(target), and d(log Z) / d logits = p
                p_RV = log_p_RV.exp_()
                if z_coefficient:
                    p_RV *= 1 + 2 * z_coefficient * log_z_R1
                p_RV.scatter_add_(1, target_N1[part], -torch.ones_like(counts_N1[part]))
                torch.mul(p_RV, counts_N1[part], out=grad_NV[part])
        ctx.save_for_backward(grad_NV)
        ctx.mark_non_differentiable(loss, z_loss)
        return LossSums(loss + z_loss, loss, z_loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_NV,) = ctx.saved_tensors
        return grad_NV.mul_(grads[0]), None, None


def loss_sums(logits_BSV: Tensor, labels_BS: Tensor, z_loss_coefficient: float = 0.0) -> LossSums:
    """The cross-entropy and the z-loss of the logits, each summed over the labels other than −100."""
    return LossSums(*_LossSums.apply(logits_BSV.flatten(0, 1), labels_BS.flatten(), z_loss_coefficient))  # type: ignore[misc]


def cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Minus the log-probability of each label, summed over the labels other than −100: a scalar in float32 at least."""
    return loss_sums(logits_BSV, labels_BS).total


def plugin_loss_sums(loss: Callable[[Tensor, Tensor], Tensor], logits_BSV: Tensor, labels_BS: Tensor) -> LossSums:
    """What a plugin's loss says of all logits at once; it is reported in the place of the cross-entropy.

    Raises ConfigError, with file and line, where it fails, and where it isn't one number that can be differentiated.
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
        raise ConfigError(f"train.loss: expected the sum over the labels that count, one number, got {shape}")
    if logits_BSV.requires_grad and not total.requires_grad:
        raise ConfigError("train.loss: expected a number that can be differentiated, got one that no logit leads to")
    total = total.reshape(())
    return LossSums(total, total.detach(), torch.zeros_like(total))
