"""The space of plans: shapes of the mesh, schedules for each shape, and the plans of each choice.

A shape decides what each rank multiplies, a choice the order of its passes, and the rest (data sharding, order of axes,
recompute) what is sent and stored. Bounds exist for each level, so that most plans are never made.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

from muster.planner.context_choice import context_fields
from muster.planner.dispatch_choice import copy_counts, dispatch_fields, expert_slices
from muster.planner.node_order import is_heterogeneous
from muster.planner.request import PlanRequest
from muster.planner.simplicity import least_simplicity
from muster.spec.frameworks import runs_schedule, treats_layers_alike
from muster.spec.layer_strategy import LayerStrategy, Offload, Recompute, ZeroLevel
from muster.spec.legality import plan_violations
from muster.spec.mesh_axes import MESH_AXES
from muster.spec.mesh_cuts import divisors
from muster.spec.model import ModelSpec
from muster.spec.pass_pairs import has_tp_pairs
from muster.spec.plan import Plan
from muster.spec.schedules import DEFAULT_SCHEDULE, SCHEDULES
from muster.spec.supported import unsupported_features
from muster.spec.workload import MAX_PROGRAM_MICRO_BATCHES

MIN_POSITIONS_PER_CP_RANK = 1024
"""Fewest positions of a context-parallel rank: with fewer, the exchange of keys and values outweighs the attention."""

CHUNK_COUNTS = (2, 3, 4, 6, 8)
"""Stages per pipeline rank that are tried: the bubble shrinks with them, and the p2p transfers grow."""

PIPELINE_INNER_AXES = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
"""Order of axes with pipeline stages next to each other and data-parallel ranks far apart, unlike in MESH_AXES."""

MAX_BLOCK_MICRO_BATCHES = 2**12
"""Largest product of micro-batches and pipeline ranks for schedules that are slow to build.

