"""Python forms of `muster plan` and `muster predict`: typed results, and exceptions instead of exit codes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, cast

from muster.api.defaults import SEARCH_EFFORT
from muster.api.former_arguments import takes_former_arguments
from muster.api.inputs import (
    default_seq_len,
    default_workload,
    require_positive_int,
    require_text,
    resolve_cluster,
    resolve_model,
    resolve_plan_input,
    resolve_planned_model,
)
from muster.config.adapter_text import with_adapter
from muster.config.load_config import load_run_config
from muster.config.outer_config import OuterConfig
from muster.config.outer_rules import require_plan_with_outer_steps
from muster.config.routing_load_file import parse_routing_load
from muster.planner.answer import PlanAnswer, answer_request
from muster.planner.auto import plan_for_cluster, require_delayed_updates, require_updates_in_backward
from muster.planner.islands import island_counts, weighs_islands
from muster.planner.node_order import reorder_nodes, with_ring_links
from muster.planner.request import (
    OBJECTIVES,
    Objective,
    PlanRequest,
    build_request,
    with_allowed,
    with_expert_load,
    with_placed_experts,
    with_tier_sizes,
)
from muster.planner.search_budget import SearchBudget
from muster.planner.training_cost import (
    DEVICE_MTBF_HOURS,
    RECOVERIES,
    RESTART_S,
    BatchRamp,
    Recovery,
    TrainingConditions,
)
from muster.simulate.predict import Prediction
from muster.simulate.predict import predict as predict_plan
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import ConfigError
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.frameworks import MUSTER, framework_named
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.suggest import did_you_mean
from muster.spec.units import parse_bytes, parse_count


@dataclass(frozen=True)
class PlanResults:
    """Results of a search for plans."""

    answer: PlanAnswer

    @property
    def plans(self) -> list[Plan]:
        """Plans, the best one first."""
        return [with_placed_experts(self.answer.request, one.plan) for one in self.answer.result.best]

    @property
    def best(self) -> Plan:
        return self.plans[0]

    @property
    def predictions(self) -> list[Prediction]:
        """Predictions of the plans."""
        return [one.prediction for one in self.answer.result.best]

    def to_json(self, explain: bool = False) -> dict[str, Any]:
        """Return the JSON of `muster plan --json`."""
        from muster.report.plan_answer import answer_json  # it draws tables, which predictions need not

        return answer_json(self.answer, explain)


@takes_former_arguments
def plan(
    model: str | Path | ModelSpec,
    cluster: str | Path | ClusterSpec,
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    tokens: float | str | None = None,
    mtbf_hours: float | None = None,
    batch_ramp: str | None = None,
    recovery: str | None = None,
    restart_s: float | None = None,
    spares: int | None = None,
    repair_hours: float | None = None,
    objective: Objective = "time",
    precision: str | None = None,
    require: str = "",
    allow: str = "",
    memory_limit: int | str | None = None,
    anticipate: bool = False,
    framework: str | FrameworkTraits = MUSTER.name,
    compile: bool | None = None,
    expert_load: str | Path | None = None,
    fastest: bool = False,
    host_memory: int | str | None = None,
    disk: int | str | None = None,
    adapter: str | None = None,
    outer: OuterConfig | None = None,
    top: int = 5,
    effort: float = SEARCH_EFFORT,
    time_limit: float | None = None,
) -> PlanResults:
    """Return the best plans for a model on a cluster; the arguments are the flags of `muster plan`, and `outer` its
    flags --outer.*.

    Raises ConfigError; InfeasibleError with the binding constraint if no plan fits.
    """
    require_positive_int("top", top)
    for name, value, unit in (("effort", effort, "a number"), ("time_limit", time_limit, "seconds")):
        if value is not None and (not isinstance(value, int | float) or not value > 0):
            raise ConfigError(f"{name}: expected {unit} above 0, got {value!r}")
    budget = SearchBudget.start(effort, time_limit)
    asked = plan_request(
        model,
        cluster,
        seq_len=seq_len,
        global_batch=global_batch,
        tokens=tokens,
        conditions=training_conditions(
            tokens,
            mtbf_hours=mtbf_hours,
            batch_ramp=batch_ramp,
            recovery=recovery,
            restart_s=restart_s,
            spares=spares,
            repair_hours=repair_hours,
        ),
        objective=objective,
        precision=precision,
        require=require,
        allow=allow,
        memory_limit=memory_limit,
        anticipate=anticipate,
        framework=framework,
        compile=compile,
        expert_load=expert_load,
        fastest=fastest,
        host_memory=host_memory,
        disk=disk,
        adapter=adapter,
        outer=outer,
    )
    return PlanResults(answer_request(asked, top, budget))


def plan_request(
    model: str | Path | ModelSpec,
    cluster: str | Path | ClusterSpec,
    *,
    seq_len: int | None,
    global_batch: int | None,
    tokens: float | str | None,
    conditions: TrainingConditions,
    objective: Objective,
    precision: str | None,
    require: str,
    allow: str = "",
    memory_limit: int | str | None,
    anticipate: bool,
    framework: str | FrameworkTraits = MUSTER.name,
    compile: bool | None = None,
    expert_load: str | Path | None = None,
    fastest: bool = False,
    host_memory: int | str | None = None,
    disk: int | str | None = None,
    adapter: str | None = None,
    outer: OuterConfig | None = None,
) -> PlanRequest:
    """Return the request that `plan` searches for. Raises ConfigError."""
    if objective not in OBJECTIVES:
        hint = did_you_mean(str(objective), OBJECTIVES)
        raise ConfigError(f"objective: expected one of {', '.join(OBJECTIVES)}, got {objective!r}{hint}")
    require_text("require", require, "parts of a plan's name such as tp2-z1")
    require_text("allow", allow, "parts of a plan's name such as epfp8")
    require = re.sub(r"(^|-)([a-z]+) +(?=\d)", r"\1\2", require)  # `tp 2`, as answers have it, for `tp2`
    if precision is not None:
        require_text("precision", precision, "a precision such as bf16")
    spec, optim = resolve_model(model), None
    if adapter is not None:
        spec, optim = with_adapter(spec, adapter)
    sizes = _optional_bytes(host_memory, "--host-memory"), _optional_bytes(disk, "--disk")
    devices = with_tier_sizes(resolve_cluster(cluster), *sizes)
    request = build_request(
        spec,
        devices,
        default_seq_len(seq_len, spec),
        require_positive_int("global_batch", global_batch),
        tokens=None if tokens is None else parse_count(str(tokens), "--tokens"),
        conditions=conditions,
        objective=objective,
        precision=precision,
        fix=require,
        memory_limit_bytes=_optional_bytes(memory_limit, "--memory-limit"),
        runnable=not anticipate,
        framework=_resolve_framework(framework, devices),
        compile=compile,
    )
    check_batch_ramp(request.conditions, request.workload.global_batch_size)
    if expert_load is not None:
        request = with_expert_load(request, parse_routing_load(str(expert_load), spec))
    if allow:
        request = with_allowed(request, allow)
    _check_outer(request, outer)
    searches_tiers = host_memory is not None or disk is not None
    tolerance = 0.0 if fastest else request.tolerance
    return replace(request, tolerance=tolerance, searches_tiers=searches_tiers, optim=optim, outer=outer)


def _check_outer(request: PlanRequest, outer: OuterConfig | None) -> None:
    """Raise ConfigError for outer steps where no plan with islands is searched for."""
    if (
        outer is not None
        and request.base.islands == 1
        and not (weighs_islands(request) and island_counts(request.cluster))
    ):
        raise ConfigError(
            f"--outer.method {outer.method} is for plans with islands, which are only searched for on"
            f" {request.cluster.name or 'this cluster'} where they are required: add --require isl2"
        )


def _optional_bytes(size: int | str | None, flag: str) -> int | None:
    """Return a size in bytes, which text may give with a unit. Raises ConfigError."""
    return None if size is None else parse_bytes(f"{size}B" if isinstance(size, int) else size, flag)


def training_conditions(
    tokens: float | str | None,
    *,
    mtbf_hours: float | None = None,
    batch_ramp: str | None = None,
    recovery: str | None = None,
    restart_s: float | None = None,
    spares: int | None = None,
    repair_hours: float | None = None,
) -> TrainingConditions:
    """Return the conditions of a whole training; `batch_ramp` is `START,STEP,SAMPLES`, and None the default of each.
    Raises ConfigError."""
    given = {
        "mtbf": mtbf_hours,
        "batch-ramp": batch_ramp,
        "recovery": recovery,
        "restart-time": restart_s,
        "spares": spares,
        "repair-time": repair_hours,
    }
    given = {flag: value for flag, value in given.items() if value is not None}
    for flag, value in given.items():
        if tokens is None:
            raise ConfigError(f"--{flag} {value} is of a whole training: add its --tokens, such as --tokens 15T")
    for flag, unit, least in (("mtbf", "hours", 50_000), ("restart-time", "seconds", 60), ("repair-time", "hours", 24)):
        value = given.get(flag, least)
        if not 0 < value < inf:
            raise ConfigError(f"--{flag} {value:g}: expected a finite number of {unit} above 0, such as {least}")
    if spares is not None and (spares < 0 or repair_hours is None):
        missing = "say how long a repair takes, such as --repair-time 24"
        raise ConfigError(f"--spares {spares}: {'expected a number of nodes, 0 or more' if spares < 0 else missing}")
    if recovery is not None and recovery not in RECOVERIES:
        hint = did_you_mean(recovery, RECOVERIES)
        raise ConfigError(f"--recovery {recovery}: expected one of {', '.join(RECOVERIES)}{hint}")
    return TrainingConditions(
        DEVICE_MTBF_HOURS if mtbf_hours is None else mtbf_hours,
        None if batch_ramp is None else _parse_batch_ramp(batch_ramp),
        cast(Recovery, recovery or "disk"),
        RESTART_S if restart_s is None else restart_s,
        spares or 0,
        repair_hours,
    )


def _parse_batch_ramp(text: str) -> BatchRamp:
    parts = text.split(",")
    if len(parts) != 3:
        raise ConfigError(f"--batch-ramp {text}: expected START,STEP,SAMPLES in sequences, such as 32,32,1M")
    ramp = BatchRamp(*(int(parse_count(part, "--batch-ramp")) for part in parts))
    if min(ramp.start, ramp.increment, ramp.samples) < 1:
        raise ConfigError(f"--batch-ramp {text}: expected whole sequences, at least 1 each")
    return ramp


def check_batch_ramp(conditions: TrainingConditions, global_batch: int) -> None:
    """Raise ConfigError for a ramp of the batch that doesn't end at the batch of a step."""
    ramp = conditions.batch_ramp
    if ramp is None:
        return
    given = f"--batch-ramp {ramp.start},{ramp.increment},{ramp.samples}"
    if ramp.start > global_batch:
        raise ConfigError(f"{given}: it starts above the batch of a step, {global_batch:,} sequences")
    if rest := (global_batch - ramp.start) % ramp.increment:
        start = ramp.start + rest if ramp.start + rest <= global_batch else ramp.start + rest - ramp.increment
        raise ConfigError(
            f"{given}: steps of {ramp.increment} from {ramp.start} don't reach the batch of {global_batch:,} sequences;"
            f" did you mean {start},{ramp.increment},{ramp.samples}?"
        )


