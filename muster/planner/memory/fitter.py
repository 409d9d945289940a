"""Fits a plan into memory: the layers of each pipeline rank that recompute their activations or offload them to the
host.

Each rank solves a knapsack: for each of its stages, how many layers get which policy, in the least time that frees what
the rank is over. The time of a policy is what it adds to a backward, and what the rank waits for its copies; the memory
is that of all micro-batches in flight at the rank's peak.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import combinations, groupby
from math import comb, inf
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from muster.config.optim_config import OptimConfig
from muster.cost.activations import offloaded_activation_bytes
from muster.cost.memory.forecast import stage_memory_key
from muster.cost.memory.liveness import AllocationOrder
from muster.cost.memory.native_storage import native_saved_per_micro_batch
from muster.planner.bounds.pass_times import PassTimes
from muster.planner.memory.knapsack import Choice, Option, cheapest_choice
from muster.schedule.offload import CopyOverlaps
from muster.spec.layer_strategy import LayerOverride, Offload, Recompute
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload

RECOMPUTE_MODES: tuple[Recompute, ...] = ("none", "elementwise", "full")

MAX_ALLOCATIONS = 25_000
"""Allocations of a stage's layers to policies that are all looked at. Where there are more, only those with three
policies at most: as many as a linear program with these two limits needs."""

ROUNDING_TOLERANCE = 1e-9
"""Relative difference below which two times may be the same sum, added in another order."""


class LayerPolicy(NamedTuple):
    """Recompute and offload of a layer's activations."""

    recompute: Recompute
    offload: Offload = "none"

    @property
    def offloads(self) -> bool:
        """True if activations go to the host's memory."""
        return self.offload == "activations"


@dataclass(frozen=True, slots=True)
class HostLink:
    """The copies to and from the host that a plan's activations may use, by stage or by pipeline rank."""

    orders: Sequence[AllocationOrder]
    """Allocations and frees of each rank if all its stages offload."""
    overlapped_passes: Sequence[CopyOverlaps]
    """Passes that the copies of each rank are overlapped with."""
    copy_s: Sequence[Callable[[float], float]]
    """Seconds of a copy of so many bytes one way, by stage."""
    host_budget_bytes: Sequence[float]
    """Bytes that each rank may hold in its host's memory."""

    def overlapped_passes_of(self, rank: int, stage: int) -> list[tuple[tuple[str, int], int, int]]:
        """Return (kind, stage) of a pass, the copies of one stage that it overlaps, and how often, for a rank."""
        return [
            (key, copied.count(stage), count)
            for (key, copied), count in self.overlapped_passes[rank].items()
            if stage in copied
        ]

    def bound_s(
        self, plan: Plan, pass_times: PassTimes, micro_batches: int, copied_bytes: Mapping[int, float]
    ) -> float:
        """Return the seconds that a step takes at least where a micro-batch of each stage copies so many bytes.

        The n-th pass of a rank begins when the (n − 1)-th and the copies overlapped with it are over, and the copies of
        the n-th not before. So between the begins of two passes lies the longer of the pass and its copies.
        """
        copy_s = {stage: self.copy_s[stage](size) for stage, size in copied_bytes.items()}
        columns = pass_times.by_kind()
        forward_ends_s = np.cumsum(pass_times.forward_transfer_s + pass_times.forward_s)
        head_s = pass_times.unshard_s[0] + forward_ends_s - pass_times.forward_s
        longest_s = 0.0
        for rank, overlaps in enumerate(self.overlapped_passes):
            waited_s = 0.0
            for ((kind, stage), copied), count in overlaps.items():
                copies_s = sum(copy_s.get(copied_stage, 0.0) for copied_stage in copied)
                waited_s += count * max(0.0, copies_s - float(columns[kind][stage]))
            if waited_s:
                stages = [stage for stage in range(plan.stages_per_replica) if plan.pp_rank(stage) == rank]
                busy_s = micro_batches * pass_times.busy_s()[stages].sum()
                longest_s = max(longest_s, float(head_s[stages[0]] + busy_s) + waited_s)
        return longest_s + pass_times.per_step_s


