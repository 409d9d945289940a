"""Elements of each parameter that a rank holds, for all axes including those of experts.

The rank is the first on every axis, which never holds less than another. For models that the runtime supports, the
counts are those of `muster.layout.tensor_layout`; experts, latent and linear attention are cut as in Megatron-LM and
torchtitan.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, prod

from muster.config.freezing import is_frozen
from muster.config.optim_config import OptimConfig
from muster.cost.precision_bytes import compute_bytes, master_bytes
from muster.layout.tensor_layout import (
    VOCAB_PARAMETERS,
    chunk_bounds,
    has_vocab_shard,
    is_expert,
    state_shard_numel,
    tp_shard,
)
from muster.spec.adapters import is_adapter
from muster.spec.four_bit import four_bit_parts, has_four_bits, part_bytes
from muster.spec.low_rank import is_low_rank
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec, layer_parameter_shapes, stage_parameter_shapes
from muster.spec.plan import Plan, Precision
from muster.spec.workload import Workload

_COLUMN_PARALLEL = {"q", "k", "v", "gate", "up", "head", "embed", "q_up", "kv_up", "b", "a", "conv"}
"""Modules whose weights tensor parallelism cuts along their output."""
_ROW_PARALLEL = {"o", "down"}
_PER_HEAD_VECTORS = {"decay", "step", "sinks"}


@dataclass(frozen=True, slots=True)
class ParamShard:
    """Elements of one parameter, or of several together, on one rank.

    Weights in 4 bits count as elements with as many bytes in all: in passes in the dtype of these, and of shards in
    that of master weights.
    """

    unsharded_numel: int
    """Elements as the passes use them: cut by tensor and expert parallelism only."""
    shard_numel: int
    """Elements after sharded data parallelism, padded as `fully_shard` does."""
    last_param_numel: int = 0
    """Part of `unsharded_numel` that belongs to the last parameter that has gradients."""
    frozen_unsharded_numel: int = 0
    """Part of `unsharded_numel` that has no gradients."""
    frozen_shard_numel: int = 0
    """Part of `shard_numel` that has none."""

    def __add__(self, other: "ParamShard") -> "ParamShard":
        return ParamShard(
            self.unsharded_numel + other.unsharded_numel,
            self.shard_numel + other.shard_numel,
            other.last_param_numel or self.last_param_numel,
            self.frozen_unsharded_numel + other.frozen_unsharded_numel,
            self.frozen_shard_numel + other.frozen_shard_numel,
        )

    @property
    def trained(self) -> "ParamShard":
        """The part that has gradients."""
        unsharded, shard = (
            self.unsharded_numel - self.frozen_unsharded_numel,
            self.shard_numel - self.frozen_shard_numel,
        )
        return ParamShard(unsharded, shard, self.last_param_numel)

    def __sub__(self, part: "ParamShard") -> "ParamShard":
        """Return the elements without those of a part, whose last parameter is not the last."""
        if part is NO_PARAMS:
            return self
        return ParamShard(
            self.unsharded_numel - part.unsharded_numel,
            self.shard_numel - part.shard_numel,
            min(self.last_param_numel, self.unsharded_numel - part.unsharded_numel),
            self.frozen_unsharded_numel - part.frozen_unsharded_numel,
            self.frozen_shard_numel - part.frozen_shard_numel,
        )


NO_PARAMS = ParamShard(0, 0)


@dataclass(frozen=True)
class StageParamShards:
    """Parameters of a stage in the groups in which they are gathered and reduced."""

    layers: tuple[ParamShard, ...]
    """Parameters of each layer, those for multi-token prediction last."""
    vocab: ParamShard
    """Embedding and head."""
    other: ParamShard
    """Last norm and position embeddings."""
    last_root_numel: int
    """Unsharded elements of the last parameter outside layers, in the order of the module."""
    experts: tuple[ParamShard, ...]
    """Part of each layer's that is a group of its own: experts, where expert parallelism leaves a rank some of them."""

    @cached_property
    def blocks(self) -> tuple[ParamShard, ...]:
        """Parameters of each layer without those in groups of their own."""
        return tuple(whole - part for whole, part in zip(self.layers, self.experts, strict=True))

    @cached_property
    def root(self) -> ParamShard:
        """Parameters outside layers."""
        return replace(self.other + self.vocab, last_param_numel=self.last_root_numel)

    def buckets(self, num_layers: int) -> tuple[ParamShard, ...]:
        """Return the parameters of each bucket of so many layers, in model order; the last one may have fewer."""
        if num_layers == 1:
            return self.layers
        starts = range(0, len(self.layers), num_layers)
        return tuple(sum(self.layers[start : start + num_layers], start=NO_PARAMS) for start in starts)

    @cached_property
    def trained(self) -> "StageParamShards":
        """The part of all that has gradients."""
        layers, experts = (tuple(one.trained for one in held) for held in (self.layers, self.experts))
        return StageParamShards(layers, self.vocab.trained, self.other.trained, self.last_root_numel, experts)

    @cached_property
    def total(self) -> ParamShard:
        last = next(
            (held.last_param_numel for held in reversed(self.layers) if held.last_param_numel),
            self.root.last_param_numel,
        )
        return replace(sum(self.layers, start=self.root), last_param_numel=last)


