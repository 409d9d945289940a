"""Homes of a plan's parameters, found rank by rank: what each holds, and whether that adds up to the model.

It shares no code with `muster.spec.legality` and reads a plan as plain data, so that each can find faults of the other.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from muster.spec.model import ModelSpec, layer_parameter_shapes
from muster.spec.plan import Plan

AXES = "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"
STAGES_PER_RANK = {
    **dict.fromkeys(("gpipe", "1f1b", "2bp-gpipe", "2bp-1f1b", "zb-h1", "zb-h2"), {1}),
    **dict.fromkeys(("interleaved", "gis", "breadth-first", "zeropp"), set(range(1, 100))),
    **dict.fromkeys(("zb-v", "v-half", "v-min", "v-zb", "dualpipe-v", "dualpipe"), {2}),
    "hanayo": set(range(2, 100, 2)),
    "bitpipe": {4},
}
COPIES = {"dualpipe": 2, "bitpipe": 2}
THERE_AND_BACK = {"zb-v", "v-half", "v-min", "v-zb", "dualpipe-v", "hanayo", "bitpipe"}

CUT_BY_ROWS = {"q", "k", "v", "gate", "up", "head", "embed", "q_up", "kv_up", "decay", "step", "sinks"}
CUT_BY_COLUMNS = {"o", "down"}

Mesh = tuple[int, ...]
"""Degrees of `AXES`."""
Interval = tuple[int, int, int]
"""First element, end, and length of the whole that it is a part of."""
Path = tuple[Interval, ...]
"""Cuts that lead from a parameter to the part that a rank holds."""


class NoHomeError(Exception):
    """A reason why some parameter, position or sequence has no place, or a place has nothing."""


def home_problem(plan: Plan, model: ModelSpec, seq_len: int, batch: int, world: int) -> str | None:
    """Return the first reason why a plan can't hold the model, or None."""
    given = plan.model_dump(mode="json")
    try:
        _check(given, model, seq_len, batch, world)
    except NoHomeError as error:
        return str(error)
    return None


