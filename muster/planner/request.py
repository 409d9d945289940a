"""The request that a search for plans answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import log2, sqrt
from typing import Any, Literal, get_args

from muster.config.optim_config import OptimConfig
from muster.config.outer_config import OuterConfig
from muster.config.step_law import STEP_LAW_SOURCE, non_embedding_parameters, step_law
from muster.cost.time.cost_cache import CostCache
from muster.planner.node_order import part_of_island
from muster.planner.simplicity import PREDICTION_ERROR, Simplicity, simplicity
from muster.planner.training_cost import TrainingConditions, require_a_sequence
from muster.spec.cluster import ClusterSpec
from muster.spec.device import DiskSpec
from muster.spec.device_precision import substitutions
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.expert_kinds import DispatchDtype
from muster.spec.formatting import format_bytes
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.frameworks import MUSTER
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.model import ModelSpec
from muster.spec.pass_pairs import has_tp_pairs
from muster.spec.plan import PRECISIONS, Plan, Precision
from muster.spec.plan_name import TP_OVERLAPS, parse_name_parts
from muster.spec.routing_load import RoutingLoad
from muster.spec.schedules import DEFAULT_SCHEDULE, SCHEDULES
from muster.spec.suggest import did_you_mean
from muster.spec.supported import unsupported_parts
from muster.spec.units import alternatives
from muster.spec.workload import Workload

Objective = Literal["time", "cost", "energy", "memory"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A model, its workload, the devices to train it on, and wishes about the plan.

    The one request type from the verbs (`muster plan`, the Python API, `parallel: auto`) down to the search.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    objective: Objective = "time"
    precision: Precision = "bf16"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a plan, or of its default strategy, that must have these values."""
    fixed_text: str = ""
    """The same as it was specified: parts of a plan's name."""
    memory_limit_bytes: int | None = None
    """Memory of each device that may be used; None: all of it, less the head-room."""
    axes: frozenset[str] | None = None
    """Axes among tp, pp, cp and ep that must be used, and no others; None: any."""
    framework: FrameworkTraits = MUSTER
    """Framework that trains, whose traits the predictions take."""
    runnable: bool = False
    """True if only plans are wanted that `muster train` runs today."""
    template: Plan | None = None
    """Plan with all fields that aren't searched, such as compile and buckets."""
    tolerance: float = PREDICTION_ERROR
    """Relative difference of values within which the simplest plan is wanted; 0: the best, however complicated."""
    simpler_than: Simplicity | None = None
    """Only simpler plans than this are wanted; None: any."""
    tokens: float | None = None
    """Tokens of the whole training, where they are known: its cost is shown then."""
    conditions: TrainingConditions = TrainingConditions()
    """Conditions of the whole training, such as failures."""
    optim: OptimConfig | None = None
    """Optimizer, with its moving average and what it freezes; None: AdamW of all parameters."""
    allowed_dispatch_dtypes: tuple[DispatchDtype, ...] = ()
    """Dtypes of 8 bits in which hidden states may travel to experts, though that changes losses."""
    allowed_lsh_rate: float = 0.0
    """Share of centroids that may travel in their place, likewise; 0: none."""
    allowed_overlap_words: tuple[str, ...] = ()
    """Words of overlapped tensor-parallel collectives that plans may have (`asynctp`, `domino`)."""
    overlap_word: str = ""
    """The one of them that was chosen; all plans have it."""
    outer: OuterConfig | None = None
    """Outer steps of plans with islands; None: those that reach the same loss first are chosen."""
    allows_islands: bool = False
    """True if a plan with islands may be the answer, which changes what is trained."""
    searches_tiers: bool = False
    """True if the tier of the optimizer's state is searched for, too; else that is done where nothing fits."""
    tier_word: str = ""
    """Word of a plan's name for the tier that was found; all plans have it."""
    skip_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the plan gets once it is found, by which its micro-batches skip stages; empty: none do."""
    derived_lines: tuple[str, ...] = ()
    """Line for each value that was left out and derived from others."""
    cost_cache: CostCache = field(default_factory=CostCache, compare=False, repr=False)
    """Costs that this request's plans share; requests made from it by `replace` share them too."""

    @property
    def base(self) -> Plan:
        """Plan that all candidates are changes of."""
        return self.template or _base_plan(self.precision)

    @property
    def island_devices(self) -> int:
        """Devices of one island; without islands, all."""
        return self.cluster.num_devices // self.base.islands

    @property
    def island_sequences(self) -> int:
        """Sequences of a step of one island; without islands, all."""
        return self.workload.global_batch_size // self.base.islands

    @property
    def island_cluster(self) -> ClusterSpec:
        """Nodes of one island, where those of the others are like them; else, and without islands, all nodes."""
        return part_of_island(self.cluster, self.base.islands)

    def shards_positions(self, tp: int, cp: int) -> bool:
        """Return True if plans with these degrees have sequence parallelism: as is fixed, or else wherever tp cuts
        positions evenly, but for a ladder, sub-layers side by side and pairs of passes, which hide their sums without.
        """
        divides = tp > 1 and self.workload.seq_len % (tp * cp) == 0
        return self.fixed.get("sp", divides and self.model.other_stream is None and not has_tp_pairs(self.base))

    def admits(self, name: str, value: object) -> bool:
        """Return True if a field may have this value."""
        return self.fixed.get(name, value) == value

    def is_simple_enough(self, plan: Plan) -> bool:
        """Return True if a plan is as simple as is wanted."""
        return self.simpler_than is None or simplicity(plan) < self.simpler_than


