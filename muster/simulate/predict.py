"""Prediction of a plan: step time, its breakdown, and the memory of each rank."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

from muster.config.optim_config import OptimConfig, UpdateTime
from muster.config.optimizer_state import is_zeroth_order
from muster.config.outer_config import OuterConfig
from muster.cost.flops import plan_flops_per_token
from muster.cost.memory.forecast import MEMORY_HEADROOM, MemoryForecast, forecast_memory
from muster.cost.memory.memory_fixes import MemoryFix, memory_fixes
from muster.cost.time.collectives import make_comm_group
from muster.cost.time.cost_cache import CostCache
from muster.cost.time.island_round import IslandRound, island_round
from muster.cost.time.op_times import OpTimes
from muster.cost.time.plan_times import data_ranks_by_kind, place_plan, plan_times
from muster.cost.time.sublayer import copies_chunks
from muster.cost.uncertainty import COVERAGE, ErrorInterval, step_time_interval
from muster.layout.mesh import coordinates_of, rank_at
from muster.schedule.action import PART_UPDATES, Action, Kind
from muster.schedule.build import build_program
from muster.schedule.program import Program
from muster.schedule.resolve import resolve_schedule
from muster.simulate.expert_moves import PredictedMoves, predict_moves
from muster.simulate.pairs import pairs_of_rank
from muster.simulate.simulator import SimulatedStep, simulate_step
from muster.simulate.spans import BUBBLE, P2P
from muster.simulate.timeline import Timeline
from muster.spec.cluster import ClusterSpec
from muster.spec.compilation import compiles
from muster.spec.device_precision import matmul_precision, substitutions
from muster.spec.errors import InfeasibleError
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.frameworks import MUSTER
from muster.spec.legality import plan_violations, required_world_size
from muster.spec.model import ModelSpec
from muster.spec.nearest_plans import MOST_DEVICES_WITH_NEAREST, nearest_plans
from muster.spec.pass_pairs import pairs_collectives
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.supported import not_run_yet
from muster.spec.units import pluralize
from muster.spec.workload import Workload

_AXIS_BY_KIND: dict[str, str] = dict.fromkeys(
    (
        P2P,
        Kind.ALL_REDUCE_TIED,
        Kind.ALL_REDUCE_REPLICAS,
        Kind.EMB_REDUCE,
        Kind.HIDDEN_BCAST,
        Kind.LOGIT_STATS,
        Kind.EMB_GRAD_BCAST,
    ),
    "pp",
)
_AXIS_BY_KIND |= {
    Kind.UNSHARD: "dp",
    Kind.UNSHARD_BUCKET: "dp",
    Kind.REDUCE_GRAD: "dp",
    Kind.ALL_REDUCE_TP: "tp",
    Kind.GRAD_NORM: "world",
    Kind.GRAD_NORM_BESIDE: "world",
    Kind.OFFLOAD: "host",
    Kind.RELOAD: "host",
    Kind.OFFLOAD_ACT: "host",
    Kind.RELOAD_ACT: "host",
    Kind.OFFLOAD_GRAD: "host",
    Kind.RELOAD_PARAM: "host",
    Kind.RELOAD_STATE: "host",
    Kind.OFFLOAD_STATE: "host",
    Kind.WRITE_ACT: "disk",
    Kind.WRITE_ACT_LATE: "disk",
    Kind.READ_ACT: "disk",
    Kind.LOAD_F: "host",
    Kind.LOAD_B: "host",
    Kind.READ_F: "disk",
    Kind.READ_B: "disk",
    Kind.READ_STATE: "disk",
    Kind.WRITE_STATE: "disk",
    Kind.OUTER_WAIT: "islands",
    Kind.MOVE_EXPERTS: "ep",
}
"""Kind of communication → axis on which it runs."""
_STEP_KINDS = (Kind.CLIP, *PART_UPDATES, Kind.STEP_BUCKET, Kind.STEP, Kind.OUTER_STEP)
"""Compute of the optimizer step."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """Breakdown of a step in seconds, as means over the pipeline ranks; the parts sum to the step time."""

    compute_s: float
    communication_s: Mapping[str, float]
    """Axis (pp, dp, tp, cp, ep, world; host: the link to host memory; disk) → exposed seconds of its communication."""
    bubble_s: float
    optimizer_s: float
    data_s: float


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak memory of one rank: the first rank with the least device memory among those of a pipeline rank."""

    rank: int
    pp_rank: int
    terms: Mapping[str, int]
    """Memory term → bytes."""

    @property
    def total(self) -> int:
        return sum(self.terms.values())


