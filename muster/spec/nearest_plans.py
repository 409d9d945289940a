"""The nearest plans that can run."""

from collections.abc import Iterator
from math import log2

from muster.spec.errors import InfeasibleError
from muster.spec.legality import divisors, layer_violations, plan_violations, schedules_for_vpp
from muster.spec.model import ModelSpec
from muster.spec.plan import MESH_AXES, LayerOverride, LayerStrategy, Plan, Recompute
from muster.spec.plan_name import format_plan_name
from muster.spec.supported import (
    SUPPORTED_AXES,
    SUPPORTED_PRECISIONS,
    SUPPORTED_RECOMPUTE,
    require_supported_model,
    unsupported_features,
)
from muster.spec.units import pluralize
from muster.spec.workload import Workload


def require_runnable(plan: Plan, model: ModelSpec, workload: Workload, world_size: int) -> None:
    """Raises InfeasibleError with the reasons and the nearest plans that can run, unless the plan can;
    with what it is of the model that can't, where that is the reason."""
    require_supported_model(model)
    found = plan_violations(plan, model, workload, world_size) or unsupported_features(plan)
    if not found:
        return
    sentence = f"plan {format_plan_name(plan)} can't run: {'; '.join(found)}"
    for size in range(min(world_size, model.num_layers * workload.global_batch_size), 0, -1):
        if near := nearest_plans(plan, model, workload, size):
            where = "" if size == world_size else f" with {pluralize(size, 'process')}"
            raise InfeasibleError(f"{sentence}; nearest{where}: {', '.join(map(format_plan_name, near))}")
    raise InfeasibleError(sentence)


def nearest_plans(plan: Plan, model: ModelSpec, workload: Workload, world_size: int, limit: int = 3) -> list[Plan]:
    """The runnable plans for `world_size` processes that differ least from `plan`, nearest first, ties by name.

    The distance adds up how many doublings each degree is away, and half as much for the micro-batch size.
    """
    ranked = sorted(
        (_distance(plan, candidate), format_plan_name(candidate), candidate)
        for candidate in _candidates(plan, model, workload, world_size)
        if _is_runnable(candidate, model, workload, world_size)
    )
    return [candidate for _, _, candidate in ranked[:limit]]


def _is_runnable(plan: Plan, model: ModelSpec, workload: Workload, world_size: int) -> bool:
    return not plan_violations(plan, model, workload, world_size) and not unsupported_features(plan)


# ----------------------------------------------------------------------------------------------------------------------
# Candidates


def _candidates(plan: Plan, model: ModelSpec, workload: Workload, world_size: int) -> Iterator[Plan]:
    """For each way to factor the world over the runnable axes, the plan closest to `plan` in all else."""
    for axes in _degrees(plan, world_size):
        share, rest = divmod(workload.global_batch_size, axes["dp_replicate"] * axes["dp_shard"])
        if rest or axes["pp"] > model.num_layers or (axes["tp"] > 1 and axes["tp"] != plan.tp):
            continue  # tensor parallelism is for those who ask for it
        size = min(divisors(share), key=lambda n: (abs(log2(n / plan.micro_batch_size)), n))
        asked, cut = plan.default_strategy, plan.default_strategy.sp and axes["tp"] > 1
        default = LayerStrategy(
            zero=asked.zero,
            sp=cut,
            tp_overlap=asked.tp_overlap if cut else "none",
            recompute=_supported_recompute(asked.recompute),
        )
        keeps_stages = (
            len(plan.stages) == axes["pp"] * axes["vpp"] and plan.is_uniform and not list(layer_violations(plan, model))
        )
        schedules = schedules_for_vpp(axes["vpp"])
        yield _with_degrees(plan, **axes).model_copy(
            update={
                "micro_batch_size": size,
                "stages": plan.stages if keeps_stages else (),
                "pinned_schedule": None,
                "schedule": plan.schedule
                if plan.schedule in schedules or plan.schedule_entry.searched
                else ("1f1b" if axes["vpp"] == 1 else schedules[0]),
                "precision": plan.precision if plan.precision in SUPPORTED_PRECISIONS else "bf16",
                "default_strategy": default,
                "overrides": tuple(
                    LayerOverride(
                        start=run.start,
                        count=run.count,
                        strategy=default.model_copy(update={"recompute": _supported_recompute(run.strategy.recompute)}),
                    )
                    for run in plan.overrides
                    if run.start + run.count <= model.num_layers
                ),
                "vocab_parallel": plan.vocab_parallel
                and axes["pp"] > 1
                and axes["tp"] == 1
                and plan.pipeline_replicas == 1
                and (asked.zero != "z3" or axes["dp_replicate"] * axes["dp_shard"] == 1),
                "post_validation": plan.post_validation
                and axes["pp"] > 1
                and not plan.vocab_parallel
                and plan.precision != "fp16",
                "compile": plan.compile
                and not plan.vocab_parallel
                and not any(s.recompute == "elementwise" for s in plan.strategies)
                and not plan.split_backward,
            }
        )


def _supported_recompute(recompute: Recompute) -> Recompute:
    return recompute if recompute in SUPPORTED_RECOMPUTE else "elementwise"


def _degrees(plan: Plan, world_size: int) -> Iterator[dict[str, int]]:
    """All ways to factor the world, with one stage on each pipeline rank or with as many as the plan has."""
    for degrees in _factorizations(world_size, len(SUPPORTED_AXES)):
        axes = dict(zip(SUPPORTED_AXES, degrees, strict=True))
        yield axes | {"vpp": 1}
        wanted = {plan.vpp, plan.schedule_entry.min_chunks} - {1}
        for vpp in wanted if axes["pp"] > 1 else ():
            yield axes | {"vpp": vpp}


def _with_degrees(plan: Plan, **degrees: int) -> Plan:
    """The plan with these degrees and 1 for all others, and no word about single stages."""
    ones = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "vpp", "cp", "ep", "etp"), 1)
    return plan.model_copy(update={**ones, **degrees, "stages": (), "uneven_micro_batches": ()})


def _distance(asked: Plan, candidate: Plan) -> float:
    doublings = sum(abs(log2(getattr(asked, axis) / getattr(candidate, axis))) for axis in (*MESH_AXES, "vpp"))
    return doublings + abs(log2(asked.micro_batch_size / candidate.micro_batch_size)) / 2


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write `number` as a product of `parts` factors."""
    if parts == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in _factorizations(number // first, parts - 1):
            yield (first, *rest)
