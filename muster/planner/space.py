"""The plans that are searched: shapes, and the plans of each shape."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from muster.planner.node_order import is_heterogeneous
from muster.planner.request import PlanRequest
from muster.spec.legality import divisors, plan_violations
from muster.spec.mesh_axes import MESH_AXES
from muster.spec.model import ModelSpec
from muster.spec.plan import LayerStrategy, Offload, Plan, Recompute, ZeroLevel
from muster.spec.schedules import SCHEDULES
from muster.spec.supported import unsupported_features

MIN_POSITIONS_PER_CP_RANK = 1024
"""Context parallelism is tried where a rank keeps so many positions; below, its exchange outweighs the attention."""

CHUNK_COUNTS = (2, 3, 4, 6, 8)
"""Stages of a pipeline rank that are tried: the bubble shrinks by their number, and hops grow with it."""

PIPELINE_INNER_AXES = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
"""Stages of a pipeline lie next to each other, and data-parallel ranks far apart: the other way round than AXES."""

MAX_MICRO_BATCHES = 2**18
"""Micro-batches of a step, times pipeline ranks, that are looked at: more take minutes to simulate."""

MAX_BLOCK_MICRO_BATCHES = 2**12
"""The same for ZB-V and V-Half, which are put together pass by pass: more than that takes seconds for each of them, and
what they save of the bubble shrinks with the number of micro-batches."""

MODEL_AXES = ("tp", "pp", "cp", "ep")
"""What cuts the model or a sequence; the rest of the devices are data-parallel."""


DataSharding = tuple[int, int, ZeroLevel]
"""dp_replicate, dp_shard and sharding level."""


def used_axes(plan: "Plan | MeshShape") -> frozenset[str]:
    """The model's axes that a plan uses."""
    return frozenset(axis for axis in MODEL_AXES if getattr(plan, axis) > 1)


