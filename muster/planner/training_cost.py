"""Days, dollars, energy and CO₂ of a whole training: its steps, and what it meets beside them."""

from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args

from muster.cost.time.plan_times import host_copy_s
from muster.planner.failures import FailureModel, best_interval_s, expected_times, waiting_s
from muster.simulate.predict import Prediction, predict
from muster.spec.device import DeviceSpec
from muster.spec.errors import ConfigError, InfeasibleError

PUE = 1.2
"""Energy of a data centre over that of its computers, where nobody says another: between what large operators publish
for theirs (about 1.1) and the mean of all in the United States (1.4; Lawrence Berkeley National Laboratory, United
States Data Center Energy Usage Report, 2024)."""

CO2_G_PER_KWH = 473.0
"""The world's electricity in 2024 (Ember, Global Electricity Review 2025)."""

DEVICE_MTBF_HOURS = 50_000.0
"""Mean time between failures of one device with its share of node, network and software: 419 unexpected interruptions
in 54 days on 16,384 H100 (Llama 3, arXiv:2407.21783 §3.3.4)."""
RESTART_S = 600.0
"""Time to notice a failure, find its cause and start again, before the checkpoint is loaded: less than 10 minutes on
average on 12,288 devices (MegaScale, arXiv:2402.15627 §4)."""
STORAGE_BYTES_PER_S_PER_NODE = 2e12 / 7500
"""Sustained rate of shared storage per node: 2 TB/s for 7,500 servers (Llama 3, arXiv:2407.21783 §3.3.1)."""
MAX_STORAGE_SHARE = 0.1
"""Largest share of the time in which checkpoints are written, since others use the storage too (an assumption)."""
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Float32 weight and AdamW's two moments."""
Recovery = Literal["disk", "memory"]
"""Place that a restarted training loads its state from. disk: shared storage; memory: another node's
(`train.in_memory_checkpoint_every`)."""
RECOVERIES: tuple[Recovery, ...] = get_args(Recovery)
UNKNOWN_HOST_BYTES_PER_S = 31.5e9
"""Rate assumed for an unknown link to the host: PCI Express 4 with 16 lanes."""


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """Growth of the batch at the beginning, in sequences: Megatron-LM's `--rampup-batch-size`."""

    start: int
    increment: int
    samples: int
    """Sequences until the whole batch is reached; each size lasts for the same number of them."""


@dataclass(frozen=True, slots=True)
class TrainingConditions:
    """Conditions of a whole training that are no part of a step."""

    device_mtbf_hours: float = DEVICE_MTBF_HOURS
    """Mean time between failures of one device."""
    batch_ramp: BatchRamp | None = None
    recovery: Recovery = "disk"
    restart_s: float = RESTART_S
    """Seconds to notice a failure, find its cause and start again, before the state is loaded."""
    spare_nodes: int = 0
    """Nodes that stand by for those that are being repaired."""
    repair_hours: float | None = None
    """Hours for which a failed node is away; None: another takes its place within the restart."""


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Cost of a whole training; dollars and energy are None where the devices' price or power is unknown."""

    steps: int
    steps_h: float
    """Hours of all steps, as many as a batch of full size needs from the start."""
    ramp_h: float
    """Hours that smaller batches at the beginning add."""
    data_h: float
    """Hours in which steps wait for data to be read from storage; what is read during a step costs nothing."""
    checkpoints_h: float
    """Hours in which devices wait for checkpoints: copies to host memory, which is written while training goes on."""
    lost_h: float
    """Hours of work that failures destroy: since the last checkpoint that was written whole."""
    restarts_h: float
    """Hours to notice failures, start again and load a checkpoint."""
    waiting_h: float
    """Hours in which the job waits for a repaired node, all spare ones being in use."""
    failures: float
    """Expected number of failures."""
    mtbf_h: float
    """Mean hours between failures of all devices together."""
    checkpoint_interval_s: float
    checkpoint_bytes: int
    usd: float | None
    kwh: float | None
    """Energy of the devices at their power limits, times the data centre's overhead (PUE); without hosts."""
    co2_kg: float | None

    @property
    def hours(self) -> float:
        """Hours from the first step to the last."""
        running = self.steps_h + self.ramp_h + self.data_h + self.checkpoints_h + self.lost_h + self.restarts_h
        return running + self.waiting_h

    @property
    def days(self) -> float:
        return self.hours / 24

    @property
    def effective_share(self) -> float:
        """Share of the time in steps that count, as Llama 3's *effective training time*."""
        return (self.steps_h + self.ramp_h) / self.hours


