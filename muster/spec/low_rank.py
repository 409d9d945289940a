"""Low-rank layers: a linear layer W x as a product of two narrow ones, B (A x), where A is (r, input width) and B
(output width, r) (Greenformers: S. Cahyawijaya et al., arXiv:2109.06762).

Parameters are called `low_rank_A.weight` and `low_rank_B.weight`, in the place of `weight`; a bias stays as it is.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from muster.spec.adapters import TARGETS, Targets
from muster.spec.base import Frozen

_MARK = ".low_rank_"


class LowRankSpec(Frozen):
    """Linear layers of the decoder layers that are products of two narrow ones."""

    rank: PositiveInt | None = None
    """Rank r of each of these layers; one that r wouldn't make smaller, of no less than m n / (m + n) for m outputs and
    n inputs, stays whole."""
    ratio: Annotated[float, Field(gt=0, lt=1)] | None = None
    """In place of `rank`: share of that bound, rounded down, to at least 1. The layer's parameters and FLOPs are about
    this share of the whole layer's."""
    target_modules: Targets = TARGETS
    """Linear layers that are products: q, k, v, o, gate, up, down, or PEFT's names (q_proj), or all-linear for all of
    these. One text holds several, with commas between them."""
    solver: Literal["svd", "random"] = "svd"
    """Factors of whole weights that a run begins with (`train.init_from`). svd: their largest singular values, evenly
    divided, the nearest product of this rank. random: initial values, as without weights to begin with."""

    @model_validator(mode="after")
    def _check_one(self) -> "LowRankSpec":
        if (self.rank is None) == (self.ratio is None):
            found = "neither is" if self.rank is None else "both are"
            raise ValueError(f"expected one of rank and ratio, but {found} given")
        return self

    def rank_of(self, module: str, shape: tuple[int, ...]) -> int | None:
        """Return the rank of a linear layer, given by its last name and its weight's shape; None for a whole one.

        Source of the bound: Greenformers (arXiv:2109.06762 §3): r (m + n) < m n.
        """
        if module not in self.target_modules:
            return None
        outputs, inputs = shape
        rank = self.rank or max(1, int((self.ratio or 0) * outputs * inputs / (outputs + inputs)))
        return rank if rank * (outputs + inputs) < outputs * inputs else None


NamedShapes = Iterable[tuple[str, tuple[int, ...]]]


def with_low_rank(low_rank: LowRankSpec, shapes: NamedShapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the parameters of a decoder layer, with two factors in the place of each weight that has them, behind the
    layer's bias."""
    waiting: tuple[str, int, tuple[int, ...]] | None = None
    for name, shape in (*shapes, ("", ())):
        module, _, leaf = name.rpartition(".")
        if waiting is not None and waiting[0] != module:
            yield f"{waiting[0]}{_MARK}A.weight", (waiting[1], waiting[2][1])
            yield f"{waiting[0]}{_MARK}B.weight", (waiting[2][0], waiting[1])
            waiting = None
        rank = low_rank.rank_of(module.rpartition(".")[2], shape) if leaf == "weight" and len(shape) == 2 else None
        if rank is not None:
            waiting = module, rank, shape
        elif name:
            yield name, shape


def is_low_rank(name: str) -> bool:
    """Return True for a factor of a low-rank layer."""
    return _MARK in name


def low_rank_module(name: str) -> tuple[str, str]:
    """Return the linear layer that a factor belongs to, and its place there: low_rank_A or low_rank_B."""
    module, _, rest = name.partition(_MARK)
    return module, _MARK[1:] + rest.partition(".")[0]