@dataclass(frozen=True)
class Prediction:
    """Prediction of one optimizer step of a plan. None stands for unknown values, such as a device's peak or price."""

    model: ModelSpec
    plan: Plan
    workload: Workload
    cluster: ClusterSpec
    program: Program
    times: OpTimes
    step_time_s: float
    framework: FrameworkTraits
    simulated: SimulatedStep = field(repr=False)
    make_forecast: Callable[[], MemoryForecast] = field(repr=False)
    optim: OptimConfig | None = None
    """Optimizer; None: AdamW."""
    outer: OuterConfig | None = None
    """Outer steps of a plan with islands; None: those of DiLoCo."""
    make_moves: Callable[[], PredictedMoves] | None = field(default=None, repr=False)

    @cached_property
    def moves(self) -> PredictedMoves | None:
        """Moves of experts between steps; None where they stay."""
        return None if self.make_moves is None else self.make_moves()

    @cached_property
    def round(self) -> IslandRound | None:
        """Round of a plan with islands; None without."""
        if self.plan.islands == 1:
            return None
        own = self.model, self.plan, self.workload, self.cluster
        return island_round(*own, self.outer or OuterConfig(), self.step_time_s, self.optim)

    @cached_property
    def timeline(self) -> Timeline:
        """Predicted timeline of all instructions, by pipeline rank; made on first access."""
        return self.simulated.timeline()

    @cached_property
    def _time_by_part_s(self) -> dict[str, float]:
        return {part: time_s / self.program.num_steps for part, time_s in self.simulated.time_by_part().items()}

    @cached_property
    def parts(self) -> StepParts:
        """Breakdown of the step time."""
        return _step_parts(self._time_by_part_s, self.program, self.times, self.plan)

    @property
    def bubble_fraction(self) -> float:
        """Share of the step (without data loading) in which ranks wait for compute of other ranks."""
        round_s = self.simulated.duration_s / self.program.num_steps
        return self._time_by_part_s.get(BUBBLE, 0.0) / round_s if round_s else 0.0

    @cached_property
    def forecast(self) -> MemoryForecast:
        """Forecast of the memory; made on first access, since it takes as long as the simulation."""
        return self.make_forecast()

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """Peak memory by pipeline rank."""
        return tuple(RankMemory(one.rank, one.pp_rank, one.terms.by_name()) for one in self.forecast.ranks)

    @property
    def fits(self) -> bool | None:
        """True if every rank fits; None if a device's memory is unknown."""
        return self.forecast.fits

    @cached_property
    def memory_fixes(self) -> list[MemoryFix]:
        """Up to three plans with few changes that fit, by step time; empty if this plan fits."""
        if self.fits is not False:
            return []

        def step_time_s(plan: Plan) -> float:
            own = self.model, plan, self.workload, self.cluster
            return predict(*own, framework=self.framework, cache=cache, optim=self.optim).step_time_s

        cache = CostCache()

        own = self.model, self.plan, self.workload, self.cluster
        return memory_fixes(*own, self.framework, step_time_s, optim=self.optim)

    @cached_property
    def interval(self) -> ErrorInterval | None:
        """Interval of the true step time, as factors of `step_time_s`, of the precision whose times stand for one that
        the devices lack; None where nothing like it was measured."""
        precision, recipe, recasts = self.plan.precision, self.plan.fp8_recipe, self.framework.recasts_fp8
        devices = [group.device for group in self.cluster.groups]
        used = {one.peak_precision(matmul_precision(one, precision, recipe, recasts)) for one in devices}
        plan = self.plan if len(used) > 1 else self.plan.model_copy(update={"precision": used.pop() or precision})
        return step_time_interval(self.model, plan, self.cluster)

    @cached_property
    def not_yet(self) -> list[str]:
        """Sentences about parts of the model and features of the plan that `muster train` can't run yet; empty for
        another framework."""
        return not_run_yet(self.model, self.plan) if self.framework.name == MUSTER.name else []

    @cached_property
    def substitutions(self) -> list[str]:
        """Sentences about devices that aren't known to compute in the plan's precision, each with the one whose times
        stand for it."""
        return substitutions(self.cluster, self.plan.precision, self.plan.fp8_recipe, self.framework.recasts_fp8)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices; with islands over a whole round."""
        return self.workload.tokens_per_step / self.mean_step_s

    @property
    def mean_step_s(self) -> float:
        """Seconds of a step with its share of what islands wait for one another."""
        return self.step_time_s if self.round is None else self.round.round_s / self.round.outer.every

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.plan.world_size

    @property
    def tflops_per_device(self) -> float:
        """Model TFLOP/s per device, without recomputation (see `plan_flops_per_token`)."""
        return self.tokens_per_s_per_device * self._flops_per_token() / 1e12

    def _flops_per_token(self, causal: bool = False) -> int:
        """Return the model FLOPs of a token, without those for gradients of frozen parameters."""
        has_backward, freeze = not is_zeroth_order(self.optim), () if self.optim is None else self.optim.freeze
        return plan_flops_per_token(self.plan, self.model, self.workload.seq_len, causal, has_backward, freeze)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: share of the peak in the plan's precision; attention scores count in full."""
        groups = self.cluster.groups
        peaks = [(group.device.flops_per_s(self.plan.precision), group.num_devices) for group in groups]
        known = [peak * count for peak, count in peaks if peak is not None]
        if len(known) < len(peaks):
            return None
        return self.tflops_per_device * 1e12 * self.plan.world_size / sum(known)

    @property
    def mfu_causal(self) -> float | None:
        """MFU where only the attention scores count that the causal mask leaves; None for a plugin's layers."""
        if self.mfu is None or self.model.architecture is not None:
            return None
        return self.mfu * self._flops_per_token(causal=True) / self._flops_per_token()

    @property
    def usd_per_step(self) -> float | None:
        """Rent of all devices for a step, in US dollars."""
        price = self.cluster.usd_per_hour
        return None if price is None else price * self.mean_step_s / 3600

    @property
    def joules_per_step(self) -> float | None:
        """Upper bound of the devices' energy for a step, at their power limits; without hosts and cooling."""
        watts = self.cluster.watts
        return None if watts is None else watts * self.mean_step_s

    @property
    def memory_reserve_bytes(self) -> int | None:
        """Memory of the fullest rank's device that `muster plan` leaves free where it can; None where it is unknown."""
        capacity = self.forecast.fullest.capacity_bytes if self.memory else None
        return None if capacity is None else int(MEMORY_HEADROOM * capacity)

    @property
    def compiled(self) -> bool:
        """True if the plan's blocks are compiled."""
        has_backward = not is_zeroth_order(self.optim)
        return has_backward and compiles(self.plan, self.model, self.cluster.device.kind, self.framework)

    @property
    def tp_overlap(self) -> Literal["ring", "symmetric_memory", "domino", "pairs", "ladder", "kraken"] | None:
        """Way of the chunks of asynchronous tensor parallelism on the first stage, or domino, pairs of passes, or the
        model's own way; None without any."""
        kind = self.plan.default_strategy.tp_overlap
        if self.model.residual == "ladder" and self.plan.mesh(0).tp > 1:
            return "ladder"
        if self.model.parallel_sublayers > 1 and self.plan.mesh(0).tp > 1:
            return "kraken"
        if kind == "none" or self.plan.mesh(0).tp == 1:
            return None
        if kind in ("domino", "pairs"):
            return kind
        ranks = [rank_at(self.plan, replace(coordinates_of(self.plan, 0), tp=tp)) for tp in range(self.plan.mesh(0).tp)]
        copies = copies_chunks(self.framework, make_comm_group(self.cluster, ranks))
        return "symmetric_memory" if copies else "ring"

    def interval_json(self) -> dict[str, Any] | None:
        """Return the interval of the step time as plain data."""
        found = self.interval
        if found is None:
            return None
        low_s, high_s = found.low * self.step_time_s, found.high * self.step_time_s
        return {"low_s": low_s, "high_s": high_s, "coverage": COVERAGE, "source": found.source}

    def to_json(self) -> dict[str, Any]:
        """Return plain data with every key; unknown values are null."""
        parts = self.parts
        return {
            "version": 1,
            "model": self.model.name,
            "plan": format_plan_name(self.plan),
            "cluster": self.cluster.name,
            "framework": self.framework.name,
            "compile": self.compiled,
            "tp_overlap": self.tp_overlap,
            "devices": self.plan.world_size,
            "not_yet": self.not_yet,
            "substitutions": self.substitutions,
            "seq_len": self.workload.seq_len,
            "global_batch_size": self.workload.global_batch_size,
            "step_time_s": self.step_time_s,
            "step_time_interval": self.interval_json(),
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "tflops_per_device": self.tflops_per_device,
            "mfu": self.mfu,
            "mfu_causal": self.mfu_causal,
            "bubble_fraction": self.bubble_fraction,
            "breakdown": {
                "compute_s": parts.compute_s,
                "communication_s": dict(parts.communication_s),
                "bubble_s": parts.bubble_s,
                "optimizer_s": parts.optimizer_s,
                "data_s": parts.data_s,
            },
            "memory": {str(one.rank): {"pp_rank": one.pp_rank, **one.terms, "total": one.total} for one in self.memory},
            "fits": self.fits,
            "memory_capacity_bytes": self.forecast.fullest.capacity_bytes if self.memory else None,
            "memory_reserve_bytes": self.memory_reserve_bytes,
            "largest_terms": dict(self.forecast.fullest.largest_terms),
            "changes": [
                {
                    "plan": format_plan_name(one.plan),
                    "changes": list(one.changes),
                    "peak_bytes": one.memory.fullest.terms.total,
                    "step_time_s": one.value,
                }
                for one in self.memory_fixes
            ],
            "round": None if self.round is None else self.round.to_json(),
            "moves": None if self.moves is None else self.moves.to_json(),
            "usd_per_step": self.usd_per_step,
            "joules_per_step": self.joules_per_step,
        }