def _planned(run_file: Path, cluster: ClusterSpec, seq_len: int | None, global_batch: int | None) -> Plan:
    """Return the plan that `auto` chooses for a run file on a cluster, with another length or batch where given."""
    changed = {"train.seq_len": seq_len, "train.global_batch_size": global_batch}
    overrides = [(key, value) for key, value in changed.items() if value is not None]
    return plan_for_cluster(load_run_config(None, run_file, overrides), cluster)


def _resolve_framework(framework: str | FrameworkTraits, cluster: ClusterSpec) -> FrameworkTraits:
    """Return the framework's traits. Raises ConfigError for an unknown one, or another than Muster on a profiled
    machine."""
    found = framework_named(framework)
    if cluster.device.rates is not None and found != MUSTER:
        raise ConfigError(
            f"--framework {found.name}: {cluster.name or 'the cluster'} is a profile of Muster's own kernels; expected"
            " muster, or a cluster of the catalogue such as 8xh100"
        )
    return found


def _in_node_order(cluster: ClusterSpec, node_order: str | Sequence[int] | None) -> ClusterSpec:
    """Return the cluster with its nodes in an order such as "2,3,0,1"; raises ConfigError."""
    if node_order is None:
        return cluster
    words = node_order.split(",") if isinstance(node_order, str) else [str(node) for node in node_order]
    order = [int(word) for word in words if word.strip().isdigit()]
    if len(order) != len(words) or sorted(order) != list(range(cluster.num_nodes)):
        found = ",".join(words)
        raise ConfigError(f"--node-order: expected each node from 0 to {cluster.num_nodes - 1} once, got {found}")
    return reorder_nodes(cluster, order)


