"""Memory of stages whose passes are replayed from CUDA graphs.

A graph's addresses are its own for as long as it exists: what the passes of a micro-batch save and make on the way is
held for each micro-batch that is in flight at a time, whether its passes run or not, and so are gradients and
parameters (`muster/parallel/cuda_graphs.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from muster.cost.memory.stage_memory import PeakCandidate, StageMemory
from muster.cost.memory.terms import MemoryTerms
from muster.schedule.action import Action, Kind, most_in_flight
from muster.spec.plan import Plan

_NOTHING = (PeakCandidate("replay", MemoryTerms()),)


def held_by_graphs(plan: Plan, stages: Mapping[int, StageMemory], actions: Iterable[Action]) -> dict[int, StageMemory]:
    """Return the memory of a rank's stages, of which graphs hold what passes hold at most; `actions` are the rank's."""
    in_flight = most_in_flight(actions)
    return {stage: _held(plan, stage, memory, in_flight[stage]) for stage, memory in stages.items()}


def _held(plan: Plan, stage: int, memory: StageMemory, in_flight: int) -> StageMemory:
    candidates = (one for kind in (Kind.F, Kind.B) for one in memory.peak_candidates.get(kind, ()))
    work = max((one.extra for one in candidates), key=lambda extra: extra.total, default=MemoryTerms())
    # A copy of what comes from a neighbouring stage, and of what goes there, in each direction.
    ends = 2 * (not plan.is_first(stage)) + 2 * (not plan.is_last(stage))
    passes = memory.saved + work + MemoryTerms(communication=ends * memory.message_bytes)
    kept = MemoryTerms(gathered_parameters=memory.gathered_params, gradients=memory.gradients)
    return replace(
        memory,
        resident=memory.resident + passes.scaled(in_flight) + kept,
        gathered_params=0,
        gradients=0,
        saved=MemoryTerms(),
        peak_candidates={**memory.peak_candidates, Kind.F: _NOTHING, Kind.B: _NOTHING},
    )
