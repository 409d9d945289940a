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

from muster.cost.activations import offloaded_bytes
from muster.cost.forecast import kind_of_stage
from muster.cost.own_storage import own_kept
from muster.cost.walk import RankOrder
from muster.planner.bound import PassSeconds
from muster.planner.layers import Choice, Option, cheapest
from muster.schedule.offload import Beside
from muster.spec.model import ModelSpec
from muster.spec.plan import LayerRun, Offload, Plan, Recompute
from muster.spec.workload import Workload

MODES: tuple[Recompute, ...] = ("none", "selective", "full")

MOST_COUNTS = 25_000
"""Ways to deal the layers of a stage to what may be done with them that are all looked at; where there are more, those
with at most three at once, as many as a linear program with these limits takes."""

ROUNDING = 1e-9
"""Times that differ by no more are the same, added up in another order."""


class Way(NamedTuple):
    """What is done with the activations of a layer."""

    recompute: Recompute
    offload: Offload = "none"

    @property
    def moves(self) -> bool:
        """Whether they go to the host's memory."""
        return self.offload in ("activations", "all")


@dataclass(frozen=True, slots=True)
class HostLink:
    """What the activations of a plan may use of their hosts. Lists are by stage, or by pipeline rank."""

    orders: Sequence[RankOrder]
    """Of each rank, if all its stages offload."""
    beside: Sequence[Beside]
    """Of each rank, what its copies run beside."""
    copy_s: Sequence[Callable[[float], float]]
    """Of each stage, what so many bytes take one way."""
    room_bytes: Sequence[float]
    """What each rank may have in its host's memory."""

    def beside_of(self, rank: int, stage: int) -> list[tuple[tuple[str, int], int, int]]:
        """(kind, stage) of a pass, the copies of one stage of the rank beside it, how often."""
        return [(key, own.count(stage), count) for (key, own), count in self.beside[rank].items() if stage in own]

    def bound_s(self, plan: Plan, seconds: PassSeconds, micro_batches: int, copied_bytes: Mapping[int, float]) -> float:
        """Seconds that a step takes at least where a micro-batch of each stage moves so many bytes.

        The n-th pass of a rank begins when the (n − 1)-th and the copies beside it are over, and the copies beside the
        n-th not before: so that between one pass and the next lies the longer of it and of them.
        """
        copy_s = {stage: self.copy_s[stage](size) for stage, size in copied_bytes.items()}
        columns = seconds.by_kind()
        head_s = seconds.begin[0] + np.cumsum(seconds.come + seconds.forward) - seconds.forward
        best = 0.0
        for rank, beside in enumerate(self.beside):
            waited_s = 0.0
            for ((kind, stage), copied), count in beside.items():
                copies_s = sum(copy_s.get(one, 0.0) for one in copied)
                waited_s += count * max(0.0, copies_s - float(columns[kind][stage]))
            if waited_s:
                own = [stage for stage in range(plan.depth) if plan.pp_rank(stage) == rank]
                best = max(best, float(head_s[own[0]] + micro_batches * seconds.busy()[own].sum()) + waited_s)
        return best + seconds.once


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of one stage, and what each way does to one of them."""

    held: range
    time_s: Sequence[float]
    """By way: more than the first, for each micro-batch."""
    memory_bytes: Sequence[float]
    """By way: of all micro-batches under way, when the rank holds most."""
    copied_bytes: Sequence[int]
    """By way: of each micro-batch, to the host and back."""
    waited_s: Callable[[int], float]
    """What the rank waits for each micro-batch where so many bytes are copied; infinite where they may not be."""
    adds_up: bool
    """Whether `time_s` is known to be that of each layer, however many go a way."""

    def all_s(self, way: int) -> float:
        """What all layers take more one way, for each micro-batch."""
        return len(self.held) * self.time_s[way]

    def options(self, ways: Sequence[int]) -> list[Option]:
        """How many layers may go each of some ways, and whether copies are waited for, by what that takes: those that
        no other beats in time and memory."""
        dealt = self._dealt(ways)
        return self._unbeaten(dealt, dealt.time_s, np.isfinite(dealt.time_s))

    def leaner(self, ways: Sequence[int], chosen: NDArray[np.int64]) -> list[Option]:
        """Of what takes no longer than one choice, by the bytes that it copies: those that no other beats in these and
        memory."""
        dealt = self._dealt(ways)
        most_s = dealt.time_s[np.flatnonzero((dealt.counts == chosen).all(axis=1))[0]]
        return self._unbeaten(dealt, dealt.copied_bytes, dealt.time_s <= most_s * (1 + ROUNDING))

    def _dealt(self, ways: Sequence[int]) -> "Dealt":
        counts = _counts(len(self.held), len(ways))
        time_s, memory, copied = (
            counts @ np.array([column[way] for way in ways])
            for column in (self.time_s, self.memory_bytes, self.copied_bytes)
        )
        sizes, places = np.unique(copied, return_inverse=True)
        waited_s = np.array([self.waited_s(size) for size in sizes.tolist()])[places.reshape(-1)]
        return Dealt(counts, time_s + waited_s, memory, copied, waited_s > 0)

    def _unbeaten(self, dealt: "Dealt", cost: NDArray, wanted: NDArray[np.bool_]) -> list[Option]:
        found, least = [], inf
        for index in np.lexsort((dealt.memory_bytes, cost)).tolist():
            if dealt.memory_bytes[index] < least and wanted[index]:
                least = dealt.memory_bytes[index]
                name = dealt.counts[index], bool(dealt.waits[index])
                found.append(Option(name, float(cost[index]), float(least)))
        return found


class Dealt(NamedTuple):
    """All ways to deal the layers of a stage, a row each."""

    counts: NDArray[np.int64]
    """How many go each way."""
    time_s: NDArray
    """As `Layers.time_s`, and what is waited for copies."""
    memory_bytes: NDArray
    copied_bytes: NDArray
    waits: NDArray[np.bool_]


class Fitter:
    """Gives the layers of one plan that doesn't fit the cheapest of some ways that make it.

    Ranks are independent: each frees its own memory, and the less time it takes the better, so that the best choice for
    each is the best for all. Copies take what they last longer than the passes that they run beside, which is what a
    rank waits for once the pipeline is full.
    """

    def __init__(self, plan: Plan, num_layers: int, ways: Sequence[Way], stages: Sequence[Layers]) -> None:
        """`plan` does the first of `ways` everywhere, and `stages` are its."""
        self.plan, self.ways, self.num_layers = plan, ways, num_layers
        self.ranks: list[list[Layers]] = [[] for _ in range(plan.pp)]
        for stage, layers in enumerate(stages):
            self.ranks[plan.pp_rank(stage)].append(layers)
        self.waits = False
        """Whether the last plan that was given waits for copies."""
        self.freed_bytes: list[float] = []
        """What it frees on each pipeline rank, by what is known here."""
        self._options: dict[tuple[int, ...], list[list[list[Option]]]] = {}

    def fitted(self, over_bytes: Sequence[float], ways: Sequence[Way]) -> Plan | None:
        """The plan with the cheapest of these ways for each layer that frees `over_bytes` on each pipeline rank; None
        where none frees enough."""
        choices = self._choices(over_bytes, ways)
        return None if choices is None else self._plan_of(choices, ways)

    def leaner(self, over_bytes: Sequence[float], ways: Sequence[Way]) -> Plan | None:
        """The plan that `fitted` gives for as much, but of all that take no stage longer the one that copies least.

        To copy less makes no pass wait for more, so that it is no slower, and what is copied for nothing stays.
        """
        choices = self._choices(over_bytes, ways)
        if choices is None:
            return None
        places, found = tuple(map(self.ways.index, ways)), list[Choice]()
        for own, choice, over in zip(self.ranks, choices, over_bytes, strict=True):
            options = [layers.leaner(places, name[0]) for layers, name in zip(own, choice.names, strict=True)]
            found.append(cheapest(options, _base_bytes(own) - over) or choice)
        return self._plan_of(found, ways)

    def _plan_of(self, choices: Sequence[Choice], ways: Sequence[Way]) -> Plan:
        """With what was chosen for each pipeline rank."""
        chosen: dict[int, Way] = {}
        self.waits, self.freed_bytes = False, []
        for own, choice in zip(self.ranks, choices, strict=True):
            self.freed_bytes.append(_base_bytes(own) - choice.memory_bytes)
            for layers, (counts, waits) in zip(own, choice.names, strict=True):
                self.waits = self.waits or waits
                names = [way for way, count in zip(ways, counts, strict=True) for _ in range(count)]
                chosen |= dict(zip(layers.held, names, strict=True))
        return with_layer_ways(self.plan, chosen, self.ways, self.num_layers)

    @property
    def all_again(self) -> int:
        """The way that recomputes most and copies no more than the first; its place among `ways`."""
        return self.ways.index(self.ways[-1]._replace(offload=self.ways[0].offload))

    def added_s(self, over_bytes: Sequence[float]) -> list[float] | None:
        """What each pipeline rank takes more for each micro-batch at least where it frees `over_bytes` or more, or goes
        `all_again`; 0 where that is unknown, and None where some rank can't free so much."""
        choices = self._choices(over_bytes, self.ways)
        if choices is None:
            return None
        found, options = list[float](), self._options[tuple(range(len(self.ways)))]
        for own, choice, of_rank in zip(self.ranks, choices, options, strict=True):
            # Copies are waited for less beside passes that recompute: both take the longer of the two at least.
            waits = any(option.name[1] for of_stage in of_rank for option in of_stage)
            adds_up = self.plan.replicas == 1 and all(layers.adds_up for layers in own)
            least_s = min(choice.time_s / (2 if waits else 1), sum(layers.all_s(self.all_again) for layers in own))
            found.append(least_s if adds_up else 0.0)
        return found

    def _choices(self, over_bytes: Sequence[float], ways: Sequence[Way]) -> list[Choice] | None:
        """The cheapest for each pipeline rank; None where some has none."""
        places = tuple(map(self.ways.index, ways))
        if places not in self._options:
            self._options[places] = [[layers.options(places) for layers in own] for own in self.ranks]
        found = []
        for own, options, over in zip(self.ranks, self._options[places], over_bytes, strict=True):
            choice = cheapest(options, _base_bytes(own) - over)
            if choice is None:
                return None
            found.append(choice)
        return found


