"""What to change of a plan that doesn't fit: the cheapest changes that make it fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from muster.cost.forecast import MemoryForecast, forecast
from muster.schedule.build import program_of
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.legal import problems
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, Recompute, Strategy, Zero
from muster.spec.software import Software
from muster.spec.workload import Workload

MOST_TOGETHER = 3
"""Changes that are tried together where fewer don't suffice."""
MOST_TRIED = 150
"""Plans whose memory is forecast: some milliseconds each."""
MOST_PRICED = 12
"""Plans that fit and whose price is asked for."""

_STRONGER: dict[Recompute, tuple[Recompute, ...]] = {
    "none": ("selective", "full"),
    "selective": ("full",),
    "attention": ("full",),
    "alternate": ("full",),
}
_MORE_SHARDED: dict[Zero, tuple[Zero, ...]] = {"z1": ("z2", "z3"), "z2": ("z3",)}

Edit = tuple[str, Callable[[Plan], Plan]]
"""What a change is called, and the plan that it makes of one."""


@dataclass(frozen=True, slots=True)
class Relief:
    """A plan that fits, and what it changes."""

    changes: tuple[str, ...]
    plan: Plan
    memory: MemoryForecast
    price: float
    """As `reliefs` was told to ask; the plans are compared by it."""


def reliefs(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    software: Software | None,
    price: Callable[[Plan], float],
    limit: int = 3,
) -> list[Relief]:
    """The cheapest plans that fit, and differ from `plan` in as few of these as it takes: recompute, offload, sharding
    level, sequence parallelism, micro-batch size, tensor parallelism, pipeline stages, a spread vocabulary. Cheapest
    first."""
    edits, tried = list(_edits(plan, model)), 0
    fitting: list[tuple[tuple[str, ...], Plan, MemoryForecast]] = []
    for together in range(1, MOST_TOGETHER + 1):
        for chosen in combinations(edits, together):
            if tried == MOST_TRIED or len(fitting) == MOST_PRICED:
                break
            other = plan
            for _, edit in chosen:
                other = edit(other)
            names = {name for name, _ in chosen}
            if len({name.split()[0] for name in names}) < together or any(names > set(one[0]) for one in fitting):
                continue  # two of one kind, or more than suffices
            if problems(other, model, workload, plan.world_size):
                continue
            tried += 1
            found = _forecast(model, other, workload, cluster, software)
            if found is not None and found.fits:
                fitting.append((tuple(name for name, _ in chosen), other, found))
        if len(fitting) >= limit:
            break
    priced = [
        Relief(names, other, found, value)
        for names, other, found in fitting
        if (value := _priced(price, other)) is not None
    ]
    return sorted(priced, key=lambda one: (one.price, len(one.changes)))[:limit]


def _forecast(
    model: ModelSpec, plan: Plan, workload: Workload, cluster: ClusterSpec, software: Software | None
) -> MemoryForecast | None:
    try:
        return forecast(model, plan, workload, cluster, program_of(plan, model, workload), software)
    except InfeasibleError:  # what it offloads has no time to lie in the host's memory
        return None


def _priced(price: Callable[[Plan], float], plan: Plan) -> float | None:
    try:
        return price(plan)
    except MusterError:  # its time can't be predicted
        return None


def _edits(plan: Plan, model: ModelSpec) -> Iterator[Edit]:
    """Single changes; the first word of each says what it is about."""
    default = plan.default_strategy
    for recompute in _STRONGER.get(default.recompute, ()):
        yield f"recompute {recompute}", lambda p, how=recompute: _with(p, recompute=how)
    if plan.pp > 1 and default.offload == "none":
        yield "offload activations", lambda p: _with(p, offload="activations")
    if plan.mesh(0).data_ranks > 1:
        for zero in _MORE_SHARDED.get(default.zero, ()):
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
    if plan.pp > 1 and plan.tp == 1 and not plan.spread_vocab and plan.replicas == 1:
        yield "vocabulary spread", lambda p: _with(p, zero="z2").model_copy(update={"spread_vocab": True})


def _with(plan: Plan, **fields: object) -> Plan:
    """The plan with another strategy for all layers."""
    strategy: Strategy = plan.default_strategy.model_copy(update=fields)
    runs = tuple(run.model_copy(update={"strategy": run.strategy.model_copy(update=fields)}) for run in plan.overrides)
    return plan.model_copy(update={"default_strategy": strategy, "overrides": runs})