def require_a_sequence(tokens: float, seq_len: int) -> None:
    """Raise ConfigError for tokens of a whole training that are less than one sequence."""
    if tokens < seq_len:
        raise ConfigError(
            f"--tokens {tokens:g} is less than one sequence of {seq_len:,} tokens: {tokens:g} trillion are {tokens:g}T"
        )


def training_cost(prediction: Prediction, tokens: float, conditions: TrainingConditions | None = None) -> TrainingCost:
    """Return the cost of training on `tokens` tokens with checkpoints, failures, restarts and repairs.

    Checkpoints are copied to host memory while devices wait, then written in the background, to storage or to the next
    node's memory: as often as loses least, unless storage were busy for more than a tenth of the time, or the next copy
    came before the last is complete. `muster.planner.failures` has the formulas.

    Example: 405B parameters on 16,384 devices that fail every 50,000 h each: one of them fails every 3.1 h; 4.9 TB take
    9 s to write, so that a checkpoint is made every 1.5 minutes, and a failure costs 11 minutes: 6 % of the time.

    Raises ConfigError for less than one sequence, where failures come faster than restarts, and for copies in another
    node's memory on a single node.
    """
    conditions = conditions or TrainingConditions()
    require_a_sequence(tokens, prediction.workload.seq_len)
    step_s, workload = prediction.mean_step_s, prediction.workload
    steps = ceil(tokens / workload.tokens_per_step)
    added_steps, ramp_s = _ramp(prediction, conditions.batch_ramp, tokens) if conditions.batch_ramp else (0, 0.0)
    size = CHECKPOINT_BYTES_PER_PARAMETER * prediction.model.num_parameters
    failures = _failure_model(prediction, size, conditions)
    busy = MAX_STORAGE_SHARE if conditions.recovery == "disk" else 1.0
    interval_s = max(best_interval_s(failures), failures.write_s / busy, step_s)
    token_bytes = 2 if prediction.model.vocab_size <= 2**16 else 4
    storage_bytes_per_s = STORAGE_BYTES_PER_S_PER_NODE * _num_nodes(prediction)
    read_s = max(0.0, token_bytes * workload.tokens_per_step / storage_bytes_per_s - step_s)
    work_s, data_s = steps * step_s + ramp_s, steps * read_s
    beside = expected_times(work_s + data_s, interval_s, failures)
    running_s = work_s + data_s + beside.checkpoints_s + beside.lost_s + beside.restarts_s
    total_s = running_s + _waiting_s(running_s, failures, conditions)
    price, kwh = _usd_per_hour(prediction, conditions.spare_nodes), energy_kwh(prediction, running_s)
    return TrainingCost(
        steps=steps + added_steps,
        steps_h=steps * step_s / 3600,
        ramp_h=ramp_s / 3600,
        data_h=data_s / 3600,
        checkpoints_h=beside.checkpoints_s / 3600,
        lost_h=beside.lost_s / 3600,
        restarts_h=beside.restarts_s / 3600,
        waiting_h=(total_s - running_s) / 3600,
        failures=beside.failures,
        mtbf_h=failures.mtbf_s / 3600,
        checkpoint_interval_s=interval_s,
        checkpoint_bytes=size,
        usd=None if price is None else price * total_s / 3600,
        kwh=kwh,
        co2_kg=None if kwh is None else kwh * CO2_G_PER_KWH / 1000,
    )