def _base_bytes(own: Sequence[Layers]) -> float:
    """What the layers of a rank hold the first way."""
    return sum(layers.memory_bytes[0] * len(layers.held) for layers in own)


def with_way(plan: Plan, way: Way) -> Plan:
    """The plan with one way for all layers."""
    strategy = plan.default_strategy.model_copy(update=way._asdict())
    return plan.model_copy(update={"default_strategy": strategy, "overrides": ()})


def with_layer_ways(plan: Plan, chosen: Mapping[int, Way], ways: Sequence[Way], num_layers: int) -> Plan:
    """The plan with a way for each layer; the commonest is its default."""
    own = [chosen.get(layer, ways[0]) for layer in range(num_layers)]
    default = max(ways, key=own.count)
    changed = with_way(plan, default)
    runs, start = [], 0
    for way, group in groupby(own):
        count = len(list(group))
        if way != default:
            strategy = changed.default_strategy.model_copy(update=way._asdict())
            runs.append(LayerRun(start=start, count=count, strategy=strategy))
        start += count
    return changed.model_copy(update={"overrides": tuple(runs)})


@lru_cache(maxsize=256)
def _counts(num_layers: int, num_ways: int) -> NDArray[np.int64]:
    """All ways to deal so many layers, a row each: how many go each way; most by the first way first."""
    at_once = num_ways if comb(num_layers + num_ways - 1, num_ways - 1) <= MOST_COUNTS else min(3, num_ways)
    bars = np.array(list(combinations(range(num_layers + at_once - 1), at_once - 1)), np.int64)
    bars = bars.reshape(-1, at_once - 1)
    ends = np.pad(bars, ((0, 0), (1, 1)), constant_values=-1)
    ends[:, -1] = num_layers + at_once - 1
    dealt = np.diff(ends) - 1
    tables = []
    for chosen in combinations(range(num_ways), at_once):
        tables.append(np.zeros((len(dealt), num_ways), np.int64))
        tables[-1][:, chosen] = dealt
    return np.unique(np.concatenate(tables), axis=0)[::-1]


