"""Comparison of a plan's trace with the reference's, to find where they first differ."""

from collections.abc import Iterable, Iterator, Mapping
from math import inf, isnan
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from muster.checkpoint.checkpoint_dir import checkpoint_path
from muster.checkpoint.load import read_full
from muster.checkpoint.manifest import read_manifest
from muster.config.optimizer_state import is_zeroth_order
from muster.report.parity import FirstDifference, ParityResult, Phase, relative_difference
from muster.spec.model import ModelSpec
from muster.train.verify.reference import Reference
from muster.train.verify.sketch import traced_parts
from muster.train.verify.trace import GRADIENTS_FOLDER, UPDATED_FOLDER, Trace

_FACTOR_TOLERANCE = 1e-3
"""Largest relative rest of gradients that are wrong by one common factor alone."""


def compare(plan: str, folder: Path, reference: Reference, tolerance: float) -> ParityResult:
    """Compare the plan that left its trace in `folder` with the reference."""
    ours, theirs = Trace.read(folder), reference.trace
    hidden = _hidden_differences(reference, ours, step=0)
    kept = _SavedCopies(checkpoint_path(folder / GRADIENTS_FOLDER, 1))
    idle = _zero_gradient_parameters(reference.config.model)
    gradients = {
        name: kept.differences(name, tensor, least=_norm(reference.gradients[idle[name]]) if name in idle else 0.0)
        for name, tensor in reference.gradients.items()
    }
    working = {name: g for name, g in reference.gradients.items() if name not in idle and name not in reference.frozen}
    factor = _common_factor(kept, working) if min(map(_worst, gradients.values())) > tolerance else None
    updated = reference.updated_parameters(
        {name: kept.first_copy(name, tensor) for name, tensor in reference.gradients.items()}, ours.grad_norms[0]
    )
    kept = _SavedCopies(checkpoint_path(folder / UPDATED_FOLDER, 1))
    updates = {name: kept.differences(name, tensor) for name, tensor in updated.items()}
    loss = relative_difference(ours.losses[0], theirs.losses[0])
    norm = relative_difference(ours.grad_norms[0], theirs.grad_norms[0])
    if is_zeroth_order(optim := reference.config.optim):  # rounding of the losses is divided by the points' distance
        norm = 2 * optim.zo_eps * abs(ours.grad_norms[0] - theirs.grad_norms[0]) / theirs.losses[0]
    checks = (
        *(FirstDifference("forward", 1, part, size) for part, size in hidden.items()),
        FirstDifference("loss", 1, "loss", loss),
        *_parameter_differences("backward", reversed(gradients.items()), tolerance, factor),
        FirstDifference("norm", 1, "gradients", norm),
        *_parameter_differences("update", updates.items(), tolerance),
        *_later_differences(reference, ours, tolerance),
    )
    return ParityResult(
        plan,
        reference.precision,
        tolerance,
        losses=ours.losses,
        reference_losses=theirs.losses,
        grad_norms=ours.grad_norms,
        reference_grad_norms=theirs.grad_norms,
        hidden=hidden,
        gradients={name: _worst(sizes) for name, sizes in gradients.items()},
        updates={name: _worst(sizes) for name, sizes in updates.items()},
        first=next((check for check in checks if not check.size <= tolerance), None),  # NaN is beyond any tolerance
    )


def _zero_gradient_parameters(model: ModelSpec) -> dict[str, str]:
    """Return the parameters whose gradient is rounding alone, each with another whose gradient gives its scale.

    The bias of keys without rotary embedding adds the same to all scores of a query, which the softmax cancels.
    """
    if model.position == "rope" or not model.qkv_bias:
        return {}
    return {f"layers.{layer}.attn.k.bias": f"layers.{layer}.attn.q.bias" for layer in range(model.num_layers)}


def _parameter_differences(
    phase: Phase, found: Iterable[tuple[str, list[float]]], tolerance: float, factor: float | None = None
) -> Iterator[FirstDifference]:
    """Yield the largest difference of each parameter over its copies, in the order given."""
    for name, sizes in found:
        wrong = [index for index, size in enumerate(sizes, 1) if not size <= tolerance]
        copy = f"copy {wrong[0]} of {len(sizes)}" if len(wrong) == 1 and len(sizes) > 1 else None
        yield FirstDifference(phase, 1, name, _worst(sizes), factor, copy)


def _hidden_differences(reference: Reference, ours: Trace, step: int) -> dict[str, float]:
    """Return the relative difference of the output of each part of the model in one step."""
    expected = reference.trace.sketches[step]
    off = np.linalg.norm(ours.sketches[step] - expected, axis=(1, 2)) / np.linalg.norm(expected, axis=(1, 2))
    by_part = zip(traced_parts(reference.config.model), off.tolist(), strict=True)
    return {part: size for part, size in by_part if part not in ours.unwatched}


def _later_differences(reference: Reference, ours: Trace, tolerance: float) -> list[FirstDifference]:
    """Return the differences of the losses after the first step, each with the part of the model that differs first.

    Gradient norms are not compared there: Adam turns the rounding of a small gradient into an update of full size.
    """
    found = []
    for step in range(1, len(ours.losses)):
        hidden = _hidden_differences(reference, ours, step)
        where = next((part for part, off in hidden.items() if not off <= tolerance), "loss")
        size = relative_difference(ours.losses[step], reference.trace.losses[step])
        found.append(FirstDifference("later", step + 1, where, size))
    return found


class _SavedCopies:
    """Saved tensors of a plan's ranks: every copy of each parameter."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = read_manifest(folder).tensors.keys()

    def copies(self, name: str) -> list[Tensor]:
        """Return all copies, in order; none where no rank held the parameter."""
        stored = sorted(key for key in self._names if key.partition("/")[2] == name)
        return [read_full(self._folder, key) for key in stored]

    def first_copy(self, name: str, like: Tensor) -> Tensor:
        """Return the copy that a checkpoint would hold; zeros like `like` where there is none."""
        copies = self.copies(name)
        return copies[0] if copies else torch.zeros_like(like)

    def differences(self, name: str, expected: Tensor, least: float = 0.0) -> list[float]:
        """Return the relative difference of each copy from the expected tensor."""
        return [_relative(copy, expected, least) for copy in self.copies(name)]


def _worst(sizes: list[float]) -> float:
    """Return the largest size, or NaN if there is one; infinity where no rank held the parameter."""
    return next((size for size in sizes if isnan(size)), max(sizes, default=inf))


def _common_factor(saved: _SavedCopies, expected: Mapping[str, Tensor]) -> float | None:
    """Return the factor by which all gradients are multiplied, if nothing else is wrong with them."""
    factors = []
    for name, theirs in expected.items():
        ours, theirs = saved.first_copy(name, theirs).double(), theirs.double()
        factor = float((ours * theirs).sum() / (theirs * theirs).sum())
        if not _relative(ours, factor * theirs) <= _FACTOR_TOLERANCE:
            return None
        factors.append(factor)
    return factors[0] if max(factors) - min(factors) <= _FACTOR_TOLERANCE * abs(factors[0]) else None


def _relative(ours: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the Euclidean norm of the difference relative to that of the expected tensor, or to `least` if that is
    larger."""
    off, size = _norm(ours.double() - expected.double()), max(_norm(expected), least)
    return off / size if size else (inf if off else 0.0)


def _norm(tensor: Tensor) -> float:
    """Return the Euclidean norm."""
    return float(tensor.double().norm())
