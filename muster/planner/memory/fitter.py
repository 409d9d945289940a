"""Makes a plan fit: which layers of each pipeline rank compute their activations again, and which have them wait in the
host's memory."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations, groupby
from math import comb, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from muster.cost.activations import offloaded_activation_bytes
from muster.cost.memory.forecast import stage_memory_key
from muster.cost.memory.liveness import AllocationOrder
from muster.cost.memory.native_storage import native_saved_per_micro_batch
from muster.planner.bounds.pass_times import PassTimes
from muster.planner.memory.knapsack import Choice, Option, cheapest_choice
from muster.schedule.offload import CopyOverlaps
from muster.spec.model import ModelSpec
from muster.spec.plan import LayerOverride, Offload, Plan, Recompute
from muster.spec.workload import Workload

RECOMPUTE_MODES: tuple[Recompute, ...] = ("none", "elementwise", "full")

MAX_ALLOCATIONS = 25_000
"""Ways to deal the layers of a stage to what may be done with them that are all looked at; where there are more, those
with at most three at once, as many as a linear program with these limits takes."""

ROUNDING_TOLERANCE = 1e-9
"""Times that differ by no more are the same, added up in another order."""


class LayerPolicy(NamedTuple):
    """What is done with the activations of a layer."""

    recompute: Recompute
    offload: Offload = "none"

    @property
    def offloads(self) -> bool:
        """Whether they go to the host's memory."""
        return self.offload in ("activations", "all")