def layers_of(
    plan: Plan,
    model: ModelSpec,
    workload: Workload,
    orders: Sequence[RankOrder],
    seconds_of: Callable[[Plan], PassSeconds],
    ways: Sequence[Way],
    host: HostLink | None,
) -> list[Layers]:
    """Those of each stage of a plan that does the first of `ways` everywhere; `orders` are its."""
    kept = _kept(plan, model, workload, ways)
    more_s, passes_s, adds_up = _more_seconds(plan, model, seconds_of, ways)
    micro_batches = plan.num_micro_batches(workload)
    found = []
    for stage in range(plan.depth):
        rank, sizes = plan.pp_rank(stage), kept[stage]
        own = host.beside_of(rank, stage) if host else []
        live = resident = orders[rank].live[stage]
        copied, waits = [0] * len(ways), _never
        if host and own:
            resident = host.orders[rank].resident[stage]
            copied = [round(sizes[way.recompute]) if way.moves else 0 for way in ways]
            beside = [(passes_s(*key), copies, count / micro_batches) for key, copies, count in own]
            share = host.room_bytes[rank] / plan.placement[: plan.depth].count(rank)
            waits = partial(_waited_s, host.copy_s[stage], beside, share / max(1, live))
        elif not all(way.moves for way in ways):
            # Nothing lies long enough to be copied: no layer is said to be.
            copied, waits = [int(way.moves) for way in ways], _unless_none
        memory = [sizes[way.recompute] * (resident if way.moves else live) for way in ways]
        held = plan.layers(stage, model.num_layers)
        found.append(Layers(held, [more_s[way][stage] for way in ways], memory, copied, waits, adds_up[stage]))
    return found