def stage_param_shards(spec: ModelSpec, plan: Plan, stage: int, optim: OptimConfig | None = None) -> StageParamShards:
    """Return the parameters that the first rank of a stage holds."""
    mesh, first, last = plan.mesh(stage), plan.is_first(stage), plan.is_last(stage)
    layers = [*plan.layers(stage, spec.num_layers), *spec.last_layers(last)]
    outside = [one for one in stage_parameter_shapes(spec, range(0), first, last) if not one[0].startswith("mtp.")]
    ends = _sum_shards(spec, mesh, ((name, shape) for name, shape in outside if name not in VOCAB_PARAMETERS), optim)
    if plan.vocab_parallel:
        part = NO_PARAMS
        if has_vocab_shard(plan, stage):
            rows = chunk_bounds(spec.vocab_size, plan.pp, plan.pp_rank(stage))[1]
            shape = (rows, spec.hidden_size)
            part = _param_shard(spec, mesh, "embed.weight", shape, optim)
            part = part if spec.tied_embeddings else part + _param_shard(spec, mesh, "head.weight", shape, optim)
    else:
        part = _sum_shards(spec, mesh, ((name, shape) for name, shape in outside if name in VOCAB_PARAMETERS), optim)
    if plan.vocab_parallel:
        final = part.last_param_numel or ends.last_param_numel
    else:
        final = _param_shard(spec, mesh, *outside[-1], optim).last_param_numel if outside else 0
    apart = (NO_PARAMS,) * len(layers)
    if mesh.ep > 1:
        apart = tuple(_layer_experts(spec, mesh, layer, optim) for layer in layers)
    held = _layer_shards(spec, mesh, layers, optim)
    if spec.adapter is not None and spec.adapter.load_in_4bit:
        held = tuple(one + _four_bit_shard(spec, mesh, plan.precision) for one in held)
    return StageParamShards(held, part, ends, final, apart)


def summed_gradient_share(plan: Plan, workload: Workload, stage: int) -> float:
    """Return the elements of gradients that wait between backwards for their reduction to all ranks' shards, as a
    multiple of these; 0 where every backward completes it."""
    mesh = plan.mesh(stage)
    backwards = plan.num_stage_micro_batches(stage, workload) * plan.sequence_slices
    waits = plan.reduce_ranks(mesh) < mesh.state_shards and plan.reduces_replicas_once and backwards > 1
    return mesh.state_shards / plan.reduce_ranks(mesh) if waits else 0.0


def _layer_experts(spec: ModelSpec, mesh: Mesh, layer: int, optim: OptimConfig | None) -> ParamShard:
    if not spec.has_experts(layer):
        return NO_PARAMS
    shapes = ((name, shape) for name, shape in layer_parameter_shapes(spec, layer) if is_expert(name))
    return _sum_shards(spec, mesh, shapes, optim)


def _layer_shards(
    spec: ModelSpec, mesh: Mesh, layers: Sequence[int], optim: OptimConfig | None = None
) -> tuple[ParamShard, ...]:
    """Return the parameters of each layer; layers of one type hold the same, but for which of them are frozen."""
    if optim is not None and optim.freeze:
        return tuple(_sum_shards(spec, mesh, layer_parameter_shapes(spec, layer), optim) for layer in layers)
    return _trained_layer_shards(spec, mesh, tuple(layers))


@lru_cache(maxsize=1024)
def _trained_layer_shards(spec: ModelSpec, mesh: Mesh, layers: tuple[int, ...]) -> tuple[ParamShard, ...]:
    """Return the parameters of each layer where none is frozen."""
    first_of_type = _first_layers_of_types(spec)
    examples = [first_of_type[min(layer, spec.num_layers)] for layer in layers]
    held = {example: _trained_layer_shard(spec, mesh, example) for example in dict.fromkeys(examples)}
    return tuple(held[example] for example in examples)


@lru_cache(maxsize=64)
def _first_layers_of_types(spec: ModelSpec) -> tuple[int, ...]:
    """Return for each layer the first one of its type; last, for those of further tokens, the first of them."""
    first_of = {layer_type(spec, layer): layer for layer in reversed(range(spec.num_layers))}
    return (*(first_of[layer_type(spec, layer)] for layer in range(spec.num_layers)), spec.num_layers)


