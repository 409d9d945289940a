"""The parts of global tensors that each rank holds: the one truth for initialisation, clipping, checkpoints and
memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from muster.layout.box import Box
from muster.layout.expert_placement import expert_order, placed_boxes
from muster.layout.mesh import (
    ExpertCoordinates,
    MeshCoordinates,
    coordinates_of,
    expert_coordinates,
    state_shard_index,
)
from muster.spec.adapters import MAGNITUDE, ROW_PARALLEL, adapted_module, is_adapter
from muster.spec.four_bit import NESTED, elements_per_entry, stored_parameters
from muster.spec.low_rank import is_low_rank, low_rank_module
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec, parameter_shapes, stage_parameter_shapes
from muster.spec.plan import Plan


def intersect(a: Box, b: Box) -> Box | None:
    """Return the box that lies in both, or None."""
    start = tuple(max(p, q) for p, q in zip(a.start, b.start, strict=True))
    ends = (min(p + m, q + n) for p, m, q, n in zip(a.start, a.size, b.start, b.size, strict=True))
    size = tuple(end - begin for end, begin in zip(ends, start, strict=True))
    return Box(start, size) if all(n > 0 for n in size) else None


def slices_within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that cut `inner` out of a tensor that holds `outer`."""
    start = tuple(p - q for p, q in zip(inner.start, outer.start, strict=True))
    return Box(start, inner.size).slices


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A global tensor and the parts of it that one rank holds."""

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    num_copies: int = 1
    """Ranks of the world that hold each element of these parts."""
    copy_index: int = 0
    """Index of this rank's copy: copies 0 make up the complete tensor."""
    num_writers: int = 1
    """Copies 0 … num_writers − 1 of a part are cut alike and on as many ranks, which share the work of writing it."""
    tp_dim: int = 0
    """Dimension along which tensor parallelism shards the tensor, whether it does so here or not."""

    @property
    def numel(self) -> int:
        """Elements held here."""
        return sum(box.numel for box in self.boxes)