def predict(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    program: Program | None = None,
    times: OpTimes | None = None,
    framework: FrameworkTraits | None = None,
    cache: CostCache | None = None,
    optim: OptimConfig | None = None,
    outer: OuterConfig | None = None,
    update_time: UpdateTime = "after_passes",
    rebalance_experts_every: int = 0,
) -> Prediction:
    """Predict the time and memory of a plan's step: lower the plan to its Program and simulate it.

    `framework`: the framework that trains (default: Muster). `optim`: its optimizer (default: AdamW), `outer`:
    the outer steps of a plan with islands (default: DiLoCo's). `update_time`: time at which the host updates
    parameters. `rebalance_experts_every`: steps between moves of experts, 0: they stay.
    `program` (from `build_program`) and `times` (from
    `plan_times`) may be passed in to save their computation: plans with the same schedule, micro-batches and ZeRO level
    have the same Program. Calls that share a `cache` share the costs of equal layers and stages.

    A call takes about 4 µs per instruction of the Program on one core, a third of it for lowering: 7 ms for 4 pipeline
    ranks and 32 micro-batches, 24 ms for 16 and 64, 0.6 s for 64 and 512, independent of the number of devices.

    Raises InfeasibleError with the reasons if the plan is not legal for this model, batch and cluster.
    """
    require_legal(plan, model, workload, cluster)
    plan, framework = resolve_schedule(plan, model, workload), framework or MUSTER
    longest = program or build_program(plan, model, workload, update_time=update_time, optim=optim)
    if plan.uneven_micro_batches:
        own = model, plan, workload, cluster, framework, cache or CostCache(), optim, update_time
        program, times = _slowest_data_rank(*own)
    else:
        program = longest
        times = times or plan_times(
            model, plan, workload, cluster, framework, cache=cache, optim=optim, update_time=update_time
        )
    step = simulate_step(program, times)
    forecast = partial(forecast_memory, model, plan, workload, cluster, longest, framework, optim=optim, outer=outer)
    step_time_s = step.duration_s / program.num_steps + times.data_s
    moves = None
    if rebalance_experts_every and model.moe is not None:

        def time_of(placed: Plan) -> float:
            return predict(model, placed, workload, cluster, framework=framework, cache=cache, optim=optim).step_time_s

        setting = place_plan(model, plan, workload, cluster, framework, cache=cache, optim=optim)
        moves = partial(predict_moves, setting, times, rebalance_experts_every, time_of)
    return Prediction(
        model, plan, workload, cluster, program, times, step_time_s, framework, step, forecast, optim, outer, moves
    )


