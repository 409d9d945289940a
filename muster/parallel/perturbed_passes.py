"""Forwards of a stage at perturbed parameters, for training without a backward (MeZO, arXiv:2305.17333; ZO2,
arXiv:2503.12668).

One pass computes both points of a micro-batch, part by part: a layer computes the first half of the hidden states with
its parameters θ + ε z, and the second half with θ − ε z, before the next layer begins. So a layer that is gathered
from other ranks, or brought from host memory or disk, comes once for both (ZO2's dual forward). With perturbation
parallelism (DistZO2) a rank has one of the signs, and both halves are samples: its own and those of its neighbour.

Parameters are never changed and changed back, which would leave rounding errors: θ ± ε z is a copy, that of one layer
at a time. A pass whose parameters have fewer digits than the master weights perturbs what it computes with.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muster.cost.perturbation import POINTS
from muster.model.decoder import Decoder
from muster.model.loss import LossSums
from muster.model.perturbation import Direction, Part, moved, rows_of, whole_numbers


class _Held(NamedTuple):
    """A trained parameter of a module."""

    module: nn.Module
    leaf: str
    name: str
    """Name in the whole model."""


class PerturbedPasses:
    """Lets the forwards of a decoder compute at θ + ε z and θ − ε z between `begin` and `end`."""

    def __init__(self, module: Decoder, parts: Mapping[str, Part], eps: float) -> None:
        """`parts`: the trained parameters, by name, as passes use them."""
        self._module, self._parts, self._eps = module, parts, eps
        self._direction: Direction | None = None
        self._signs: tuple[int, ...] = ()
        self._sign = 0
        self._numbers: dict[str, Tensor] = {}
        """Random numbers of the part of the model under way, which all of its points read."""
        for prefix, part in module.named_modules():
            if part is module.norm or part in module.blocks():
                held = self._held(part, prefix)
                part.forward = partial(self._at_points, held, part.forward)  # type: ignore[method-assign]
        module.embed_tokens = partial(self._embed, module.embed_tokens)  # type: ignore[method-assign]
        module.project_logits = partial(self._project, module.project_logits)  # type: ignore[method-assign]
        positions = module.position_state
        positions.learned_rows = partial(self._learned_rows, positions.learned_rows)  # type: ignore[method-assign]

    def _held(self, part: nn.Module, prefix: str) -> list[_Held]:
        return [
            _Held(owner, leaf, name)
            for path, owner in part.named_modules(prefix=prefix)
            for leaf in owner._parameters
            if (name := f"{path}.{leaf}") in self._parts
        ]

    def begin(self, direction: Direction, signs: tuple[int, ...]) -> None:
        """Perturb the passes that follow along a direction, with each of the signs."""
        self._direction, self._signs = direction, signs

    def end(self) -> None:
        """Leave the passes that follow as they are."""
        self._direction, self._signs = None, ()

    @property
    def is_active(self) -> bool:
        return self._direction is not None

    @property
    def num_points(self) -> int:
        """Points that this rank computes."""
        return len(self._signs)

    def losses(
        self, labels_BS: Tensor, loss_of: Callable[[Tensor, Tensor], LossSums], x_BSD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the mean over both points of (cross-entropy, z-loss), and the difference of the whole losses, of this
        rank's points: float64, sums over tokens. `x_BSD` are the hidden states under the head at all points."""
        means, difference = [], []
        for sign, part_BSD in self._by_sign(x_BSD):
            found = loss_of(self._module.logits(part_BSD), labels_BS)
            means.append(torch.stack((found.cross_entropy, found.z_loss)).double() / POINTS)
            difference.append(sign * found.total.double())
        self._numbers.clear()
        return torch.stack(means).sum(0), torch.stack(difference).sum()

    # ------------------------------------------------------------------------------------------------------------------
    # Parts of the model

    def _by_sign(self, x_BSD: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each sign with its part of the hidden states, while it is that of `_moved`."""
        for sign, part_BSD in zip(self._signs, x_BSD.chunk(len(self._signs)), strict=True):
            self._sign = sign
            yield sign, part_BSD

    def _at_points(self, held: list[_Held], forward: Callable[..., Tensor], x_BSD: Tensor, *constants: Any) -> Tensor:
        """Compute a part of the model at all points, whose results take the place of their inputs."""
        if not self.is_active:
            return forward(x_BSD, *constants)
        for _, part_BSD in self._by_sign(x_BSD):
            with self._in_place(held):
                part_BSD.copy_(forward(part_BSD, *constants))
        self._numbers.clear()
        return x_BSD

    @contextmanager
    def _in_place(self, held: list[_Held]) -> Iterator[None]:
        """Put perturbed copies in the place of parameters."""
        kept = [one.module._parameters[one.leaf] for one in held]
        try:
            for one, parameter in zip(held, kept, strict=True):
                assert parameter is not None
                copy = self._moved(parameter.detach(), one.name)
                one.module._parameters[one.leaf] = nn.Parameter(copy, requires_grad=False)
            yield
        finally:
            for one, parameter in zip(held, kept, strict=True):
                one.module._parameters[one.leaf] = parameter

    def _moved(self, values: Tensor, name: str) -> Tensor:
        """Return parameters at the point of the present sign."""
        assert self._direction is not None
        if (part := self._parts.get(name)) is None:
            return values
        if name not in self._numbers:
            self._numbers[name] = whole_numbers(self._direction, part, values.device)
        return moved(values, self._numbers[name], self._sign * self._eps)

    def _embed(self, embed: Callable[[Tensor, Tensor], Tensor], tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
        """Return the embeddings at all points: the rows that tokens look up are perturbed, not the table."""
        x_BSD = embed(tokens_BS, weight_VD)
        part = self._parts.get("embed.weight")
        if self._direction is None:
            return x_BSD
        if part is None:
            return torch.cat([x_BSD] * len(self._signs))
        count = x_BSD.shape[1]
        first = self._module.position_state.sequence_shard * count
        own_N = tokens_BS[:, first : first + count].flatten()
        numbers_BSD = rows_of(self._direction, part, own_N).view(x_BSD.shape)
        return torch.cat([moved(x_BSD, numbers_BSD, sign * self._eps) for sign in self._signs])

    def _learned_rows(self, rows: Callable[[Tensor, Tensor], Tensor], weight_PD: Tensor, x_BSD: Tensor) -> Tensor:
        if not self.is_active:
            return rows(weight_PD, x_BSD)
        found = [
            rows(self._moved(weight_PD.detach(), "positions.weight"), part_BSD).expand_as(part_BSD)
            for _, part_BSD in self._by_sign(x_BSD)
        ]
        self._numbers.clear()
        return torch.cat(found)

    def _project(self, project: Callable[[Tensor, Tensor], Tensor], x_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        if not self.is_active:
            return project(x_BSD, weight_VD)
        name = "embed.weight" if self._module.head is None else "head.weight"
        return project(x_BSD, self._moved(weight_VD.detach(), name))