def _failure_model(prediction: Prediction, size: int, conditions: TrainingConditions) -> FailureModel:
    """Return the rate of failures and the times of saving and loading a state of `size` bytes."""
    nodes, ranks = _num_nodes(prediction), prediction.plan.world_size
    rate = STORAGE_BYTES_PER_S_PER_NODE
    if conditions.recovery == "memory":
        nics = prediction.cluster.groups[0].nics
        if nodes == 1 or nics is None:
            raise ConfigError("--recovery memory: expected several nodes; a single one loses its memory's copy, too")
        rate = nics.count * nics.link.bandwidth_bytes_per_s * nics.link.efficiency
    transfer_s = size / nodes / rate
    return FailureModel(
        mtbf_s=3600 * conditions.device_mtbf_hours / ranks,
        stall_s=_stall_s(prediction.cluster.device, size / ranks),
        write_s=transfer_s,
        restart_s=conditions.restart_s + transfer_s,
    )


def _waiting_s(running_s: float, failures: FailureModel, conditions: TrainingConditions) -> float:
    if not conditions.repair_hours:
        return 0.0
    return waiting_s(running_s, failures.mtbf_s, conditions.repair_hours * 3600, conditions.spare_nodes)


def _usd_per_hour(prediction: Prediction, spare_nodes: int) -> float | None:
    """Return the price of the cluster and of spare nodes; None where it is unknown."""
    cluster = prediction.cluster
    price = cluster.usd_per_hour
    return None if price is None else price * (1 + spare_nodes / cluster.num_nodes)


def energy_kwh(prediction: Prediction, time_s: float) -> float | None:
    """Return the energy of the plan's devices for some time, at their power limits and with the data centre's overhead;
    None where their power is unknown."""
    watts = prediction.cluster.watts
    return None if watts is None else watts * time_s / 3.6e6 * PUE


def _num_nodes(prediction: Prediction) -> int:
    """Return the number of nodes that the plan's devices fill."""
    group = prediction.cluster.groups[0]
    return max(1, min(prediction.cluster.num_nodes, -(-prediction.plan.world_size // group.devices_per_node)))


def _stall_s(device: DeviceSpec, size: float) -> float:
    """Return the seconds to copy a device's part of a checkpoint to host memory."""
    if device.host_bandwidth_bytes_per_s is None and device.kind != "cpu":
        device = device.model_copy(update={"host_bandwidth_bytes_per_s": UNKNOWN_HOST_BYTES_PER_S})
    if device.memory_bandwidth_bytes_per_s is None:  # a CPU of which nothing is known
        return size / UNKNOWN_HOST_BYTES_PER_S
    return host_copy_s(device, size)


def _ramp(prediction: Prediction, ramp: BatchRamp, tokens: float) -> tuple[int, float]:
    """Return the steps and the seconds that a ramp of the batch adds to the training.

    The same plan runs all batches. Its step takes a time for each micro-batch and a time of its own (bubble,
    reductions, optimizer), so the time of each batch lies on the line between the first and the last.
    """
    workload, full = prediction.workload, prediction.workload.global_batch_size
    sizes = list(range(ramp.start, full, ramp.increment))
    samples = min(ramp.samples, int(tokens / workload.seq_len))
    if not sizes or not samples:
        return 0, 0.0
    least, least_s = _smallest_batch(prediction, ramp.start)
    slope_s = (prediction.step_time_s - least_s) / (full - least) if full > least else 0.0
    each = samples / len(sizes)
    steps = [each / size for size in sizes]
    times_s = [least_s + slope_s * max(0, size - least) for size in sizes]
    spent_s = sum(count * time_s for count, time_s in zip(steps, times_s, strict=True))
    whole = samples / full
    return round(sum(steps) - whole), spent_s - whole * prediction.step_time_s


def _smallest_batch(prediction: Prediction, start: int) -> tuple[int, float]:
    """Return the smallest batch from `start` on that the plan can run, and the seconds of its step."""
    plan, workload = prediction.plan, prediction.workload
    unit = plan.islands * plan.micro_batch_size * plan.mesh(0).dp_size
    for batch in range(-(-start // unit) * unit, workload.global_batch_size, unit):
        smaller = workload.model_copy(update={"global_batch_size": batch})
        own = prediction.model, plan, smaller, prediction.cluster
        try:
            return batch, predict(*own, framework=prediction.framework, optim=prediction.optim).step_time_s
        except InfeasibleError:  # a schedule may need more micro-batches
            continue
    return workload.global_batch_size, prediction.step_time_s
