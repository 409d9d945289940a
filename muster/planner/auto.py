"""`parallel: auto`: the plan of a run, searched for on the machine that it is on."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

from muster.config.load_config import ResolvedConfig, derived_value_lines
from muster.config.local_machine import (
    PROFILE_FILE,
    detect_machine,
    nvidia_gpu_names,
    profiled_machine,
    usable_cores,
    with_num_ranks,
)
from muster.config.optimizers import OPTIMIZERS
from muster.config.run_config import RunConfig
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.explain import explain_no_plan
from muster.planner.memory.trim_offload import trim_offload
from muster.planner.request import PlanRequest
from muster.planner.search import search
from muster.planner.search_result import SearchResult
from muster.plugins.registry import get_component
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.legality import required_world_size
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan import LayerStrategy, Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.plugin_model import plugin_model
from muster.spec.supported import require_supported_model
from muster.spec.units import pluralize

SEARCH_LIMIT_S = 30.0
"""At most, for models and numbers of processes far beyond one machine: what is small takes tenths of a second."""


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """The plan of a run, and what people are told of how it came about."""

    plan: Plan
    lines: tuple[str, ...] = ()
    """Nothing where the plan was given. No step time: a run says that of the passes that it times before it begins."""
    step_line: str | None = None
    """What a step takes by the times that the plan was chosen by, for those who start no run."""


@dataclass(frozen=True, slots=True)
class _Machine:
    """What is planned for, and in words where that comes from."""

    cluster: ClusterSpec
    source: str


def resolve_plan(resolved: ResolvedConfig, world_size: int | None) -> Plan:
    """The plan for `world_size` processes; see `choose_plan`."""
    return choose_plan(resolved, world_size).plan


def choose_plan(resolved: ResolvedConfig, world_size: int | None, nodes: int = 1) -> ChosenPlan:
    """The plan for `world_size` processes on so many nodes like this one.

    None stands for as many as the plan asks for; where `auto` chooses, that is one for each GPU; on CPUs that were
    measured (`muster profile`) as many, up to their cores, as are fastest; and one on others. What the configuration
    says of the plan beside its degrees stays as it is. Deterministic.
    Raises InfeasibleError, with what binds or the nearest plans that can run, when there is none.
    """
    try:
        return _choose(resolved, world_size, nodes)
    except InfeasibleError as error:
        batch = [line for line in derived_value_lines(resolved) if line.startswith("train.global_batch_size")]
        raise InfeasibleError("; ".join([str(error), *batch])) from None


def _choose(resolved: ResolvedConfig, world_size: int | None, nodes: int) -> ChosenPlan:
    config = resolved.config
    if config.data.packing != "concatenate" and config.parallel.compile:
        raise InfeasibleError(
            f"data.packing {config.data.packing} can't be run with compile, which would follow the lengths of documents"
            " from batch to batch: leave compile out, or take data.packing concatenate"
        )
    own = plugin_model(config.model)
    if own is not None and config.data.packing != "concatenate" and not own.document_mask:
        raise InfeasibleError(
            f"data.packing {config.data.packing} wants layers that keep documents apart, and model {own.name} doesn't"
            " say that its do (documents=True): take data.packing concatenate"
        )
    if not resolved.plan_is_auto:
        _require_parts_run(config)
        require_runnable(
            config.parallel, config.model, config.workload, world_size or required_world_size(config.parallel)
        )
        return ChosenPlan(config.parallel)
    require_supported_model(config.model)
    _require_parts_run(config)
    best: tuple[EvaluatedPlan, _Machine] | None = None
    standing = True, inf  # what leaves head-room first, then what is faster
    refusal: InfeasibleError | None = None
    is_known = nodes == 1 and config.model.architecture is None
    measured = _measured_cluster(config.parallel.precision) if is_known else None
    for count in _process_counts(world_size, measured is not None):
        machine = _machine(count, nodes, measured)
        request = request_of_config(resolved, machine.cluster)
        found = trim_offload(search(request, 1, SEARCH_LIMIT_S))
        if not found.best:
            refusal = refusal or _explain_refusal(request, found)
        elif (own := (not found.leaves_head_room, found.best[0].prediction.step_time_s)) < standing:
            best, standing = (found.best[0], machine), own
        if best is not None and measured is None:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    verdict, machine = best
    step_ms = verdict.prediction.step_time_s * 1e3
    step_line = (
        f"      {step_ms:,.4g} ms a step by these times; a run times its passes anew before it begins, and says what"
        " they come to"
    )
    return ChosenPlan(
        _with_requested_schedule(verdict.plan, config.parallel), tuple(_lines(verdict, machine)), step_line
    )


def _require_parts_run(config: RunConfig) -> None:
    """Raises InfeasibleError where the plan doesn't go with a loss or a step that a plugin registers, ConfigError where
    ranks can't share its optimizer."""
    plan, train, optim = config.parallel, config.train, config.optim
    if optim.name not in OPTIMIZERS:
        get_component("optimizer", optim.name).state_names(optim.options)
    if train.loss is not None and (plan.vocab_parallel or any(plan.mesh(rank).tp > 1 for rank in range(plan.pp))):
        raise InfeasibleError(
            f"train.loss {train.loss} reads the logits of all words, which tp and vocab_parallel cut: take tp 1 and"
            " leave vocab_parallel out"
        )
    if train.training_step is not None and plan.post_validation:
        raise InfeasibleError(
            f"train.training_step {train.training_step} sees the gradient norm of all ranks, which post_validation"
            " doesn't wait for: leave pv out"
        )