class RecomputeTimes:
    """Times of a plan's passes under each of some policies, which are found when they are first asked for: most plans
    that don't fit are told by their memory alone."""

    def __init__(
        self, plan: Plan, model: ModelSpec, pass_times_of: Callable[[Plan], PassTimes], policies: Sequence[LayerPolicy]
    ) -> None:
        self._plan, self._pass_times_of, self._policies = plan, pass_times_of, policies
        stages = range(plan.stages_per_replica)
        self._num_layers = np.maximum(1, [len(plan.layers(stage, model.num_layers)) for stage in stages])

    @cached_property
    def _of_mode(self) -> dict[Recompute, PassTimes]:
        modes: dict[Recompute, None] = dict.fromkeys(policy.recompute for policy in self._policies)
        return {mode: self._pass_times_of(with_policy(self._plan, LayerPolicy(mode))) for mode in modes}

    @cached_property
    def added_s(self) -> list[list[float]]:
        """Seconds that each policy adds to a layer's backward, by stage and policy."""
        depth = self._plan.stages_per_replica
        backward_s = {
            mode: (times.backward_s + times.weight_backward_s)[:depth] for mode, times in self._of_mode.items()
        }
        base_s = backward_s[self._policies[0].recompute]
        columns = [(backward_s[policy.recompute] - base_s) / self._num_layers for policy in self._policies]
        return np.array(columns).T.tolist()

    @cached_property
    def is_additive(self) -> list[bool]:
        """True, by stage, if times are known to hold for each layer, however many get the policy."""
        return np.logical_and.reduce([times.is_additive for times in self._of_mode.values()]).tolist()

    @cached_property
    def _columns(self) -> dict[str, NDArray]:
        return self._of_mode[self._policies[0].recompute].by_kind()

    def pass_s(self, kind: str, stage: int) -> float:
        """Return the seconds of a pass with the first policy."""
        return float(self._columns[kind][stage])


@dataclass(frozen=True)
class StageLayers:
    """The layers of one stage, and the effect of each policy on one of them. The first policy is the plan's own."""

    stage: int
    layers: range
    times: RecomputeTimes
    memory_bytes: Sequence[float]
    """Bytes of all micro-batches in flight at the rank's peak, by policy."""
    copied_bytes: Sequence[int]
    """Bytes copied to the host and back for each micro-batch, by policy."""
    copy_limit_bytes: float
    """Bytes of a micro-batch that may be copied at most."""
    copy_wait_s: Callable[[int], float]
    """Seconds that the rank waits for each micro-batch where so many bytes are copied."""

    layer_wait_s: Callable[[int], float] | None = None
    """Seconds that a layer's passes wait for its copies of so many bytes, where layers are copied beside each other."""

    @cached_property
    def time_s(self) -> Sequence[float]:
        """Seconds added for each micro-batch, by policy."""
        added_s = self.times.added_s[self.stage]
        if self.layer_wait_s is None:
            return added_s
        return [time_s + self.layer_wait_s(size) for time_s, size in zip(added_s, self.copied_bytes, strict=True)]

    @property
    def is_additive(self) -> bool:
        """True if `time_s` is known to hold for each layer, however many get the policy."""
        return self.times.is_additive[self.stage]

    @property
    def least_memory_bytes(self) -> float:
        """Bytes with the policy for all layers that frees most, whether it may be chosen or not."""
        return len(self.layers) * min(self.memory_bytes)

    @property
    def smallest_policy(self) -> int | None:
        """Index of the policy that frees most, where all layers may have it; of several, the one that recomputes most,
        which leaves least to single passes."""
        least, count = min(self.memory_bytes), len(self.layers)
        smallest = [policy for policy, size in enumerate(self.memory_bytes) if size == least]
        found = [policy for policy in smallest if count * self.copied_bytes[policy] <= self.copy_limit_bytes]
        return found[-1] if found else None

    def wait_s(self, copied_bytes: int) -> float:
        """Return the seconds that the rank waits for each micro-batch; infinite where so much may not be copied."""
        return inf if copied_bytes > self.copy_limit_bytes else self.copy_wait_s(copied_bytes)

    def all_layers_s(self, policy: int) -> float:
        """Return the seconds that a policy for all layers adds for each micro-batch."""
        return len(self.layers) * self.time_s[policy]

    def options(self, policies: Sequence[int]) -> list[Option]:
        """Return the allocations that no other beats in time and memory.

        The label of each has the number of layers by policy, and True if copies are waited for.
        """
        allocations = self._allocations(policies)
        return self._non_dominated(allocations, allocations.time_s, np.isfinite(allocations.time_s))

    def less_offload_options(self, policies: Sequence[int], chosen: NDArray[np.int64]) -> list[Option]:
        """Return the allocations no slower than the chosen one that no other beats in copied bytes and memory."""
        allocations = self._allocations(policies)
        chosen_s = allocations.time_s[np.flatnonzero((allocations.counts == chosen).all(axis=1))[0]]
        no_slower = allocations.time_s <= chosen_s * (1 + ROUNDING_TOLERANCE)
        return self._non_dominated(allocations, allocations.copied_bytes, no_slower)

    def _allocations(self, policies: Sequence[int]) -> "PolicyAllocations":
        counts = _allocation_counts(len(self.layers), len(policies))
        time_s, memory, copied = (
            counts @ np.array([column[policy] for policy in policies])
            for column in (self.time_s, self.memory_bytes, self.copied_bytes)
        )
        sizes, index = np.unique(copied, return_inverse=True)
        waited_s = np.array([self.wait_s(size) for size in sizes.tolist()])[index.reshape(-1)]
        return PolicyAllocations(counts, time_s + waited_s, memory, copied, waited_s > 0)

    def _non_dominated(
        self, allocations: "PolicyAllocations", cost: NDArray, wanted: NDArray[np.bool_]
    ) -> list[Option]:
        found: list[Option] = []
        least = inf
        for index in np.lexsort((allocations.memory_bytes, cost)).tolist():
            if allocations.memory_bytes[index] < least and wanted[index]:
                least = allocations.memory_bytes[index]
                label = allocations.counts[index], bool(allocations.waits[index])
                found.append(Option(label, float(cost[index]), float(least)))
        return found


