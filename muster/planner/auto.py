"""The plan of a run: `parallel: auto` searches for it on the machine that the run is on."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from shutil import disk_usage

from muster.config.bucket_steps import require_bucket_steps
from muster.config.load_config import ResolvedConfig, derived_value_lines
from muster.config.local_machine import (
    PROFILE_FILE,
    detect_machine,
    nvidia_gpu_names,
    profiled_machine,
    system_memory_bytes,
    usable_cores,
    with_num_ranks,
)
from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import is_zeroth_order, whole_matrix_shapes
from muster.config.optimizers import OPTIMIZERS
from muster.config.run_config import RunConfig
from muster.config.zeroth_order import require_zeroth_order_runs
from muster.layout.tensor_layout import tp_partial_grad_copies
from muster.planner.bucket_choice import choose_buckets
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.explain import explain_no_plan
from muster.planner.memory.trim_offload import trim_offload
from muster.planner.request import PlanRequest, require_memory_of_devices, with_tier_sizes
from muster.planner.search import search
from muster.planner.search_budget import SearchBudget
from muster.planner.search_result import SearchResult
from muster.planner.simple_first import find_simplest
from muster.planner.simplicity import PREDICTION_ERROR
from muster.planner.slow_ranks import require_straggler_action_runs
from muster.planner.tiers import choose_tier, explain_no_tier, tier_words
from muster.plugins.registry import get_component
from muster.spec.cluster import ClusterSpec
from muster.spec.cuda_graphs import require_static_shapes
from muster.spec.device_update_rules import updates_fetched_state
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.legality import required_world_size
from muster.spec.machine_rates import PROFILED_PRECISIONS
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.plugin_model import plugin_model
from muster.spec.schedules import DEFAULT_SCHEDULE
from muster.spec.skip_rules import NO_SKIPS
from muster.spec.supported import require_supported_model
from muster.spec.tp_overlap_rules import has_domino
from muster.spec.units import alternatives, pluralize

SEARCH_EFFORT = 4.0
"""Effort of the search, for models and numbers of processes far beyond one machine; small ones take tenths of a
second."""

FORECAST_ERROR = 0.05
"""Share of a memory limit that `auto` leaves free, since what a rank holds may differ so much from its forecast."""

SIMPLE_EFFORT = 0.4
"""Work for the simplest plan about as good as the best, as a part of that of the search."""


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """The plan of a run, and lines that say how it came about."""

    plan: Plan
    lines: tuple[str, ...] = ()
    """Empty where the plan was given. They have no step time: a run predicts it anew from its own timed passes."""
    step_line: str | None = None
    """Step time by the times that the plan was chosen by, for those who start no run."""
    num_nodes: int = 1


@dataclass(frozen=True, slots=True)
class _Machine:
    """The cluster that is planned for, and its source in words."""

    cluster: ClusterSpec
    source: str


def resolve_plan(resolved: ResolvedConfig, world_size: int | None) -> Plan:
    """Return the plan for `world_size` processes; see `choose_plan`."""
    return choose_plan(resolved, world_size).plan


def choose_plan(resolved: ResolvedConfig, world_size: int | None, nodes: int = 1) -> ChosenPlan:
    """Return the plan for `world_size` processes on so many nodes like this one.

    `world_size` None means as many as the plan needs. Where `auto` chooses, that is one process for each GPU; on CPUs
    that were measured (`muster profile`) as many as are fastest, up to their cores; one on other machines. Fields of
    the plan that the configuration specifies beside the degrees stay as they are. Deterministic.

    Raises InfeasibleError, with the limit that binds or the nearest plans that can run, if there is no plan.
    """
    try:
        return _choose(resolved, world_size, nodes)
    except InfeasibleError as error:
        batch = [line for line in derived_value_lines(resolved) if line.startswith("train.global_batch_size")]
        raise InfeasibleError("; ".join([str(error), *batch])) from None


def _choose(resolved: ResolvedConfig, world_size: int | None, nodes: int) -> ChosenPlan:
    config = resolved.config
    _require_packing_runs(config)
    if not resolved.plan_is_auto:
        _require_parts_run(config)
        num_processes = world_size or required_world_size(config.parallel)
        require_runnable(config.parallel, config.model, config.workload, num_processes)
        return ChosenPlan(_eager_if_unpacked(config.parallel, config), num_nodes=nodes)
    require_supported_model(config.model)
    _require_parts_run(config)
    evaluated, machine = _search_process_counts(resolved, world_size, nodes)
    step_ms = evaluated.prediction.step_time_s * 1e3
    step_line = (
        f"      {step_ms:,.4g} ms a step by these times; a run measures its passes again before it starts, and prints"
        " the resulting step time"
    )
    plan = _eager_if_unpacked(_with_requested_schedule(evaluated.plan, config.parallel), config)
    return ChosenPlan(plan, tuple(_lines(evaluated, machine)), step_line, nodes)


def _eager_if_unpacked(plan: Plan, config: RunConfig) -> Plan:
    """Return a plan that compiles nothing on GPUs where samples differ in length; on CPUs that is so by default."""
    is_open = config.data.packing == "none" and plan.compile is None and bool(nvidia_gpu_names())
    return plan.model_copy(update={"compile": False}) if is_open else plan


def _require_packing_runs(config: RunConfig) -> None:
    """Raise InfeasibleError where the packing of documents doesn't go with compile, CUDA graphs or a plugin's
    model."""
    if config.data.packing == "none" and config.parallel.compile:
        raise InfeasibleError(
            "data.packing none can't be run with compile, which would follow the lengths of samples from batch to"
            " batch: leave compile out, or take data.packing next_fit, whose samples have one length"
        )
    if config.parallel.cuda_graphs:
        require_static_shapes(config.data.packing)
    plugin = plugin_model(config.model)
    if plugin is not None and config.data.packing != "concatenate" and not plugin.document_mask:
        raise InfeasibleError(
            f"data.packing {config.data.packing} needs layers that keep documents apart, and model {plugin.name}"
            " doesn't declare that (documents=True): take data.packing concatenate"
        )


def _search_process_counts(
    resolved: ResolvedConfig, world_size: int | None, nodes: int
) -> tuple[EvaluatedPlan, _Machine]:
    """Return the simplest plan about as good as the best over the numbers of processes, and the machine that it is for.

    A plan that leaves head-room goes before a faster one.
    """
    config = resolved.config
    best: tuple[EvaluatedPlan, _Machine] | None = None
    best_rank = True, inf
    refusal: InfeasibleError | None = None
    measured, reason = _measured_cluster(config, nodes)
    for count in _process_counts(world_size, measured is not None):
        machine = _machine(count, nodes, measured, reason)
        cluster = machine_within_limit(machine.cluster, config.train.memory_limit_bytes)
        request = request_of_config(resolved, cluster)
        found, budget = _search(request, config)
        if not found.best:
            refusal = refusal or _explain_refusal(request, found, config)
        elif (rank := (not found.leaves_head_room, found.best[0].prediction.step_time_s)) < best_rank:
            best = _simplest(found, budget), machine
            best_rank = rank
        if best is not None and measured is None:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def words_under_limit(config: RunConfig, words: Collection[str]) -> tuple[str, ...]:
    """Return those of the words of plans with state off the devices that a run may take where all else exceeds its
    memory limit; none without a limit."""
    if config.train.memory_limit_bytes is None:
        return ()
    try:
        _require_host_updates(config)
    except InfeasibleError:
        return ()
    return tuple(word for word in words if "oparam" not in word or not config.optim.freeze)


def machine_within_limit(cluster: ClusterSpec, limit_bytes: int | None) -> ClusterSpec:
    """Return the cluster of this machine with the host memory, and the disk space in the working directory, that tiers
    may take beside devices with a memory limit; as it is without one."""
    if limit_bytes is None:
        return cluster
    require_memory_of_devices(cluster, limit_bytes)
    group = cluster.groups[0]
    of_devices = limit_bytes * group.devices_per_node if group.device.shared_cores else 0
    host_bytes = group.host_memory_bytes or max(1, system_memory_bytes() - of_devices)
    return with_tier_sizes(cluster, host_bytes, max(1, disk_usage(Path.cwd()).free))


def plan_for_cluster(resolved: ResolvedConfig, cluster: ClusterSpec) -> Plan:
    """Return the plan that a run with `parallel: auto` would get on all devices of a cluster. Raises
    InfeasibleError."""
    request = request_of_config(resolved, cluster)
    found, budget = _search(request, resolved.config)
    if not found.best:
        raise _explain_refusal(request, found, resolved.config)
    return _with_requested_schedule(_simplest(found, budget).plan, resolved.config.parallel)


def best_plan_for(resolved: ResolvedConfig, num_ranks: int) -> EvaluatedPlan:
    """Return the plan that a run with `parallel: auto` would get for so many ranks on this machine. Raises
    InfeasibleError."""
    require_supported_model(resolved.config.model)
    _require_parts_run(resolved.config)
    evaluated, _ = _search_process_counts(resolved, num_ranks, nodes=1)
    return replace(evaluated, plan=_eager_if_unpacked(evaluated.plan, resolved.config))


def _search(request: PlanRequest, config: RunConfig) -> tuple[SearchResult, SearchBudget]:
    """Search for the best plans; under a memory limit that none keeps, with state off the devices."""
    budget = SearchBudget.start(SEARCH_EFFORT)
    found = search(request, 1, budget)
    if not found.best and (words := words_under_limit(config, tier_words(request)[1:])):
        choice = choose_tier(request, budget.renew(), words)
        found = search(choice.request, 1, budget.renew()) if choice.fits else found
    return choose_buckets(trim_offload(found, budget), budget), budget


def _simplest(found: SearchResult, budget: SearchBudget) -> EvaluatedPlan:
    """Return the simplest plan about as good as the best."""
    return find_simplest(found.best[0], found.best, found.evaluator, budget.renew(SIMPLE_EFFORT)).evaluated


def _require_parts_run(config: RunConfig) -> None:
    """Raise InfeasibleError where a registered loss or training step can't run under the plan, ConfigError where ranks
    can't share the registered optimizer."""
    plan, train, optim = config.parallel, config.train, config.optim
    if optim.name not in OPTIMIZERS:
        get_component("optimizer", optim.name).state_names(optim.options)
    if train.loss is not None and (plan.vocab_parallel or any(plan.mesh(rank).tp > 1 for rank in range(plan.pp))):
        raise InfeasibleError(
            f"train.loss {train.loss} reads the logits of all words, which tp and vocab_parallel cut: take tp 1 and"
            " leave vocab_parallel out"
        )
    for key, name in (("loss", train.loss), ("training_step", train.training_step)):
        if name is not None and plan.cuda_graphs:
            raise InfeasibleError(
                f"train.{key} {name} of a plugin may read values, which a captured pass can't: leave cuda_graphs out"
            )
    tiers = {strategy.offload_optimizer for strategy in plan.strategies} - {"none"}
    require_zeroth_order_runs(config)
    require_bucket_steps(plan, optim, train)
    if plan.schedule_entry.has_paths and is_zeroth_order(optim):
        raise InfeasibleError(
            f"optim.name {optim.name} has no gradients that stages could average over the micro-batches that they see:"
            f" leave schedule {plan.schedule} out"
        )
    if tiers:
        _require_host_updates(config)
    if train.delayed_update:
        require_delayed_updates(plan)
    if train.update_in_backward:
        require_updates_in_backward(plan, config.model, optim, bool(train.spike_sigmas), config.outer is not None)
    if train.rebalance_experts_every:
        _require_moving_experts(config)
    require_straggler_action_runs(train, plan)
    if optim.clip_by_previous_norm and (train.training_step is not None or plan.post_validation):
        raise InfeasibleError(
            "optim.clip_by_previous_norm clips a step by a norm that is known before, where a plugin's training step"
            " clips by its own and post_validation takes steps back that should have been clipped: leave it, or"
            " train.training_step and pv, out"
        )
    if config.optim.delay_compensation != "none" and not plan.schedule_entry.is_asynchronous:
        raise InfeasibleError(
            f"optim.delay_compensation {config.optim.delay_compensation} is for gradients of older weights, which"
            f" schedule {plan.schedule} hasn't: leave it out, or take schedule pipedream or pipedream-2bw"
        )
    if plan.schedule_entry.is_asynchronous:
        _require_flushes_alone(config)
        if config.optim.delay_compensation == "predict" and not plan.schedule_entry.stashes_weights:
            raise InfeasibleError(
                f"optim.delay_compensation predict makes weights for each version, which schedule {plan.schedule}"
                " doesn't keep: set it to spike (sgd with momentum) or none, or take schedule pipedream"
            )
        if plan.schedule_entry.steps_alone and (config.optim.clip_norm or train.spike_sigmas):
            key = "optim.clip_norm" if config.optim.clip_norm else "train.spike_sigmas"
            raise InfeasibleError(
                f"{key} needs the gradient norm of all ranks, for which they don't wait under schedule {plan.schedule}:"
                f" set {key} to 0, or take schedule pipedream-2bw"
            )
    if train.gradient_check_every and (reason := _why_no_gradient_check(config, plan)) is not None:
        raise InfeasibleError(f"train.gradient_check_every doesn't go with {format_plan_name(plan)}: {reason}")
    if train.training_step is not None and plan.post_validation:
        raise InfeasibleError(
            f"train.training_step {train.training_step} sees the gradient norm of all ranks, which post_validation"
            " doesn't wait for: leave pv out"
        )