@lru_cache(maxsize=16)
def _base_plan(precision: Precision) -> Plan:
    return Plan(precision=precision)


# ----------------------------------------------------------------------------------------------------------------------
# Requests from flags and arguments


MAX_DEVICES = 1_000_000
MAX_BATCH_TOKENS = 10**12

DEFAULT_BATCH_TOKENS = 4 * 2**20
"""Tokens of a step where neither a batch nor the tokens of the training are given: those of Llama 3's first phase."""


def build_request(
    model: ModelSpec,
    cluster: ClusterSpec,
    seq_len: int,
    global_batch: int | None = None,
    *,
    tokens: float | None = None,
    conditions: TrainingConditions | None = None,
    objective: Objective = "time",
    precision: str | None = None,
    fix: str = "",
    memory_limit_bytes: int | None = None,
    runnable: bool = False,
    framework: FrameworkTraits = MUSTER,
    compile: bool | None = None,
) -> PlanRequest:
    """Build a request, and derive what is left out: the batch from the tokens of the training by the Step Law, the
    precision from the devices.

    `fix`: parts of a plan's name that all plans must have, such as `tp8-z1`. Raises ConfigError, and InfeasibleError
    where only plans are wanted that run, of a model that doesn't.
    """
    if cluster.num_devices > MAX_DEVICES:
        raise ConfigError(f"--cluster {cluster.name}: expected at most {MAX_DEVICES:,} devices")
    require_memory_of_devices(cluster, memory_limit_bytes)
    batch, derived = _resolve_batch(model, seq_len, global_batch, tokens, cluster.num_devices)
    if runnable and (parts := unsupported_parts(model)):
        raise InfeasibleError(
            f"model {model.name} can't be trained yet: it has {' and '.join(parts)}; --anticipate shows the plans that"
            " are predicted for it"
        )
    fixed, skip_fields = _without_skips(fixed_fields(fix), fix)
    schedule = fixed.get("schedule")
    if schedule and SCHEDULES[schedule].searched:
        raise ConfigError(
            f"--require {fix}: schedule {schedule} is searched for a given plan: leave it out, and give"
            f" it to the plan that is found (--parallel.schedule {schedule})"
        )
    kind = _resolve_precision(precision, fixed, fix, cluster)
    template = _template(fixed, kind).model_copy(update={"compile": compile})
    return PlanRequest(
        model,
        cluster,
        Workload(seq_len=seq_len, global_batch_size=batch),
        objective,
        kind,
        fixed,
        fix,
        memory_limit_bytes,
        framework=framework,
        runnable=runnable,
        template=template,
        tokens=tokens,
        conditions=conditions or TrainingConditions(),
        skip_fields=skip_fields,
        derived_lines=(
            *derived,
            *substitutions(cluster, kind, template.fp8_recipe, framework.recasts_fp8),
        ),
    )


