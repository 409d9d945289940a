"""Lays the trace of a plan beside the reference's, and finds where they part."""

from collections.abc import Iterable, Iterator, Mapping
from math import inf, isnan
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from muster.checkpoint.folder import folder_of
from muster.checkpoint.load import read_full
from muster.checkpoint.manifest import read_manifest
from muster.report.verdict import Difference, Phase, Verdict, relative
from muster.spec.model import ModelSpec
from muster.train.verify.reference import Reference
from muster.train.verify.sketch import parts_of
from muster.train.verify.trace import GRADIENTS, UPDATED, Trace

_ONE_FACTOR = 1e-3
"""Gradients that a factor explains up to this part of them are wrong by that factor alone."""


def compare(plan: str, folder: Path, reference: Reference, tolerance: float) -> Verdict:
    """How the plan that left its trace in `folder` differs from the reference."""
    ours, theirs = Trace.read(folder), reference.trace
    hidden = _hidden(reference, ours, step=0)
    kept = _Kept(folder_of(folder / GRADIENTS, 1))
    idle = _idle(reference.config.model)
    gradients = {
        name: kept.differences(name, tensor, least=_size(reference.gradients[idle[name]]) if name in idle else 0.0)
        for name, tensor in reference.gradients.items()
    }
    working = {name: tensor for name, tensor in reference.gradients.items() if name not in idle}
    factor = _common_factor(kept, working) if min(map(_worst, gradients.values())) > tolerance else None
    updated = reference.updated({name: kept.first_copy(name, tensor) for name, tensor in reference.gradients.items()})
    kept = _Kept(folder_of(folder / UPDATED, 1))
    updates = {name: kept.differences(name, tensor) for name, tensor in updated.items()}
    loss, norm = relative(ours.losses[0], theirs.losses[0]), relative(ours.grad_norms[0], theirs.grad_norms[0])
    checks = (
        *(Difference("forward", 1, part, size) for part, size in hidden.items()),
        Difference("loss", 1, "loss", loss),
        *_of_parameters("backward", reversed(gradients.items()), tolerance, factor),
        Difference("norm", 1, "gradients", norm),
        *_of_parameters("update", updates.items(), tolerance),
        *_later(reference, ours, tolerance),
    )
    return Verdict(
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


def _idle(model: ModelSpec) -> dict[str, str]:
    """The parameters whose gradient is rounding alone, each with another whose gradient says how large that may be.

    The bias of keys that aren't turned adds the same to all scores of a query, which the softmax takes away.
    """
    if model.position == "rope" or not model.qkv_bias:
        return {}
    return {f"layers.{layer}.attn.k.bias": f"layers.{layer}.attn.q.bias" for layer in range(model.num_layers)}


def _of_parameters(
    phase: Phase, found: Iterable[tuple[str, list[float]]], tolerance: float, factor: float | None = None
) -> Iterator[Difference]:
    """The worst copy of each parameter, in the order given."""
    for name, sizes in found:
        wrong = [index for index, size in enumerate(sizes, 1) if not size <= tolerance]
        copy = f"copy {wrong[0]} of {len(sizes)}" if len(wrong) == 1 and len(sizes) > 1 else None
        yield Difference(phase, 1, name, _worst(sizes), factor, copy)


def _hidden(reference: Reference, ours: Trace, step: int) -> dict[str, float]:
    """How far the outputs of the model's parts are from the reference's in one step."""
    expected = reference.trace.sketches[step]
    off = np.linalg.norm(ours.sketches[step] - expected, axis=(1, 2)) / np.linalg.norm(expected, axis=(1, 2))
    by_part = zip(parts_of(reference.config.model), off.tolist(), strict=True)
    return {part: size for part, size in by_part if part not in ours.unwatched}


def _later(reference: Reference, ours: Trace, tolerance: float) -> list[Difference]:
    """The losses of the steps after the first, and which part of the model parts first in such a step.

    Norms of gradients are not judged there: Adam turns the rounding of a small gradient into an update of full size.
    """
    found = []
    for step in range(1, len(ours.losses)):
        hidden = _hidden(reference, ours, step)
        where = next((part for part, off in hidden.items() if not off <= tolerance), "loss")
        size = relative(ours.losses[step], reference.trace.losses[step])
        found.append(Difference("later", step + 1, where, size))
    return found


class _Kept:
    """What the ranks of a plan kept of each parameter: every copy of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = read_manifest(folder).tensors.keys()

    def copies(self, name: str) -> list[Tensor]:
        """All copies, in order; none where no rank held the parameter."""
        stored = sorted(key for key in self._names if key.partition("/")[2] == name)
        return [read_full(self._folder, key) for key in stored]

    def first_copy(self, name: str, like: Tensor) -> Tensor:
        """The copy that a checkpoint would hold; zeros, of the kind of `like`, where there is none."""
        copies = self.copies(name)
        return copies[0] if copies else torch.zeros_like(like)

    def differences(self, name: str, expected: Tensor, least: float = 0.0) -> list[float]:
        """How far each copy is from what is expected, as `_relative` says it."""
        return [_relative(copy, expected, least) for copy in self.copies(name)]


def _worst(sizes: list[float]) -> float:
    """The largest, or one that is no number; infinite where no rank held the parameter."""
    return next((size for size in sizes if isnan(size)), max(sizes, default=inf))


def _common_factor(kept: _Kept, expected: Mapping[str, Tensor]) -> float | None:
    """What all gradients are multiplied by, if that is all that is wrong with them."""
    factors = []
    for name, theirs in expected.items():
        ours, theirs = kept.first_copy(name, theirs).double(), theirs.double()
        factor = float((ours * theirs).sum() / (theirs * theirs).sum())
        if not _relative(ours, factor * theirs) <= _ONE_FACTOR:
            return None
        factors.append(factor)
    return factors[0] if max(factors) - min(factors) <= _ONE_FACTOR * abs(factors[0]) else None


def _relative(ours: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """The Euclidean norm of the difference as a part of that of what is expected, or of `least` if that is more."""
    off, size = _size(ours.double() - expected.double()), max(_size(expected), least)
    return off / size if size else (inf if off else 0.0)


def _size(tensor: Tensor) -> float:
    """The Euclidean norm."""
    return float(tensor.double().norm())