def _require_flushes_alone(config: RunConfig) -> None:
    """Raise InfeasibleError for what a run does after every step, where an asynchronous pipeline isn't flushed."""
    train = config.train
    wanted = {
        "train.elastic": train.elastic,
        "train.straggler_check_every": train.straggler_check_every > 0,
        "train.gradient_check_every": train.gradient_check_every > 0,
        "train.training_step": train.training_step is not None,
        "optim.clip_by_previous_norm": config.optim.clip_by_previous_norm,
        "outer": config.outer is not None,
        "optim.name mezo": is_zeroth_order(config.optim),
    }
    for key, is_set in wanted.items():
        if is_set:
            raise InfeasibleError(
                f"{key} acts on the state after each step, which an asynchronous schedule has at a flush alone: leave"
                " it out, or take schedule 1f1b"
            )


def _why_no_gradient_check(config: RunConfig, plan: Plan) -> str | None:
    """Return why the gradients of a micro-batch can't be compared among ranks before they are reduced, or None."""
    meshes = [plan.mesh(pp_rank) for pp_rank in range(plan.pp)]
    beside = (
        (plan.islands > 1, "islN, whose parameters differ"),
        (any(mesh.ep > 1 for mesh in meshes), "epN, by which experts see the tokens of other ranks"),
        (plan.vocab_parallel, "vocab"),
        (plan.sequence_slices > 1, "sliceN"),
        (plan.dynamic_context_parallel, "cpdyn"),
        (plan.offloads_params, "oparam"),
        (plan.schedule_entry.has_paths, f"schedule {plan.schedule}, whose micro-batches take different paths"),
        (plan.post_validation, "pv"),
        (config.train.update_in_backward, "train.update_in_backward, which would update by those gradients"),
        (config.model.mtp_layers > 0, "model.mtp_layers"),
        (is_zeroth_order(config.optim), f"optim.name {config.optim.name}, which has no gradients"),
    )
    if (word := next((word for is_there, word in beside if is_there), None)) is not None:
        return f"expected a run without {word}"
    if any(mesh.dp_replicate * mesh.dp_shard == 1 for mesh in meshes):
        return "there has to be another rank with the same layers: expected dp2 or more"
    if any(mesh.dp_shard > 1 for mesh in meshes) and plan.default_strategy.zero != "z1":
        return "z2 and z3 hold no whole gradients: expected z1, or replicas (dp2x1)"
    return None


