"""Bytes that ranks which share a stage's state, or are replicas, pass to collectives: gathers of parameters, reductions
of gradients."""

from collections import Counter
from collections.abc import Callable

from muster.config.freezing import is_frozen
from muster.config.optim_config import OptimConfig
from muster.cost.precision_bytes import compute_bytes, grad_reduce_bytes, master_bytes
from muster.layout.island_bytes import Compression, encoded_bytes, island_chunk
from muster.layout.mesh import MeshCoordinates, dp_index_of
from muster.layout.tensor_layout import VOCAB_PARAMETERS, is_expert, stage_shards, state_shard_numel
from muster.schedule.build import unit_counts
from muster.spec.four_bit import part_bytes
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload

SHARD_LEVELS = ("params", "grads", "between_grads")
"""Axes of plans with `param_shard_size` or `grad_shard_size`: neighbours from whose copies passes gather parameters,
those over which backwards reduce gradients, and the ranks of all of these that have the same place."""


def shard_axis_bytes(
    spec: ModelSpec,
    plan: Plan,
    workload: Workload,
    stage: int,
    at: MeshCoordinates,
    optim: OptimConfig | None = None,
    experts: bool = False,
) -> Counter[str]:
    """Return the bytes that one stage passes to collectives of the ranks that share its state (arXiv:1910.02054 §5, §7;
    arXiv:2304.11277 §3.2).

    All-gathers: its padded parameter shards in the compute dtype, once per step under z1 and z2; under z3 once per
    pass, except that parameters outside layers stay gathered from a forward to the next backward. Reduce-scatters: its
    unsharded gradients, padded to equal shards, in the master dtype, once per step under z1, else in each backward;
    all-to-alls in their place with `grad_reduce_dtype: bf16`. With `max_active_stages` both once for each unit of
    passes.

    With `experts`, those of the ranks that have the same experts, where these are fewer than share all else. Without
    what goes to groups of `SHARD_LEVELS`.
    """
    mesh = plan.mesh(stage)
    ranks = mesh.expert_state_shards if experts else mesh.state_shards
    if ranks == 1 or (experts and mesh.ep == 1):
        return Counter()
    gathers = _gathers(spec, plan, workload, stage, at)
    if plan.copies_params(mesh):
        gathers = _once
    reduced = 0
    if plan.reduce_ranks(mesh) == mesh.state_shards:
        reduced = _reduced_numel(spec, plan, workload, stage, at, optim, experts=experts)
    gathered = _padded_numel(spec, plan, stage, at, gathers, experts, compute_bytes(plan.precision))
    if plan.quantized_weights != "none":
        gathered = _encoded_bytes(spec, plan, stage, at, plan.quantized_weights)
    kind = "all_to_all" if plan.grad_reduce_dtype == "bf16" else "reduce_scatter"
    return Counter({"all_gather": gathered, kind: reduced * ranks * grad_reduce_bytes(plan)})


