"""How much memory each rank of a plan needs, moment by moment of its Program, and whether that is there."""

from collections.abc import Mapping
from dataclasses import dataclass

from muster.cost.device_memory import device_terms
from muster.cost.holdings import layer_kind
from muster.cost.megatron_memory import megatron_stage
from muster.cost.memory import MemoryTerms
from muster.cost.own_memory import KERNELS, OTHER_KERNELS, Kernels, own_stage
from muster.cost.stage_memory import StageMemory
from muster.schedule.program import Program
from muster.spec.cluster import ClusterSpec
from muster.spec.layout import has_words, stages_of
from muster.spec.mesh import members
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.software import Software
from muster.spec.workload import Workload


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
    alike: dict[tuple, StageMemory] = {}
    found = []
    for pp_rank in range(plan.pp):
        stages = {}
        for stage in stages_of(plan, pp_rank):
            key = _kind_of_stage(model, plan, stage)
            if key not in alike:
                alike[key] = (
                    megatron_stage(model, plan, workload, stage, software)
                    if software.storage == "megatron"
                    else own_stage(model, plan, workload, stage, kernels)
                )
            stages[stage] = alike[key]
        at, terms = walk(program, pp_rank, stages)
        ranks = [rank for rank, _ in members(plan, pp_rank)]
        device = cluster.group_of(ranks[0]).device
        fixed = sum(stage.resident.total for stage in stages.values())
        terms += device_terms(device, plan, pp_rank, terms.total - fixed)
        found.append(RankForecast(pp_rank, ranks[0], len(ranks), at, terms, device.memory_bytes))
    return MemoryForecast(tuple(found))


def _kind_of_stage(model: ModelSpec, plan: Plan, stage: int) -> tuple:
    """What stages that hold alike have in common."""
    layers, own = plan.layers(stage, model.num_layers), plan.pp_rank(stage)
    neighbours = [0 <= other < plan.num_stages and plan.pp_rank(other) == own for other in (stage - 1, stage + 1)]
    words = plan.spread_vocab and (own, has_words(plan, stage))
    kinds = (
        tuple((layer_kind(model, layer), str(plan.strategy(layer))) for layer in layers)
        if plan.overrides
        else (tuple(layer_kind(model, layer) for layer in layers))
    )
    return kinds, plan.is_first(stage), plan.is_last(stage), str(plan.mesh(stage)), tuple(neighbours), words


def walk(program: Program, pp_rank: int, stages: Mapping[int, StageMemory]) -> tuple[str, MemoryTerms]:
    """The peak of one rank's compute and collective lanes: when it is, and what is held then."""
    state = _State(program, pp_rank, stages)
    for (kind, stage, *_), _, _ in program.ranks[pp_rank].get("collective", ()):
        if kind == "UNSHARD":
            state.enter(kind, stage, 0)
    for (kind, stage, micro_batch, *_), _, _ in program.ranks[pp_rank].get("compute", ()):
        state.enter(kind, stage, micro_batch)
    for (kind, stage, micro_batch, *_), _, _ in program.ranks[pp_rank].get("collective", ()):
        if kind in ("REDUCE", "MERGE"):
            state.enter(kind, stage, micro_batch)
    return state.peak()


class _State:
    """What a rank holds as its program goes on: counts, and their sum in bytes."""

    def __init__(self, program: Program, pp_rank: int, stages: Mapping[int, StageMemory]) -> None:
        self.program, self.stages, self.pp_rank = program, stages, pp_rank
        self.live = dict.fromkeys(stages, 0)
        self.deferred = dict.fromkeys(stages, 0)
        self.gathered: set[int] = set()
        self.reduced: set[int] = set()
        self.sent = self.words = 0
        self.total = sum(stage.resident.total for stage in stages.values())
        self.best, self.at = -1, ("", -1, -1, "")
        self.snapshot: MemoryTerms = MemoryTerms()
        self.totals = {
            (kind, index): [(moment, moment.extra.total) for moment in moments]
            for index, stage in stages.items()
            for kind, moments in stage.moments.items()
        }
        self.kept = {index: stage.kept.total for index, stage in stages.items()}
        self.later = {index: stage.deferred.total for index, stage in stages.items()}

    def enter(self, kind: str, stage: int, micro_batch: int) -> None:
        """Follows one instruction: what it makes, its moments, what it frees."""
        own = self.stages.get(stage)
        if own is None or (kind, stage) not in self.totals:
            return
        first = kind in ("B", "I") and stage not in self.reduced
        moments = self.totals[kind, stage]
        if kind == "F":
            self.live[stage] += 1
            self.total += self.kept[stage]
        if kind == "S":
            self.words += 1
            self.total += own.words.total
        if kind in ("F", "B", "I", "W", "UNSHARD") and stage not in self.gathered:
            self.gathered.add(stage)
            self.total += own.gathered
            moments = moments + self.totals.get(("gather F" if kind == "F" else "gather B", stage), [])
        for moment, extra in moments:
            held = self.total + extra + (moment.gradients if first else 0)
            if held > self.best:
                self.best, self.at = held, (kind, stage, micro_batch, moment.name)
                self.snapshot = self._terms(own, moment.extra, moment.gradients if first else 0)
        self._leave(kind, stage, own, first)

    def _leave(self, kind: str, stage: int, own: StageMemory, first: bool) -> None:
        if kind in ("B", "I"):
            self.live[stage] -= 1
            self.total -= self.kept[stage]
            if self._goes_away(stage, 1):
                self.sent += own.sent
                self.total += own.sent
            if kind == "I":
                self.deferred[stage] += 1
                self.total += self.later[stage]
            if self._goes_away(stage, -1):
                self.sent += own.sent
                self.total += own.sent
        if kind == "W":
            self.deferred[stage] -= 1
            self.total -= self.later[stage]
        if kind == "T":
            self.words -= 1
            self.total -= own.words.total
        if first:
            self.reduced.add(stage)
            self.total += own.gradients
        if kind in ("B", "W") and not own.stays and stage in self.gathered:
            self.gathered.remove(stage)
            self.total -= own.gathered

    def _goes_away(self, stage: int, step: int) -> bool:
        """Whether what a stage passes on leaves the rank."""
        if self.program.is_last(stage) if step > 0 else self.program.is_first(stage):
            return False
        return self.program.placement[stage + step] != self.pp_rank

    def _terms(self, own: StageMemory, extra: MemoryTerms, gradients: int) -> MemoryTerms:
        total = extra + MemoryTerms(gradients=gradients, communication=self.sent)
        for index, stage in self.stages.items():
            total += stage.resident + stage.kept.times(self.live[index]) + stage.deferred.times(self.deferred[index])
            total += stage.words.times(self.words) + MemoryTerms(
                gathered_parameters=stage.gathered if index in self.gathered else 0,
                gradients=stage.gradients if index in self.reduced else 0,
            )
        return total

    def peak(self) -> tuple[str, MemoryTerms]:
        kind, stage, micro_batch, name = self.at
        return f"{stage}{kind}{micro_batch if micro_batch >= 0 else ''}, {name}", self.snapshot