def require_delayed_updates(plan: Plan) -> None:
    """Raise InfeasibleError where updates can't be delayed."""
    tiers = {strategy.offload_optimizer for strategy in plan.strategies} - {"none"}
    if not tiers:
        raise InfeasibleError(
            "train.delayed_update lets the host update parameters beside the passes of the next step, but the plan has"
            " all optimizer state on the device: add oopth or ooptd to the plan, or leave train.delayed_update out"
        )
    if any(one.offload_optimizer == "none" or one.offload_optimizer_ratio < 1 for one in plan.strategies):
        raise InfeasibleError(
            "train.delayed_update delays all updates, but the plan leaves optimizer state of some layers on the device:"
            " take oopth or ooptd for all, or leave train.delayed_update out"
        )
    if updates_fetched_state(plan):
        raise InfeasibleError(
            "train.delayed_update leaves all updates to the host, beside passes that have the device: leave"
            " train.delayed_update or devupdateR out"
        )
    if plan.offloads_params:
        raise InfeasibleError(
            "train.delayed_update copies gradients and parameters after the passes, but under oparam they are copied"
            " within the passes: leave train.delayed_update or oparam out"
        )
    if plan.dynamic_context_parallel:
        raise InfeasibleError("train.delayed_update with cpdyn isn't tested yet: leave one of them out")
    if "disk" in tiers and any(strategy.offload == "activations_on_disk" for strategy in plan.strategies):
        raise InfeasibleError(
            "train.delayed_update reads and writes optimizer state on disk beside the passes, whose activations have"
            " the disk then: leave train.delayed_update or oactd out, or keep the state in host memory (oopth)"
        )


