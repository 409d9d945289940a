"""Rules for plans whose schedule is asynchronous: their steps follow each other on versions of the weights."""

from collections.abc import Callable, Iterator

from muster.spec.errors import InfeasibleError
from muster.spec.plan import Plan
from muster.spec.rules import Rule, setting
from muster.spec.schedules import DEFAULT_SCHEDULE
from muster.spec.workload import Workload

_FLUSH_EVERY = Plan.model_fields["flush_every"].default
_SYNCHRONOUS = setting(schedule=DEFAULT_SCHEDULE, flush_every=_FLUSH_EVERY)


def _is_asynchronous(plan: Plan) -> bool:
    return plan.schedule_entry.is_asynchronous


ASYNCHRONOUS_LEGAL_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: _is_asynchronous(plan) and plan.pp == 1,
        lambda plan: f"schedule {plan.schedule} lets pipeline ranks go on without a flush, but pp is 1",
        _SYNCHRONOUS,
    ),
    Rule(
        lambda plan: not _is_asynchronous(plan) and plan.flush_every != _FLUSH_EVERY,
        lambda plan: (
            f"flush_every {plan.flush_every} is of asynchronous schedules; schedule {plan.schedule} flushes after each"
            " step: leave it out"
        ),
        setting(flush_every=_FLUSH_EVERY),
    ),
    Rule(
        lambda plan: _is_asynchronous(plan) and plan.vocab_parallel,
        lambda plan: (
            f"schedule {plan.schedule} goes on over several steps, but the collectives of vocab_parallel are those of"
            " one: drop vocab_parallel"
        ),
        setting(vocab_parallel=False),
    ),
)


def few_micro_batches(plan: Plan, workload: Workload) -> Iterator[str]:
    """Yield a sentence where a step has fewer micro-batches than the plan's schedule needs."""
    least = plan.schedule_entry.min_micro_batches(plan.pp)
    try:
        count = plan.num_micro_batches(workload)
    except InfeasibleError:
        return
    if count < least:
        yield (
            f"schedule {plan.schedule} needs at least {least} micro-batches in a step on {plan.pp} pipeline ranks,"
            f" but global_batch_size {workload.global_batch_size} gives {count}: take a smaller micro_batch_size, or a"
            " larger batch"
        )


def _rule(has: Callable[[Plan], bool], what: str) -> Rule:
    return Rule(
        lambda plan: _is_asynchronous(plan) and has(plan),
        lambda plan: f"schedule {plan.schedule} with {what}",
        _SYNCHRONOUS,
    )


_UNTESTED = "(not tested yet)"

ASYNCHRONOUS_RUNTIME_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: _is_asynchronous(plan) and any(mesh.dp_shard > 1 for mesh in plan.distinct_meshes),
        lambda plan: (
            f"schedule {plan.schedule} with sharded data parallelism (each rank keeps whole versions of its weights, as"
            " replicas do: dp2x1)"
        ),
        lambda plan: plan.model_copy(update={"dp_replicate": plan.dp_replicate * plan.dp_shard, "dp_shard": 1}),
    ),
    _rule(lambda plan: any(mesh.cp > 1 for mesh in plan.distinct_meshes), f"context parallelism {_UNTESTED}"),
    _rule(lambda plan: len(plan.distinct_meshes) > 1, f"stages with degrees of their own {_UNTESTED}"),
    _rule(lambda plan: bool(plan.uneven_micro_batches), f"uneven_micro_batches {_UNTESTED}"),
    _rule(lambda plan: plan.grad_reduce_dtype != "fp32", f"grad_reduce_dtype {_UNTESTED}"),
    _rule(lambda plan: any(s.tp_overlap != "none" for s in plan.strategies), f"tp_overlap {_UNTESTED}"),
    _rule(lambda plan: plan.islands > 1, f"islands {_UNTESTED}"),
    _rule(
        lambda plan: plan.precision not in ("fp64", "fp32", "bf16"),
        "another precision than fp64, fp32 and bf16 (scales of one step would be those of another)",
    ),
    _rule(lambda plan: plan.post_validation, "post_validation (the gradient norm has a step to arrive already)"),
    _rule(lambda plan: plan.sequence_slices > 1, f"sequence_slices {_UNTESTED}"),
    _rule(
        lambda plan: not plan.schedule_entry.stashes_weights and any(s.recompute != "none" for s in plan.strategies),
        "recompute (which would repeat forwards on the newest weights; pipedream keeps older ones)",
    ),
    _rule(lambda plan: plan.cuda_graphs, "cuda_graphs (which remember the memory of one version)"),
    _rule(
        lambda plan: any(
            (s.offload, s.offload_optimizer, s.offload_param) != ("none", "none", "none") for s in plan.strategies
        ),
        f"offload {_UNTESTED}",
    ),
)
"""Things that the runtime can't do under an asynchronous schedule."""

ASYNCHRONOUS_MODEL_RULES: tuple[Rule, ...] = (
    _rule(
        lambda plan: True,
        "experts, tied embeddings, adapters or multi-token prediction (their gradients or loads are those of one step)",
    ),
)
"""Things that it can't do for a model with one of these."""
