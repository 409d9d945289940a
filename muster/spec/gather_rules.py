"""Rules for plans that gather parameters for units of passes under z3 (`active1`), or beside the optimizer step under
z1 and z2 (`stepgather`)."""

from collections.abc import Callable

from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.rules import Rule, in_every_layer, setting

_EVERY_PASS = setting(max_active_stages=None)
_AFTER_STEP = setting(overlap_param_gather_with_optimizer_step=False)
_Z1 = in_every_layer(lambda strategy: strategy.model_copy(update={"zero": "z1"}))


def _shares_no_state(plan: Plan) -> bool:
    return all(mesh.state_shards == 1 for mesh in plan.distinct_meshes)


def _with_z1(plan: Plan) -> Plan:
    """Return the plan under z1, which `stepgather` is for; without `stepgather` where other parts rule z1 out."""
    needs_z3 = plan.max_active_stages is not None or plan.has_shard_levels
    return _AFTER_STEP(plan) if needs_z3 or _shares_no_state(plan) else _Z1(plan)


GATHER_LEGAL_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.max_active_stages is not None and any(strategy.zero != "z3" for strategy in plan.strategies),
        "max_active_stages (activeN) belongs to z3, which alone drops parameters before the step ends",
        _EVERY_PASS,
    ),
    Rule(
        lambda plan: plan.max_active_stages is not None and plan.max_active_stages >= plan.vpp,
        lambda plan: (
            f"max_active_stages {plan.max_active_stages} keeps the parameters of all {plan.vpp} stages of a rank"
            " gathered: expected fewer, or z1, which does so"
            if plan.vpp > 1
            else "max_active_stages (activeN) needs several stages on each pipeline rank (ppNvK), which have one: leave"
            " it out"
        ),
        _EVERY_PASS,
    ),
    Rule(
        lambda plan: plan.max_active_stages is not None and plan.has_shard_levels,
        "max_active_stages (activeN) gathers parameters from all ranks for units of passes, zpNgM from few for each",
        _EVERY_PASS,
    ),
    Rule(
        lambda plan: (
            plan.overlap_param_gather_with_optimizer_step and any(strategy.zero == "z3" for strategy in plan.strategies)
        ),
        "stepgather is for z1 and z2, under which parameters are gathered once a step; z3 gathers them in every pass",
        _with_z1,
    ),
    Rule(
        lambda plan: plan.overlap_param_gather_with_optimizer_step and _shares_no_state(plan),
        "stepgather is for parameters whose optimizer state ranks share, but dp_shard and cp are 1",
        _AFTER_STEP,
    ),
)
"""Combinations that have no meaning."""


def _skips_or_swaps(plan: Plan) -> bool:
    return plan.skip_ratio > 0 or plan.schedule_entry.swaps_end_stages


_BESIDE_STEP: tuple[tuple[Callable[[Plan], bool], str], ...] = (
    (
        lambda plan: plan.offloads_params or any(one.offload_optimizer != "none" for one in plan.strategies),
        "oparam or oopt (whose updates have an order of their own)",
    ),
    (lambda plan: plan.schedule_entry.is_asynchronous, "an asynchronous schedule (whose weights have versions)"),
    (lambda plan: plan.post_validation, "post_validation (whose updates may be taken back)"),
    (lambda plan: plan.islands > 1, "islands (whose outer steps change parameters behind the step)"),
    (lambda plan: plan.cuda_graphs, "cuda_graphs (whose passes keep their parameters in place)"),
    (lambda plan: plan.vocab_parallel, "vocab_parallel (not tested yet)"),
    (lambda plan: plan.dynamic_context_parallel, "cpdyn (not tested yet)"),
    (_skips_or_swaps, "micro-batches that skip or swap stages (not tested yet)"),
)
"""Things that can't be beside gathers during the optimizer step, each with a few words."""


def _rule(has: Callable[[Plan], bool], what: str) -> Rule:
    return Rule(lambda plan: plan.max_active_stages is not None and has(plan), f"activeN with {what}", _EVERY_PASS)


GATHER_RUNTIME_RULES: tuple[Rule, ...] = (
    _rule(lambda plan: plan.pipeline_replicas > 1, "two replicas of the model (not tested yet)"),
    _rule(
        lambda plan: any(mesh.ep > 1 for mesh in plan.distinct_meshes),
        "expert parallelism (not tested yet)",
    ),
    _rule(
        lambda plan: plan.offloads_params or any(one.offload_optimizer != "none" for one in plan.strategies),
        "oparam or oopt (not tested yet)",
    ),
    _rule(lambda plan: plan.dynamic_context_parallel, "cpdyn (not tested yet)"),
    _rule(lambda plan: plan.cuda_graphs, "cuda_graphs (whose passes keep their parameters in place)"),
    _rule(lambda plan: plan.post_validation, "post_validation (not tested yet)"),
    _rule(_skips_or_swaps, "micro-batches that skip or swap stages (not tested yet)"),
    _rule(lambda plan: plan.islands > 1, "islands (not tested yet)"),
    *(
        Rule(
            lambda plan, has=has: plan.overlap_param_gather_with_optimizer_step and has(plan),  # type: ignore[misc]
            f"stepgather with {what}",
            _AFTER_STEP,
        )
        for has, what in _BESIDE_STEP
    ),
)
"""Things that can't be beside such units, or such gathers, in a plan for any model."""


def gather_rules_of(model: ModelSpec) -> tuple[Rule, ...]:
    """Return the rules of plans for a model whose parameters can't be updated bucket by bucket."""
    parts = (
        (model.moe is not None, "experts (whose biases move behind the update)"),
        (model.adapter is not None, "an adapter (not tested yet)"),
    )
    return tuple(
        Rule(lambda plan: plan.overlap_param_gather_with_optimizer_step, f"stepgather with {what}", _AFTER_STEP)
        for is_there, what in parts
        if is_there
    )
