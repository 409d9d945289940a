"""How many numbers of each parameter a rank holds: for the axes that the runtime has, and for experts' own.

The rank is the first on every axis, which never holds less than another. Where the runtime can hold a model, the counts
are those of `muster.spec.layout`; experts, latent and linear attention are cut as Megatron-LM and torchtitan cut them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from operator import attrgetter

from muster.spec.layout import WORDS, has_words, shard_rows
from muster.spec.model import ModelSpec, layer_parameters, stage_parameters
from muster.spec.plan import Mesh, Plan

_ROWS = {"q", "k", "v", "gate", "up", "head", "embed", "q_up", "kv_up", "b", "a", "conv"}
"""Modules whose weights tensor parallelism cuts along their output."""
_COLUMNS = {"o", "down"}
_BY_HEAD = {"decay", "step", "sinks"}


@dataclass(frozen=True, slots=True)
class Held:
    """One parameter, or several together, on one rank: numbers."""

    whole: int
    """As the passes use it: whole, but for what tensor and expert parallelism cut off."""
    shard: int
    """Of that the part that sharded data parallelism leaves it, padded as `fully_shard` pads."""
    last: int = 0
    """Of `whole`, the last parameter's."""

    def __add__(self, other: "Held") -> "Held":
        return Held(self.whole + other.whole, self.shard + other.shard, other.last or self.last)


NOTHING = Held(0, 0)


@dataclass(frozen=True)
class StageHoldings:
    """The parameters of a stage in the groups in which they are gathered and reduced."""

    layers: tuple[Held, ...]
    """Layer by layer."""
    words: Held
    """Embedding and head."""
    rest: Held
    """The last norm, positions, and heads that predict further tokens."""

    @property
    def root(self) -> Held:
        """What belongs to no layer."""
        return self.rest + self.words

    @cached_property
    def all(self) -> Held:
        last = next((held.last for held in reversed(self.layers) if held.last), self.root.last)
        whole, shard = (sum(map(attrgetter(name), self.layers)) for name in ("whole", "shard"))
        return Held(self.root.whole + whole, self.root.shard + shard, last)


def stage_holdings(spec: ModelSpec, plan: Plan, stage: int) -> StageHoldings:
    """What the first rank of a stage holds."""
    layers, mesh = plan.layers(stage, spec.num_layers), plan.mesh(stage)
    first, last = plan.is_first(stage), plan.is_last(stage)
    outside = list(stage_parameters(spec, range(0), first, last))
    ends = _sum(spec, mesh, ((name, shape) for name, shape in outside if name not in WORDS))
    if plan.spread_vocab:
        part = NOTHING
        if has_words(plan, stage):
            rows = shard_rows(spec.vocab_size, plan.pp, plan.pp_rank(stage))[1]
            each = _held(spec, mesh, "embed.weight", (rows, spec.hidden_size))
            part = each if spec.tied_embeddings else each + each
    else:
        part = _sum(spec, mesh, ((name, shape) for name, shape in outside if name in WORDS))
    return StageHoldings(_layers(spec, mesh, layers), part, ends)


def _layers(spec: ModelSpec, mesh: Mesh, layers: range) -> tuple[Held, ...]:
    """Layers of one kind hold alike."""
    if layers and spec.moe is None and spec.linear_attention is None:
        return (_sum(spec, mesh, layer_parameters(spec, layers.start)),) * len(layers)
    held: dict[tuple[bool, bool], Held] = {}
    for layer in layers:
        if (kind := layer_kind(spec, layer)) not in held:
            held[kind] = _sum(spec, mesh, layer_parameters(spec, layer))
    return tuple(held[layer_kind(spec, layer)] for layer in layers)


def layer_kind(spec: ModelSpec, layer: int) -> tuple[bool, bool]:
    """What tells layers of one model apart: experts, linear attention."""
    return spec.has_experts(layer), spec.has_linear_attention(layer)


def _sum(spec: ModelSpec, mesh: Mesh, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Held:
    return sum((_held(spec, mesh, name, shape) for name, shape in shapes), start=NOTHING)


def _held(spec: ModelSpec, mesh: Mesh, name: str, shape: tuple[int, ...]) -> Held:
    """Experts are spread over ep, each cut by etp, and sharded over the ranks that are left; all else is cut by tp and
    sharded over dp_shard and cp (torchtitan's `dp_shard_cp`, Megatron-LM's distributed optimizer)."""
    if ".experts." in name:
        numel = prod(shape) // (mesh.ep * mesh.etp)
        ranks = max(1, mesh.dp_shard * mesh.cp * mesh.tp // (mesh.ep * mesh.etp))
        return Held(numel, ceil(numel / ranks), numel)
    size = list(shape)
    _cut(spec, name, size, mesh.tp)
    rows, *others = size
    return Held(prod(size), ceil(rows / (mesh.dp_shard * mesh.cp)) * prod(others), prod(size))


def _cut(spec: ModelSpec, name: str, size: list[int], tp: int) -> None:
    """Makes `size` that of the first of `tp` ranks, as `muster.spec.layout.tensor_slice` does."""
    kind, is_bias = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2], name.endswith(".bias")
    if tp == 1 or (kind in _COLUMNS and is_bias) or ".shared_gate" in name or "join" in name:
        return
    if kind in _COLUMNS:
        size[-1] = ceil(size[-1] / tp)
    elif kind in ("k", "v") and tp > spec.num_kv_heads and spec.linear_attention is None:
        size[0] = spec.head_dim
    elif kind in _ROWS or kind in _BY_HEAD:
        unit = spec.head_dim if kind in ("q", "k", "v") and size[0] % (tp * spec.head_dim) else 1
        size[0] = ceil(size[0] / unit / tp) * unit