def _slowest_data_rank(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    framework: FrameworkTraits | None,
    cache: CostCache,
    optim: OptimConfig | None,
    update_time: UpdateTime,
) -> tuple[Program, OpTimes]:
    """Return the Program and the times of the slowest data-parallel ranks under uneven micro-batches.

    Their time is exact for the whole step: ranks with different numbers of micro-batches meet only in the gradient
    reductions at the end, and max(a + r, b + r) = max(a, b) + r.
    """
    kinds = data_ranks_by_kind(place_plan(model, plan, workload, cluster, framework, cache=cache))
    candidates: dict[tuple[int, int], tuple[Program, OpTimes]] = {}
    for number, ranks in enumerate(kinds.values()):
        for data_rank in ranks:
            key = number, plan.num_micro_batches(workload, data_rank)
            if key not in candidates:
                program = build_program(
                    plan, model, workload, data_rank=data_rank, update_time=update_time, optim=optim
                )
                times = plan_times(model, plan, workload, cluster, framework, data_rank, cache, optim, update_time)
                candidates[key] = program, times
    return max(candidates.values(), key=lambda pair: simulate_step(*pair).duration_s)


def require_legal(plan: Plan, model: ModelSpec, workload: Workload, cluster: ClusterSpec) -> None:
    """Raise InfeasibleError with all reasons why the plan is not legal, and the nearest plans that can run; missing
    support in the runtime is no reason."""
    # Cores of a measured machine are shared by any number of ranks.
    shared = cluster.device.rates is not None and cluster.device.shared_cores
    devices = required_world_size(plan) if shared else cluster.num_devices
    found = plan_violations(plan, model, workload, devices)
    if not found:
        return
    needed = required_world_size(plan)
    near = nearest_plans(plan, model, workload, devices) if devices <= MOST_DEVICES_WITH_NEAREST else []
    refusal, remedy = "can't be used", f"; nearest: {', '.join(map(format_plan_name, near))}" if near else ""
    if found != plan_violations(plan, model, workload, needed):
        refusal, remedy = f"doesn't fit {cluster.name or pluralize(devices, 'device')}", _other_cluster(cluster, needed)
    found = [reason.replace("processes", "devices").replace("process", "device") for reason in found]
    raise InfeasibleError(f"plan {format_plan_name(plan)} {refusal}: {'; '.join(found)}{remedy}")