class PolicyAllocations(NamedTuple):
    """All allocations of a stage's layers to policies, a row each."""

    counts: NDArray[np.int64]
    """Number of layers by policy."""
    time_s: NDArray
    """Seconds as in `StageLayers.time_s`, with the wait for copies."""
    memory_bytes: NDArray
    copied_bytes: NDArray
    waits: NDArray[np.bool_]


class MemoryFitter:
    """Chooses the cheapest policies by layer that make one plan fit.

    Ranks are independent: each frees its own memory, and less time on a rank is never worse, so that the best choice
    for each is the best for all. A copy costs what it lasts longer than the passes that it overlaps: once the pipeline
    is full, that is what the rank waits for.
    """

    def __init__(
        self,
        plan: Plan,
        num_layers: int,
        policies: Sequence[LayerPolicy],
        stages: Sequence[StageLayers],
        eager_s: Callable[[], Sequence[float]] | None = None,
    ) -> None:
        """`stages` are those of `plan`, whose layers all have the first of `policies`; where their times are those of
        eager blocks, `eager_s` returns the seconds by which a backward of each stage is longer than a compiled one."""
        self.plan = plan
        self._find_eager_s = eager_s
        self.policies = policies
        self.num_layers = num_layers
        self.ranks: list[list[StageLayers]] = [[] for _ in range(plan.pp)]
        for stage, layers in enumerate(stages):
            self.ranks[plan.pp_rank(stage)].append(layers)
        self.waits = False
        """True if the last fitted plan waits for copies."""
        self.freed_bytes: list[float] = []
        """Bytes that the last fitted plan frees, by pipeline rank."""
        self._options: dict[tuple[int, ...], list[list[list[Option]]]] = {}

    def is_for(self, plan: Plan) -> bool:
        """Return True unless the times are those of eager blocks, and those of this plan would be compiled."""
        is_eager = self._find_eager_s is not None
        return not is_eager or any(strategy.recompute == "elementwise" for strategy in plan.strategies)

    @cached_property
    def _eager_s(self) -> list[float]:
        """Seconds by which the backwards of each pipeline rank are longer than compiled ones; 0 for compiled ones."""
        longer_s = self._find_eager_s() if self._find_eager_s else [0.0] * self.plan.stages_per_replica
        return [sum((max(0.0, longer_s[one.stage]) for one in stages), 0.0) for stages in self.ranks]

    def fit(self, excess_bytes: Sequence[float], policies: Sequence[LayerPolicy]) -> Plan | None:
        """Return the plan with the cheapest policies by layer that free `excess_bytes` on each pipeline rank; None
        where none do."""
        choices = self._choices(excess_bytes, policies)
        return None if choices is None else self._plan_of(choices, policies)

    def fit_most(self) -> Plan:
        """Return the plan with the policies by layer that free the most memory on each pipeline rank."""
        choices: list[Choice] = []
        for stages in self.ranks:
            smallest = [self._smallest_option(layers) for layers in stages]
            memory_bytes = sum(option.memory_bytes for option in smallest)
            choices.append(Choice(0.0, memory_bytes, tuple(option.label for option in smallest)))
        return self._plan_of(choices, self.policies)

    def _smallest_option(self, layers: StageLayers) -> Option:
        """Return a stage's allocation with the least memory, without its time where one policy makes it up."""
        count = len(self.policies)
        if (policy := layers.smallest_policy) is None:
            if options := layers.options(range(count)):
                return min(options, key=attrgetter("memory_bytes"))
            policy = count - 1  # all policies offload more than the host holds
        label = len(layers.layers) * np.eye(count, dtype=np.int64)[policy], False
        return Option(label, 0.0, layers.least_memory_bytes)

    def fit_with_less_offload(self, excess_bytes: Sequence[float], policies: Sequence[LayerPolicy]) -> Plan | None:
        """Return a plan that frees as much in the same time, and copies the least.

        Less copying makes no pass wait longer, so that it is no slower.
        """
        choices = self._choices(excess_bytes, policies)
        if choices is None:
            return None
        indices = tuple(map(self.policies.index, policies))
        found: list[Choice] = []
        for stages, choice, excess in zip(self.ranks, choices, excess_bytes, strict=True):
            options = [
                layers.less_offload_options(indices, counts)
                for layers, (counts, _) in zip(stages, choice.labels, strict=True)
            ]
            found.append(cheapest_choice(options, _unchanged_bytes(stages) - excess) or choice)
        return self._plan_of(found, policies)

    def _plan_of(self, choices: Sequence[Choice], policies: Sequence[LayerPolicy]) -> Plan:
        """Return the plan with the choice for each pipeline rank."""
        chosen: dict[int, LayerPolicy] = {}
        self.waits = False
        self.freed_bytes = []
        for stages, choice in zip(self.ranks, choices, strict=True):
            self.freed_bytes.append(_unchanged_bytes(stages) - choice.memory_bytes)
            for layers, (counts, waits) in zip(stages, choice.labels, strict=True):
                self.waits = self.waits or waits
                by_layer = [policy for policy, count in zip(policies, counts, strict=True) for _ in range(count)]
                chosen |= dict(zip(layers.layers, by_layer, strict=True))
        return with_layer_policies(self.plan, chosen, self.policies, self.num_layers)

    @property
    def full_recompute(self) -> int:
        """Index of the policy that recomputes most and offloads no more than the first."""
        return self.policies.index(self.policies[-1]._replace(offload=self.policies[0].offload))

    def added_s(self, excess_bytes: Sequence[float]) -> list[float] | None:
        """Return the least seconds that each pipeline rank takes longer for each micro-batch so as to free
        `excess_bytes`.

        0 where that is unknown; None where some rank can't free so much. Recompute of all layers is no bound of its
        own: it counts where it is shorter.
        """
        for stages, excess in zip(self.ranks, excess_bytes, strict=True):
            least_bytes = sum(layers.least_memory_bytes for layers in stages) * (1 - ROUNDING_TOLERANCE)
            if least_bytes > _unchanged_bytes(stages) - excess:
                return None
        choices = self._choices(excess_bytes, self.policies)
        if choices is None:
            return None
        found: list[float] = []
        options = self._options[tuple(range(len(self.policies)))]
        for stages, choice, stage_options, eager_s in zip(self.ranks, choices, options, self._eager_s, strict=True):
            # Passes that recompute are longer and hide more of a copy, so that recompute and waits may overlap: their
            # sum may be twice the true time, but no more.
            waits = any(option.label[1] for of_stage in stage_options for option in of_stage)
            all_recomputed_s = sum(layers.all_layers_s(self.full_recompute) for layers in stages)
            least_s = min(choice.time_s / (2 if waits else 1), all_recomputed_s)
            is_additive = self.plan.pipeline_replicas == 1 and all(layers.is_additive for layers in stages)
            found.append(eager_s + least_s if is_additive else 0.0)
        return found

    def _choices(self, excess_bytes: Sequence[float], policies: Sequence[LayerPolicy]) -> list[Choice] | None:
        """Return the cheapest choice for each pipeline rank; None where some rank has none."""
        indices = tuple(map(self.policies.index, policies))
        if indices not in self._options:
            self._options[indices] = [[layers.options(indices) for layers in stages] for stages in self.ranks]
        found: list[Choice] = []
        for stages, options, excess in zip(self.ranks, self._options[indices], excess_bytes, strict=True):
            choice = cheapest_choice(options, _unchanged_bytes(stages) - excess)
            if choice is None:
                return None
            found.append(choice)
        return found


