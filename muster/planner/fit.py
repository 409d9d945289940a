"""Makes a plan fit: which layers of each pipeline rank compute their activations again."""

from collections.abc import Callable, Hashable, Sequence
from itertools import groupby

import numpy as np

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
    kept = _kept(plan, model, workload)
    stages_of: list[list[int]] = [[] for _ in range(plan.pp)]
    for stage in range(plan.depth):
        stages_of[plan.pp_rank(stage)].append(stage)
    layers = [plan.layers(stage, model.num_layers) for stage in range(plan.depth)]
    none_bytes = [
        sum(kept[stage]["none"] * order.live[stage] * len(layers[stage]) for stage in own)
        for own, order in zip(stages_of, orders, strict=True)
    ]
    if any(over > most for over, most in zip(over_bytes, none_bytes, strict=True)):
        return None
    more_s = _more_seconds(plan, [len(held) for held in layers], seconds_of)
    chosen: dict[int, str] = {}
    for rank, own in enumerate(stages_of):
        options: list[list[Option]] = []
        for stage in own:
            live = orders[rank].live[stage]
            row = [Option(mode, more_s[mode][stage], kept[stage][mode] * live) for mode in MODES]
            options += [row] * len(layers[stage])
        choice = cheapest(options, none_bytes[rank] - over_bytes[rank])
        if choice is None:
            return None
        chosen |= dict(zip((layer for stage in own for layer in layers[stage]), choice.names, strict=True))
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


def _kept(plan: Plan, model: ModelSpec, workload: Workload) -> list[dict[str, float]]:
    """Of each stage, by mode: what a layer keeps of a micro-batch beyond the mode that keeps least, in bytes."""
    modes = {mode: with_recompute(plan, mode) for mode in MODES}
    known: dict[Hashable, dict[str, float]] = {}
    found = []
    for stage in range(plan.depth):
        kind = kind_of_stage(model, plan, stage)
        if kind not in known:
            own = {mode: own_kept(model, changed, workload, stage).total for mode, changed in modes.items()}
            each = max(1, len(plan.layers(stage, model.num_layers)))
            known[kind] = {mode: (own[mode] - own["full"]) / each for mode in MODES}
        found.append(known[kind])
    return found


def _more_seconds(
    plan: Plan, num_layers: Sequence[int], seconds_of: Callable[[Plan], PassSeconds]
) -> dict[str, list[float]]:
    """By mode and stage: the time that it adds to each layer's backward."""
    backward_s = {}
    for mode in MODES:
        seconds = seconds_of(with_recompute(plan, mode))
        backward_s[mode] = (seconds.inputs + seconds.weights)[: plan.depth]
    each = np.maximum(1, num_layers)
    return {mode: ((time_s - backward_s["none"]) / each).tolist() for mode, time_s in backward_s.items()}
