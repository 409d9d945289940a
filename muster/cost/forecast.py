"""How much memory each rank of a plan needs, moment by moment of its Program, and whether that is there."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from muster.cost.device_memory import device_terms
from muster.cost.holdings import layer_kind
from muster.cost.megatron_memory import megatron_stage
from muster.cost.memory import MemoryTerms
from muster.cost.own_memory import KERNELS, OTHER_KERNELS, Kernels, own_stage
from muster.cost.stage_memory import Moment, StageMemory
from muster.schedule.action import Action, Lane
from muster.schedule.program import Instruction, Program
from muster.spec.cluster import ClusterSpec
from muster.spec.layout import has_words, stages_of
from muster.spec.mesh import members
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.software import Software
from muster.spec.workload import Workload

HEAD_ROOM = 0.1
"""Of a device's memory, what chosen plans leave free where any plan does and nobody says `--memory`: the peaks that
programs report are off by so much from their forecasts on average (`memory` of `muster validate --json`), and what
nearly fills a device is slower, since its allocator gives memory back and asks for it again."""


@dataclass(frozen=True, slots=True)
class RankForecast:
    """The ranks that hold one pipeline rank's stages, all of which do the same: the one that holds most."""

    pp_rank: int
    rank: int
    """The first of them."""
    count: int
    at: str
    """When it holds most: an instruction, and the moment within it."""
    terms: MemoryTerms
    capacity_bytes: int | None
    """Of the rank's device; None where it is unknown."""

    @property
    def fits(self) -> bool | None:
        return None if self.capacity_bytes is None else self.terms.total <= self.capacity_bytes

    @property
    def largest(self) -> list[tuple[str, int]]:
        """The three terms that take most, with their bytes, largest first."""
        return sorted(self.terms.by_name().items(), key=lambda pair: -pair[1])[:3]


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """What a plan needs, by pipeline rank."""

    ranks: tuple[RankForecast, ...]

    @property
    def fullest(self) -> RankForecast:
        """The ranks that hold most, of those that come nearest to what they have or have too little."""
        return max(self.ranks, key=lambda one: one.terms.total / (one.capacity_bytes or 1))

    @property
    def fits(self) -> bool | None:
        """Whether every rank's memory suffices; None where a device's is unknown."""
        found = [one.fits for one in self.ranks]
        return None if None in found else all(found)


def forecast(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    program: Program,
    software: Software | None = None,
    kernels: Kernels | None = None,
) -> MemoryForecast:
    """What each rank holds at its peak while it follows the Program.

    `software`: how it stores the model, Muster's own way if not given. `kernels`: what kernels need for a while, those
    of the cluster's first device if not given.
    """
    software = software or Software()
    kernels = kernels or KERNELS.get(cluster.device.kind, OTHER_KERNELS)
    alike: dict[Hashable, StageMemory] = {}
    found = []
    for pp_rank in range(plan.pp):
        stages = {}
        for stage in stages_of(plan, pp_rank):
            key = kind_of_stage(model, plan, stage)
            if key not in alike:
                alike[key] = (
                    megatron_stage(model, plan, workload, stage, software)
                    if software.storage == "megatron"
                    else own_stage(model, plan, workload, stage, kernels)
                )
            stages[stage] = alike[key]
        at, terms = walk(program, pp_rank, stages)
        rank = next(members(plan, pp_rank))[0]
        device = cluster.group_of(rank).device
        fixed = sum(stage.resident.total for stage in stages.values())
        terms += device_terms(device, plan, pp_rank, terms.total - fixed)
        found.append(RankForecast(pp_rank, rank, plan.mesh(pp_rank).ranks, at, terms, device.memory_bytes))
    return MemoryForecast(tuple(found))


def kind_of_stage(model: ModelSpec, plan: Plan, stage: int) -> Hashable:
    """What stages that hold alike have in common."""
    layers, own = plan.layers(stage, model.num_layers), plan.pp_rank(stage)
    neighbours = [0 <= other < plan.num_stages and plan.pp_rank(other) == own for other in (stage - 1, stage + 1)]
    words = plan.spread_vocab and (own, has_words(plan, stage))
    kinds = (
        tuple((layer_kind(model, layer), plan.strategy(layer)) for layer in layers)
        if plan.overrides
        else (tuple(layer_kind(model, layer) for layer in layers))
    )
    return kinds, plan.is_first(stage), plan.is_last(stage), plan.mesh(stage), tuple(neighbours), words


def walk(program: Program, pp_rank: int, stages: Mapping[int, StageMemory]) -> tuple[str, MemoryTerms]:
    """The peak of one rank as it follows its lanes: when it is, and what is held then."""
    order = _order(program, pp_rank)
    keys = [action[:2] for action in order]
    steps = {key: _Step.of(key, stages) for key in set(keys)}
    fullest = _find_peak(keys, steps, sum(stage.resident.total for stage in stages.values()))
    moment, terms = _terms_at(keys, fullest, steps, stages)
    kind, stage, micro_batch = order[fullest][:3]
    return f"{stage}{kind}{micro_batch if micro_batch >= 0 else ''}, {moment}", terms


def _order(program: Program, pp_rank: int) -> list[Action]:
    """What makes or frees memory: gathers come first, sums over ranks last; what comes back from the host takes its
    memory when its copy may begin, and what goes there frees it when a pass waits for that."""
    lanes = program.ranks[pp_rank]
    collectives = [action for action, _, _ in lanes.get("collective", ())]
    compute = (action for action, _, _ in lanes.get("compute", ()) if action[0] in _PASSES)
    return [
        *(action for action in collectives if action[0] == "UNSHARD"),
        *(_with_copies(lanes) if lanes.get("copy") else compute),
        *(action for action in collectives if action[0] in ("REDUCE", "MERGE")),
    ]