def require_updates_in_backward(
    plan: Plan, model: ModelSpec, optim: OptimConfig | None, skips_spikes: bool = False, has_outer_steps: bool = False
) -> None:
    """Raise ConfigError for clipping by a norm that isn't known within a backward, InfeasibleError where the host can't
    update layers within it; without an `optim` a run would clip by its step's own norm."""
    key = "train.update_in_backward"
    if optim is None or (optim.clip_norm and not optim.clip_by_previous_norm):
        raise ConfigError(
            f"{key} updates layers before the step's gradient norm is known: clip by that of the step before"
            " (optim.clip_by_previous_norm: true), or not at all (optim.clip_norm: 0)"
        )
    num_layers = model.num_layers
    if not any(plan.host_updated_layers(stage, num_layers) for stage in range(plan.num_stages)):
        raise InfeasibleError(
            f"{key} lets the host update layers within the last backward, but the plan has all optimizer state on the"
            f" device: add oopth or ooptd to the plan, or leave {key} out"
        )
    has_copies = any(
        tp_partial_grad_copies(model, [name for name, _ in parameter_shapes(model)], plan.mesh(stage), strategy.sp)
        for stage in range(plan.num_stages)
        for strategy in plan.strategies
    )
    beside = (
        (
            has_copies,
            "weights that tensor-parallel ranks hold copies of, whose gradients are added up after the passes",
        ),
        (plan.precision == "fp16", "fp16, whose steps may overflow and be skipped"),
        (skips_spikes, "train.spike_sigmas, which skips steps by their gradient norm"),
        (updates_fetched_state(plan), "devupdateR, whose updates by the device have room for state after the passes"),
        (has_domino(plan), "domino, whose slices complete a layer's gradients one after the other"),
        (plan.sequence_slices > 1, "sequence_slices (not tested yet)"),
        (plan.sequence_tiles > 1, "sequence_tiles (not tested yet)"),
        (plan.cuda_graphs, "cuda_graphs, whose passes tell of no layer"),
        (plan.split_backward, f"schedule {plan.schedule}, which splits backwards (not tested yet)"),
        (plan.vocab_parallel, "vocab (not tested yet)"),
        (plan.dynamic_context_parallel, "cpdyn (not tested yet)"),
        (plan.islands > 1 or has_outer_steps, "islands (not tested yet)"),
        (model.moe is not None, "experts (not tested yet)"),
        (model.mtp_layers > 0, "multi-token prediction (not tested yet)"),
    )
    for is_there, what in beside:
        if is_there:
            raise InfeasibleError(f"{key} can't be run with {what}: leave one of them out")


