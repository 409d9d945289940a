"""Plans, models and keys that zeroth-order training (`optim.name: mezo`) can't have, since it has no backward."""

from collections.abc import Callable

from muster.config.optimizer_state import is_zeroth_order
from muster.config.run_config import RunConfig
from muster.spec.errors import InfeasibleError
from muster.spec.pass_pairs import has_tp_pairs
from muster.spec.plan import Plan
from muster.spec.tp_overlap_rules import has_domino


def _keeps_activations(plan: Plan) -> bool:
    return any(strategy.offload != "none" for strategy in plan.strategies)


def _offloads_state_alone(plan: Plan) -> bool:
    return any(one.offload_optimizer != "none" and one.offload_param == "none" for one in plan.strategies)


_PLANS: tuple[tuple[Callable[[Plan], bool], str, str], ...] = (
    (_keeps_activations, "no activations to keep in host memory or on disk", "leave oact out of the plan"),
    (
        _offloads_state_alone,
        "no optimizer state to keep off the device",
        "leave oopt out of the plan, or keep parameters there, too (oparam)",
    ),
    (lambda plan: plan.compile is True, "blocks whose parameters are replaced within a step", "leave compile out"),
    (lambda plan: plan.cuda_graphs, "passes whose parameters lie elsewhere in each step", "leave cuda_graphs out"),
    (lambda plan: plan.post_validation, "no gradients to validate after a step", "leave pv out of the plan"),
    (lambda plan: plan.pipeline_replicas > 1, "no backwards for which two replicas are", "take another schedule"),
    (lambda plan: plan.islands > 1, "not been tested with islands yet", "leave isl out of the plan"),
    (lambda plan: plan.vocab_parallel, "not been tested with vocab_parallel yet", "leave vocab out of the plan"),
    (lambda plan: plan.dynamic_context_parallel, "not been tested with cpdyn yet", "leave cpdyn out of the plan"),
    (lambda plan: plan.sequence_slices > 1, "not been tested with sequence_slices yet", "leave slice out of the plan"),
    (lambda plan: plan.sequence_tiles > 1, "no backward that tiles would make smaller", "leave tile out of the plan"),
    (has_domino, "no backward whose slices take turns", "leave domino out of the plan"),
    (has_tp_pairs, "no backward that takes turns with a forward", "leave tppairs out of the plan"),
    (lambda plan: plan.precision == "fp8", "not been tested in fp8 yet", "take bf16"),
    (lambda plan: not plan.is_uniform, "not been tested with unequal stages yet", "give all stages one mesh"),
)
"""Properties of a plan; what zeroth-order training has for them; what to do."""


def require_zeroth_order_runs(config: RunConfig) -> None:
    """Raise InfeasibleError where a zeroth-order run has a plan, a model or a key that it can't have."""
    if not is_zeroth_order(config.optim):
        return
    plan, model, train = config.parallel, config.model, config.train
    found = [(what, remedy) for has, what, remedy in _PLANS if has(plan)]
    found += [
        (what, "take another model, or another optimizer")
        for has, what in (
            (model.moe is not None, "not been tested with experts yet"),
            (model.mtp_layers > 0, "not been tested with multi-token prediction yet"),
            (model.other_stream is not None, f"not been tested with {model.other_stream} yet"),
            (model.architecture is not None, "not been tested with a plugin's layers yet"),
        )
        if has
    ]
    if model.adapter is not None and model.adapter.changes_weights:
        found.append(("no gradients for hd_pissa", "take another kind of adapter"))
    found += [
        (f"no gradients for train.{key}", f"leave train.{key} out")
        for key in ("loss", "training_step", "delayed_update", "update_in_backward")
        if getattr(train, key)
    ]
    if config.optim.clip_by_previous_norm:
        found.append(("no gradient norm for optim.clip_by_previous_norm", "leave it out"))
    if config.optim.perturbation_parallel:
        found += _against_pairs(plan)
    if found:
        what, remedy = found[0]
        raise InfeasibleError(f"optim.name {config.optim.name} has {what}: {remedy}")


def _against_pairs(plan: Plan) -> list[tuple[str, str]]:
    """Return what is against perturbation parallelism."""
    ranks = plan.mesh(0).dp_size
    if ranks % 2:
        return [
            (
                f"pairs of data-parallel ranks under perturbation_parallel, but the plan has {ranks}",
                f"take dp{ranks + 1}, or leave optim.perturbation_parallel out",
            )
        ]
    if plan.uneven_micro_batches:
        what = "equally many micro-batches on both ranks of a pair under perturbation_parallel"
        return [(what, "leave uneven_micro_batches out")]
    return []
