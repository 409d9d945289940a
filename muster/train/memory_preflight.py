"""Check of a run's plan against the memory of this machine, before any process starts."""

from muster.config.local_machine import detect_machine, system_memory_bytes
from muster.config.run_config import RunConfig
from muster.cost.memory.forecast import MemoryForecast, forecast_memory
from muster.cost.memory.memory_fixes import memory_fixes
from muster.schedule.build import build_program
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import InfeasibleError
from muster.spec.formatting import format_bytes
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.units import pluralize

_OVERRIDE = "--ignore-memory tries it all the same"


def require_memory(config: RunConfig, plan: Plan, num_nodes: int = 1) -> None:
    """Raise InfeasibleError where the forecast of a plan exceeds the memory of nodes like this one.

    Devices have a memory each; processes that compute on CPU cores share that of their machine.
    """
    cluster = detect_machine(plan.world_size, num_nodes)
    program = build_program(plan, config.model, config.workload, optim=config.optim)
    own = config.model, plan, config.workload, cluster, program
    forecast = forecast_memory(*own, optim=config.optim, outer=config.outer)
    shortage = (
        _machine_shortage(forecast, num_nodes) if cluster.device.shared_cores else _device_shortage(forecast, cluster)
    )
    if shortage is not None:
        raise InfeasibleError(
            f"plan {format_plan_name(plan)} {shortage}: {_advice(config, plan, cluster)}; {_OVERRIDE}"
        )


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


def _device_shortage(forecast: MemoryForecast, cluster: ClusterSpec) -> str | None:
    """Return what the fullest device, or the host memory beside a device, lacks; None if nothing or unknown."""
    for rank in forecast.ranks:
        if rank.exceeds_host_memory:
            share = format_bytes(rank.host_capacity_bytes)
            return f"offloads {format_bytes(rank.host_bytes)} from each device, whose share of host memory is {share}"
    fullest = forecast.fullest
    if fullest.fits is not False:
        return None
    return (
        f"needs {format_bytes(fullest.terms.total)} on rank {fullest.rank} ({_largest_terms(forecast)}), but a device"
        f" ({cluster.device.name}) has {format_bytes(fullest.capacity_bytes)}"
    )


def _largest_terms(forecast: MemoryForecast) -> str:
    terms = forecast.fullest.largest_terms
    return "on the fullest rank " + ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in terms)


def _advice(config: RunConfig, plan: Plan, cluster: ClusterSpec) -> str:
    """Return the fewest changes that make the plan fit, or a larger step where no such changes do."""
    fixes = memory_fixes(
        config.model, plan, config.workload, cluster, None, evaluate=lambda _: 0.0, max_fixes=1, optim=config.optim
    )
    if not fixes:
        return (
            "recompute, offload, sharding and smaller micro-batches don't suffice; take a smaller model, or more nodes"
        )
    return (
        f"{' and '.join(fixes[0].changes)} would fit ({format_plan_name(fixes[0].plan)}), or let parallel: auto choose"
    )
