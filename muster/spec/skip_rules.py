"""Rules for plans whose micro-batches have paths of their own (schedules skippipe and checkfree-plus)."""

from collections.abc import Callable, Iterator

from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.rules import Rule, setting
from muster.spec.schedules import DEFAULT_SCHEDULE

NO_SKIPS = {name: Plan.model_fields[name].default for name in ("skip_ratio", "min_visits", "swaps_stages")}
"""Fields of a plan whose micro-batches pass through all stages."""
_ORDINARY = setting(schedule=DEFAULT_SCHEDULE, pinned_schedule=None, **NO_SKIPS)


def _given(plan: Plan) -> list[str]:
    return [name for name, default in NO_SKIPS.items() if getattr(plan, name) != default]


SKIP_LEGAL_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: not plan.schedule_entry.skips_stages and bool(_given(plan)),
        lambda plan: f"{_given(plan)[0]} is of schedule skippipe, not of {plan.schedule}: leave it out",
        setting(**NO_SKIPS),
    ),
    Rule(
        lambda plan: plan.schedule_entry.has_paths and plan.pp == 1,
        lambda plan: f"schedule {plan.schedule} lets micro-batches take paths through a pipeline, but pp is 1",
        _ORDINARY,
    ),
    Rule(
        lambda plan: plan.schedule_entry.has_paths and plan.vocab_parallel,
        lambda plan: (
            f"schedule {plan.schedule} lets micro-batches take different paths, but vocab_parallel needs all ranks for"
            " each of them in turn"
        ),
        _ORDINARY,
    ),
    Rule(
        lambda plan: plan.schedule_entry.has_paths and plan.sequence_slices > 1,
        lambda plan: f"schedule {plan.schedule} has no order for slices of sequences",
        _ORDINARY,
    ),
    Rule(
        lambda plan: plan.schedule_entry.swaps_end_stages and plan.pp > 1 and (plan.pp < 4 or plan.pp == 5),
        lambda plan: (
            f"schedule {plan.schedule} swaps the first two stages with layers, and the last two, but pp is {plan.pp}:"
            " expected 4, where they are the same two, or 6 or more"
        ),
        _ORDINARY,
    ),
    Rule(
        lambda plan: plan.schedule_entry.swaps_end_stages and not _has_bare_ends(plan),
        lambda plan: (
            f"schedule {plan.schedule} needs a first stage with the embedding alone, a last one with the head alone,"
            " and layers in all others: give each stage's number of layers, as in l0.2.2.0"
        ),
        _ORDINARY,
    ),
)


def _has_bare_ends(plan: Plan) -> bool:
    """Return whether the first and the last stage have no layers, and all others have some."""
    counts = [stage.layers for stage in plan.stages]
    return len(counts) > 2 and not counts[0] and not counts[-1] and all(counts[1:-1])


def pinned_path_faults(plan: Plan) -> Iterator[str]:
    """Yield a sentence where the paths pinned in a plan aren't those of its schedule."""
    order = plan.pinned_schedule
    if order is None:
        return
    again = "leave pinned_schedule out to search again"
    if order.paths and not plan.schedule_entry.has_paths:
        yield f"its pinned_schedule has paths, which schedule {plan.schedule} doesn't have: {again}"
    if not order.paths and plan.schedule_entry.has_paths:
        yield f"its pinned_schedule has no paths, which schedule {plan.schedule} needs: {again}"
    for path in order.stage_paths:
        skipped = int(plan.skip_ratio * plan.num_stages + 0.5)
        if not set(path) <= set(range(plan.num_stages)):
            shown = ".".join(map(str, path))
            yield f"its pinned_schedule has a path {shown}, but stages are 0 to {plan.num_stages - 1}: {again}"
            return
        if len(path) != plan.num_stages - skipped:
            yield (
                f"its pinned_schedule has a path of {len(path)} stages, but skip_ratio {plan.skip_ratio:g} skips"
                f" {skipped} of {plan.num_stages}: {again}"
            )
            return


def _rule(has: Callable[[Plan], bool], what: str) -> Rule:
    return Rule(
        lambda plan: plan.schedule_entry.has_paths and has(plan),
        lambda plan: f"schedule {plan.schedule} with {what}",
        _ORDINARY,
    )


_UNTESTED = "(not tested yet)"

SKIP_RUNTIME_RULES: tuple[Rule, ...] = (
    _rule(lambda plan: not plan.is_uniform, f"stages that have ranks or degrees of their own {_UNTESTED}"),
    _rule(lambda plan: plan.islands > 1, f"islands {_UNTESTED}"),
    _rule(lambda plan: plan.uses_axis("cp"), f"context parallelism {_UNTESTED}"),
    _rule(lambda plan: plan.post_validation, f"post_validation {_UNTESTED}"),
    _rule(lambda plan: plan.cuda_graphs, f"cuda_graphs {_UNTESTED}"),
    _rule(
        lambda plan: any(
            (s.offload, s.offload_optimizer, s.offload_param) != ("none", "none", "none") for s in plan.strategies
        ),
        "offload (not tested yet, and the host updates parameters before gradients are weighted)",
    ),
)
"""Things that the runtime can't do where micro-batches have paths of their own."""


def skip_rules_of(model: ModelSpec) -> tuple[Rule, ...]:
    """Return the rules for a model whose gradients or loads are those of all micro-batches, or whose layers need those
    before them."""
    of_all = model.moe, model.adapter, model.mtp_layers, model.architecture, model.other_stream
    what = "experts, adapters, multi-token prediction, a ladder residual, sub-layers side by side or a plugin's layers"
    return (_rule(lambda plan: True, f"{what} {_UNTESTED}"),) if any(of_all) else ()
