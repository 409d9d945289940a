"""Makes a plan fit: which layers of each pipeline rank compute their activations again."""

from collections.abc import Callable
from itertools import groupby

from muster.cost.op_times import OpTimes
from muster.cost.own_memory import OTHER_KERNELS, own_stage
from muster.planner.balance import seconds_of
from muster.planner.layers import Option, cheapest
from muster.schedule.program import Program
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
    program: Program,
    times_of: Callable[[Plan], OpTimes],
    over_bytes: list[float],
) -> Plan | None:
    """The plan with the cheapest recompute that frees `over_bytes` on each pipeline rank; None where none frees enough.

    `plan` recomputes nothing. Ranks are independent: each frees its own memory, and the less time it takes the better,
    so that the best choice for each is the best for all.
    """
    modes = {mode: with_recompute(plan, mode) for mode in MODES}
    times = {mode: times_of(changed) for mode, changed in modes.items()}
    chosen: dict[int, str] = {}
    for rank in range(plan.pp):
        live = _live_at_peak(program, rank)
        layers: list[int] = []
        options: list[list[Option]] = []
        for stage in (stage for stage in range(plan.depth) if plan.pp_rank(stage) == rank):
            held = plan.layers(stage, model.num_layers)
            if not held:
                continue
            kept = {
                mode: own_stage(model, changed, workload, stage, OTHER_KERNELS).kept.total
                for mode, changed in modes.items()
            }
            backward_s = {mode: _backward_s(plan, times[mode], stage) for mode in MODES}
            count = len(held)
            row = [
                Option(
                    mode,
                    (backward_s[mode] - backward_s["none"]) / count,
                    (kept[mode] - kept["full"]) / count * live[stage],
                )
                for mode in MODES
            ]
            layers += held
            options += [row] * count
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


def _backward_s(plan: Plan, times: OpTimes, stage: int) -> float:
    kinds = ("I", "W") if plan.schedule_entry.splits else ("B",)
    return sum(seconds_of(times, kind, stage) for kind in kinds)


def _live_at_peak(program: Program, rank: int) -> dict[int, int]:
    """Stage → micro-batches between their forward and their backward's end when a rank keeps most."""
    live = {stage: 0 for stage, holder in enumerate(program.placement) if holder == rank}
    total = most = 0
    at_peak = dict(live)
    for (kind, stage, *_), _, _ in program.ranks[rank].get("compute", ()):
        if kind in ("F", "B", "W"):
            change = 1 if kind == "F" else -1
            live[stage] += change
            total += change
            if total > most:
                most, at_peak = total, dict(live)
    return at_peak
