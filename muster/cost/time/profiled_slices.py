"""Times of a layer in two slices of a micro-batch (`tp_overlap: domino`), of a ladder, or of sub-layers side by side,
on a machine that has been profiled."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Protocol

from muster.cost.time.alternating_turns import alternating_s
from muster.cost.time.batch_slices import slices_s
from muster.cost.time.pass_cost import PassCost
from muster.cost.time.profiled_cost import ProfiledCost
from muster.cost.time.rate_interpolation import RateInterpolator
from muster.layout.batch_slices import batch_slices
from muster.spec.adapters import ROW_PARALLEL
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec


class _Passes(Protocol):
    model: ModelSpec
    rates: RateInterpolator
    rows: int
    mesh: Mesh
    strategy: LayerStrategy

    def of_rows(self, rows: int) -> "_Passes": ...

    def sum_of_streams_s(self) -> float: ...

    def layer(
        self, parts: dict[str, tuple[int, ...]], recompute: str, is_linear: bool, has_experts: bool
    ) -> ProfiledCost: ...


def layer_of_slices(
    passes: _Passes,
    parts: dict[str, tuple[int, ...]],
    recompute: str,
    is_linear: bool,
    has_experts: bool,
    sums_streams: bool,
) -> ProfiledCost:
    """Return the cost of a layer with these parameters, in slices under domino, whose gradients of matrices are added.

    Collectives on a CPU take the cores that compute, and hide nothing; on other devices the slices take turns.
    """
    key = recompute, is_linear, has_experts
    if passes.model.residual == "ladder":
        return _layer_of_ladder(passes, passes.layer(parts, *key))
    if sums_streams:
        return _layer_of_sublayers(passes, parts, recompute)
    if passes.strategy.tp_overlap != "domino" or passes.mesh.tp == 1:
        return passes.layer(parts, *key)
    total = ProfiledCost()
    for own in batch_slices(passes.rows):
        total.add(passes.of_rows(len(own)).layer(parts, *key))
    total.weight_grad_s += passes.rates.kernel("add", sum(prod(shape) for shape in parts.values() if len(shape) > 1))
    if passes.rates.machine.cores:
        return total
    return _in_turns(total, lambda computed_s, sums_s: slices_s([computed_s / 4] * 2, [sums_s / 4] * 2))  # two a slice


def _layer_of_ladder(passes: _Passes, total: ProfiledCost) -> ProfiledCost:
    """Return the cost of a layer of a ladder, of which all is given as if nothing overlapped; on a CPU nothing does."""
    if passes.mesh.tp == 1 or passes.rates.machine.cores:
        return total
    return _in_turns(total, lambda computed_s, sums_s: alternating_s([(computed_s / 2, sums_s / 2, 0.0)] * 2))


def _in_turns(total: ProfiledCost, run: Callable[[float, float], tuple[float, float]]) -> ProfiledCost:
    """Return the cost of a layer whose collectives travel beside its compute: of the seconds of both, `run` makes those
    of one layer of many and those at the end of them."""
    ends_s = []
    for computed_s, exposed_s in (
        (total.forward_s, total.forward_exposed_s),
        (total.input_grad_s + total.weight_grad_s, total.backward_exposed_s),
    ):
        each_s, end_s = run(computed_s, exposed_s["tp"])
        exposed_s["tp"] = each_s - computed_s
        ends_s.append(end_s)
    return replace(total, ends_s=(ends_s[0], ends_s[1]))


def matrix_of_sublayer(name: str, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the shape of one of `count` matrices that the weight of this name has side by side."""
    outer, inner = shape
    return (outer, inner // count) if name.split(".")[-2] in ROW_PARALLEL else (outer // count, inner)


def _layer_of_sublayers(passes: _Passes, parts: dict[str, tuple[int, ...]], recompute: str) -> ProfiledCost:
    """Return the cost of a layer whose sum of streams travels beside attention, forward and backward, and beside what
    full recompute repeats of it."""
    total, sum_s = passes.layer(parts, recompute, False, False), passes.sum_of_streams_s()
    attention = passes.layer(
        {name: shape for name, shape in parts.items() if name.startswith("attn")}, "none", False, False
    )
    hides_s = 0.0 if passes.rates.machine.cores else 1.0
    backward_s = attention.input_grad_s + attention.weight_grad_s
    forward, backward = PassCost(), PassCost()
    forward.add_overlapped("tp", sum_s, hides_s * attention.forward_s)
    backward.add_overlapped("tp", sum_s, hides_s * backward_s)
    if recompute == "full":
        backward.add_overlapped("tp", sum_s, hides_s * attention.forward_s)
    total.forward_exposed_s["tp"] += forward.exposed_s.get("tp", 0.0)
    total.backward_exposed_s["tp"] += backward.exposed_s.get("tp", 0.0)
    return total
