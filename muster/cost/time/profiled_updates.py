"""Times of updates by the host, and of those that the device shares with it, on a machine that has been profiled."""

from collections.abc import Iterator

from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import mean_state_bytes
from muster.cost.host_updates import host_part_copies, shared_update_numels
from muster.cost.param_offload import OffloadedParams
from muster.cost.precision_bytes import master_bytes
from muster.cost.time.rate_interpolation import RateInterpolator
from muster.cost.time.update_bytes import ADAMW_UPDATE_BYTES, optimizer_bytes_per_element
from muster.schedule.action import Kind
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan import Plan


def adamw_numel(count: int, model: ModelSpec, optim: OptimConfig | None) -> int:
    """Return the elements that AdamW updates in the time in which the optimizer updates `count`."""
    if optim is None:
        return count
    return round(count * optimizer_bytes_per_element(model, optim) / ADAMW_UPDATE_BYTES)


def host_update_times(
    rates: RateInterpolator,
    model: ModelSpec,
    plan: Plan,
    stage: int,
    optim: OptimConfig | None,
    away: OffloadedParams,
    disk_bytes_per_s: tuple[float, float],
) -> Iterator[tuple[Kind, float]]:
    """Yield the seconds of the mean part of a stage that the host updates, and of the mean one that the device does.

    `away`: the stage's parameters off the device; `disk_bytes_per_s`: reads and writes of all ranks together.
    """
    wide = master_bytes(plan.precision)
    state_bytes = mean_state_bytes(optim, dict(parameter_shapes(model)), wide)
    by_host, by_device = shared_update_numels(model, plan, stage, optim)
    if by_device:
        mean = sum(by_device) // len(by_device)
        for kind in (Kind.RELOAD_STATE, Kind.OFFLOAD_STATE):
            yield kind, rates.kernel("copy", int(state_bytes * mean) // wide)
        yield Kind.DEVICE_UPDATE, rates.kernel("adamw", adamw_numel(mean, model, optim))
    if not by_host:
        return
    mean = sum(by_host) // len(by_host)
    sent, returned = host_part_copies(model, plan, stage, optim)
    yield Kind.OFFLOAD_GRAD, rates.kernel("copy", int(sent) // wide) if sent else 0.0
    yield Kind.UPDATE, rates.kernel("adamw", adamw_numel(mean, model, optim))
    yield Kind.RELOAD_PARAM, rates.kernel("copy", int(returned) // wide) if sent else 0.0
    if "disk" in plan.host_update_tiers(stage, model.num_layers):
        read, written = away.disk_bytes_per_update
        for kind, moved, rate in zip(
            (Kind.READ_STATE, Kind.WRITE_STATE), (read, written), disk_bytes_per_s, strict=True
        ):
            yield kind, (state_bytes * mean + moved / len(by_host)) * plan.world_size / rate