@dataclass(frozen=True, slots=True)
class MeshShape:
    """What cuts the model and the batch. All plans of a shape multiply the same matrices on each rank."""

    data: int
    tp: int
    pp: int
    cp: int
    ep: int
    micro_batch_size: int

    @property
    def axes(self) -> frozenset[str]:
        """The model's axes that are in use."""
        return used_axes(self)

    def __str__(self) -> str:
        degrees = {"dp": self.data, "tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}
        return "-".join([f"{axis}{n}" for axis, n in degrees.items() if n > 1] + [f"mb{self.micro_batch_size}"])


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """A shape with a schedule. `balanced`: layers lie on the stages so that no rank has more to do than it must;
    `shares`: data-parallel ranks run as many micro-batches as suits their devices."""

    shape: MeshShape
    schedule: str
    vpp: int
    balances_layers: bool
    uneven_batch: bool = False


def mesh_shapes(request: PlanRequest) -> Iterator[MeshShape]:
    """All legal ways to spread the model over all devices of the cluster."""
    model, world = request.model, request.cluster.num_devices
    for tp in legal_tp_degrees(request):
        for pp in divisors(world // tp):
            if pp > model.num_layers or not request.admits("pp", pp):
                continue
            for cp in _cp_degrees(request, world // tp // pp):
                data = world // tp // pp // cp
                share, rest = divmod(request.workload.global_batch_size, data)
                if rest:
                    continue
                for ep in _ep_degrees(request, data * cp * tp):
                    for size in micro_batch_sizes(request, share):
                        shape = MeshShape(data, tp, pp, cp, ep, size)
                        if share // size * pp > MAX_MICRO_BATCHES:
                            continue
                        if request.admits("micro_batch_size", size) and request.axes in (None, shape.axes):
                            yield shape


def legal_tp_degrees(request: PlanRequest) -> list[int]:
    """Those that cut heads and words evenly and stay where devices are joined by the fastest links."""
    model, world = request.model, request.cluster.num_devices
    return [
        tp
        for tp in divisors(world)
        if tp <= domain_devices(request)
        and divides_heads(model, tp)
        and -(-model.vocab_size // tp) * (tp - 1) < model.vocab_size
        and request.admits("tp", tp)
    ]


def domain_devices(request: PlanRequest) -> int:
    """The devices that the fastest links join, in the smallest of the cluster's nodes."""
    return min(group.domain_devices for group in request.cluster.groups)


def divides_heads(model: ModelSpec, tp: int) -> bool:
    """Whether each tensor-parallel rank gets whole heads, and key/value heads or a copy of one."""
    kv_heads = model.num_kv_heads
    return model.num_heads % tp == 0 and max(tp, kv_heads) % min(tp, kv_heads) == 0


def micro_batch_sizes(request: PlanRequest, sequences_per_rank: int) -> list[int]:
    """Of a rank's `share` of the batch: powers of two, and 3, or what is asked for."""
    asked = request.fixed.get("micro_batch_size")
    return [size for size in divisors(sequences_per_rank) if size == asked or size == 3 or size & (size - 1) == 0]


def _cp_degrees(request: PlanRequest, ranks: int) -> list[int]:
    seq_len = request.workload.seq_len
    return [
        cp
        for cp in divisors(ranks)
        if request.admits("cp", cp)
        and (cp == 1 or (seq_len % (2 * cp) == 0 and seq_len >= cp * MIN_POSITIONS_PER_CP_RANK))
    ]


def _ep_degrees(request: PlanRequest, ranks: int) -> list[int]:
    experts = request.model.moe.num_experts if request.model.moe else 1
    return [ep for ep in divisors(experts) if ranks % ep == 0 and request.admits("ep", ep)]


# ----------------------------------------------------------------------------------------------------------------------
# Plans of a shape


def schedule_choices(request: PlanRequest, shape: MeshShape) -> Iterator["ScheduleChoice"]:
    """What gives a shape's passes their order: schedules with so many stages per rank, layers evenly on them or not."""
    share = request.workload.global_batch_size // shape.data // shape.micro_batch_size
    is_long = share * shape.pp > MAX_BLOCK_MICRO_BATCHES
    for schedule, vpp in schedule_options(request, shape.pp):
        if is_long and SCHEDULES[schedule].planner.slow_to_build and request.fixed.get("schedule") != schedule:
            continue
        if request.admits("schedule", schedule) and request.admits("vpp", vpp):
            for shares in uneven_batch_options(request, shape):
                yield ScheduleChoice(shape, schedule, vpp, False, shares)
                if vpp == 1 and shape.pp > 1 and "stages" not in request.fixed:
                    yield ScheduleChoice(shape, schedule, vpp, True, shares)


def uneven_batch_options(request: PlanRequest, shape: MeshShape) -> tuple[bool, ...]:
    """Whether data-parallel ranks run as many micro-batches, or as suits their devices: where these differ, both."""
    if "uneven_micro_batches" in request.fixed:
        return (bool(request.fixed["uneven_micro_batches"]),)
    differ = len({group.device.name for group in request.cluster.groups}) > 1
    return (False, True) if differ and shape.data > 1 and request.admits("zero", "z1") else (False,)


def draft_plans(
    request: PlanRequest, choice: "ScheduleChoice", is_wanted: Callable[[DataSharding], bool] | None = None
) -> Iterator[Plan]:
    """The legal plans of an order: ways to shard, to lay the axes on the devices, and to recompute all layers alike.

    Where the order balances layers, they are yet to be moved. `wanted` says of a way to shard whether it is.
    """
    first = None
    for data in data_shardings(request, choice.shape):
        if choice.uneven_batch and data[2] != "z1":
            continue
        if is_wanted is not None and not is_wanted(data):
            continue
        for axis_order in axis_orders(request, choice.shape):
            for recompute in recompute_modes(request):
                plan = plan_of_choice(request, choice, data, axis_order, recompute)
                # How a plan shards, recomputes and lies on the devices decides nothing about whether it is legal.
                if first is None and plan_violations(
                    plan, request.model, request.workload, request.cluster.num_devices
                ):
                    return
                first = first or plan
                if choice.uneven_batch or is_admitted(request, plan):
                    yield plan


def plan_of_choice(
    request: PlanRequest,
    choice: "ScheduleChoice",
    sharding: DataSharding,
    axis_order: tuple[str, ...],
    recompute: Recompute,
) -> Plan:
    """One plan of an order."""
    fields = {"schedule": choice.schedule, "vpp": choice.vpp, **_wanted_stages(request)}
    return make_plan(request, choice.shape, sharding, axis_order, recompute, fields)


def _wanted_stages(request: PlanRequest) -> dict[str, Any]:
    return {"stages": request.fixed["stages"]} if "stages" in request.fixed else {}


def recompute_modes(request: PlanRequest) -> tuple[Recompute, ...]:
    """What all layers do. For speed nothing is computed again but where the plan doesn't fit (`fit.py`)."""
    wanted = request.fixed.get("recompute")
    if wanted is not None:
        return (wanted,)
    return ("none", "elementwise", "full") if request.objective == "memory" else ("none",)


def make_plan(
    request: PlanRequest,
    shape: MeshShape,
    sharding: DataSharding,
    axis_order: tuple[str, ...] = MESH_AXES,
    recompute: Recompute = "none",
    fields: Mapping[str, Any] | None = None,
) -> Plan:
    """A plan of a shape, with `more` fields."""
    dp_replicate, dp_shard, zero = sharding
    cut = shape.tp > 1 and request.workload.seq_len % (shape.tp * shape.cp) == 0
    return request.base.model_copy(
        update={
            "dp_replicate": dp_replicate,
            "dp_shard": dp_shard,
            "tp": shape.tp,
            "pp": shape.pp,
            "cp": shape.cp,
            "ep": shape.ep,
            "micro_batch_size": shape.micro_batch_size,
            "axis_order": axis_order,
            "default_strategy": _strategy(
                request.base.default_strategy,
                zero,
                request.fixed.get("sp", cut),
                recompute,
                request.fixed.get("offload", request.base.default_strategy.offload),
            ),
            **(fields or {}),
        }
    )


@lru_cache(maxsize=1024)  # plans of a search share few strategies, and are compared by them
def _strategy(base: LayerStrategy, zero: ZeroLevel, sp: bool, recompute: Recompute, offload: Offload) -> LayerStrategy:
    return base.model_copy(update={"zero": zero, "sp": sp, "recompute": recompute, "offload": offload})


def schedule_options(request: PlanRequest, pp: int) -> list[tuple[str, int]]:
    """Return schedules and stages per rank for `pp` pipeline ranks: those that the planner searches (`PlannerTraits`),
    or the one that is required even where it isn't searched."""
    num_layers = request.model.num_layers
    required = request.fixed.get("schedule", "")
    if required in SCHEDULES and not SCHEDULES[required].planner.searchable:
        counts = (1,) if pp == 1 else (1, *CHUNK_COUNTS)
        entry = SCHEDULES[required]
        return [(required, count) for count in counts if entry.supports_chunks(count) and pp * count <= num_layers]
    if pp == 1:
        return [("1f1b", 1)]
    counts = [count for count in CHUNK_COUNTS if pp * count <= num_layers]
    hides_slow_links = is_heterogeneous(request.cluster)
    single: list[tuple[str, int]] = []
    free: list[tuple[str, int]] = []
    several: list[tuple[str, int]] = []
    for name, entry in SCHEDULES.items():
        if not entry.planner.searchable or (entry.planner.for_slow_links and not hides_slow_links):
            continue
        if entry.chunks is None:
            free += [(name, count) for count in counts if entry.supports_chunks(count)]
        elif entry.chunks == 1:
            single.append((name, 1))
        elif entry.chunks in counts:
            several.append((name, entry.chunks))
    return single + free + several


def data_shardings(request: PlanRequest, shape: MeshShape) -> list[DataSharding]:
    """All ranks hold copies, all share, or those of one or eight nodes; where nodes or links differ, of any number of
    nodes that divides theirs, since a block of nodes with fast links may be of any size; or what is asked for."""
    data = shape.data
    if data == 1:
        alone: DataSharding = (1, 1, request.fixed.get("zero", "z3"))
        return [alone] if _admits_sharding(request, alone) else []
    found: list[DataSharding] = [(data, 1, "z1"), (1, data, "z1"), (1, data, "z2"), (1, data, "z3")]
    node = domain_devices(request)
    blocks = divisors(request.cluster.num_nodes) if is_heterogeneous(request.cluster) else (1, 8)
    for ranks in (node * nodes for nodes in blocks):
        shard, rest = divmod(ranks, shape.tp * shape.cp)
        if not rest and 1 < shard < data and data % shard == 0:
            found.append((data // shard, shard, "z1"))
            found.append((data // shard, shard, "z3"))
    replicate: int = request.fixed.get("dp_replicate", 1)
    shard: int = request.fixed.get("dp_shard", 1)
    if replicate * shard == data and (replicate, shard) not in [split[:2] for split in found]:
        asked: list[DataSharding] = [(replicate, shard, "z1"), (replicate, shard, "z2"), (replicate, shard, "z3")]
        found += asked
    return [split for split in found if _admits_sharding(request, split)]


def _admits_sharding(request: PlanRequest, sharding: DataSharding) -> bool:
    return all(map(request.admits, ("dp_replicate", "dp_shard", "zero"), sharding))


def axis_orders(request: PlanRequest, shape: MeshShape) -> list[tuple[str, ...]]:
    """Where nodes are alike and their network is flat, the order matters to what shares a node with others alone."""
    cluster = request.cluster
    flat = cluster.is_uniform and not cluster.tiers and cluster.node_bandwidth_bytes_per_s is None
    fills_a_node = shape.tp * shape.cp >= domain_devices(request) or cluster.num_devices <= domain_devices(request)
    return (
        [MESH_AXES] if shape.pp == 1 or shape.data == 1 or (flat and fills_a_node) else [MESH_AXES, PIPELINE_INNER_AXES]
    )


def is_admitted(request: PlanRequest, plan: Plan) -> bool:
    """Whether a legal plan is as the request wants it."""
    strategy = plan.default_strategy
    for name, value in request.fixed.items():
        if (getattr(strategy, name) if name in LayerStrategy.model_fields else getattr(plan, name)) != value:
            return False
    return not (request.runnable and unsupported_features(plan))