def _never(_: int) -> float:
    """Nothing is copied, and nothing waited for."""
    return 0.0


def _unless_none(copied_bytes: float) -> float:
    """Copies that may not be."""
    return inf if copied_bytes else 0.0


def _waited_s(
    copy_s: Callable[[float], float],
    beside: Sequence[tuple[float, int, float]],
    room_bytes: float,
    copied_bytes: int,
) -> float:
    """`Layers.waited_s` of a stage; `beside`: what a pass takes, copies beside it, and how often for a micro-batch."""
    if copied_bytes > room_bytes:
        return inf
    time_s = copy_s(copied_bytes)
    return sum(part * max(0.0, copies * time_s - pass_s) for pass_s, copies, part in beside)


def _kept(plan: Plan, model: ModelSpec, workload: Workload, ways: Sequence[Way]) -> list[dict[Recompute, float]]:
    """Of each stage, by the kinds of recompute among `ways`: what a layer keeps of a micro-batch, in bytes."""
    wanted: set[Recompute] = {"full", *(way.recompute for way in ways)}
    modes: dict[Recompute, Plan] = {mode: with_way(plan, Way(mode)) for mode in wanted}
    known: dict[Hashable, dict[Recompute, float]] = {}
    found = []
    for stage in range(plan.depth):
        kind = kind_of_stage(model, plan, stage)
        if kind not in known:
            own = {mode: own_kept(model, changed, workload, stage).total for mode, changed in modes.items()}
            each = max(1, len(plan.layers(stage, model.num_layers)))
            least = offloaded_bytes(model, with_way(plan, Way("full", "activations")), workload, stage)
            known[kind] = {mode: (own[mode] - own["full"] + least) / each for mode in modes}
        found.append(known[kind])
    return found


def _more_seconds(
    plan: Plan, model: ModelSpec, seconds_of: Callable[[Plan], PassSeconds], ways: Sequence[Way]
) -> tuple[dict[Way, list[float]], Callable[[str, int], float], list[bool]]:
    """By way and stage: the time that it adds to each layer's backward; what each pass takes the first way; and whether
    a stage's times add up."""
    of_mode = {way.recompute: seconds_of(with_way(plan, Way(way.recompute))) for way in ways}
    backward_s = {mode: (found.inputs + found.weights)[: plan.depth] for mode, found in of_mode.items()}
    first = of_mode[ways[0].recompute]
    each = np.maximum(1, [len(plan.layers(stage, model.num_layers)) for stage in range(plan.depth)])
    columns = first.by_kind()
    base_s = backward_s[ways[0].recompute]
    return (
        {way: ((backward_s[way.recompute] - base_s) / each).tolist() for way in ways},
        lambda kind, stage: float(columns[kind][stage]),
        np.logical_and.reduce([found.adds_up for found in of_mode.values()]).tolist(),
    )