More take seconds each, and their smaller bubble matters less with more micro-batches.
"""

MODEL_AXES = ("tp", "pp", "cp", "ep")
"""Axes that cut the model or a sequence; all other devices are data-parallel."""


DataSharding = tuple[int, int, ZeroLevel] | tuple[int, int, ZeroLevel, int, int]
"""dp_replicate, dp_shard and ZeRO level, and where parameters and gradients are sharded over fewer ranks than optimizer
state, the numbers of these."""


def used_axes(plan: "Plan | MeshShape") -> frozenset[str]:
    """Return the model axes that a plan or shape uses."""
    return frozenset(axis for axis in MODEL_AXES if getattr(plan, axis) > 1)


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Degrees of parallelism, the micro-batch size and copies of experts on each rank.

    All plans of a shape run the same matmuls on each rank.
    """

    data: int
    tp: int
    pp: int
    cp: int
    ep: int
    micro_batch_size: int
    copies: int = 0

    @property
    def axes(self) -> frozenset[str]:
        """Model axes that are used."""
        return used_axes(self)

    def __str__(self) -> str:
        degrees = {"dp": self.data, "tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}
        words = [f"{axis}{n}" for axis, n in degrees.items() if n > 1] + [f"mb{self.micro_batch_size}"]
        return "-".join([*words, *([f"{self.copies} copies"] if self.copies else [])])


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """A shape with a schedule, and two ways to even out the work of its ranks.

    `balances_layers`: layers lie on the stages so that no rank has more to do than it must; else evenly.
    `uneven_batch`: data-parallel ranks run numbers of micro-batches that suit their devices; else all the same.
    """

    shape: MeshShape
    schedule: str
    vpp: int
    balances_layers: bool
    uneven_batch: bool = False


def mesh_shapes(request: PlanRequest) -> Iterator[MeshShape]:
    """Yield all legal ways to spread the model over all devices of the cluster, or of an island."""
    model, world = request.model, request.island_devices
    for tp in legal_tp_degrees(request):
        for pp in divisors(world // tp):
            if pp > model.num_layers or not request.admits("pp", pp):
                continue
            for cp in _cp_degrees(request, world // tp // pp):
                data = world // tp // pp // cp
                sequences, rest = divmod(request.island_sequences, data)
                if rest:
                    continue
                for ep in _ep_degrees(request, data * cp * tp, tp):
                    sizes = micro_batch_sizes(request, sequences)
                    for copies, size in product(copy_counts(request, ep), sizes):
                        shape = MeshShape(data, tp, pp, cp, ep, size, copies)
                        if sequences // size * pp > MAX_PROGRAM_MICRO_BATCHES:
                            continue
                        if request.admits("micro_batch_size", size) and request.axes in (None, shape.axes):
                            yield shape


def legal_tp_degrees(request: PlanRequest) -> list[int]:
    """Return the tensor-parallel degrees that divide heads and vocabulary and stay within the fastest links."""
    model, world = request.model, request.island_devices
    return [
        tp
        for tp in divisors(world)
        if tp <= domain_devices(request)
        and divides_heads(model, tp)
        and -(-model.vocab_size // tp) * (tp - 1) < model.vocab_size
        and request.admits("tp", tp)
    ]


def domain_devices(request: PlanRequest) -> int:
    """Return the number of devices that the fastest links join (an NVLink domain), in the smallest of the nodes."""
    return min(group.domain_devices for group in request.cluster.groups)


def divides_heads(model: ModelSpec, tp: int) -> bool:
    """Return True if each tensor-parallel rank gets whole heads, and whole key/value heads or a copy of one; of
    sub-layers side by side whole ones."""
    kv_heads = model.num_kv_heads
    if model.parallel_sublayers > 1 and model.parallel_sublayers % tp:
        return False
    return model.num_heads % tp == 0 and max(tp, kv_heads) % min(tp, kv_heads) == 0


def micro_batch_sizes(request: PlanRequest, sequences_per_rank: int) -> list[int]:
    """Return the micro-batch sizes that divide a rank's sequences: powers of two, 3, and the required one."""
    required = request.fixed.get("micro_batch_size")
    return [size for size in divisors(sequences_per_rank) if size == required or size == 3 or size & (size - 1) == 0]


def _cp_degrees(request: PlanRequest, ranks: int) -> list[int]:
    seq_len = request.workload.seq_len
    return [
        cp
        for cp in divisors(ranks)
        if request.admits("cp", cp)
        and (cp == 1 or (seq_len % (2 * cp) == 0 and seq_len >= cp * MIN_POSITIONS_PER_CP_RANK))
    ]


def _ep_degrees(request: PlanRequest, ranks: int, tp: int) -> list[int]:
    experts = request.model.moe.num_experts if request.model.moe else 1
    return [
        ep
        for ep in divisors(experts)
        if ranks % (ep * expert_slices(request, tp, ep)) == 0 and request.admits("ep", ep)
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Plans of a shape


def schedule_choices(request: PlanRequest, shape: MeshShape, tried_late: bool = False) -> Iterator[ScheduleChoice]:
    """Yield the choices of a shape: searched schedules, or those that are `tried_late`, with layers evenly on stages or
    balanced."""
    count = request.island_sequences // shape.data // shape.micro_batch_size
    is_long = count * shape.pp > MAX_BLOCK_MICRO_BATCHES
    for schedule, vpp in schedule_options(request, shape.pp):
        if is_tried_late(request, schedule) != tried_late:
            continue
        if is_long and SCHEDULES[schedule].planner.slow_to_build and request.fixed.get("schedule") != schedule:
            continue
        if request.admits("schedule", schedule) and request.admits("vpp", vpp):
            for uneven in uneven_batch_options(request, shape):
                balanced = vpp == 1 and shape.pp > 1 and "stages" not in request.fixed
                choices = (
                    ScheduleChoice(shape, schedule, vpp, balances, uneven) for balances in (False, True)[: 1 + balanced]
                )
                yield from filter(partial(_may_be_simple_enough, request), choices)


def _may_be_simple_enough(request: PlanRequest, choice: ScheduleChoice) -> bool:
    """Return True if a choice has plans that are as simple as is wanted."""
    if request.simpler_than is None:
        return True
    others = choice.balances_layers + choice.uneven_batch + (choice.shape.copies > 0)
    return least_simplicity(len(choice.shape.axes), choice.schedule, others) < request.simpler_than


def uneven_batch_options(request: PlanRequest, shape: MeshShape) -> tuple[bool, ...]:
    """Return the values of `uneven_batch` to try: both where data-parallel ranks may lie on unlike devices."""
    if "uneven_micro_batches" in request.fixed:
        return (bool(request.fixed["uneven_micro_batches"]),)
    differ = len({group.device.name for group in request.cluster.groups}) > 1
    return (False, True) if differ and shape.data > 1 and request.admits("zero", "z1") else (False,)


def draft_plans(
    request: PlanRequest, choice: ScheduleChoice, is_wanted: Callable[[DataSharding], bool] | None = None
) -> Iterator[Plan]:
    """Yield the legal plans of a choice: data shardings, orders of axes, and recompute of all layers alike.

    Where the choice balances layers or splits the batch, that is yet to be done (`PlanEvaluator.complete_draft`).
    `is_wanted` says which data shardings to make plans for.
    """
    legal: dict[tuple[bool, ZeroLevel], bool] = {}
    for sharding in data_shardings(request, choice.shape):
        if choice.uneven_batch and sharding[2] != "z1":
            continue
        if is_wanted is not None and not is_wanted(sharding):
            continue
        for axis_order in axis_orders(request, choice.shape):
            for recompute in recompute_modes(request):
                plan = plan_of_choice(request, choice, sharding, axis_order, recompute)
                # Whether a plan is legal depends on whether ranks share state, and on what is sharded; numbers of
                # ranks, recompute and the order of axes don't decide it: one check serves all that differ in these.
                kind = sharding[1] * choice.shape.cp > 1, sharding[2]
                if kind not in legal:
                    legal[kind] = not plan_violations(
                        plan, request.model, request.workload, request.cluster.num_devices
                    )
                if not legal[kind]:
                    continue
                if request.is_simple_enough(plan) and (choice.uneven_batch or is_admitted(request, plan)):
                    yield plan


def plan_of_choice(
    request: PlanRequest,
    choice: ScheduleChoice,
    sharding: DataSharding,
    axis_order: tuple[str, ...],
    recompute: Recompute,
) -> Plan:
    """Return one plan of a choice."""
    fields = {"schedule": choice.schedule, "vpp": choice.vpp, **_required_stages(request)}
    return make_plan(request, choice.shape, sharding, axis_order, recompute, fields)


def _required_stages(request: PlanRequest) -> dict[str, Any]:
    return {"stages": request.fixed["stages"]} if "stages" in request.fixed else {}


def recompute_modes(request: PlanRequest) -> tuple[Recompute, ...]:
    """Return the recompute modes to try for all layers alike. For speed that is none: where a plan doesn't fit,
    recompute is chosen by layer (`memory/fitter.py`)."""
    required = request.fixed.get("recompute")
    if required is not None:
        return (required,)
    return ("none", "elementwise", "full") if request.objective == "memory" else ("none",)


def make_plan(
    request: PlanRequest,
    shape: MeshShape,
    sharding: DataSharding,
    axis_order: tuple[str, ...] = MESH_AXES,
    recompute: Recompute = "none",
    fields: Mapping[str, Any] | None = None,
) -> Plan:
    """Return a plan of a shape, with more `fields`."""
    dp_replicate, dp_shard, zero, *levels = sharding
    param_shard_size, grad_shard_size = levels or (None, None)
    sp = request.shards_positions(shape.tp, shape.cp)
    return request.base.model_copy(
        update={
            "dp_replicate": dp_replicate,
            "dp_shard": dp_shard,
            **{name: request.fixed[name] for name in QUANTIZED if name in request.fixed},
            "param_shard_size": param_shard_size,
            "grad_shard_size": grad_shard_size,
            "max_active_stages": _active_stages(request, zero, (fields or {}).get("vpp", 1)),
            "tp": shape.tp,
            "pp": shape.pp,
            "cp": shape.cp,
            **context_fields(request, shape.tp, shape.cp),
            "ep": shape.ep,
            "etp": expert_slices(request, shape.tp, shape.ep),
            **dispatch_fields(
                request,
                shape.tp,
                shape.cp,
                shape.ep,
                sp,
                shape.copies,
                (fields or {}).get("schedule", DEFAULT_SCHEDULE),
            ),
            "micro_batch_size": shape.micro_batch_size,
            "sequence_tiles": request.fixed.get("sequence_tiles", request.base.sequence_tiles),
            "sequence_slices": request.fixed.get("sequence_slices", request.base.sequence_slices),
            "axis_order": axis_order,
            "default_strategy": _strategy(
                request.base.default_strategy,  # pyright: ignore[reportArgumentType] -- frozen models are hashable
                zero,
                sp,
                recompute,
                request.fixed.get("offload", request.base.default_strategy.offload),
            ),
            **(fields or {}),
        }
    )


def _active_stages(request: PlanRequest, zero: ZeroLevel, vpp: int) -> int | None:
    """Return the required number of stages that are gathered at a time, for plans that have more of them on a rank."""
    required: int | None = request.fixed.get("max_active_stages", request.base.max_active_stages)
    return required if required is not None and zero == "z3" and required < vpp else None


@lru_cache(maxsize=1024)  # plans of a search share few strategies, and are compared by them
def _strategy(base: LayerStrategy, zero: ZeroLevel, sp: bool, recompute: Recompute, offload: Offload) -> LayerStrategy:
    return base.model_copy(update={"zero": zero, "sp": sp, "recompute": recompute, "offload": offload})


def schedule_options(request: PlanRequest, pp: int) -> list[tuple[str, int]]:
    """Return schedules and stages per rank for `pp` pipeline ranks.

    They are those that the planner searches (`PlannerTraits`), or the required one even where it isn't searched. A
    schedule of pipelines isn't required of a plan without one, unless a run file's plan has it.
    """
    found = _schedule_options(request, pp)
    if has_tp_pairs(request.base):
        found = [option for option in found if SCHEDULES[option[0]].has_pairs]
    if not has_slices(request):
        return found
    return [option for option in found if pp > 1 and SCHEDULES[option[0]].has_slices]


def has_slices(request: PlanRequest) -> bool:
    """Return True if sequences pass through the pipeline in slices, which a search tries where they are required."""
    return request.fixed.get("sequence_slices", request.base.sequence_slices) > 1


def is_asynchronous(request: PlanRequest) -> bool:
    """Return True if the schedule has no flush after each step, as a search tries where it is required."""
    return SCHEDULES[request.fixed.get("schedule", request.base.schedule)].is_asynchronous


def _schedule_options(request: PlanRequest, pp: int) -> list[tuple[str, int]]:
    num_layers = request.model.num_layers
    required = request.fixed.get("schedule", "")
    if required and not runs_schedule(request.framework, required):
        return []
    if pp == 1:
        own = request.base.schedule
        allowed = (DEFAULT_SCHEDULE, own) if SCHEDULES[own].supports_chunks(1) else (DEFAULT_SCHEDULE,)
        return [(required or DEFAULT_SCHEDULE, 1)] if required in ("", *allowed) else []
    if required in SCHEDULES and not SCHEDULES[required].planner.searchable:
        entry = SCHEDULES[required]
        counts = (1, *CHUNK_COUNTS)
        return [(required, count) for count in counts if entry.supports_chunks(count) and pp * count <= num_layers]
    counts = [count for count in CHUNK_COUNTS if pp * count <= num_layers]
    single: list[tuple[str, int]] = []
    free: list[tuple[str, int]] = []
    several: list[tuple[str, int]] = []
    for name, entry in SCHEDULES.items():
        if not entry.planner.searchable or not runs_schedule(request.framework, name):
            continue
        if entry.chunks is None:
            free += [(name, count) for count in counts if entry.supports_chunks(count)]
        elif entry.chunks == 1:
            single.append((name, 1))
        elif pp * entry.chunks // entry.default_replicas <= num_layers:
            several.append((name, entry.chunks))
    return single + free + several


def is_tried_late(request: PlanRequest, schedule: str) -> bool:
    """Return True if a schedule is only tried for the shapes of the best plans."""
    traits = SCHEDULES[schedule].planner
    if request.fixed.get("schedule") == schedule or has_tp_pairs(request.base):
        return False
    return traits.tried_late or (traits.for_slow_links and not is_heterogeneous(request.island_cluster))


def data_shardings(request: PlanRequest, shape: MeshShape) -> list[DataSharding]:
    """Return the ways to replicate and shard: all ranks replicate, all shard, or those of one or eight nodes shard.

    Where nodes or links differ, any number of nodes that divides theirs may shard, since a block of nodes with fast
    links may be of any size. Required degrees are added, and required groups for parameters and gradients: that these
    are of fewer ranks than optimizer state is tried from the best plan on (`reasons.py`, `neighbours.py`).
    """
    data = shape.data
    if data == 1:
        single: DataSharding = (1, 1, request.fixed.get("zero", "z3"))
        return [single] if _admits_sharding(request, single) else []
    found: list[DataSharding] = [(data, 1, "z1"), (1, data, "z1"), (1, data, "z2"), (1, data, "z3")]
    node = domain_devices(request)
    own = request.island_cluster
    blocks = divisors(own.num_nodes) if is_heterogeneous(own) else (1, 8)
    for ranks in (node * nodes for nodes in blocks):
        shard, rest = divmod(ranks, shape.tp * shape.cp)
        if not rest and 1 < shard < data and data % shard == 0:
            found.append((data // shard, shard, "z1"))
            found.append((data // shard, shard, "z3"))
    replicate: int = request.fixed.get("dp_replicate", 1)
    shard: int = request.fixed.get("dp_shard", 1)
    if replicate * shard == data and (replicate, shard) not in [sharding[:2] for sharding in found]:
        required: list[DataSharding] = [(replicate, shard, "z1"), (replicate, shard, "z2"), (replicate, shard, "z3")]
        found += required
    params, grads = map(request.fixed.get, SHARD_SIZES)
    if params and grads:
        found.append((1, data, "z3", params, grads))
    # The experts of a layer lie on the ranks of one replica.
    expert_ranks = {sharding: sharding[1] * shape.cp * shape.tp for sharding in found}
    cut = shape.ep * expert_slices(request, shape.tp, shape.ep)
    return [one for one in found if expert_ranks[one] % cut == 0 and _admits_sharding(request, one)]


SHARD_SIZES = ("param_shard_size", "grad_shard_size")
QUANTIZED = ("quantized_weights", "quantized_gradients")


def _admits_sharding(request: PlanRequest, sharding: DataSharding) -> bool:
    fields = ("dp_replicate", "dp_shard", "zero", *SHARD_SIZES)
    return all(map(request.admits, fields, (*sharding, None, None)))


def axis_orders(request: PlanRequest, shape: MeshShape) -> list[tuple[str, ...]]:
    """Return the orders of axes to try: one where each group of tensor- and context-parallel ranks fills a node and the
    network is flat, since every order gives the same neighbours then."""
    cluster = request.island_cluster
    flat = cluster.is_uniform and not cluster.tiers and cluster.node_bandwidth_bytes_per_s is None
    fills_a_node = shape.tp * shape.cp >= domain_devices(request) or request.island_devices <= domain_devices(request)
    return (
        [MESH_AXES] if shape.pp == 1 or shape.data == 1 or (flat and fills_a_node) else [MESH_AXES, PIPELINE_INNER_AXES]
    )


def is_admitted(request: PlanRequest, plan: Plan) -> bool:
    """Return True if a legal plan has all required values, in all layers, and axes, and can be run where that is
    required."""
    if request.axes not in (None, used_axes(plan)) or not runs_schedule(request.framework, plan.schedule):
        return False
    if plan.overrides and treats_layers_alike(request.framework):
        return False
    for name, value in request.fixed.items():
        parts = plan.strategies if name in LayerStrategy.model_fields else [plan]
        if any(getattr(part, name) != value for part in parts):
            return False
    return not (request.runnable and unsupported_features(plan, request.model))
