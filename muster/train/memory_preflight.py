"""Check of a run's plan against the memory of this machine, before any process starts."""

from muster.config.local_machine import detect_machine, system_memory_bytes
from muster.config.run_config import RunConfig
from muster.cost.memory.forecast import MemoryForecast, forecast_memory
from muster.cost.memory.memory_fixes import memory_fixes
from muster.planner.auto import FORECAST_ERROR, machine_within_limit, words_under_limit
from muster.schedule.build import build_program
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import InfeasibleError
from muster.spec.formatting import format_bytes
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.units import pluralize

_OVERRIDE = "--ignore-memory tries it all the same"
_HIGHER_LIMIT = "a higher --memory-limit lets it run"

_TIER_WORDS = ("oopt", "ooptd", "oopt-oparam", "ooptd-oparamd")
"""Words of plans with all state of a kind off the devices, the nearest tier first."""


def require_memory(config: RunConfig, plan: Plan, num_nodes: int = 1) -> None:
    """Raise InfeasibleError where the forecast of a plan exceeds the run's memory limit, or the memory of nodes like
    this one.

    Devices have a memory each; processes that compute on CPU cores share that of their machine.
    """
    limit_bytes = config.train.memory_limit_bytes
    cluster = _with_device_memory(
        machine_within_limit(detect_machine(plan.world_size, num_nodes), limit_bytes), limit_bytes
    )
    forecast = _forecast(config, plan, cluster)
    shortage = _machine_shortage(forecast, num_nodes) if cluster.device.shared_cores else None
    if shortage is None and not (cluster.device.shared_cores and limit_bytes is None):
        shortage = _device_shortage(forecast, cluster, limit_bytes is not None)
    if shortage is not None:
        raise InfeasibleError(
            f"plan {format_plan_name(plan)} {shortage}: {_advice(config, plan, cluster)};"
            f" {_OVERRIDE if limit_bytes is None else _HIGHER_LIMIT}"
        )


def has_memory(config: RunConfig, plan: Plan) -> bool:
    """Return whether the forecast of a plan fits, as `require_memory` has it."""
    try:
        require_memory(config, plan)
    except InfeasibleError:
        return False
    return True


def excess_of_limit(config: RunConfig, plan: Plan, held_bytes: int | None) -> InfeasibleError:
    """Return the error of a rank that has exceeded the run's memory limit, with the nearest plan that should fit.

    `held_bytes`: what the rank held, None where that is unknown.
    """
    limit_bytes = config.train.memory_limit_bytes
    assert limit_bytes is not None
    cluster = machine_within_limit(detect_machine(plan.world_size), limit_bytes)
    forecast_bytes = _forecast(config, plan, cluster).fullest.terms.total
    wanted_bytes = min(limit_bytes, int(forecast_bytes * (1 - FORECAST_ERROR)))
    held = "more" if held_bytes is None else f"{held_bytes:,} bytes of tensors, more"
    return InfeasibleError(
        f"plan {format_plan_name(plan)} holds {held} than its memory limit of {limit_bytes:,} bytes (forecast:"
        f" {forecast_bytes:,}): {_advice(config, plan, _with_device_memory(cluster, wanted_bytes))}; the run goes on"
        " from its last checkpoint under another plan, or with a higher --memory-limit"
    )


def _forecast(config: RunConfig, plan: Plan, cluster: ClusterSpec) -> MemoryForecast:
    program = build_program(plan, config.model, config.workload, optim=config.optim)
    own = config.model, plan, config.workload, cluster, program
    return forecast_memory(*own, optim=config.optim, outer=config.outer)


def _with_device_memory(cluster: ClusterSpec, limit_bytes: int | None) -> ClusterSpec:
    """Return the cluster with devices that have no more memory than a limit."""
    if limit_bytes is None:
        return cluster
    groups = []
    for group in cluster.groups:
        size = min(limit_bytes, group.device.memory_bytes or limit_bytes)
        groups.append(group.model_copy(update={"device": group.device.model_copy(update={"memory_bytes": size})}))
    return cluster.model_copy(update={"groups": tuple(groups)})


def _machine_shortage(forecast: MemoryForecast, num_nodes: int) -> str | None:
    """Return what the processes of a node lack together; None if nothing."""
    has = system_memory_bytes()
    needs = sum(rank.num_ranks * (rank.terms.total + rank.host_bytes) for rank in forecast.ranks) // num_nodes
    if needs <= has:
        return None
    count = sum(rank.num_ranks for rank in forecast.ranks) // num_nodes
    return (
        f"needs {format_bytes(needs)} of memory for {pluralize(count, 'process')} on a machine"
        f" ({_largest_terms(forecast)}), which has {format_bytes(has)}"
    )


def _device_shortage(forecast: MemoryForecast, cluster: ClusterSpec, is_limited: bool) -> str | None:
    """Return what the fullest device, or the host memory beside a device, lacks; None if nothing or unknown."""
    for rank in forecast.ranks:
        if rank.exceeds_host_memory:
            share = format_bytes(rank.host_capacity_bytes)
            return f"offloads {format_bytes(rank.host_bytes)} from each device, whose share of host memory is {share}"
        if rank.exceeds_disk:
            share = format_bytes(rank.disk_capacity_bytes)
            return f"puts {format_bytes(rank.disk_bytes)} of each device on disk, where {share} are free for it"
    fullest = forecast.fullest
    if fullest.fits is not False:
        return None
    has = f"a device ({cluster.device.name}) has" if not is_limited else "the memory limit of a device is"
    return (
        f"needs {format_bytes(fullest.terms.total)} on rank {fullest.rank} ({_largest_terms(forecast)}), but {has}"
        f" {format_bytes(fullest.capacity_bytes)}"
    )


def _largest_terms(forecast: MemoryForecast) -> str:
    terms = forecast.fullest.largest_terms
    return "on the fullest rank " + ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in terms)


def _advice(config: RunConfig, plan: Plan, cluster: ClusterSpec) -> str:
    """Return the fewest changes that make the plan fit, or a larger step where no such changes do."""
    words = words_under_limit(config, _TIER_WORDS)
    for tiers in ((), words) if words else ((),):
        fixes = memory_fixes(
            config.model,
            plan,
            config.workload,
            cluster,
            None,
            evaluate=lambda _: 0.0,
            max_fixes=1,
            optim=config.optim,
            tier_words=tiers,
        )
        if fixes:
            changes = " and ".join(fixes[0].changes)
            return f"{changes} would fit ({format_plan_name(fixes[0].plan)}), or let parallel: auto choose"
    tiers = "state in host memory and on disk, " if words else ""
    return (
        f"recompute, offload, {tiers}sharding and smaller micro-batches don't suffice; take a smaller model, or more"
        " nodes"
    )