def _require_moving_experts(config: RunConfig) -> None:
    """Raise ConfigError for a model without experts, InfeasibleError where experts can't move between steps."""
    plan, key = config.parallel, "train.rebalance_experts_every"
    if config.model.moe is None:
        raise ConfigError(f"{key} moves experts between ranks, but the model has none: leave it out")
    beside = (
        (plan.islands > 1, "islands, each of which has a load of its own", "islN"),
        (plan.offloads_params, "parameters off the device", "oparam"),
        (config.train.elastic, "train.elastic, which redoes a step from the state before it", "it"),
        (is_zeroth_order(config.optim), f"optim.name {config.optim.name}, which counts no choices of experts", "it"),
        (plan.dynamic_context_parallel, "groups of ranks of their own in each step", "cpdyn"),
        (config.train.training_step is not None, "a plugin's training step", "train.training_step"),
        (config.train.delayed_update, "train.delayed_update, whose gradients wait for experts in their places", "it"),
    )
    for is_there, what, word in beside:
        if is_there:
            raise InfeasibleError(f"{key} can't be run with {what}: leave {word} or {key} out")


def _require_host_updates(config: RunConfig) -> None:
    """Raise InfeasibleError where the host can't make a run's updates."""
    optim, shapes = config.optim, dict(parameter_shapes(config.model))
    if optim.name not in OPTIMIZERS or whole_matrix_shapes(optim, shapes):
        elementwise = [name for name in OPTIMIZERS if not whole_matrix_shapes(OptimConfig(name=name, lr=1.0), shapes)]
        raise InfeasibleError(
            f"optim.name {optim.name} can't step in host memory, where each rank updates its own elements: take"
            f" {alternatives(elementwise)}, or leave oopt out of the plan"
        )
    if config.parallel.offloads_params and config.model.adapter is not None:
        raise InfeasibleError(
            f"adapter {config.model.adapter.kind} leaves the model's own weights without an update, which the host"
            " makes where oparam has them: leave oparam out of the plan"
        )
    if config.parallel.offloads_params and optim.freeze:
        raise InfeasibleError(
            f"optim.freeze {', '.join(optim.freeze)} leaves parameters without an update, which the host makes where"
            " oparam has them: leave oparam out of the plan"
        )
    if config.train.training_step is not None:
        raise InfeasibleError(
            f"train.training_step {config.train.training_step} steps the optimizer on the device: leave oopt out of the"
            " plan"
        )