def shard_level_bytes(
    spec: ModelSpec, plan: Plan, workload: Workload, stage: int, at: MeshCoordinates, optim: OptimConfig | None = None
) -> dict[str, Counter[str]]:
    """Return the bytes that one stage passes to collectives of each of `SHARD_LEVELS` (arXiv:2501.04266).

    Passes gather neighbours' parts of the copy of the parameters in the compute dtype, as often as under z3. Backwards
    reduce gradients over neighbours, in the master dtype; what these hold is reduced further once a step, or at every
    reduction where the plan needs it (`Plan.reduces_replicas_once`).
    """
    sent, mesh = dict[str, Counter[str]](), plan.mesh(stage)
    ranks, params, grads = mesh.state_shards, plan.gather_ranks(mesh), plan.reduce_ranks(mesh)
    if params < ranks:
        gathers = _gathers(spec, plan, workload, stage, at)
        part = _padded_numel(spec, plan, stage, at, gathers, False, compute_bytes(plan.precision)) * ranks // params
        sent["params"] = Counter(all_gather=part)
    if grads < ranks:
        reduced = _reduced_numel(spec, plan, workload, stage, at, optim)
        last = _reduced_numel(spec, plan, workload, stage, at, optim, once=plan.reduces_replicas_once)
        sent["grads"] = Counter(reduce_scatter=reduced * ranks * master_bytes(plan.precision))
        sent["between_grads"] = Counter(reduce_scatter=last * ranks // grads * master_bytes(plan.precision))
        if (compression := plan.quantized_gradients) != "none":
            passes = plan.num_stage_micro_batches(stage, workload, dp_index_of(plan, at)) * plan.sequence_slices
            times = 1 if plan.reduces_replicas_once else passes
            each = _encoded_bytes(spec, plan, stage, at, compression, optim)
            sent["between_grads"] = Counter(all_to_all=times * each * ranks // grads)
    return sent


def _encoded_bytes(
    spec: ModelSpec,
    plan: Plan,
    stage: int,
    at: MeshCoordinates,
    compression: Compression,
    optim: OptimConfig | None = None,
) -> int:
    """Return the bytes of a rank's shards of a stage's parameters in integers, whole blocks of these for each group
    that `fully_shard` gathers; without those that are frozen."""
    layers: dict[str, int] = {}
    groups: Counter[int] = Counter()
    for name, _, part, *_ in stage_shards(spec, plan, stage, at):
        head, _, rest = name.partition(".")
        group = -1
        if head in ("layers", "mtp"):
            group = layers.setdefault(f"{head}.{rest.partition('.')[0]}", len(layers)) // plan.bucket_layers
        groups[group] += 0 if is_frozen(optim, name) else state_shard_numel(plan.mesh(stage), name, part.size)
    return sum(encoded_bytes(island_chunk(numel, 1, compression), compression) for numel in groups.values())


def _once(name: str) -> int:
    return 1


def _gathers(spec: ModelSpec, plan: Plan, workload: Workload, stage: int, at: MeshCoordinates) -> Callable[[str], int]:
    """Return the function that says how often a step gathers a parameter."""
    if _zero(spec, plan, stage) != "z3":
        return _once
    if plan.max_active_stages is not None:
        gathers = unit_counts(plan, stage, workload)[0]
        return lambda name: gathers
    passes = plan.num_stage_micro_batches(stage, workload, dp_index_of(plan, at)) * plan.sequence_slices
    return lambda name: passes * (1 + name.startswith(("layers.", "mtp.")))


def replicate_axis_bytes(
    spec: ModelSpec, plan: Plan, workload: Workload, stage: int, at: MeshCoordinates, optim: OptimConfig | None = None
) -> Counter[str]:
    """Return the bytes that one stage all-reduces over dp_replicate: its padded gradient shards, once a step, or at
    every reduction where the plan needs it (`Plan.reduces_replicas_once`)."""
    if plan.mesh(stage).dp_replicate == 1:
        return Counter()
    numel = _reduced_numel(spec, plan, workload, stage, at, optim, once=plan.reduces_replicas_once, experts=None)
    return Counter(all_reduce=numel * master_bytes(plan.precision))


def _reduced_numel(
    spec: ModelSpec,
    plan: Plan,
    workload: Workload,
    stage: int,
    at: MeshCoordinates,
    optim: OptimConfig | None,
    once: bool = False,
    experts: bool | None = False,
) -> int:
    """Return the elements of the gradients that a rank reduces in a step; frozen parameters have none. `experts` as in
    `_padded_numel`."""
    is_once = once or _zero(spec, plan, stage) == "z1"
    passes = plan.num_stage_micro_batches(stage, workload, dp_index_of(plan, at)) * plan.sequence_slices
    times = 1 if is_once else passes
    if plan.max_active_stages is not None:
        times = unit_counts(plan, stage, workload)[1]
    twice = not is_once and plan.vocab_parallel and spec.tied_embeddings  # after T, and after EW

    def reductions(name: str) -> int:
        if is_frozen(optim, name):
            return 0
        return 2 * times if twice and name in VOCAB_PARAMETERS else times

    return _padded_numel(spec, plan, stage, at, reductions, experts)


def _zero(spec: ModelSpec, plan: Plan, stage: int) -> str:
    return plan.strategy(plan.layers(stage, spec.num_layers).start).zero


def _padded_numel(
    spec: ModelSpec,
    plan: Plan,
    stage: int,
    at: MeshCoordinates,
    times: Callable[[str], int],
    experts: bool | None = None,
    size: int | None = None,
) -> int:
    """Return the elements in a rank's shards of a stage's parameters, each counted `times(name)` times; with `size`,
    the bytes of one, their bytes.

    `experts`: of those alone that expert parallelism leaves to the rank, or of all others; None: of both.

    `fully_shard` pads every shard of a parameter to the size of the largest.
    """
    total = 0
    mesh = plan.mesh(stage)
    for name, _, part, *_ in stage_shards(spec, plan, stage, at):
        if experts is None or experts == (mesh.ep > 1 and is_expert(name)):
            each = 1 if size is None else part_bytes(name) or size
            total += times(name) * state_shard_numel(mesh, name, part.size) * each
    return total


def forward_gather_bytes(
    spec: ModelSpec, plan: Plan, workload: Workload, stage: int, at: MeshCoordinates
) -> Counter[str]:
    """Return the bytes of the parameters that one stage gathers for a step's forwards: under z3 those of layers once
    for each, all others once a step."""
    if plan.mesh(stage).state_shards == 1:
        return Counter()
    passes = plan.num_stage_micro_batches(stage, workload, dp_index_of(plan, at))

    def gathers(name: str) -> int:
        return passes if _zero(spec, plan, stage) == "z3" and name.startswith("layers.") else 1

    size = compute_bytes(plan.precision)
    return Counter(all_gather=_padded_numel(spec, plan, stage, at, gathers, False, size))
