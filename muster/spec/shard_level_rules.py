"""Rules for plans that shard parameters or gradients over fewer ranks than the optimizer's state (`zp2g8`)."""

from collections.abc import Callable

from muster.spec.plan import Plan
from muster.spec.rules import Rule, setting

_LEVELS = {"param_shard_size": "parameters", "grad_shard_size": "gradients"}


def _misfits(plan: Plan) -> str | None:
    """Return a sentence for a size that doesn't divide the ranks of some stage, if there is one."""
    for field, what in _LEVELS.items():
        size = getattr(plan, field)
        for mesh in plan.distinct_meshes:
            if size is not None and mesh.state_shards % size:
                return (
                    f"{field} {size} shards {what} over ranks of which {mesh.state_shards} share a stage's state:"
                    f" expected a divisor of {mesh.state_shards}"
                )
    return None


def _is_plain(plan: Plan) -> bool:
    """Return True if both sizes are those of z3 anyway."""
    return all(plan.gather_ranks(mesh) == plan.reduce_ranks(mesh) == mesh.state_shards for mesh in plan.distinct_meshes)


_ONE_LEVEL = setting(param_shard_size=None, grad_shard_size=None, quantized_weights="none", quantized_gradients="none")

SHARD_LEVEL_LEGAL_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.has_shard_levels and any(strategy.zero != "z3" for strategy in plan.strategies),
        "param_shard_size and grad_shard_size (zpNgM) belong to z3, which alone shards parameters and gradients in"
        " passes",
        _ONE_LEVEL,
    ),
    Rule(
        lambda plan: plan.has_shard_levels and any(mesh.dp_replicate > 1 for mesh in plan.distinct_meshes),
        "param_shard_size and grad_shard_size (zpNgM) shard the optimizer's state over all ranks, but dp_replicate is"
        " above 1",
        _ONE_LEVEL,
    ),
    Rule(lambda plan: _misfits(plan) is not None, lambda plan: _misfits(plan) or "", _ONE_LEVEL),
    Rule(
        lambda plan: plan.has_shard_levels and _misfits(plan) is None and _is_plain(plan),
        "param_shard_size and grad_shard_size (zpNgM) are all ranks that share a stage's state: that is z3, so leave"
        " them out",
        _ONE_LEVEL,
    ),
    Rule(
        lambda plan: plan.quantized_weights != "none" and not all(map(plan.copies_params, plan.distinct_meshes)),
        "quantized_weights (qwint8) round parameters on their way to copies, which zpNgM makes with N below all ranks",
        setting(quantized_weights="none"),
    ),
    Rule(
        lambda plan: (
            plan.quantized_gradients != "none"
            and any(plan.reduce_ranks(mesh) == mesh.state_shards for mesh in plan.distinct_meshes)
        ),
        "quantized_gradients (qgint8, qgint4) round sums between groups of ranks: zpNgM has any with M below all ranks",
        setting(quantized_gradients="none"),
    ),
)
"""Combinations that have no meaning."""


def _rule(has: Callable[[Plan], bool], what: str) -> Rule:
    return Rule(lambda plan: plan.has_shard_levels and has(plan), f"zpNgM with {what}", _ONE_LEVEL)


SHARD_LEVEL_RUNTIME_RULES: tuple[Rule, ...] = (
    _rule(
        lambda plan: any(mesh.ep > 1 for mesh in plan.distinct_meshes),
        "expert parallelism (whose experts are sharded over ranks of their own)",
    ),
    _rule(lambda plan: plan.offloads_params, "oparam (whose passes gather from host memory or disk)"),
    _rule(lambda plan: plan.dynamic_context_parallel, "cpdyn (not tested yet)"),
    _rule(
        lambda plan: plan.grad_reduce_dtype != "fp32",
        "gbf16 (gradients that are reduced in two steps travel in fp32)",
    ),
    _rule(lambda plan: plan.islands > 1, "islands (not tested yet)"),
    _rule(lambda plan: not plan.is_uniform, "stages of unequal meshes (not tested yet)"),
)
"""Things that can't be beside these levels in a plan for any model."""