@dataclass(frozen=True, slots=True)
class HostLink:
    """What the activations of a plan may use of their hosts. Lists are by stage, or by pipeline rank."""

    orders: Sequence[AllocationOrder]
    """Of each rank, if all its stages offload."""
    overlapped_passes: Sequence[CopyOverlaps]
    """Of each rank, what its copies run beside."""
    copy_s: Sequence[Callable[[float], float]]
    """Of each stage, what so many bytes take one way."""
    host_budget_bytes: Sequence[float]
    """What each rank may have in its host's memory."""

    def overlapped_passes_of(self, rank: int, stage: int) -> list[tuple[tuple[str, int], int, int]]:
        """(kind, stage) of a pass, the copies of one stage of the rank beside it, how often."""
        return [
            (key, own.count(stage), count) for (key, own), count in self.overlapped_passes[rank].items() if stage in own
        ]

    def bound_s(
        self, plan: Plan, pass_times: PassTimes, micro_batches: int, copied_bytes: Mapping[int, float]
    ) -> float:
        """Seconds that a step takes at least where a micro-batch of each stage moves so many bytes.

        The n-th pass of a rank begins when the (n − 1)-th and the copies beside it are over, and the copies beside the
        n-th not before: so that between one pass and the next lies the longer of it and of them.
        """
        copy_s = {stage: self.copy_s[stage](size) for stage, size in copied_bytes.items()}
        columns = pass_times.by_kind()
        head_s = (
            pass_times.unshard_s[0]
            + np.cumsum(pass_times.forward_transfer_s + pass_times.forward_s)
            - pass_times.forward_s
        )
        best = 0.0
        for rank, beside in enumerate(self.overlapped_passes):
            waited_s = 0.0
            for ((kind, stage), copied), count in beside.items():
                copies_s = sum(copy_s.get(one, 0.0) for one in copied)
                waited_s += count * max(0.0, copies_s - float(columns[kind][stage]))
            if waited_s:
                own = [stage for stage in range(plan.stages_per_replica) if plan.pp_rank(stage) == rank]
                best = max(best, float(head_s[own[0]] + micro_batches * pass_times.busy_s()[own].sum()) + waited_s)
        return best + pass_times.per_step_s


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The layers of one stage, and what each way does to one of them."""

    layers: range
    time_s: Sequence[float]
    """By way: more than the first, for each micro-batch."""
    memory_bytes: Sequence[float]
    """By way: of all micro-batches under way, when the rank holds most."""
    copied_bytes: Sequence[int]
    """By way: of each micro-batch, to the host and back."""
    wait_s: Callable[[int], float]
    """What the rank waits for each micro-batch where so many bytes are copied; infinite where they may not be."""
    is_additive: bool
    """Whether `time_s` is known to be that of each layer, however many go a way."""

    def all_layers_s(self, policy: int) -> float:
        """What all layers take more one way, for each micro-batch."""
        return len(self.layers) * self.time_s[policy]

    def options(self, policies: Sequence[int]) -> list[Option]:
        """How many layers may go each of some ways, and whether copies are waited for, by what that takes: those that
        no other beats in time and memory."""
        dealt = self._allocations(policies)
        return self._non_dominated(dealt, dealt.time_s, np.isfinite(dealt.time_s))

    def less_offload_options(self, policies: Sequence[int], chosen: NDArray[np.int64]) -> list[Option]:
        """Of what takes no longer than one choice, by the bytes that it copies: those that no other beats in these and
        memory."""
        dealt = self._allocations(policies)
        most_s = dealt.time_s[np.flatnonzero((dealt.counts == chosen).all(axis=1))[0]]
        return self._non_dominated(dealt, dealt.copied_bytes, dealt.time_s <= most_s * (1 + ROUNDING_TOLERANCE))

    def _allocations(self, policies: Sequence[int]) -> "PolicyAllocations":
        counts = _allocation_counts(len(self.layers), len(policies))
        time_s, memory, copied = (
            counts @ np.array([column[way] for way in policies])
            for column in (self.time_s, self.memory_bytes, self.copied_bytes)
        )
        sizes, places = np.unique(copied, return_inverse=True)
        waited_s = np.array([self.wait_s(size) for size in sizes.tolist()])[places.reshape(-1)]
        return PolicyAllocations(counts, time_s + waited_s, memory, copied, waited_s > 0)

    def _non_dominated(
        self, allocations: "PolicyAllocations", cost: NDArray, wanted: NDArray[np.bool_]
    ) -> list[Option]:
        found, least = [], inf
        for index in np.lexsort((allocations.memory_bytes, cost)).tolist():
            if allocations.memory_bytes[index] < least and wanted[index]:
                least = allocations.memory_bytes[index]
                name = allocations.counts[index], bool(allocations.waits[index])
                found.append(Option(name, float(cost[index]), float(least)))
        return found


class PolicyAllocations(NamedTuple):
    """All ways to deal the layers of a stage, a row each."""

    counts: NDArray[np.int64]
    """How many go each way."""
    time_s: NDArray
    """As `Layers.time_s`, and what is waited for copies."""
    memory_bytes: NDArray
    copied_bytes: NDArray
    waits: NDArray[np.bool_]


class MemoryFitter:
    """Gives the layers of one plan that doesn't fit the cheapest of some ways that make it.

    Ranks are independent: each frees its own memory, and the less time it takes the better, so that the best choice for
    each is the best for all. Copies take what they last longer than the passes that they run beside, which is what a
    rank waits for once the pipeline is full.
    """

    def __init__(
        self, plan: Plan, num_layers: int, policies: Sequence[LayerPolicy], stages: Sequence[StageLayers]
    ) -> None:
        """`plan` does the first of `ways` everywhere, and `stages` are its."""
        self.plan, self.policies, self.num_layers = plan, policies, num_layers
        self.ranks: list[list[StageLayers]] = [[] for _ in range(plan.pp)]
        for stage, layers in enumerate(stages):
            self.ranks[plan.pp_rank(stage)].append(layers)
        self.waits = False
        """Whether the last plan that was given waits for copies."""
        self.freed_bytes: list[float] = []
        """What it frees on each pipeline rank, by what is known here."""
        self._options: dict[tuple[int, ...], list[list[list[Option]]]] = {}

    def fit(self, excess_bytes: Sequence[float], policies: Sequence[LayerPolicy]) -> Plan | None:
        """The plan with the cheapest of these ways for each layer that frees `over_bytes` on each pipeline rank; None
        where none frees enough."""
        choices = self._choices(excess_bytes, policies)
        return None if choices is None else self._plan_of(choices, policies)

    def fit_with_less_offload(self, excess_bytes: Sequence[float], policies: Sequence[LayerPolicy]) -> Plan | None:
        """The plan that `fitted` gives for as much, but of all that take no stage longer the one that copies least.

        To copy less makes no pass wait for more, so that it is no slower, and what is copied for nothing stays.
        """
        choices = self._choices(excess_bytes, policies)
        if choices is None:
            return None
        places, found = tuple(map(self.policies.index, policies)), list[Choice]()
        for own, choice, over in zip(self.ranks, choices, excess_bytes, strict=True):
            options = [
                layers.less_offload_options(places, name[0]) for layers, name in zip(own, choice.labels, strict=True)
            ]
            found.append(cheapest_choice(options, _unchanged_bytes(own) - over) or choice)
        return self._plan_of(found, policies)

    def _plan_of(self, choices: Sequence[Choice], policies: Sequence[LayerPolicy]) -> Plan:
        """With what was chosen for each pipeline rank."""
        chosen: dict[int, LayerPolicy] = {}
        self.waits, self.freed_bytes = False, []
        for own, choice in zip(self.ranks, choices, strict=True):
            self.freed_bytes.append(_unchanged_bytes(own) - choice.memory_bytes)
            for layers, (counts, waits) in zip(own, choice.labels, strict=True):
                self.waits = self.waits or waits
                names = [way for way, count in zip(policies, counts, strict=True) for _ in range(count)]
                chosen |= dict(zip(layers.layers, names, strict=True))
        return with_layer_policies(self.plan, chosen, self.policies, self.num_layers)

    @property
    def full_recompute(self) -> int:
        """The way that recomputes most and copies no more than the first; its place among `ways`."""
        return self.policies.index(self.policies[-1]._replace(offload=self.policies[0].offload))

    def added_s(self, excess_bytes: Sequence[float]) -> list[float] | None:
        """What each pipeline rank takes more for each micro-batch at least where it frees `over_bytes` or more, or goes
        `all_again`; 0 where that is unknown, and None where some rank can't free so much."""
        choices = self._choices(excess_bytes, self.policies)
        if choices is None:
            return None
        found, options = list[float](), self._options[tuple(range(len(self.policies)))]
        for own, choice, of_rank in zip(self.ranks, choices, options, strict=True):
            # Copies are waited for less beside passes that recompute: both take the longer of the two at least.
            waits = any(option.label[1] for of_stage in of_rank for option in of_stage)
            adds_up = self.plan.pipeline_replicas == 1 and all(layers.is_additive for layers in own)
            least_s = min(
                choice.time_s / (2 if waits else 1), sum(layers.all_layers_s(self.full_recompute) for layers in own)
            )
            found.append(least_s if adds_up else 0.0)
        return found

    def _choices(self, excess_bytes: Sequence[float], policies: Sequence[LayerPolicy]) -> list[Choice] | None:
        """The cheapest for each pipeline rank; None where some has none."""
        places = tuple(map(self.policies.index, policies))
        if places not in self._options:
            self._options[places] = [[layers.options(places) for layers in own] for own in self.ranks]
        found = []
        for own, options, over in zip(self.ranks, self._options[places], excess_bytes, strict=True):
            choice = cheapest_choice(options, _unchanged_bytes(own) - over)
            if choice is None:
                return None
            found.append(choice)
        return found