def request_of_config(resolved: ResolvedConfig, cluster: ClusterSpec) -> PlanRequest:
    """Return the request for `auto`: all fields of the plan that the configuration specifies are fixed."""
    config, plan = resolved.config, resolved.config.parallel
    if is_zeroth_order(config.optim):
        raise InfeasibleError(
            f"parallel: auto searches for the best plan with a backward, which optim.name {config.optim.name} doesn't"
            " have: give a plan, such as dp1 or dp1-oopt-oparam"
        )
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
        fixed["schedule"] = DEFAULT_SCHEDULE  # its order is found for the plan that is chosen
    if plan.overrides:  # which say all of a strategy
        fixed |= {name: getattr(plan.default_strategy, name) for name in ("zero", "sp", "recompute", "offload")}
    limit_bytes = config.train.memory_limit_bytes
    return PlanRequest(
        config.model,
        cluster,
        config.workload,
        "time",
        plan.precision,
        fixed,
        memory_limit_bytes=None if limit_bytes is None else int(limit_bytes * (1 - FORECAST_ERROR)),
        runnable=True,
        template=plan,
        optim=config.optim if config.optim.name in OPTIMIZERS else None,
    )


def _with_requested_schedule(plan: Plan, requested: Plan) -> Plan:
    """Return the plan with the requested searched schedule, if it has a pipeline."""
    searched = requested.schedule_entry.searched and plan.pp > 1
    return (
        plan.model_copy(update={name: getattr(requested, name) for name in ("schedule", "pinned_schedule", *NO_SKIPS)})
        if searched
        else plan
    )


