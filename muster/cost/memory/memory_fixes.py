"""Fixes for a plan that runs out of memory: the cheapest changes that make it fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from muster.config.optim_config import OptimConfig
from muster.cost.memory.forecast import MemoryForecast, forecast_memory
from muster.schedule.build import build_program
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.frameworks import MUSTER
from muster.spec.layer_strategy import LayerStrategy, Recompute, ZeroLevel
from muster.spec.legality import plan_violations
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_name_parts
from muster.spec.sequence_tiles import tiled
from muster.spec.supported import unsupported_features
from muster.spec.workload import Workload

MAX_CHANGES = 3
"""Largest number of changes that are combined, if fewer don't suffice."""
MAX_FORECASTS = 150
"""Largest number of plans whose memory is forecast, some milliseconds each."""
MAX_EVALUATED = 12
"""Largest number of fitting plans that are evaluated."""

_STRONGER_RECOMPUTE: dict[Recompute, tuple[Recompute, ...]] = {
    "none": ("elementwise", "full"),
    "elementwise": ("full",),
    "core_attention": ("full",),
    "every_second_matmul": ("full",),
}
_STRONGER_ZERO: dict[ZeroLevel, tuple[ZeroLevel, ...]] = {"z1": ("z2", "z3"), "z2": ("z3",)}

PlanEdit = tuple[str, Callable[[Plan], Plan]]
"""Change of a plan: its name, and the function that makes it."""


@dataclass(frozen=True, slots=True)
class MemoryFix:
    """Plan that fits, and its changes."""

    changes: tuple[str, ...]
    plan: Plan
    memory: MemoryForecast
    value: float
    """Value of the plan by the caller's `evaluate`; smaller is better."""


def memory_fixes(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    framework: FrameworkTraits | None,
    evaluate: Callable[[Plan], float],
    max_fixes: int = 3,
    optim: OptimConfig | None = None,
    tier_words: Sequence[str] = (),
) -> list[MemoryFix]:
    """Return the cheapest plans that fit and differ from `plan` in as few changes as needed, cheapest first.

    Changes: recompute, offload, sharding level, sequence parallelism, micro-batch size, tiles of long sequences, tensor
    parallelism, pipeline stages, vocabulary parallelism; and `tier_words`, of plans with state off the devices, which
    `muster train` then must run. It can run every change of a plan that it can run.
    """
    edits = list(_edits(plan, model))
    fields_of = {word: parse_name_parts(word) for word in tier_words}
    edits += [(f"state {word}", lambda p, own=fields: _with(p, **own)) for word, fields in fields_of.items()]
    with_tiles = None if (framework or MUSTER).storage == "megatron" else tiled(plan, model, workload.seq_len)
    if with_tiles is not None:
        count = with_tiles.sequence_tiles
        edits.insert(0, (f"tiles {count}", lambda p: p.model_copy(update={"sequence_tiles": count})))
    is_trained = framework in (None, MUSTER)
    known_gaps = set(() if tier_words else unsupported_features(plan, model))
    tried = 0
    fitting: list[tuple[tuple[str, ...], Plan, MemoryForecast]] = []
    for together in range(1, MAX_CHANGES + 1):
        for chosen in combinations(edits, together):
            if tried == MAX_FORECASTS or len(fitting) == MAX_EVALUATED:
                break
            other = plan
            for _, edit in chosen:
                other = edit(other)
            names = {name for name, _ in chosen}
            if len({name.split()[0] for name in names}) < together or any(names > set(one[0]) for one in fitting):
                continue  # two changes of one kind, or more than suffice
            if plan_violations(other, model, workload, plan.world_size):
                continue
            if is_trained and not known_gaps.issuperset(unsupported_features(other, model)):
                continue
            tried += 1
            found = _forecast(model, other, workload, cluster, framework, optim)
            if found is not None and found.fits:
                fitting.append((tuple(name for name, _ in chosen), other, found))
        if len(fitting) >= max_fixes:
            break
    priced = [
        MemoryFix(names, other, found, value)
        for names, other, found in fitting
        if (value := _evaluated(evaluate, other)) is not None
    ]
    return sorted(priced, key=lambda one: (one.value, len(one.changes)))[:max_fixes]


def _forecast(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    framework: FrameworkTraits | None,
    optim: OptimConfig | None,
) -> MemoryForecast | None:
    try:
        program = build_program(plan, model, workload, optim=optim)
        return forecast_memory(model, plan, workload, cluster, program, framework, optim=optim)
    except InfeasibleError:  # there is no time for its offload
        return None


def _evaluated(evaluate: Callable[[Plan], float], plan: Plan) -> float | None:
    try:
        return evaluate(plan)
    except MusterError:  # its time can't be predicted
        return None


def _edits(plan: Plan, model: ModelSpec) -> Iterator[PlanEdit]:
    """Yield single changes; the first word of a name is the kind of change."""
    default = plan.default_strategy
    for recompute in _STRONGER_RECOMPUTE.get(default.recompute, ()):
        yield f"recompute {recompute}", lambda p, how=recompute: _with(p, recompute=how)
    if default.offload == "none":
        yield "offload activations", lambda p: _with(p, offload="activations")
    if plan.mesh(0).dp_size > 1:
        for zero in _STRONGER_ZERO.get(default.zero, ()):
            yield f"shard {zero}", lambda p, level=zero: _with(p, zero=level)
    if plan.dp_replicate > 1:
        yield (
            f"replicate 1 (dp_shard {plan.dp_replicate * plan.dp_shard})",
            lambda p: p.model_copy(update={"dp_shard": p.dp_shard * p.dp_replicate, "dp_replicate": 1}),
        )
    for size in (plan.micro_batch_size // 2, plan.micro_batch_size // 4):
        if size:
            yield f"micro-batch {size}", lambda p, n=size: p.model_copy(update={"micro_batch_size": n})
    if plan.tp > 1 and not default.sp:
        yield "sequence parallel", lambda p: _with(p, sp=True)
    if not plan.is_uniform or plan.stages:
        return
    for factor in (2, 4):
        if plan.dp_shard % factor == 0:
            shard = plan.dp_shard // factor
            yield (
                f"tp {plan.tp * factor}",
                lambda p, f=factor, n=shard: _with(p, sp=True).model_copy(update={"tp": p.tp * f, "dp_shard": n}),
            )
            if plan.pp * factor * plan.vpp <= model.num_layers:
                yield (
                    f"pp {plan.pp * factor}",
                    lambda p, f=factor, n=shard: p.model_copy(update={"pp": p.pp * f, "dp_shard": n}),
                )
    if plan.pp > 1 and plan.tp == 1 and not plan.vocab_parallel and plan.pipeline_replicas == 1:
        yield "vocabulary spread", lambda p: _with(p, zero="z2").model_copy(update={"vocab_parallel": True})


def _with(plan: Plan, **fields: object) -> Plan:
    """Return the plan with fields of the strategy changed for all layers."""
    strategy: LayerStrategy = plan.default_strategy.model_copy(update=fields)
    runs = tuple(run.model_copy(update={"strategy": run.strategy.model_copy(update=fields)}) for run in plan.overrides)
    return plan.model_copy(update={"default_strategy": strategy, "overrides": runs})