def _other_cluster(cluster: ClusterSpec, devices: int) -> str:
    """Return the advice to take a cluster of so many devices, by its name where it is of the form `8xh100`."""
    count, times, device = cluster.name.partition("x")
    if count.isdecimal() and times and len(cluster.groups) == 1:
        return f"; give a plan for {pluralize(cluster.num_devices, 'device')}, or --cluster {devices}x{device}"
    return f"; give a plan for {pluralize(cluster.num_devices, 'device')}, or a cluster of {devices}"


def _step_parts(found_s: Mapping[str, float], program: Program, times: OpTimes, plan: Plan) -> StepParts:
    communication_s: defaultdict[str, float] = defaultdict(float)
    if plan.world_size == 1:  # without other ranks the gradient norm is compute of the optimizer
        norm_s = found_s.get(Kind.GRAD_NORM, 0.0)
        found_s = {**found_s, Kind.GRAD_NORM: 0.0, Kind.STEP: found_s.get(Kind.STEP, 0.0) + norm_s}
    step_s = sum(found_s.get(kind, 0.0) for kind in _STEP_KINDS)
    for kind, time_s in found_s.items():
        if kind in _AXIS_BY_KIND:
            communication_s[_AXIS_BY_KIND[kind]] += time_s
    within = _exposed_in_passes(program, times, "tp" if pairs_collectives(plan) else "ep")
    within_s = {key: time_s / program.num_steps for key, time_s in within.items()}
    compute_s = sum(time_s for kind, time_s in found_s.items() if kind not in (*_AXIS_BY_KIND, *_STEP_KINDS, BUBBLE))
    optimizer_s = step_s
    for (kind, axis), time_s in within_s.items():
        communication_s[axis] += time_s
        if kind == Kind.STEP:
            optimizer_s -= time_s
        else:
            compute_s -= time_s
    shown = {axis: time_s for axis, time_s in sorted(communication_s.items(), key=lambda pair: -pair[1]) if time_s}
    return StepParts(compute_s, shown, found_s.get(BUBBLE, 0.0), optimizer_s, times.data_s)


def _exposed_in_passes(program: Program, times: OpTimes, paired_axis: str) -> dict[tuple[str, str], float]:
    """Return (kind, axis) → exposed seconds of communication within passes and the optimizer step, as means over the
    pipeline ranks. `paired_axis`: axis of what the passes of a pair hide."""
    total_s: defaultdict[tuple[str, str], float] = defaultdict(float)
    if not times.exposed_s and not times.slices:
        return total_s
    for rank, lanes in enumerate(program.ranks):
        for timed, count in Counter(program.timed_as(lanes.get("compute", ()))).items():
            for axis, time_s in times.exposed_in(Action(*timed)).items():
                total_s[timed[0], axis] += count * time_s / program.num_ranks
        for _, forward, backward in pairs_of_rank(program, rank):
            hidden = 1 - times.pair_share(forward, backward)
            for action in (forward, backward):
                total_s[action.kind, paired_axis] -= hidden * times.duration_s(action) / program.num_ranks
    return total_s