def _check(plan: dict[str, Any], model: ModelSpec, seq_len: int, batch: int, world: int) -> None:
    copies = COPIES.get(plan["schedule"], 1)
    place = _stage_ranks(plan, copies)
    counts = _layer_counts(plan, model, len(place) // copies)
    meshes = _meshes(plan, place, copies)
    _check_world(plan, meshes, world)
    _check_sequences(plan, meshes, batch, copies)
    strategies = [plan["default_strategy"], *(run["strategy"] for run in plan["overrides"])]
    sp = any(one["sp"] for one in strategies)
    for mesh in set(meshes):
        # To whole experts each tp rank sends tokens of its own, so that these ranks cut the sequence, too.
        own_tokens = model.moe is not None and mesh[5] == 1 and plan["ep_dispatcher"] != "slicing"
        _check_positions(mesh, seq_len, model, sp or own_tokens)
    _check_settings(plan, strategies, meshes, model, copies)
    _check_parameters(plan, model, counts, meshes)


# ----------------------------------------------------------------------------------------------------------------------
# Stages


def _stage_ranks(plan: dict[str, Any], copies: int) -> list[int]:
    """Return the pipeline rank of each stage, copy by copy."""
    pp, vpp = plan["pp"], plan["vpp"]
    if vpp not in STAGES_PER_RANK[plan["schedule"]]:
        raise NoHomeError(f"{plan['schedule']} has no order of {vpp} stages on a rank")
    if vpp > 1 and pp == 1:
        raise NoHomeError("one rank would run several stages after each other")
    one: list[int] = []
    for chunk in range(vpp // copies):
        turns = plan["schedule"] in THERE_AND_BACK and chunk % 2
        one += reversed(range(pp)) if turns else range(pp)
    found = list(one)
    for _ in range(copies - 1):
        found += [pp - 1 - rank for rank in one]
    for stage, rank in enumerate(one):
        if copies > 1 and found[len(one) + stage] == rank:
            raise NoHomeError(f"both copies of stage {stage} lie on rank {rank}")
    return found


def _layer_counts(plan: dict[str, Any], model: ModelSpec, stages: int) -> list[int]:
    if plan["stages"]:
        counts = [stage["layers"] for stage in plan["stages"]]
    else:
        counts = [model.num_layers // stages + (stage < model.num_layers % stages) for stage in range(stages)]
        if min(counts) == 0:
            raise NoHomeError("more stages than layers")
    if len(counts) != stages:
        raise NoHomeError("layers are given for another number of stages")
    ends = list(accumulate(counts))
    held = [layer for end, count in zip(ends, counts, strict=True) for layer in range(end - count, end)]
    if held != list(range(model.num_layers)):
        raise NoHomeError("the stages' layers are not those of the model")
    if any(count == 0 for count in counts[1:-1]):
        raise NoHomeError("a stage between two others has nothing to compute")
    for run in plan["overrides"]:
        if not set(range(run["start"], run["start"] + run["count"])) <= set(held):
            raise NoHomeError("an override is about a layer that nobody has")
    return counts


def _meshes(plan: dict[str, Any], place: list[int], copies: int) -> list[Mesh]:
    """Return the mesh of each stage of one copy."""
    default = tuple(plan[axis] for axis in AXES)
    own = [stage["mesh"] for stage in plan["stages"]]
    stages = len(place) // copies
    found = [tuple(mesh[axis] for axis in AXES) if mesh else default for mesh in own] or [default] * stages
    if any(own):
        if copies > 1:
            raise NoHomeError("copies of a stage on unlike meshes")
        if all(own) and prod(default) > 1:
            raise NoHomeError("degrees that no stage has")
        if plan["axis_order"][0] != "pp":
            raise NoHomeError("the ranks of a stage lie apart")
    for stage, rank in enumerate(place[:stages]):
        if found[stage] != found[place.index(rank)]:
            raise NoHomeError(f"rank {rank} would be in two meshes")
    return found


def _stage_size(mesh: Mesh) -> int:
    return prod(mesh[:4])


def _check_world(plan: dict[str, Any], meshes: list[Mesh], world: int) -> None:
    if any(stage["mesh"] for stage in plan["stages"]):
        ranks = sum(map(_stage_size, meshes[: plan["pp"]]))
    else:
        ranks = plan["pp"] * _stage_size(meshes[0])
    if ranks != world:
        raise NoHomeError(f"{ranks} ranks on {world} devices")


# ----------------------------------------------------------------------------------------------------------------------
# Work


def _check_sequences(plan: dict[str, Any], meshes: list[Mesh], batch: int, copies: int) -> None:
    """Deal the sequences of a step to the data-parallel ranks, and cut micro-batches at every stage."""
    ranks, size = meshes[0][0] * meshes[0][1], plan["micro_batch_size"]
    shares = plan["uneven_micro_batches"] or [1]
    if ranks % len(shares):
        raise NoHomeError("shares for another number of ranks")
    weights = [share for share in shares for _ in range(ranks // len(shares))]
    dealt = [batch * weight // sum(weights) for weight in weights]
    if sum(dealt) != batch or any(batch * weight % sum(weights) for weight in weights):
        raise NoHomeError("sequences that nobody reads")
    if any(count % size or count // size < copies for count in dealt):
        raise NoHomeError("a rank without whole micro-batches for each copy")
    # Shares are relative: the least of them is a whole number of micro-batches on each rank.
    if any((count // size) % weight for count, weight in zip(dealt, weights, strict=True)):
        raise NoHomeError("shares of micro-batches that are no whole numbers")
    if len(shares) > 1:
        zeros = {plan["default_strategy"]["zero"], *(run["strategy"]["zero"] for run in plan["overrides"])}
        if zeros != {"z1"} or any(stage["mesh"] for stage in plan["stages"]):
            raise NoHomeError("ranks with unequal numbers of backwards wait for each other in each")
    if any(size * ranks % (mesh[0] * mesh[1]) for mesh in meshes):
        raise NoHomeError("a stage that can't cut a micro-batch")


def _check_positions(mesh: Mesh, seq_len: int, model: ModelSpec, sp: bool) -> None:
    cp, tp = mesh[2], mesh[3]
    if cp > 1 and seq_len % (2 * cp):
        raise NoHomeError("two equal chunks of the sequence for each cp rank")
    if sp and tp > 1 and seq_len % (tp * cp):
        raise NoHomeError("equal chunks of the sequence for each tp rank")
    if model.position == "learned" and seq_len > (model.max_positions or 0):
        raise NoHomeError("positions that no vector stands for")


def _check_settings(
    plan: dict[str, Any], strategies: list[dict[str, Any]], meshes: list[Mesh], model: ModelSpec, copies: int
) -> None:
    """Refuse settings that nothing could follow."""
    alone = plan["pp"] == 1
    widest = max(mesh[3] for mesh in meshes)
    for one in strategies:
        if (one["sp"] and widest == 1) or (one["tp_overlap"] != "none" and not one["sp"]):
            raise NoHomeError("sequences that no tp rank shards")
    if alone and (plan["post_validation"] or plan["vocab_parallel"]):
        raise NoHomeError("a setting of several pipeline ranks on one")
    if plan["vocab_parallel"] and copies > 1:
        raise NoHomeError("a vocabulary for two copies")
    if any(mesh[4] * mesh[5] > 1 for mesh in meshes) and model.moe is None:
        raise NoHomeError("experts of a model without any")


# ----------------------------------------------------------------------------------------------------------------------
# Parameters


def _check_parameters(plan: dict[str, Any], model: ModelSpec, counts: list[int], meshes: list[Mesh]) -> None:
    """Add up what all ranks hold of all parameters."""
    held: Counter[str] = Counter()
    layer = 0
    for count, mesh in zip(counts, meshes, strict=True):
        for index in range(layer, layer + count):
            for name, numel in _layer_homes(model, mesh, model.has_experts(index)).items():
                held[f"layers.{index}.{name}"] += numel
        layer += count
    for index in range(model.num_layers):
        for name, shape in layer_parameter_shapes(model, index):
            if held[name] != prod(shape):
                raise NoHomeError(f"{held[name]} of {prod(shape)} elements of {name} have a home")
    for mesh in set(meshes):  # also of a stage without layers: a degree is one of the model's
        _check_heads(model, mesh[3])
        _vocabulary(model.vocab_size, mesh[3], "tp")
    if plan["vocab_parallel"]:
        _vocabulary(model.vocab_size, plan["pp"], "pp")


@lru_cache(maxsize=4096)
def _layer_homes(model: ModelSpec, mesh: Mesh, experts: bool) -> dict[str, int]:
    """Return the elements of each parameter of a layer that the ranks of one copy of the stage hold together."""
    index = next(layer for layer in range(model.num_layers) if model.has_experts(layer) == experts)
    found = {}
    for name, shape in layer_parameter_shapes(model, index):
        paths = Counter(_paths(name, shape, model, mesh))
        found[name.removeprefix(f"layers.{index}.")] = _covered(paths, prod(shape))
    return found


def _check_heads(model: ModelSpec, tp: int) -> None:
    """Give each tp rank neighbouring query heads, and the key/value heads that these attend with."""
    if model.num_heads % tp:
        raise NoHomeError("a query head on two ranks")
    per_rank, group = model.num_heads // tp, model.num_heads // model.num_kv_heads
    needed = [{head // group for head in range(rank * per_rank, (rank + 1) * per_rank)} for rank in range(tp)]
    holders = Counter(head for heads in needed for head in heads)
    if len(set(map(len, needed))) > 1 or len(set(holders.values())) > 1:
        raise NoHomeError("key/value heads on unequal numbers of ranks")
    if any(len(heads) * group > per_rank and len(heads) > 1 for heads in needed):
        raise NoHomeError("a key/value head shared by ranks that have others")


def _paths(name: str, shape: tuple[int, ...], model: ModelSpec, mesh: Mesh) -> Iterator[Path]:
    """Yield what each rank of a stage holds of a parameter."""
    replicas, shards, cp, tp, ep, etp = mesh
    kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    is_bias = name.endswith(".bias")
    for _ in range(replicas):
        for number in range(shards * cp * tp):
            state, at = divmod(number, tp)
            if ".experts." in name:
                block, at = divmod(number, ep * etp)
                expert = _even(model.moe.num_experts if model.moe else 0, ep, at // etp)
                own = expert[1] - expert[0]
                if kind == "down" and is_bias:
                    width, size = (0, 1, 1), own * shape[-1]
                else:
                    inner = shape[-1] if kind == "down" or is_bias else shape[-2]
                    width = _even(inner, etp, at % etp)
                    size = own * (width[1] - width[0]) * (prod(shape[1:]) // inner)
                yield expert, width, _chunk(size, -(-shards * cp * tp // (ep * etp)), block)
            elif kind in CUT_BY_COLUMNS and not is_bias:
                yield _chunk(shape[-1], tp, at), _chunk(shape[0], shards * cp, state)
            elif kind in ("k", "v") and tp > model.num_kv_heads and model.mla is None:
                part = _even(shape[0], model.num_kv_heads, at * model.num_kv_heads // tp)
                yield part, _chunk(part[1] - part[0], shards * cp, state)
            elif kind in CUT_BY_ROWS:
                part = _chunk(shape[0], tp, at)
                yield part, _chunk(part[1] - part[0], shards * cp, state)
            else:
                yield (0, 1, 1), _chunk(shape[0], shards * cp, state)


def _covered(paths: Counter[Path], numel: int) -> int:
    """Return the elements of a parameter, all of which equally many ranks hold. Raises NoHomeError for gaps."""
    if len({count for path, count in paths.items() if all(start < end for start, end, _ in path)}) > 1:
        raise NoHomeError("a part on more ranks than another")
    _require_tiles(list(paths))
    return numel


def _require_tiles(paths: list[Path]) -> None:
    """Check that the first cuts tile their whole, and so on within each part."""
    if not paths[0]:
        return
    children: dict[Interval, list[Path]] = {}
    for first, *rest in paths:
        children.setdefault(first, []).append(tuple(rest))
    end, whole = 0, paths[0][0][2]
    for start, stop, length in sorted(children):
        if start == stop:
            continue
        if start != end or length != whole:
            raise NoHomeError(f"elements {end} to {start} of {whole} have no home, or two")
        end = stop
    if end != whole:
        raise NoHomeError(f"elements {end} to {whole} have no home")
    for interval, inner in children.items():
        if interval[0] < interval[1]:
            _require_tiles(inner)


def _even(length: int, parts: int, index: int) -> Interval:
    if length % parts:
        raise NoHomeError(f"{length} in {parts} equal parts")
    return index * (length // parts), (index + 1) * (length // parts), length


def _chunk(length: int, parts: int, index: int) -> Interval:
    """Return part `index` as torch.chunk cuts it: the last ones may be smaller, or empty."""
    step = -(-length // parts)
    return min(index * step, length), min((index + 1) * step, length), length


def _vocabulary(entries: int, parts: int, axis: str) -> None:
    if any(start == stop for start, stop, _ in (_chunk(entries, parts, index) for index in range(parts))):
        raise NoHomeError(f"a {axis} rank without vocabulary entries")
