"""Makes a plan fit: which layers of each pipeline rank compute their activations again."""

from collections.abc import Callable, Hashable, Sequence
from itertools import groupby

from muster.cost.forecast import kind_of_stage
from muster.cost.own_memory import own_kept
from muster.cost.walk import RankOrder
from muster.planner.bound import PassSeconds
from muster.planner.layers import Option, cheapest
from muster.spec.model import ModelSpec
from muster.spec.plan import LayerRun, Plan, Recompute
from muster.spec.workload import Workload

MODES: tuple[Recompute, ...] = ("none", "selective", "full")


def with_recompute(plan: Plan, mode: Recompute) -> Plan:
    """The plan with one mode for all layers."""
    strategy = plan.default_strategy.model_copy(update={"recompute": mode})
    return plan.model_copy(update={"default_strategy": strategy, "overrides": ()})


def fitted(
    plan: Plan,
    model: ModelSpec,
    workload: Workload,
    orders: Sequence[RankOrder],
    seconds_of: Callable[[Plan], PassSeconds],
    over_bytes: list[float],
) -> Plan | None:
    """The plan with the cheapest recompute that frees `over_bytes` on each pipeline rank; None where none frees enough.

    `plan` recomputes nothing. Ranks are independent: each frees its own memory, and the less time it takes the better,
    so that the best choice for each is the best for all.
    """
    layer = _layer_options(plan, model, workload, seconds_of)
    chosen: dict[int, str] = {}
    for rank in range(plan.pp):
        live = orders[rank].live
        layers: list[int] = []
        options: list[list[Option]] = []
        for stage in (stage for stage in range(plan.depth) if plan.pp_rank(stage) == rank):
            held = plan.layers(stage, model.num_layers)
            layers += held
            options += [[Option(mode, time_s, kept * live[stage]) for mode, time_s, kept in layer[stage]]] * len(held)
        none_bytes = sum(row[0].memory_bytes for row in options)
        choice = cheapest(options, none_bytes - over_bytes[rank])
        if choice is None:
            return None
        chosen |= dict(zip(layers, choice.names, strict=True))
    return with_layer_modes(plan, chosen, model.num_layers)


def with_layer_modes(plan: Plan, modes: dict[int, str], num_layers: int) -> Plan:
    """The plan with a mode for each layer; the commonest is its default."""
    names = [modes.get(layer, "none") for layer in range(num_layers)]
    default = max(MODES, key=names.count)
    changed = with_recompute(plan, default)
    runs, start = [], 0
    for name, group in groupby(names):
        count = len(list(group))
        if name != default:
            strategy = changed.default_strategy.model_copy(update={"recompute": name})
            runs.append(LayerRun(start=start, count=count, strategy=strategy))
        start += count
    return changed.model_copy(update={"overrides": tuple(runs)})


def _layer_options(
    plan: Plan, model: ModelSpec, workload: Workload, seconds_of: Callable[[Plan], PassSeconds]
) -> list[list[tuple[str, float, float]]]:
    """Of each stage, by mode: the time that it adds to each layer's backward, and what each keeps of a micro-batch
    beyond the mode that keeps least, in bytes."""
    modes = {mode: with_recompute(plan, mode) for mode in MODES}
    seconds = {mode: seconds_of(changed) for mode, changed in modes.items()}
    backward_s = {mode: found.inputs + found.weights for mode, found in seconds.items()}
    kept: dict[Hashable, dict[str, int]] = {}
    found = []
    for stage in range(plan.depth):
        count = len(plan.layers(stage, model.num_layers))
        kind = kind_of_stage(model, plan, stage)
        if kind not in kept:
            kept[kind] = {mode: own_kept(model, changed, workload, stage).total for mode, changed in modes.items()}
        own, each = kept[kind], max(1, count)
        more_s = {mode: float(backward_s[mode][stage] - backward_s["none"][stage]) for mode in MODES}
        found.append([(mode, more_s[mode] / each, (own[mode] - own["full"]) / each) for mode in MODES])
    return found
