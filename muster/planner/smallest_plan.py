"""The least memory that any plan needs, and the changes that make a plan fit where none does."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, inf

from muster.cost.memory.forecast import forecast_memory
from muster.planner.memory.budget import MemoryBudget
from muster.planner.plan_costs import PlanCosts
from muster.planner.request import PlanRequest, refix_request
from muster.planner.space import data_shardings, make_plan, mesh_shapes
from muster.planner.tiles import tiled_plan
from muster.schedule.build import build_program
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import MusterError
from muster.spec.legality import plan_violations
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.supported import unsupported_features

_MAX_FORECASTS = 40
"""Plans with the lowest bounds of memory whose peak is forecast."""
_MAX_GROWTH = 64
"""Largest number of times as many nodes that is tried."""
MOMENT_BYTES = 8
"""Bytes of AdamW's two moments per parameter."""
_SHORTEST_SEQ_LEN = 256
"""Shortest sequences that are tried."""
_MANY_LOGITS = 0.05
"""Share of a rank's memory from which a loss in chunks is worth a word."""


@dataclass(frozen=True, slots=True)
class SmallestPlan:
    """Plan with the least memory on its fullest rank, among plans that recompute all that they may."""

    plan: Plan
    peak_bytes: int
    limit_bytes: float
    """Bytes that this rank may hold; infinite where that is unknown."""
    terms: dict[str, int]
    """Memory term → bytes at the peak."""
    tiers: tuple[tuple[str, int, float], ...] = ()
    """(`host memory` or `disk`, bytes that a rank keeps there, its share), where the share is known."""

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes and not self.full_tiers

    @property
    def fits_device(self) -> bool:
        """True if only a tier off the device is too small, if anything."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def full_tiers(self) -> list[tuple[str, int, float]]:
        """Tiers that hold less than the plan keeps there."""
        return [tier for tier in self.tiers if tier[1] > tier[2]]

    @property
    def name(self) -> str:
        return format_plan_name(self.plan)


@dataclass(frozen=True, slots=True)
class HelpfulChange:
    """Change of the question, and the smallest plan then."""

    change: str
    smallest: SmallestPlan


def smallest_plan(request: PlanRequest) -> SmallestPlan | None:
    """Return the plan that needs the least memory, relative to what its ranks may hold; None where none is legal.

    Memory is forecast for the plans with the lowest bounds, one for each degrees of tensor, pipeline and context
    with micro-batches as small as allowed and every layer recomputed, until no bound is below the least forecast.
    """
    budget = MemoryBudget(request, PlanCosts(request)).without_head_room()
    shapes = list(mesh_shapes(request))
    least_size = min((shape.micro_batch_size for shape in shapes), default=1)
    bounds = [
        (budget.min_bytes(shape, sharding), shape, sharding)
        for shape in shapes
        if shape.micro_batch_size == least_size
        for sharding in data_shardings(request, shape)
    ]
    best: SmallestPlan | None = None
    tried: set[tuple[int, int, int]] = set()
    for bound, shape, sharding in sorted(bounds, key=lambda entry: entry[0]):
        if len(tried) == _MAX_FORECASTS or (best is not None and bound >= best.peak_bytes):
            break
        if (shape.tp, shape.pp, shape.cp) in tried:
            continue
        fields = {name: value for name, value in request.fixed.items() if name in ("schedule", "vpp", "stages")}
        plan = make_plan(request, shape, sharding, recompute=request.fixed.get("recompute", "full"), fields=fields)
        plan = tiled_plan(request, plan) or plan
        if plan_violations(plan, request.model, request.workload, request.cluster.num_devices):
            continue
        if request.runnable and unsupported_features(plan, request.model):
            continue
        tried.add((shape.tp, shape.pp, shape.cp))
        found = _forecast(request, plan, budget)
        if found is not None and (best is None or found.peak_bytes < best.peak_bytes):
            best = found
    return best


def _forecast(request: PlanRequest, plan: Plan, budget: MemoryBudget) -> SmallestPlan | None:
    """Return the memory of a plan's fullest rank; None where the plan has no Program."""
    model, cluster = request.model, request.cluster
    # The peak doesn't grow with the micro-batches once the pipeline is full.
    unit = plan.islands * plan.micro_batch_size * plan.mesh(0).dp_size
    batch = min(request.workload.global_batch_size, 2 * plan.pp * unit)
    workload = request.workload.model_copy(update={"global_batch_size": batch})
    try:
        program = build_program(plan, model, workload, optim=request.optim)
        ranks = forecast_memory(model, plan, workload, cluster, program, request.framework, optim=request.optim).ranks
    except MusterError:
        return None
    limits = [budget.limit_bytes(one.rank) or inf for one in ranks]
    fullest, limit = max(zip(ranks, limits, strict=True), key=lambda pair: pair[0].terms.total / pair[1])
    held = (
        ("host memory", fullest.host_bytes, fullest.host_capacity_bytes),
        ("disk", fullest.disk_bytes, fullest.disk_capacity_bytes),
    )
    tiers = tuple((name, size, share) for name, size, share in held if share is not None)
    return SmallestPlan(plan, fullest.terms.total, limit, fullest.terms.by_name(), tiers)


