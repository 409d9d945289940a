"""`parallel: auto`: the plan of a run, searched for on the machine that it is on."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

from muster.planner.explain import no_plan
from muster.planner.found import Found
from muster.planner.judge import Judge
from muster.planner.lean import leanest
from muster.planner.request import Request
from muster.planner.search import search
from muster.planner.verdict import Verdict
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.legal import asked_world_size
from muster.spec.load import Resolved, derived_lines
from muster.spec.machine import PROFILE, found_machine, gpu_names, measured_machine, usable_cores, with_processes
from muster.spec.nearest import require_runnable
from muster.spec.optim import OPTIMIZERS
from muster.spec.own_model import own_model
from muster.spec.parts import part_of
from muster.spec.plan import Plan, Strategy
from muster.spec.plan_name import format_plan_name
from muster.spec.run import RunConfig
from muster.spec.runnable import require_runnable_model
from muster.spec.sizes import counted

LIMIT_S = 30.0
"""At most, for models and numbers of processes far beyond one machine: what is small takes tenths of a second."""


@dataclass(frozen=True, slots=True)
class Chosen:
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


def resolve_plan(resolved: Resolved, world_size: int | None) -> Plan:
    """The plan for `world_size` processes; see `choose_plan`."""
    return choose_plan(resolved, world_size).plan


def choose_plan(resolved: Resolved, world_size: int | None, nodes: int = 1) -> Chosen:
    """The plan for `world_size` processes on so many nodes like this one.

    None stands for as many as the plan asks for; where `auto` chooses, that is one for each GPU; on CPUs that were
    measured (`muster profile`) as many, up to their cores, as are fastest; and one on others. What the configuration
    says of the plan beside its degrees stays as it is. Deterministic.
    Raises InfeasibleError, with what binds or the nearest plans that can run, when there is none.
    """
    try:
        return _choose(resolved, world_size, nodes)
    except InfeasibleError as error:
        batch = [line for line in derived_lines(resolved) if line.startswith("train.global_batch_size")]
        raise InfeasibleError("; ".join([str(error), *batch])) from None


def _choose(resolved: Resolved, world_size: int | None, nodes: int) -> Chosen:
    config = resolved.config
    if config.data.packing != "concatenate" and config.parallel.compile:
        raise InfeasibleError(
            f"data.packing {config.data.packing} can't be run with compile, which would follow the lengths of documents"
            " from batch to batch: leave compile out, or take data.packing concatenate"
        )
    own = own_model(config.model)
    if own is not None and config.data.packing != "concatenate" and not own.documents:
        raise InfeasibleError(
            f"data.packing {config.data.packing} wants layers that keep documents apart, and model {own.name} doesn't"
            " say that its do (documents=True): take data.packing concatenate"
        )
    if not resolved.auto:
        _require_parts_run(config)
        require_runnable(
            config.parallel, config.model, config.workload, world_size or asked_world_size(config.parallel)
        )
        return Chosen(config.parallel)
    require_runnable_model(config.model)
    _require_parts_run(config)
    best: tuple[Verdict, _Machine] | None = None
    standing = True, inf  # what leaves head-room first, then what is faster
    refusal: InfeasibleError | None = None
    is_known = nodes == 1 and config.model.architecture is None
    measured = _measured(config.parallel.precision) if is_known else None
    for count in _counts(world_size, measured is not None):
        machine = _machine(count, nodes, measured)
        request = request_of(resolved, machine.cluster)
        judge = Judge(request)
        found = leanest(search(request, 1, LIMIT_S, judge), judge)
        if not found.best:
            refusal = refusal or _refusal(request, found, judge)
        elif (own := (not judge.room.head_room, found.best[0].prediction.step_time_s)) < standing:
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
    return Chosen(_as_asked(verdict.plan, config.parallel), tuple(_lines(verdict, machine)), step_line)


def _require_parts_run(config: RunConfig) -> None:
    """Raises InfeasibleError where the plan doesn't go with a loss or a step that a plugin registers, ConfigError where
    ranks can't share its optimizer."""
    plan, train, optim = config.parallel, config.train, config.optim
    if optim.name not in OPTIMIZERS:
        part_of("optimizer", optim.name).state_names(optim.options)
    if train.loss is not None and (plan.spread_vocab or any(plan.mesh(rank).tp > 1 for rank in range(plan.pp))):
        raise InfeasibleError(
            f"train.loss {train.loss} reads the logits of all words, which tp and spread_vocab cut: take tp 1 and leave"
            " spread_vocab out"
        )
    if train.training_step is not None and plan.post_validation:
        raise InfeasibleError(
            f"train.training_step {train.training_step} sees the gradient norm of all ranks, which post_validation"
            " doesn't wait for: leave pv out"
        )