@lru_cache(maxsize=1024)
def _trained_layer_shard(spec: ModelSpec, mesh: Mesh, layer: int) -> ParamShard:
    """Return the parameters of a layer that has none frozen; a search asks for those of the same few layers often."""
    return _sum_shards(spec, mesh, layer_parameter_shapes(spec, layer))


def layer_type(spec: ModelSpec, layer: int) -> tuple[bool, bool, bool]:
    """Return the type of a layer, as (has experts, has linear attention, begins a ladder)."""
    return spec.has_experts(layer), spec.has_linear_attention(layer), spec.residual == "ladder" and layer == 0


def _sum_shards(
    spec: ModelSpec, mesh: Mesh, shapes: Iterable[tuple[str, tuple[int, ...]]], optim: OptimConfig | None = None
) -> ParamShard:
    return sum((_param_shard(spec, mesh, name, shape, optim) for name, shape in shapes), start=NO_PARAMS)


def _param_shard(
    spec: ModelSpec, mesh: Mesh, name: str, shape: tuple[int, ...], optim: OptimConfig | None = None
) -> ParamShard:
    """Return the elements of one parameter, and which of them are frozen."""
    if has_four_bits(spec, name):
        return NO_PARAMS
    whole, shard = _param_numels(spec, mesh, name, shape)
    return ParamShard(whole, shard, 0, whole, shard) if is_frozen(optim, name) else ParamShard(whole, shard, whole)


@lru_cache(maxsize=1024)
def _four_bit_shard(spec: ModelSpec, mesh: Mesh, precision: Precision) -> ParamShard:
    """Return what a layer's weights in 4 bits count as. A stage that one rank holds whole has no copies for its
    passes."""
    whole = shard = 0
    for name, shape in layer_parameter_shapes(spec, 0):
        for part, size in four_bit_parts(name, shape) if has_four_bits(spec, name) else ():
            rows, *others = tp_shard(spec, part, size, mesh.tp, 0)[0].size
            each = prod(others) * (part_bytes(part) or 0)
            whole, shard = whole + rows * each, shard + ceil(rows / mesh.state_shards) * each
    gathered = 0 if mesh.grad_sum_size == 1 else ceil(whole / compute_bytes(precision))
    kept = ceil(shard / master_bytes(precision))
    return ParamShard(gathered, kept, 0, gathered, kept)


def _param_numels(spec: ModelSpec, mesh: Mesh, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the elements of one parameter as the passes use them, and after sharded data parallelism.

    Experts are distributed over ep, each cut by etp, and sharded over the remaining ranks; all else is cut by tp and
    sharded over dp_shard and cp (torchtitan's `dp_shard_cp`, Megatron-LM's distributed optimizer).
    """
    if ".experts." in name:
        size = [shape[0] // mesh.ep, *shape[1:]]
        if not name.endswith("down.bias"):  # added to the sum over the ranks of etp
            size[2 if "down" in name else 1] //= mesh.etp
        return prod(size), state_shard_numel(mesh, name, tuple(size))
    size = list(shape)
    _shard_by_tp(spec, name, size, mesh.tp)
    rows, *others = size
    return prod(size), ceil(rows / mesh.state_shards) * prod(others)


def _shard_by_tp(spec: ModelSpec, name: str, size: list[int], tp: int) -> None:
    """Change `size` to that on the first of `tp` ranks, as `muster.layout.tensor_layout.tp_shard` does."""
    if is_adapter(name) or is_low_rank(name) or spec.parallel_sublayers > 1:
        size[:] = tp_shard(spec, name, tuple(size), tp, 0)[0].size
        return
    kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    is_bias, is_linear = name.endswith(".bias"), spec.has_linear_attention_parameter(name)
    if kind in ("q_norm", "k_norm") and spec.qk_norm_width == "projection":
        kind = kind[0]
    if tp == 1 or (kind in _ROW_PARALLEL and is_bias) or ".shared_gate" in name or "eh_proj" in name:
        return
    if kind in _ROW_PARALLEL:
        size[-1] = ceil(size[-1] / tp)
    elif kind in ("k", "v") and tp > spec.num_kv_heads and not is_linear:
        size[0] = spec.head_dim
    elif kind in _COLUMN_PARALLEL or kind in _PER_HEAD_VECTORS:
        is_head = kind in ("q", "k", "v") and not is_linear
        unit = spec.head_dim if is_head and size[0] % (tp * spec.head_dim) else 1
        size[0] = ceil(size[0] / unit / tp) * unit