def helpful_changes(request: PlanRequest) -> Iterator[HelpfulChange]:
    """Yield each kind of change with the least of it that makes a plan fit, or as far as it gets without."""
    for changed in _kinds(request):
        far: HelpfulChange | None = None
        for change, other in changed(request):
            found = smallest_plan(other)
            if found is not None:
                far = HelpfulChange(change, found)
                if found.fits:
                    break
        if far is not None:
            yield far


_Changes = Callable[[PlanRequest], Iterator[tuple[str, PlanRequest]]]
"""Function that yields a change, from the least to the largest, and the question after it."""


def _kinds(request: PlanRequest) -> Iterator[_Changes]:
    if request.fixed_text:
        yield _no_requirement
    if limits_memory(request):
        yield _all_memory
    yield _more_devices
    yield _shorter_sequences
    if request.base.default_strategy.offload_optimizer == "none" and request.cluster.device.kind != "cpu":
        yield _optimizer_offload


def _more_devices(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    factor = 2
    while factor <= _MAX_GROWTH:
        try:
            cluster = _grown_cluster(request.cluster, factor)
        except ValueError:  # nothing is known of a network between nodes
            return
        batch = request.workload.global_batch_size
        per_device = -(-batch // cluster.num_devices) * cluster.num_devices
        batch = batch if batch % cluster.num_devices == 0 else max(batch, per_device)
        workload = request.workload.model_copy(update={"global_batch_size": batch})
        yield f"{cluster.num_devices:,} such devices", replace(request, cluster=cluster, workload=workload)
        factor *= 2


def _grown_cluster(cluster: ClusterSpec, factor: int) -> ClusterSpec:
    """Return the cluster with `factor` times as many devices: nodes are filled first. Raises ValueError."""
    groups = []
    for group in cluster.groups:
        node, each, nodes = group.device.node, group.devices_per_node, group.num_nodes
        wanted = each * nodes * factor
        if node is not None and nodes == 1 and each < node.devices:
            each = min(node.devices, wanted)
        changed: dict[str, object] = {"devices_per_node": each, "num_nodes": max(1, wanted // each)}
        if group.nics is None and node is not None:
            changed["nics"] = node.nics
        groups.append(group.model_copy(update=changed))
    return ClusterSpec(name=cluster.name, groups=tuple(groups), tiers=cluster.tiers)


def _shorter_sequences(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Yield halves, quarters … of the sequence, with as many tokens in a step."""

    def divided(factor: int) -> tuple[str, PlanRequest]:
        workload = request.workload
        size = {"seq_len": workload.seq_len // factor, "global_batch_size": workload.global_batch_size * factor}
        return f"sequences of {size['seq_len']:,}", replace(request, workload=workload.model_copy(update=size))

    factors = [2**n for n in range(1, (request.workload.seq_len // _SHORTEST_SEQ_LEN).bit_length())]
    shortest = smallest_plan(divided(factors[-1])[1]) if factors else None
    if shortest is not None:
        yield from map(divided, factors if shortest.fits else factors[-1:])


def _no_requirement(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    yield f"no --require {request.fixed_text}", refix_request(request, "")


def _all_memory(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    yield "all memory of the devices", replace(request, memory_limit_bytes=None)


def _optimizer_offload(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    hosts = [group.host_memory_bytes and group.host_memory_bytes * group.num_nodes for group in request.cluster.groups]
    state = MOMENT_BYTES * request.model.num_parameters
    if state <= sum(size or state for size in hosts):
        change = "the optimizer's state in host memory, oopt in the plan's name"
        yield change, _with_strategy(request, {"offload_optimizer": "host"})
    change = "parameters and optimizer state on disk (--disk), ooptd-oparamd in the plan's name"
    yield change, _with_strategy(request, {"offload_optimizer": "disk", "offload_param": "disk"})


def _with_strategy(request: PlanRequest, fields: Mapping[str, str]) -> PlanRequest:
    """Return the request for plans whose layers all have these fields."""
    strategy = request.base.default_strategy.model_copy(update=fields)
    template = request.base.model_copy(update={"default_strategy": strategy})
    return replace(request, fixed={**request.fixed, **fields}, template=template)


def describe_need(request: PlanRequest) -> str:
    """Return what the smallest plan needs, and what would make one fit, in words; empty where no plan is legal."""
    smallest = smallest_plan(request)
    if smallest is None:
        return ""
    needs = f"needs {format_size(smallest.peak_bytes)} on a device {_limit_text(request, smallest)}"
    for name, size, share in smallest.full_tiers:
        needs += f", and {format_size(size)} of {name} for each device, whose share is {format_size(share)}"
    if smallest.fits:
        return f"{smallest.name} would fit: it {needs}"
    if smallest.fits_device:
        return _tiers_text(request, smallest)
    how = "as required" if "recompute" in request.fixed else "with every layer recomputed"
    terms = sorted(((size, name) for name, size in smallest.terms.items() if size), reverse=True)[:2]
    largest = " and ".join(f"{format_size(size)} of {name.replace('_', ' ')}" for size, name in terms)
    tried = list(helpful_changes(request))
    helps = [_change_text(one) for one in tried if one.smallest.fits]
    fails = [_change_text(one) for one in tried if not one.smallest.fits]
    logits = smallest.terms.get("logits", 0)
    if logits > _MANY_LOGITS * smallest.peak_bytes and smallest.plan.sequence_tiles == 1:
        fails.append(f"a loss in chunks (at most {format_size(logits)} of logits less)")
    parts = [f"the smallest {how}, {smallest.name}, {needs} ({largest})"]
    parts += [f"it would fit with {', or '.join(helps)}"] if helps else []
    parts += [f"not enough: {', '.join(fails)}"] if fails else []
    return "; ".join(parts)


def _tiers_text(request: PlanRequest, smallest: SmallestPlan) -> str:
    """Return what the tiers lack for a plan that fits the devices."""
    devices = max(group.devices_per_node for group in request.cluster.groups)
    lacks = (
        f"{format_size(size)} of {name} for each device, whose share is {format_size(share)}: give"
        f" --{name.replace(' ', '-')} {ceil(size * devices / 1e9)}G for a node, or more"
        for name, size, share in smallest.full_tiers
    )
    return f"the smallest, {smallest.name}, fits on the devices, but needs {', and '.join(lacks)}"


def _limit_text(request: PlanRequest, smallest: SmallestPlan) -> str:
    limit = format_size(smallest.limit_bytes)
    return f"of which {limit} may be used" if limits_memory(request) else f"that has {limit}"


def limits_memory(request: PlanRequest) -> bool:
    """Return True if some device has more memory than may be used of it."""
    limit = request.memory_limit_bytes
    return limit is not None and any(limit < (group.device.memory_bytes or inf) for group in request.cluster.groups)


def _change_text(one: HelpfulChange) -> str:
    return f"{one.change} ({one.smallest.name}: {format_size(one.smallest.peak_bytes)})"


def format_size(size: float) -> str:
    """Return GiB with one decimal, or MiB below that."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.3g} MiB"