def _unchanged_bytes(stages: Sequence[StageLayers]) -> float:
    """Return the bytes of a rank's layers with the first policy."""
    return sum(layers.memory_bytes[0] * len(layers.layers) for layers in stages)


def with_policy(plan: Plan, policy: LayerPolicy) -> Plan:
    """Return the plan with one policy for all layers."""
    strategy = plan.default_strategy.model_copy(update=policy._asdict())
    return plan.model_copy(update={"default_strategy": strategy, "overrides": ()})


def with_layer_policies(
    plan: Plan, chosen: Mapping[int, LayerPolicy], policies: Sequence[LayerPolicy], num_layers: int
) -> Plan:
    """Return the plan with a policy for each layer; the commonest becomes its default."""
    by_layer = [chosen.get(layer, policies[0]) for layer in range(num_layers)]
    default = max(policies, key=by_layer.count)
    changed = with_policy(plan, default)
    runs: list[LayerOverride] = []
    start = 0
    for policy, group in groupby(by_layer):
        count = len(list(group))
        if policy != default:
            strategy = changed.default_strategy.model_copy(update=policy._asdict())
            runs.append(LayerOverride(start=start, count=count, strategy=strategy))
        start += count
    return changed.model_copy(update={"overrides": tuple(runs)})


@lru_cache(maxsize=256)
def _allocation_counts(num_layers: int, num_policies: int) -> NDArray[np.int64]:
    """Return all allocations of so many layers, a row each: layers by policy, most with the first policy first.

    The rows are compositions, enumerated by stars and bars: each choice of bars among layers + policies − 1 places
    leaves gaps that are the numbers of layers.
    """
    num_allocations = comb(num_layers + num_policies - 1, num_policies - 1)
    at_once = num_policies if num_allocations <= MAX_ALLOCATIONS else min(3, num_policies)
    bars = np.array(list(combinations(range(num_layers + at_once - 1), at_once - 1)), np.int64)
    bars = bars.reshape(-1, at_once - 1)
    ends = np.pad(bars, ((0, 0), (1, 1)), constant_values=-1)
    ends[:, -1] = num_layers + at_once - 1
    counts = np.diff(ends) - 1
    tables = []
    for chosen in combinations(range(num_policies), at_once):
        tables.append(np.zeros((len(counts), num_policies), np.int64))
        tables[-1][:, chosen] = counts
    return np.unique(np.concatenate(tables), axis=0)[::-1]