def _unchanged_bytes(own: Sequence[StageLayers]) -> float:
    """What the layers of a rank hold the first way."""
    return sum(layers.memory_bytes[0] * len(layers.layers) for layers in own)


def with_policy(plan: Plan, policy: LayerPolicy) -> Plan:
    """The plan with one way for all layers."""
    strategy = plan.default_strategy.model_copy(update=policy._asdict())
    return plan.model_copy(update={"default_strategy": strategy, "overrides": ()})


def with_layer_policies(
    plan: Plan, chosen: Mapping[int, LayerPolicy], policies: Sequence[LayerPolicy], num_layers: int
) -> Plan:
    """The plan with a way for each layer; the commonest is its default."""
    own = [chosen.get(layer, policies[0]) for layer in range(num_layers)]
    default = max(policies, key=own.count)
    changed = with_policy(plan, default)
    runs, start = [], 0
    for way, group in groupby(own):
        count = len(list(group))
        if way != default:
            strategy = changed.default_strategy.model_copy(update=way._asdict())
            runs.append(LayerOverride(start=start, count=count, strategy=strategy))
        start += count
    return changed.model_copy(update={"overrides": tuple(runs)})


@lru_cache(maxsize=256)
def _allocation_counts(num_layers: int, num_policies: int) -> NDArray[np.int64]:
    """All ways to deal so many layers, a row each: how many go each way; most by the first way first."""
    at_once = (
        num_policies
        if comb(num_layers + num_policies - 1, num_policies - 1) <= MAX_ALLOCATIONS
        else min(3, num_policies)
    )
    bars = np.array(list(combinations(range(num_layers + at_once - 1), at_once - 1)), np.int64)
    bars = bars.reshape(-1, at_once - 1)
    ends = np.pad(bars, ((0, 0), (1, 1)), constant_values=-1)
    ends[:, -1] = num_layers + at_once - 1
    dealt = np.diff(ends) - 1
    tables = []
    for chosen in combinations(range(num_policies), at_once):
        tables.append(np.zeros((len(dealt), num_policies), np.int64))
        tables[-1][:, chosen] = dealt
    return np.unique(np.concatenate(tables), axis=0)[::-1]


