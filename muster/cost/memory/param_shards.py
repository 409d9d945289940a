"""How many numbers of each parameter a rank holds: for the axes that the runtime has, and for experts' own.

The rank is the first on every axis, which never holds less than another. Where the runtime can hold a model, the counts
are those of `muster.layout.tensor_layout`; experts, latent and linear attention are cut as Megatron-LM and
torchtitan cut them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from muster.layout.tensor_layout import VOCAB_PARAMETERS, chunk_bounds, has_vocab_shard
from muster.spec.model import ModelSpec, layer_parameter_shapes, stage_parameter_shapes
from muster.spec.plan import Mesh, Plan

_COLUMN_PARALLEL = {"q", "k", "v", "gate", "up", "head", "embed", "q_up", "kv_up", "b", "a", "conv"}
"""Modules whose weights tensor parallelism cuts along their output."""
_ROW_PARALLEL = {"o", "down"}
_PER_HEAD_VECTORS = {"decay", "step", "sinks"}


@dataclass(frozen=True, slots=True)
class ParamShard:
    """One parameter, or several together, on one rank: numbers."""

    unsharded_numel: int
    """As the passes use it: whole, but for what tensor and expert parallelism cut off."""
    shard_numel: int
    """Of that the part that sharded data parallelism leaves it, padded as `fully_shard` pads."""
    last_param_numel: int = 0
    """Of `whole`, the last parameter's."""

    def __add__(self, other: "ParamShard") -> "ParamShard":
        return ParamShard(
            self.unsharded_numel + other.unsharded_numel,
            self.shard_numel + other.shard_numel,
            other.last_param_numel or self.last_param_numel,
        )


NO_PARAMS = ParamShard(0, 0)


@dataclass(frozen=True)
class StageParamShards:
    """The parameters of a stage in the groups in which they are gathered and reduced."""

    layers: tuple[ParamShard, ...]
    """Layer by layer."""
    vocab: ParamShard
    """Embedding and head."""
    other: ParamShard
    """The last norm, positions, and heads that predict further tokens."""

    @property
    def root(self) -> ParamShard:
        """What belongs to no layer."""
        return self.other + self.vocab

    @cached_property
    def total(self) -> ParamShard:
        last = next(
            (held.last_param_numel for held in reversed(self.layers) if held.last_param_numel),
            self.root.last_param_numel,
        )
        unsharded_numel = sum(held.unsharded_numel for held in self.layers)
        shard_numel = sum(held.shard_numel for held in self.layers)
        return ParamShard(self.root.unsharded_numel + unsharded_numel, self.root.shard_numel + shard_numel, last)


def stage_param_shards(spec: ModelSpec, plan: Plan, stage: int) -> StageParamShards:
    """What the first rank of a stage holds."""
    layers, mesh = plan.layers(stage, spec.num_layers), plan.mesh(stage)
    first, last = plan.is_first(stage), plan.is_last(stage)
    outside = list(stage_parameter_shapes(spec, range(0), first, last))
    ends = _sum_shards(spec, mesh, ((name, shape) for name, shape in outside if name not in VOCAB_PARAMETERS))
    if plan.vocab_parallel:
        part = NO_PARAMS
        if has_vocab_shard(plan, stage):
            rows = chunk_bounds(spec.vocab_size, plan.pp, plan.pp_rank(stage))[1]
            each = _param_shard(spec, mesh, "embed.weight", (rows, spec.hidden_size))
            part = each if spec.tied_embeddings else each + each
    else:
        part = _sum_shards(spec, mesh, ((name, shape) for name, shape in outside if name in VOCAB_PARAMETERS))
    return StageParamShards(_layer_shards(spec, mesh, layers), part, ends)


def _layer_shards(spec: ModelSpec, mesh: Mesh, layers: range) -> tuple[ParamShard, ...]:
    """Layers of one kind hold alike."""
    if layers and spec.moe is None and spec.linear_attention is None:
        return (_sum_shards(spec, mesh, layer_parameter_shapes(spec, layers.start)),) * len(layers)
    held: dict[tuple[bool, bool], ParamShard] = {}
    for layer in layers:
        if (kind := layer_type(spec, layer)) not in held:
            held[kind] = _sum_shards(spec, mesh, layer_parameter_shapes(spec, layer))
    return tuple(held[layer_type(spec, layer)] for layer in layers)


def layer_type(spec: ModelSpec, layer: int) -> tuple[bool, bool]:
    """What tells layers of one model apart: experts, linear attention."""
    return spec.has_experts(layer), spec.has_linear_attention(layer)


def _sum_shards(spec: ModelSpec, mesh: Mesh, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> ParamShard:
    return sum((_param_shard(spec, mesh, name, shape) for name, shape in shapes), start=NO_PARAMS)


def _param_shard(spec: ModelSpec, mesh: Mesh, name: str, shape: tuple[int, ...]) -> ParamShard:
    """Experts are spread over ep, each cut by etp, and sharded over the ranks that are left; all else is cut by tp and
    sharded over dp_shard and cp (torchtitan's `dp_shard_cp`, Megatron-LM's distributed optimizer)."""
    if ".experts." in name:
        numel = prod(shape) // (mesh.ep * mesh.etp)
        ranks = max(1, mesh.state_shards * mesh.tp // (mesh.ep * mesh.etp))
        return ParamShard(numel, ceil(numel / ranks), numel)
    size = list(shape)
    _shard_by_tp(spec, name, size, mesh.tp)
    rows, *others = size
    return ParamShard(prod(size), ceil(rows / mesh.state_shards) * prod(others), prod(size))


def _shard_by_tp(spec: ModelSpec, name: str, size: list[int], tp: int) -> None:
    """Makes `size` that of the first of `tp` ranks, as `muster.layout.tensor_layout.tensor_slice` does."""
    kind, is_bias = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2], name.endswith(".bias")
    if tp == 1 or (kind in _ROW_PARALLEL and is_bias) or ".shared_gate" in name or "join" in name:
        return
    if kind in _ROW_PARALLEL:
        size[-1] = ceil(size[-1] / tp)
    elif kind in ("k", "v") and tp > spec.num_kv_heads and spec.linear_attention is None:
        size[0] = spec.head_dim
    elif kind in _COLUMN_PARALLEL or kind in _PER_HEAD_VECTORS:
        unit = spec.head_dim if kind in ("q", "k", "v") and size[0] % (tp * spec.head_dim) else 1
        size[0] = ceil(size[0] / unit / tp) * unit