def stage_layers(
    plan: Plan,
    model: ModelSpec,
    workload: Workload,
    orders: Sequence[AllocationOrder],
    pass_times_of: Callable[[Plan], PassTimes],
    policies: Sequence[LayerPolicy],
    host: HostLink | None,
    optim: OptimConfig | None = None,
) -> list[StageLayers]:
    """Return the layers of each stage of a plan whose layers all have the first of `policies`; `orders`: its
    allocations."""
    saved_bytes = _saved_bytes(plan, model, workload, policies, optim)
    times = RecomputeTimes(plan, model, pass_times_of, policies)
    micro_batches = plan.num_micro_batches(workload)
    found: list[StageLayers] = []
    for stage in range(plan.stages_per_replica):
        rank = plan.pp_rank(stage)
        sizes = saved_bytes[stage]
        passes = host.overlapped_passes_of(rank, stage) if host else []
        live = orders[rank].live_micro_batches[stage]
        on_device = live
        copied = [0] * len(policies)
        limit = inf
        wait_s, layer_wait_s = _no_wait, None
        layers = plan.layers(stage, model.num_layers)
        if host and passes:
            on_device = host.orders[rank].on_device_micro_batches[stage]
            copied = [round(sizes[policy.recompute]) if policy.offloads else 0 for policy in policies]
            overlapped = [(key, copies, count / micro_batches) for key, copies, count in passes]
            share = host.host_budget_bytes[rank] / plan.placement[: plan.stages_per_replica].count(rank)
            limit = share / max(1, live)
            if plan.offloads_by_layer:  # those of two layers are on the device at a time, whatever it has in flight
                on_device = 0
                layer_wait_s = partial(_layer_wait_s, host.copy_s[stage], overlapped, times, len(layers))
            else:
                wait_s = partial(_copy_wait_s, host.copy_s[stage], overlapped, times)
        elif not all(policy.offloads for policy in policies):
            # Nothing is saved long enough to be copied: forbid offload instead of fitting by it.
            copied = [int(policy.offloads) for policy in policies]
            limit = 0
        memory = [sizes[policy.recompute] * (on_device if policy.offloads else live) for policy in policies]
        found.append(StageLayers(stage, layers, times, memory, copied, limit, wait_s, layer_wait_s))
    return found