def _with_copies(lanes: Mapping[Lane, Sequence[Instruction]]) -> Iterator[Action]:
    copies = lanes["copy"]
    back: defaultdict[int, list[Action]] = defaultdict(list)
    for action, _, waits in copies:
        if action.kind == "RELOAD":
            back[waits[0].index].append(action)
    for index, (action, _, waits) in enumerate(lanes["compute"]):
        waited = (copies[wait.index].action for wait in waits if wait.lane == "copy")
        yield from (copy for copy in waited if copy.kind == "OFFLOAD")
        if action[0] in _PASSES:
            yield action
        yield from back[index]


_COPYING = (Moment("copying", MemoryTerms()),)
_PASSES = frozenset(("F", "B", "I", "W", "S", "T"))
_Key = tuple[str, int]
"""Kind and stage of an instruction."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What one kind of instruction of one stage does to the bytes that a rank holds."""

    before: int
    """Added when it begins."""
    after: int
    """Added when it ends."""
    moments: tuple[Moment, ...]
    highest: int
    """The most that a moment adds."""
    first: int | None
    """That in the stage's first backward of a step; None for what is no backward."""
    gathered: int
    """Parameters that it gathers if they aren't there; and what it adds then at most."""
    gathering: int
    drops: bool
    """Whether it drops them at its end."""
    gradients: int

    @classmethod
    def of(cls, key: tuple[str, int], stages: Mapping[int, StageMemory]) -> "_Step":
        kind, index = key
        own = stages[index] if index in stages else next(iter(stages.values()))
        moments = _COPYING if kind in ("OFFLOAD", "RELOAD") else own.moments.get(kind, ())
        away = own.offloaded.total
        kept, deferred, words = own.kept.total, own.deferred.total, own.words.total
        backward = kind in ("B", "I")
        gather = own.moments.get("gather F" if kind == "F" else "gather B", ())
        return cls(
            before={"F": kept, "S": words, "RELOAD": away}.get(kind, 0),
            after={"OFFLOAD": -away, "B": -kept, "I": deferred - kept, "W": -deferred, "T": -words}.get(kind, 0),
            moments=moments,
            highest=max((moment.extra.total for moment in moments), default=0),
            first=max((m.extra.total + m.gradients for m in moments), default=0) if backward else None,
            gathered=own.gathered if kind in ("F", "B", "I", "W", "UNSHARD") else 0,
            gathering=max((moment.extra.total for moment in gather), default=0),
            drops=kind in ("B", "W") and not own.stays,
            gradients=own.gradients,
        )


def _find_peak(keys: Sequence[_Key], steps: Mapping[_Key, _Step], total: int) -> int:
    """The place in the order at which most is held."""
    there: set[int] = set()
    begun: set[int] = set()
    most = fullest = 0
    for place, key in enumerate(keys):
        step = steps[key]
        total += step.before
        high = step.highest
        if step.first is not None and key[1] not in begun:
            begun.add(key[1])
            high = step.first - step.gradients
            total += step.gradients
        if step.gathered and key[1] not in there:
            there.add(key[1])
            total += step.gathered
            high = max(high, step.gathering)
        if total + high > most:
            most, fullest = total + high, place
        total += step.after
        if step.drops and key[1] in there:
            there.remove(key[1])
            total -= step.gathered
    return fullest


def _terms_at(
    keys: Sequence[_Key], fullest: int, steps: Mapping[_Key, _Step], stages: Mapping[int, StageMemory]
) -> tuple[str, MemoryTerms]:
    """What is held at one place of the order, by term, and the name of the moment."""
    done, (kind, stage) = Counter(keys[:fullest]), keys[fullest]
    there = {index for index in stages if _is_gathered(keys[:fullest], steps, index)}
    begun = {index for index in stages if done["B", index] + done["I", index]}
    step, own = steps[kind, stage], stages.get(stage) or next(iter(stages.values()))
    is_first = step.first is not None and stage not in begun
    moments = list(step.moments)
    if step.gathered and stage not in there:
        there.add(stage)
        moments += own.moments.get("gather F" if kind == "F" else "gather B", ())
    done[kind, stage] += kind in ("F", "S", "RELOAD")
    words = sum(done["S", index] - done["T", index] for index in stages)
    moment = max(moments, key=lambda one: one.extra.total + (one.gradients if is_first else 0))
    terms = moment.extra + MemoryTerms(gradients=moment.gradients if is_first else 0)
    for index, memory in stages.items():
        live = done["F", index] - done["B", index] - done["I", index]
        deferred = done["I", index] - done["W", index]
        terms += memory.resident + memory.kept.times(live) + memory.deferred.times(deferred)
        terms += memory.offloaded.times(done["RELOAD", index] - done["OFFLOAD", index])
        terms += memory.words.times(words) + MemoryTerms(
            gathered_parameters=memory.gathered if index in there else 0,
            gradients=memory.gradients if index in begun else 0,
        )
    return moment.name, terms


def _is_gathered(keys: Sequence[_Key], steps: Mapping[_Key, _Step], stage: int) -> bool:
    """Whether a stage's parameters are there after these instructions."""
    for key in reversed(keys):
        if key[1] == stage and (steps[key].gathered or steps[key].drops):
            return not steps[key].drops
    return False