def _has_peers(outer: OuterConfig | None) -> bool:
    """Return whether the devices of a cluster are peers of a coordinator, whose rounds are those of as many islands."""
    return outer is not None and outer.coordinator is not None


def predict(
    model: str | Path | ModelSpec | None,
    cluster: str | Path | ClusterSpec,
    plan: str | Path | Plan,
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    framework: str | FrameworkTraits = MUSTER.name,
    compile: bool | None = None,
    node_order: str | Sequence[int] | None = None,
    expert_load: str | Path | None = None,
    adapter: str | None = None,
    outer: OuterConfig | None = None,
) -> Prediction:
    """Predict a plan's step: its time, where the time goes, and each rank's memory; the arguments are the flags of
    `muster predict`.

    A run file that is given as the plan also supplies model, sequence length, batch, optimizer and outer steps where
    these are None. Where it has outer.coordinator, each device of the cluster is a peer with such a batch.
    `outer`: outer steps of a plan with islands. `compile`: as the plan says where it is None. `node_order`: the
    cluster's nodes in the order of their ranks, as `muster plan` names it; None: as listed. `expert_load`: a run
    directory, its expert-load.json, or `zipf:1.0`; None: an even one. `adapter`: as in `lora:r=16`, the only parameters
    that are trained then. `.to_json()` is the verb's JSON. If the plan doesn't fit in memory, `.fits` is False. A run
    file whose plan is `auto` is planned for the cluster first. Raises ConfigError, InfeasibleError.
    """
    given, devices = resolve_plan_input(plan), _in_node_order(resolve_cluster(cluster), node_order)
    if given.swarm is not None:
        raise ConfigError(f"{plan} has a section swarm: expected muster.api.swarms.predict_swarm, or muster predict")
    spec, spread, optim = resolve_planned_model(model, plan, given), given.plan, given.optim
    if adapter is not None:
        spec, optim = with_adapter(spec, adapter, optim)
    outer = outer or given.outer
    if given.is_auto and _has_peers(outer):
        raise ConfigError(f"{plan} leaves the plan to auto: expected that of a peer, such as parallel: mb1")
    if given.is_auto:
        spread = _planned(Path(str(plan)), devices, seq_len, global_batch)
    require_plan_with_outer_steps(outer, spread)
    devices = with_ring_links(devices) if _has_peers(outer) else devices
    num_peers = devices.num_devices if _has_peers(outer) else 1
    spread = spread.model_copy(update={"islands": num_peers}) if num_peers > 1 else spread
    if compile is not None:
        spread = spread.model_copy(update={"compile": compile})
    length = given.seq_len if seq_len is None else seq_len
    batch = given.global_batch_size if global_batch is None else global_batch
    batch = None if batch is None else batch * num_peers  # a peer's batch is its own
    workload = default_workload(spread, default_seq_len(length, spec), batch)
    if expert_load is not None:
        workload = workload.model_copy(update={"expert_load": parse_routing_load(str(expert_load), spec)})
    if given.update_time == "in_backward":
        require_updates_in_backward(spread, spec, optim)
    if given.update_time == "delayed":
        require_delayed_updates(spread)
    return predict_plan(
        spec,
        spread,
        workload,
        devices,
        framework=_resolve_framework(framework, devices),
        optim=optim,
        outer=outer,
        update_time=given.update_time,
        rebalance_experts_every=given.rebalance_experts_every,
    )