def _without_skips(fixed: dict[str, Any], fix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields that the search for an ordinary pipeline is to keep, and those by which its micro-batches then
    skip stages. Raises ConfigError where `fix` names no pipeline."""
    if not SCHEDULES[fixed.get("schedule", DEFAULT_SCHEDULE)].skips_stages:
        return fixed, {}
    if fixed.get("pp", 1) == 1:
        raise ConfigError(f"--require {fix}: stages are skipped in a pipeline: name its ranks, too, as in pp4-skip0.25")
    skips = {name: fixed[name] for name in ("schedule", "skip_ratio", "min_visits", "swaps_stages") if name in fixed}
    ordinary = DEFAULT_SCHEDULE if fixed.get("vpp", 1) == 1 else "interleaved"
    return {**{name: value for name, value in fixed.items() if name not in skips}, "schedule": ordinary}, skips


def with_placed_experts(request: PlanRequest, plan: Plan) -> Plan:
    """Return a plan with the places of the experts that it was predicted with."""
    load, degrees = request.workload.expert_load, {mesh.ep for mesh in plan.distinct_meshes}
    if load is None or not load.is_placed or plan.expert_placement or len(degrees) > 1 or max(degrees) == 1:
        return plan
    return plan.model_copy(update={"expert_placement": load.placement(max(degrees))})


def with_expert_load(request: PlanRequest, load: RoutingLoad) -> PlanRequest:
    """Return the request for experts that have this load."""
    line = f"experts loaded by {load.source}: the most chosen one gets {load.max_over_mean:.2f} times the mean"
    if request.framework.name == MUSTER.name:  # whose runtime finds experts wherever they lie
        load, line = load.placed(), f"{line}; plans place them evenly (-o writes how), and may copy some (epNxM)"
    workload = request.workload.model_copy(update={"expert_load": load})
    return replace(request, workload=workload, derived_lines=(*request.derived_lines, line))


ALLOW_ISLANDS = "islands"
"""Word of --allow for plans with islands."""
_LOSSY_WORDS: Mapping[str, DispatchDtype] = {"epfp8": "fp8", "epint8": "int8"}


_CENTROIDS = "eplsh"
"""Word of --allow for centroids in place of hidden states; a share of them may follow."""


def with_allowed(request: PlanRequest, name_parts: str) -> PlanRequest:
    """Return the request for plans that may have parts of a name, such as `epfp8`, or islands, which change losses.

    Raises ConfigError for other parts."""
    words = name_parts.split("-")
    known = (*_LOSSY_WORDS, _CENTROIDS, ALLOW_ISLANDS)
    for word in words:
        if word not in (*known, *TP_OVERLAPS) and not word.startswith(_CENTROIDS):
            lossy = f"{', '.join(known[:-1])} or {known[-1]}, which change losses"
            expected = f"expected {lossy}, or {alternatives([*TP_OVERLAPS])}"
            raise ConfigError(f"--allow {word}: {expected}{did_you_mean(word, (*known, *TP_OVERLAPS))}")
    if overlaps := tuple(word for word in TP_OVERLAPS if word in words):
        request = replace(request, allowed_overlap_words=overlaps)
        words = [word for word in words if word not in TP_OVERLAPS]
    if ALLOW_ISLANDS in words:
        request = replace(request, allows_islands=True)
        words = [word for word in words if word != ALLOW_ISLANDS]
    if not words:
        return request
    if request.model.moe is None:
        raise ConfigError(f"--allow {name_parts}: model {request.model.name} has no experts; leave it out")
    dtypes = tuple(dict.fromkeys(_LOSSY_WORDS[word] for word in words if word in _LOSSY_WORDS))
    rates = [parse_name_parts(word)["ep_lsh_rate"] for word in words if word not in _LOSSY_WORDS]
    ways = ["in 8 bits"] * bool(dtypes) + ["as centroids of alike ones"] * bool(rates)
    line = (
        f"{' and '.join(words)} allowed: hidden states may travel to experts {' and '.join(ways)}, which changes losses"
    )
    return replace(
        request,
        allowed_dispatch_dtypes=dtypes or request.allowed_dispatch_dtypes,
        allowed_lsh_rate=rates[-1] if rates else request.allowed_lsh_rate,
        derived_lines=(*request.derived_lines, line),
    )


def require_memory_of_devices(cluster: ClusterSpec, limit_bytes: int | None) -> None:
    """Raise ConfigError for a memory limit above what any device has."""
    sizes = [group.device.memory_bytes for group in cluster.groups]
    known = [size for size in sizes if size is not None]
    if limit_bytes is not None and len(known) == len(sizes) and limit_bytes > max(known):
        largest = max(cluster.groups, key=lambda group: group.device.memory_bytes or 0).device
        raise ConfigError(
            f"--memory-limit {format_bytes(limit_bytes)}: {largest.name} has {format_bytes(max(known))}; give no more,"
            " or leave it out"
        )


def fixed_fields(name_parts: str) -> dict[str, Any]:
    """Return the fields that parts of a plan's name specify, such as `tp8-z1`.

    `dp8` fixes one replica, as it does in a name. Raises ConfigError.
    """
    fixed = parse_name_parts(name_parts) if name_parts else {}
    if "dynamic_context_parallel" in fixed:
        raise ConfigError(
            "cpdyn can't be required of a search, to which all sequences are equally long: require cpN, and put cpdyn"
            " behind it in the plan that is found"
        )
    return {"dp_replicate": 1, **fixed} if "dp_shard" in fixed else fixed


SEARCHED = frozenset(
    ("dp_replicate", "dp_shard", "tp", "pp", "vpp", "cp", "ep", "micro_batch_size", "schedule", "axis_order", "stages")
    + ("uneven_micro_batches", "zero", "sp", "recompute", "offload")
)
"""Fields of a plan, or of its strategy, that the search tries values of."""


def _template(fixed: Mapping[str, Any], precision: Precision) -> Plan:
    """Return a plan with the fixed fields that aren't searched, such as precision or a parallel vocabulary."""
    given = {name: value for name, value in fixed.items() if name not in SEARCHED}
    strategy = {name: given.pop(name) for name in tuple(given) if name in LayerStrategy.model_fields}
    default = LayerStrategy().model_copy(update=strategy)
    return Plan().model_copy(update={**given, "precision": precision, "default_strategy": default})


def require_more(request: PlanRequest, name_parts: str) -> PlanRequest:
    """Return the request with more fixed parts of a plan's name."""
    fixed = {**request.fixed, **fixed_fields(name_parts)}
    return replace(request, fixed=fixed, fixed_text="-".join(filter(None, (request.fixed_text, name_parts))))


def refix_request(request: PlanRequest, name_parts: str) -> PlanRequest:
    """Return the request with other fixed parts of a plan's name."""
    fixed = fixed_fields(name_parts)
    kind = fixed.get("precision", "bf16" if "precision" in request.fixed else request.precision)
    kept = "-".join(filter(None, (request.tier_word, request.overlap_word)))
    found = parse_name_parts(kept) if kept else {}
    template = _template({**found, **fixed}, kind).model_copy(update={"compile": request.base.compile})
    return replace(request, fixed=fixed, fixed_text=name_parts, precision=kind, template=template)


def with_islands(request: PlanRequest, islands: int) -> PlanRequest:
    """Return the request for plans with so many islands."""
    return replace(request, template=request.base.model_copy(update={"islands": islands}))


def with_tier(request: PlanRequest, word: str) -> PlanRequest:
    """Return the request for plans with this word of a tier, such as `oopt0.5`; none if it is empty."""
    fields = parse_name_parts(word) if word else {}
    strategy = request.base.default_strategy.model_copy(update=fields)
    template = request.base.model_copy(update={"default_strategy": strategy})
    return replace(request, template=template, tier_word=word, searches_tiers=False)


def with_overlap_word(request: PlanRequest, word: str) -> PlanRequest:
    """Return the request for plans with this word of overlapped tensor-parallel collectives; none if it is empty."""
    overlap = TP_OVERLAPS[word] if word else "none"
    strategy = request.base.default_strategy.model_copy(update={"tp_overlap": overlap})
    template = request.base.model_copy(update={"default_strategy": strategy})
    return replace(request, template=template, overlap_word=word)


def with_tier_sizes(cluster: ClusterSpec, host_memory_bytes: int | None, disk_bytes: int | None) -> ClusterSpec:
    """Return the cluster with so much host memory and disk space on each node; None: as it is."""
    changed: dict[str, Any] = {} if host_memory_bytes is None else {"host_memory_bytes": host_memory_bytes}
    groups = []
    for group in cluster.groups:
        if disk_bytes is not None:
            disk = group.disk or DiskSpec()
            changed["disk"] = disk.model_copy(update={"capacity_bytes": disk_bytes})
        groups.append(group.model_copy(update=changed))
    return cluster.model_copy(update={"groups": tuple(groups)})


def round_batch(target: float, num_devices: int) -> int:
    """Return the number of sequences nearest to `target` that divides well: a power of two, times the odd factor of the
    number of devices unless that makes the batch far larger."""
    odd = num_devices // (num_devices & -num_devices)
    step = odd if odd < target * sqrt(2) else 1
    return step * 2 ** max(0, round(log2(target / step)))


def _resolve_batch(
    model: ModelSpec, seq_len: int, requested: int | None, tokens: float | None, num_devices: int
) -> tuple[int, list[str]]:
    """Return the sequences of a step, and a line for each derived value."""
    batch = requested
    derived: list[str] = []
    if tokens is not None:
        require_a_sequence(tokens, seq_len)
        law = step_law(non_embedding_parameters(model), tokens)
        if batch is None:
            batch = round_batch(law.batch_tokens / seq_len, num_devices)
            derived.append(f"global batch {batch} sequences, derived ({STEP_LAW_SOURCE})")
        derived.append(f"learning rate {law.lr:.3g}, derived ({STEP_LAW_SOURCE})")
    batch = batch or round_batch(DEFAULT_BATCH_TOKENS / seq_len, num_devices)
    if batch * seq_len > MAX_BATCH_TOKENS:
        raise ConfigError(
            f"a step of {batch:,} sequences of {seq_len:,} tokens: expected at most {MAX_BATCH_TOKENS:,} tokens;"
            " give a smaller --global-batch"
        )
    return batch, derived


def _resolve_precision(requested: str | None, fixed: Mapping[str, Any], fix: str, cluster: ClusterSpec) -> Precision:
    for known in PRECISIONS:
        if known == requested:
            if fixed.get("precision", requested) != requested:
                raise ConfigError(f"--precision {requested} contradicts --require {fix}: leave one of them out")
            return known
    if requested is not None:
        known = f"expected one of {', '.join(PRECISIONS)}"
        raise ConfigError(f"--precision {requested}: {known}{did_you_mean(requested, PRECISIONS)}")
    return fixed.get("precision") or ("fp32" if cluster.device.kind == "cpu" else "bf16")