def request_of(resolved: Resolved, cluster: ClusterSpec) -> Request:
    """What is searched for where `auto` chooses: all that the configuration says of the plan stays."""
    config, plan = resolved.config, resolved.config.parallel
    fixed = {
        field: getattr(plan, field)
        for field in ("micro_batch_size", "schedule", "axis_order")
        if f"parallel.{field}" in resolved.origins
    }
    said = [name for name in Strategy.model_fields if f"parallel.default_strategy.{name}" in resolved.origins]
    fixed |= {name: getattr(plan.default_strategy, name) for name in said}
    if config.train.loss is not None:
        fixed["tp"] = 1  # its logits must be whole
    if plan.schedule_entry.searched:
        fixed["schedule"] = "1f1b"  # its order is found for the plan that is chosen
    if plan.overrides:  # which say all of a strategy
        fixed |= {name: getattr(plan.default_strategy, name) for name in ("zero", "sp", "recompute", "offload")}
    return Request(config.model, cluster, config.workload, "time", plan.precision, fixed, runnable=True, template=plan)


def _as_asked(plan: Plan, asked: Plan) -> Plan:
    """With the searched schedule that was asked for, where there is a pipeline."""
    searched = asked.schedule_entry.searched and plan.pp > 1
    return plan.model_copy(update={"schedule": asked.schedule, "order": asked.order}) if searched else plan


def _counts(world_size: int | None, measured: bool) -> Iterator[int]:
    """Numbers of processes that may be."""
    if world_size is not None:
        yield world_size
    elif gpus := len(gpu_names()):
        yield from range(gpus, 0, -1)
    else:
        yield from range(1, usable_cores() + 1 if measured else 2)


def _measured(precision: str) -> ClusterSpec | None:
    """The profile in the working directory, where it has this precision."""
    if not Path(PROFILE).exists():
        return None
    try:
        cluster = measured_machine()
    except ConfigError:
        return None
    rates = cluster.device.rates
    return cluster if rates is not None and precision in rates.kernels else None


def _machine(count: int, nodes: int, measured: ClusterSpec | None) -> _Machine:
    if measured is not None:
        return _Machine(with_processes(measured, count), f"this machine, as measured in {PROFILE}")
    cluster = found_machine(count, nodes)
    cores = f"{usable_cores()} cores" if cluster.device.shared_cores else cluster.device.name
    where = f" of {counted(nodes, 'node')}" if nodes > 1 else ""
    return _Machine(cluster, f"{cores}{where}, times of the catalogue ('muster profile' measures this machine)")


def _refusal(request: Request, found: Found, judge: Judge) -> InfeasibleError:
    """What binds."""
    plan = _data_parallel(request)
    if found.closest is None and not found.seen["too_large"]:
        try:
            require_runnable(plan, request.model, request.workload, request.cluster.num_devices)
        except InfeasibleError as error:
            return error
    return InfeasibleError(no_plan(request, found, judge))


def _data_parallel(request: Request) -> Plan:
    """Data parallelism alone, with all that is asked for."""
    base, strategy = request.base, request.base.default_strategy
    sp = strategy.sp and base.tp > 1
    return base.model_copy(
        update={
            "dp_shard": request.cluster.num_devices,
            "default_strategy": strategy.model_copy(update={"sp": sp}),
        }
    )


def _lines(verdict: Verdict, machine: _Machine) -> Iterator[str]:
    peak = verdict.peak_bytes
    size = f"{peak / 2**30:,.3g} GiB" if peak >= 2**30 else f"{peak / 2**20:,.3g} MiB"
    yield (
        f"plan: {format_plan_name(verdict.plan)} for {counted(verdict.plan.world_size, 'process')}, the fastest that"
        f" can be run, {size} on the fullest rank"
    )
    yield f"      chosen for {machine.source}"