def stage_layers(
    plan: Plan,
    model: ModelSpec,
    workload: Workload,
    orders: Sequence[AllocationOrder],
    pass_times_of: Callable[[Plan], PassTimes],
    policies: Sequence[LayerPolicy],
    host: HostLink | None,
) -> list[StageLayers]:
    """Those of each stage of a plan that does the first of `ways` everywhere; `orders` are its."""
    kept = _saved_bytes(plan, model, workload, policies)
    more_s, passes_s, adds_up = _recompute_times(plan, model, pass_times_of, policies)
    micro_batches = plan.num_micro_batches(workload)
    found = []
    for stage in range(plan.stages_per_replica):
        rank, sizes = plan.pp_rank(stage), kept[stage]
        own = host.overlapped_passes_of(rank, stage) if host else []
        live = resident = orders[rank].live_micro_batches[stage]
        copied, waits = [0] * len(policies), _no_wait
        if host and own:
            resident = host.orders[rank].on_device_micro_batches[stage]
            copied = [round(sizes[way.recompute]) if way.offloads else 0 for way in policies]
            beside = [(passes_s(*key), copies, count / micro_batches) for key, copies, count in own]
            share = host.host_budget_bytes[rank] / plan.placement[: plan.stages_per_replica].count(rank)
            waits = partial(_copy_wait_s, host.copy_s[stage], beside, share / max(1, live))
        elif not all(way.offloads for way in policies):
            # Nothing lies long enough to be copied: no layer is said to be.
            copied, waits = [int(way.offloads) for way in policies], _forbidden_copy_s
        memory = [sizes[way.recompute] * (resident if way.offloads else live) for way in policies]
        held = plan.layers(stage, model.num_layers)
        found.append(StageLayers(held, [more_s[way][stage] for way in policies], memory, copied, waits, adds_up[stage]))
    return found


def _no_wait(_: int) -> float:
    """Nothing is copied, and nothing waited for."""
    return 0.0


def _forbidden_copy_s(copied_bytes: float) -> float:
    """Copies that may not be."""
    return inf if copied_bytes else 0.0


def _copy_wait_s(
    copy_s: Callable[[float], float],
    overlapped: Sequence[tuple[float, int, float]],
    host_budget_bytes: float,
    copied_bytes: int,
) -> float:
    """`Layers.waited_s` of a stage; `beside`: what a pass takes, copies beside it, and how often for a micro-batch."""
    if copied_bytes > host_budget_bytes:
        return inf
    time_s = copy_s(copied_bytes)
    return sum(part * max(0.0, copies * time_s - pass_s) for pass_s, copies, part in overlapped)


def _saved_bytes(
    plan: Plan, model: ModelSpec, workload: Workload, policies: Sequence[LayerPolicy]
) -> list[dict[Recompute, float]]:
    """Of each stage, by the kinds of recompute among `ways`: what a layer keeps of a micro-batch, in bytes."""
    wanted: set[Recompute] = {"full", *(way.recompute for way in policies)}
    modes: dict[Recompute, Plan] = {mode: with_policy(plan, LayerPolicy(mode)) for mode in wanted}
    known: dict[Hashable, dict[Recompute, float]] = {}
    found = []
    for stage in range(plan.stages_per_replica):
        kind = stage_memory_key(model, plan, stage)
        if kind not in known:
            own = {
                mode: native_saved_per_micro_batch(model, changed, workload, stage).total
                for mode, changed in modes.items()
            }
            each = max(1, len(plan.layers(stage, model.num_layers)))
            least = offloaded_activation_bytes(
                model, with_policy(plan, LayerPolicy("full", "activations")), workload, stage
            )
            known[kind] = {mode: (own[mode] - own["full"] + least) / each for mode in modes}
        found.append(known[kind])
    return found


def _recompute_times(
    plan: Plan, model: ModelSpec, pass_times_of: Callable[[Plan], PassTimes], policies: Sequence[LayerPolicy]
) -> tuple[dict[LayerPolicy, list[float]], Callable[[str, int], float], list[bool]]:
    """By way and stage: the time that it adds to each layer's backward; what each pass takes the first way; and whether
    a stage's times add up."""
    of_mode = {way.recompute: pass_times_of(with_policy(plan, LayerPolicy(way.recompute))) for way in policies}
    backward_s = {
        mode: (found.backward_s + found.weight_backward_s)[: plan.stages_per_replica] for mode, found in of_mode.items()
    }
    first = of_mode[policies[0].recompute]
    each = np.maximum(1, [len(plan.layers(stage, model.num_layers)) for stage in range(plan.stages_per_replica)])
    columns = first.by_kind()
    base_s = backward_s[policies[0].recompute]
    return (
        {way: ((backward_s[way.recompute] - base_s) / each).tolist() for way in policies},
        lambda kind, stage: float(columns[kind][stage]),
        np.logical_and.reduce([found.is_additive for found in of_mode.values()]).tolist(),
    )