def request_of_config(resolved: ResolvedConfig, cluster: ClusterSpec) -> PlanRequest:
    """What is searched for where `auto` chooses: all that the configuration says of the plan stays."""
    config, plan = resolved.config, resolved.config.parallel
    fixed = {
        field: getattr(plan, field)
        for field in ("micro_batch_size", "schedule", "axis_order")
        if f"parallel.{field}" in resolved.origins
    }
    said = [name for name in LayerStrategy.model_fields if f"parallel.default_strategy.{name}" in resolved.origins]
    fixed |= {name: getattr(plan.default_strategy, name) for name in said}
    if config.train.loss is not None:
        fixed["tp"] = 1  # its logits must be whole
    if plan.schedule_entry.searched:
        fixed["schedule"] = "1f1b"  # its order is found for the plan that is chosen
    if plan.overrides:  # which say all of a strategy
        fixed |= {name: getattr(plan.default_strategy, name) for name in ("zero", "sp", "recompute", "offload")}
    return PlanRequest(
        config.model, cluster, config.workload, "time", plan.precision, fixed, runnable=True, template=plan
    )


def _with_requested_schedule(plan: Plan, requested: Plan) -> Plan:
    """With the searched schedule that was asked for, where there is a pipeline."""
    searched = requested.schedule_entry.searched and plan.pp > 1
    return (
        plan.model_copy(update={"schedule": requested.schedule, "pinned_schedule": requested.pinned_schedule})
        if searched
        else plan
    )


def _process_counts(world_size: int | None, measured: bool) -> Iterator[int]:
    """Numbers of processes that may be."""
    if world_size is not None:
        yield world_size
    elif gpus := len(nvidia_gpu_names()):
        yield from range(gpus, 0, -1)
    else:
        yield from range(1, usable_cores() + 1 if measured else 2)


def _measured_cluster(precision: str) -> ClusterSpec | None:
    """The profile in the working directory, where it has this precision."""
    if not Path(PROFILE_FILE).exists():
        return None
    try:
        cluster = profiled_machine()
    except ConfigError:
        return None
    rates = cluster.device.rates
    return cluster if rates is not None and precision in rates.kernels else None


def _machine(count: int, nodes: int, measured: ClusterSpec | None) -> _Machine:
    if measured is not None:
        return _Machine(with_num_ranks(measured, count), f"this machine, as measured in {PROFILE_FILE}")
    cluster = detect_machine(count, nodes)
    cores = f"{usable_cores()} cores" if cluster.device.shared_cores else cluster.device.name
    where = f" of {pluralize(nodes, 'node')}" if nodes > 1 else ""
    return _Machine(cluster, f"{cores}{where}, times of the catalogue ('muster profile' measures this machine)")


def _explain_refusal(request: PlanRequest, result: SearchResult) -> InfeasibleError:
    """What binds."""
    plan = _data_parallel(request)
    if result.nearest_miss is None and not result.counts["too_large"]:
        try:
            require_runnable(plan, request.model, request.workload, request.cluster.num_devices)
        except InfeasibleError as error:
            return error
    return InfeasibleError(explain_no_plan(result))


def _data_parallel(request: PlanRequest) -> Plan:
    """Data parallelism alone, with all that is asked for."""
    base, strategy = request.base, request.base.default_strategy
    sp = strategy.sp and base.tp > 1
    return base.model_copy(
        update={
            "dp_shard": request.cluster.num_devices,
            "default_strategy": strategy.model_copy(update={"sp": sp}),
        }
    )


def _lines(verdict: EvaluatedPlan, machine: _Machine) -> Iterator[str]:
    peak = verdict.peak_bytes
    size = f"{peak / 2**30:,.3g} GiB" if peak >= 2**30 else f"{peak / 2**20:,.3g} MiB"
    yield (
        f"plan: {format_plan_name(verdict.plan)} for {pluralize(verdict.plan.world_size, 'process')}, the fastest that"
        f" can be run, {size} on the fullest rank"
    )
    yield f"      chosen for {machine.source}"