def _process_counts(world_size: int | None, measured: bool) -> Iterator[int]:
    """Yield the numbers of processes to try."""
    if world_size is not None:
        yield world_size
    elif gpus := len(nvidia_gpu_names()):
        yield from range(gpus, 0, -1)
    else:
        yield from range(1, usable_cores() + 1 if measured else 2)


_NO_PROFILE = "'muster profile' measures this machine"


def _measured_cluster(config: RunConfig, nodes: int) -> tuple[ClusterSpec | None, str]:
    """Return the cluster of the profile in the working directory, or None and the reason why its times can't be
    used."""
    precision = config.parallel.precision
    if nodes > 1 or config.model.architecture is not None:
        return None, f"profiles aren't used for {'several nodes' if nodes > 1 else 'architectures of plugins'}"
    if not Path(PROFILE_FILE).exists():
        return None, _NO_PROFILE
    try:
        cluster = profiled_machine()
    except ConfigError as error:
        return None, f"the profile can't be read: {error}; 'muster profile' measures this machine again"
    known = [] if cluster.device.rates is None else list(cluster.device.rates.kernels)
    if precision in known:
        return cluster, ""
    if not known:
        return None, f"{PROFILE_FILE} has no measured times; {_NO_PROFILE}"
    full = ", which 'muster profile' without --quick measures, too" if precision in PROFILED_PRECISIONS else ""
    return None, f"{PROFILE_FILE} was measured in {', '.join(known)}, not in {precision}{full}"


def _machine(count: int, nodes: int, measured: ClusterSpec | None, reason: str) -> _Machine:
    if measured is not None:
        return _Machine(with_num_ranks(measured, count), f"this machine, as measured in {PROFILE_FILE}")
    cluster = detect_machine(count, nodes)
    cores = f"{usable_cores()} cores" if cluster.device.shared_cores else cluster.device.name
    where = f" of {pluralize(nodes, 'node')}" if nodes > 1 else ""
    return _Machine(cluster, f"{cores}{where}, times of the catalogue ({reason})")


def _explain_refusal(request: PlanRequest, result: SearchResult, config: RunConfig) -> InfeasibleError:
    """Return the error that says which limit binds."""
    if words_under_limit(config, tier_words(request)[1:]):
        return explain_no_tier(request)
    plan = _data_parallel(request)
    if result.nearest_miss is None and not result.counts["too_large"]:
        try:
            require_runnable(plan, request.model, request.workload, request.cluster.num_devices)
        except InfeasibleError as error:
            return error
    return InfeasibleError(explain_no_plan(result, SearchBudget.start()))


def _data_parallel(request: PlanRequest) -> Plan:
    """Return a plan of data parallelism alone, with all fixed fields."""
    base, strategy = request.base, request.base.default_strategy
    sp = strategy.sp and base.tp > 1
    return base.model_copy(
        update={
            "dp_shard": request.cluster.num_devices,
            "default_strategy": strategy.model_copy(update={"sp": sp}),
        }
    )


def _lines(evaluated: EvaluatedPlan, machine: _Machine) -> Iterator[str]:
    peak = evaluated.peak_bytes
    size = f"{peak / 2**30:,.3g} GiB" if peak >= 2**30 else f"{peak / 2**20:,.3g} MiB"
    plan = evaluated.plan
    yield (
        f"plan: {format_plan_name(plan)} for {pluralize(plan.world_size, 'process')}, the simplest within"
        f" {PREDICTION_ERROR:.0%} of the fastest that can be run, {size} on the fullest rank"
    )
    yield f"      chosen for {machine.source}"