def _no_wait(_: int) -> float:
    """Return no wait, for stages that copy nothing."""
    return 0.0


def _copy_wait_s(
    copy_s: Callable[[float], float],
    overlapped: Sequence[tuple[tuple[str, int], int, float]],
    times: RecomputeTimes,
    copied_bytes: int,
) -> float:
    """Return the seconds that a stage waits for each micro-batch (`StageLayers.copy_wait_s`).

    `overlapped`: kind and stage of a pass, copies that it overlaps, and how often for a micro-batch.
    """
    time_s = copy_s(copied_bytes)
    return sum(part * max(0.0, copies * time_s - times.pass_s(*key)) for key, copies, part in overlapped)


def _layer_wait_s(
    copy_s: Callable[[float], float],
    overlapped: Sequence[tuple[tuple[str, int], int, float]],
    times: RecomputeTimes,
    num_layers: int,
    copied_bytes: int,
) -> float:
    """Return the seconds that a layer's passes wait for its copies, each beside the computation of one layer."""
    time_s = copy_s(copied_bytes)
    return sum(part * max(0.0, time_s - times.pass_s(*key) / num_layers) for key, _, part in overlapped)


def _saved_bytes(
    plan: Plan,
    model: ModelSpec,
    workload: Workload,
    policies: Sequence[LayerPolicy],
    optim: OptimConfig | None = None,
) -> list[dict[Recompute, float]]:
    """Return, for each stage and recompute mode, the bytes that a layer saves for a micro-batch."""
    modes: set[Recompute] = {"full", *(policy.recompute for policy in policies)}
    plans: dict[Recompute, Plan] = {mode: with_policy(plan, LayerPolicy(mode)) for mode in modes}
    full_offload = with_policy(plan, LayerPolicy("full", "activations"))
    by_kind: dict[Hashable, dict[Recompute, float]] = {}
    found: list[dict[Recompute, float]] = []
    for stage in range(plan.stages_per_replica):
        kind = stage_memory_key(model, plan, stage, optim)
        if kind not in by_kind:
            saved = {
                mode: native_saved_per_micro_batch(model, changed, workload, stage, optim).total
                for mode, changed in plans.items()
            }
            num_layers = max(1, len(plan.layers(stage, model.num_layers)))
            least = offloaded_activation_bytes(model, full_offload, workload, stage)
            by_kind[kind] = {mode: (saved[mode] - saved["full"] + least) / num_layers for mode in plans}
        found.append(by_kind[kind])
    return found


@dataclass(frozen=True, slots=True)
class PendingFit:
    """A plan that doesn't fit, with what is needed to make it fit."""

    fitters: list[MemoryFitter]
    """Fitters by what blocks do: compiled, and eager where elementwise recompute stands against compile."""
    may_offload: bool
    """True if it may offload as well as recompute."""
    excess_bytes: list[float]
    """Bytes beyond the limit, by pipeline rank."""
    added_s: list[float]
    """Least seconds that fitting adds for each micro-batch, by pipeline rank."""


def corrected_excess(excess: list[float], left: list[float], freed: list[float]) -> list[float]:
    """Return the bytes that ranks must free, where some still exceed their limit by `left` after freeing that much."""
    return [max(old + more, done + 1) if more > 0 else old for old, more, done in zip(excess, left, freed, strict=True)]