def chunk_bounds(rows: int, parts: int, index: int) -> tuple[int, int]:
    """Return first row and number of rows of part `index` when dimension 0 is cut as `torch.chunk` (and fully_shard)
    cut it.

    The first parts have ceil(rows / parts) rows, the last may have fewer or none. 10 rows in 4 parts: 3, 3, 3, 1.
    """
    step = -(-rows // parts)
    start = min(index * step, rows)
    return start, min(step, rows - start)


def stages_on(plan: Plan, pp_rank: int) -> list[int]:
    """Return the stages of a pipeline rank."""
    return [stage for stage in range(plan.num_stages) if plan.pp_rank(stage) == pp_rank]


def computed_layers(spec: ModelSpec, plan: Plan, stage: int) -> list[int]:
    """Return the layers that a stage computes: its own, and on the last stage the model's last one again for each of
    `mtp_layers`, which are like it."""
    return [*plan.layers(stage, spec.num_layers), *[spec.num_layers - 1] * len(spec.last_layers(plan.is_last(stage)))]


def tp_shard(spec: ModelSpec, name: str, shape: tuple[int, ...], tp: int, index: int) -> tuple[Box, int, int]:
    """Return rank `index` of `tp`'s shard of a parameter: (box, number of its copies, index of this copy).

    Sharded are rows of q, k, v, gate, up, head and embedding, of decays of linear attention, and of the matrices that
    project latent vectors up, with their biases, attention sinks, and columns of o and down, of each of the stacked
    experts too; norms, routers, matrices that make latent vectors, the first of two matrices for decays, the biases of
    o and down and learned positions are replicated; of sub-layers side by side each rank has whole ones, with their
    norms and biases. Query and key/value heads stay whole; with more ranks than
    key/value heads, neighbours hold the same one. Vocabulary entries and inner widths that `tp` doesn't divide give the
    last ranks fewer. Norms over all heads together are sharded as the rows of q and k. Of an adapter or a low-rank
    layer, the matrix at the cut side is sharded as a weight: B of q, columns of A of o; the other is replicated. Of a
    weight in 4 bits codes and absolute maxima are cut where its elements are, and the scales of these replicated.
    """
    kind, leaf = _kind_and_leaf(spec, name)
    whole = Box((0,) * len(shape), shape)
    if tp == 1:
        return whole, 1, 0
    is_of_streams = _is_of_streams(spec, kind, leaf)
    if _is_whole(kind, leaf) and not is_of_streams:
        return whole, tp, index
    is_linear = spec.has_linear_attention_parameter(name)
    if kind in ("k", "v") and tp > spec.num_kv_heads and not is_linear:
        copies = tp // spec.num_kv_heads
        return _cut(whole, 0, index // copies * spec.head_dim, spec.head_dim), copies, index % copies
    # Heads of linear attention stay whole too, as tp divides their number.
    unit = 1 if is_linear else _head_width(spec, kind)
    if is_of_streams or kind == "conjunction":
        unit = spec.hidden_size
    dim = _tensor_dim(name, shape)
    each = elements_per_entry(name) if dim == len(shape) - 1 else 1
    start, count = chunk_bounds(shape[dim] * each // unit, tp, index)
    return _cut(whole, dim, start * unit // each, count * unit // each), 1, 0


def _is_of_streams(spec: ModelSpec, kind: str, leaf: str) -> bool:
    """Return True for a vector that has a part for each of the streams of sub-layers side by side."""
    return spec.parallel_sublayers > 1 and (kind in _LAYER_NORMS or kind in ("o", "down") and leaf == "bias")


def _head_width(spec: ModelSpec, kind: str) -> int:
    """Return the rows, or columns, of a head in a module of attention; 1 for other modules."""
    mla = spec.mla
    if mla is not None and kind in ("kv_up", "o"):
        return mla.v_head_dim + (mla.nope_head_dim if kind == "kv_up" else 0)
    return spec.head_dim if kind in ("q", "k", "v", "o", "q_up") else 1


def _tensor_dim(name: str, shape: tuple[int, ...]) -> int:
    """Return the dimension along which tensor parallelism shards a parameter: of a matrix, or of stacked ones, columns
    or rows; of stacked biases, the second."""
    kind, leaf = name.split(".")[-2:]
    if is_expert(name) and leaf == "bias":
        return 1
    if is_adapter(name) or is_low_rank(name):
        kind = _kind_of_factor(name)[0]
    return max(0, len(shape) - (1 if kind in ROW_PARALLEL else 2))


def _kind_and_leaf(spec: ModelSpec, name: str) -> tuple[str, str]:
    """Return the last two parts of a parameter's name; a norm over all heads of q or k is of the kind of these, and
    matrices of an adapter and a low-rank layer are called lora_A, low_rank_B and the like, in their linear layer."""
    if is_adapter(name) or is_low_rank(name):
        return _kind_of_factor(name)
    module, _, leaf = name.rpartition(".")
    kind = module.rpartition(".")[2]
    if kind in ("q_norm", "k_norm") and spec.qk_norm_width == "projection":
        kind = kind[0]
    return kind, leaf


def _kind_of_factor(name: str) -> tuple[str, str]:
    """Return the linear layer, by its last name, that a matrix of an adapter or of a low-rank layer belongs to, and its
    place there."""
    module, leaf = adapted_module(name) if is_adapter(name) else low_rank_module(name)
    return module.rpartition(".")[2], leaf


def _is_whole(kind: str, leaf: str) -> bool:
    """Return True for a parameter that every tensor-parallel rank has in full."""
    whole = (
        kind.endswith("norm") or leaf == NESTED or kind in ("positions", "decay_down", "eh_proj", *_LATENT, *_ROUTING)
    )
    is_row_parallel = kind in ROW_PARALLEL
    return (
        whole
        or (leaf in ("bias", "lora_B", "low_rank_B", MAGNITUDE) and is_row_parallel)
        or (leaf in ("lora_A", "low_rank_A") and not is_row_parallel)
    )


_ROUTING = ("router", "shared_gate")
"""Modules that weigh experts' outputs, of which a tensor-parallel rank makes a part, and so of these gradients."""


_PARTIAL = ("q_norm", "k_norm", "out_norm", "decay_down", *_ROUTING)
"""Modules that every tensor-parallel rank uses for heads, or parts of outputs, of its own."""


_LATENT = ("q_down", "kv_down")
"""Modules that make latent vectors, which every tensor-parallel rank projects up for its own heads."""


def is_expert(name: str) -> bool:
    """Return True for a parameter that holds a matrix of each of a layer's routed experts."""
    return ".experts." in name


def state_shard_ranks(mesh: Mesh, name: str) -> int:
    """Return the number of ranks that share a parameter's state: those with the same tokens' experts, for experts."""
    return mesh.expert_state_shards if is_expert(name) else mesh.state_shards


def state_shard_dim(name: str, size: tuple[int, ...], ranks: int) -> int:
    """Return the dimension along which `ranks` share a parameter, or a part of one, of this size: the first, but the
    second for experts of which ranks would get unequal numbers (torchtitan does the same)."""
    return 1 if is_expert(name) and size[0] % ranks and size[1] % ranks == 0 else 0


def state_shard_numel(mesh: Mesh, name: str, size: tuple[int, ...]) -> int:
    """Return the elements of the largest state shard of a parameter that has this size in passes; `fully_shard` pads
    the others to it."""
    ranks = state_shard_ranks(mesh, name)
    dim = state_shard_dim(name, size, ranks)
    return prod(size) // size[dim] * chunk_bounds(size[dim], ranks, 0)[1]


VOCAB_PARAMETERS = ("embed.weight", "head.weight")
"""Parameters with one row per vocabulary entry."""


def stage_shards(
    spec: ModelSpec, plan: Plan, stage: int, at: MeshCoordinates | None = None
) -> Iterator[tuple[str, tuple[int, ...], Box, int, int]]:
    """Yield the parameters of a stage as its passes use them: name, complete shape, and the shard of the rank at `at`,
    or of the stage's first, as `tp_shard` gives it; of experts, those that expert parallelism leaves to the rank.

    Under vocab_parallel each pipeline rank's first stage has its shard of the vocabulary: rows as `chunk_bounds` cuts
    them.
    """
    first = plan.is_first(stage)
    last = plan.is_last(stage)
    shapes = stage_parameter_shapes(spec, plan.layers(stage, spec.num_layers), first, last)
    mesh, tp_index = plan.mesh(stage), 0 if at is None else at.tp
    own = ExpertCoordinates(0, 0, 0) if at is None else expert_coordinates(plan, at)
    for name, shape in stored_parameters(spec, shapes):
        if is_expert(name):
            box, copies, copy = tp_shard(spec, name, shape, mesh.etp, own.etp)
            yield name, shape, _cut(box, 0, *chunk_bounds(shape[0], mesh.ep, own.ep)), copies, copy
        elif not (plan.vocab_parallel and name in VOCAB_PARAMETERS):
            yield name, shape, *tp_shard(spec, name, shape, mesh.tp, tp_index)
    if has_vocab_shard(plan, stage):
        for name, shape in parameter_shapes(spec):
            if name in VOCAB_PARAMETERS:
                yield (
                    name,
                    shape,
                    _cut(Box((0, 0), shape), 0, *chunk_bounds(shape[0], plan.pp, plan.pp_rank(stage))),
                    1,
                    0,
                )


def has_vocab_shard(plan: Plan, stage: int) -> bool:
    """Return True for the stage of a rank that has its shard of a parallel vocabulary."""
    return plan.vocab_parallel and stage == stages_on(plan, plan.pp_rank(stage))[0]


def _cut(box: Box, dim: int, start: int, count: int) -> Box:
    """Return `count` elements along `dim` from `start`, counted from the box's own beginning."""
    return Box(
        box.start[:dim] + (box.start[dim] + start,) + box.start[dim + 1 :],
        box.size[:dim] + (count,) + box.size[dim + 1 :],
    )


_LAYER_NORMS = ("attn_norm", "mlp_norm")
"""Norms of the inputs of a layer's attention and MLP."""


def tp_partial_grad_copies(spec: ModelSpec, names: Iterable[str], mesh: Mesh, sp: bool) -> dict[str, int]:
    """Return the parameters, with their number of copies, that several tensor-parallel ranks hold and each use on a
    part of the data only, or for a part of each expert's output: their gradients are summed.

    Under sequence parallelism these are all replicated parameters; in a ladder the norms before sub-layers,
    through which each rank takes its own part of a gradient; norms of queries and keys, and what makes outputs
    and decays of linear attention, always, as each rank has other heads; routers always; key and value heads where
    several ranks hold the same one; the last biases of sliced experts, which one rank adds; the matrix of an adapter or
    a low-rank layer at the side that isn't cut, always, as each rank has a part of the other.
    """
    tp = mesh.tp
    if tp == 1:
        return {}
    kv_copies = tp // spec.num_kv_heads
    found = {}
    for name in names:
        kind, leaf = _kind_and_leaf(spec, name)
        if is_expert(name):
            if mesh.etp > 1 and _is_whole(kind, leaf):
                found[name] = mesh.etp
        elif (is_adapter(name) or is_low_rank(name)) and _is_whole(kind, leaf) or kind in _PARTIAL:
            found[name] = tp
        elif kind in ("k", "v") and kv_copies > 1 and not spec.has_linear_attention_parameter(name):
            found[name] = kv_copies
        elif sp and _is_whole(kind, leaf) or spec.residual == "ladder" and kind in _LAYER_NORMS:
            found[name] = tp
    return found


def stage_layouts(spec: ModelSpec, plan: Plan, stage: int, at: MeshCoordinates) -> list[TensorLayout]:
    """Return the layouts of the rank at `at` for stage `stage`: its tensor-parallel shard, of that the rows of its
    state-shard index (dp_shard and cp; for experts edp), replicated over dp_replicate.

    A tied embedding, or one that `mtp_layers` read, is on the first and on the last stage, which may shard it
    differently; the first stage's copies come first.
    """
    mesh = plan.mesh(stage)
    last = plan.is_last(stage)
    shard, expert_shard = state_shard_index(plan, at), expert_coordinates(plan, at).edp
    replica = stage // plan.stages_per_replica
    layouts = []
    for name, shape, part, tp_copies, tp_copy in stage_shards(spec, plan, stage, at):
        ranks = state_shard_ranks(mesh, name)
        dim = state_shard_dim(name, part.size, ranks)
        box = _cut(part, dim, *chunk_bounds(part.size[dim], ranks, expert_shard if is_expert(name) else shard))
        copies = tp_copies * mesh.dp_replicate
        copy_index = tp_copy * mesh.dp_replicate + at.dp_replicate
        writers = copies
        if (
            name == "embed.weight"
            and spec.embeds_on_last_stage
            and plan.stages_per_replica > 1
            and not plan.vocab_parallel
        ):
            copy_index += plan.mesh(0).dp_replicate if last else 0
            writers = plan.mesh(0).dp_replicate
            copies = writers + plan.mesh(plan.stages_per_replica - 1).dp_replicate
        boxes = (box,) if box.numel else ()
        if boxes and is_expert(name) and mesh.ep > 1 and (order := expert_order(spec, plan, name)):
            boxes = placed_boxes(box, order)
        copies, copy_index = copies * plan.pipeline_replicas, replica * copies + copy_index
        layouts.append(TensorLayout(name, shape, boxes, copies, copy_index, writers, _tensor_dim(name, shape)))
    return layouts


def rank_layouts(spec: ModelSpec, plan: Plan, rank: int) -> list[TensorLayout]:
    """Return the layouts of world rank `rank`, stage by stage."""
    at = coordinates_of(plan, rank)
    return [layout for stage in stages_on(plan, at.pp) for layout in stage_layouts(spec, plan, stage, at)]
