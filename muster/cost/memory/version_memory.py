"""Memory of steps that begin before others are over: a second set of gradients, and the versions of the weights that
passes of an asynchronous pipeline need, or the state to which post-validation may go back."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from muster.config.optim_config import OptimConfig
from muster.cost.memory.stage_memory import StageMemory
from muster.cost.memory.terms import MemoryTerms
from muster.schedule.action import Action, Kind
from muster.spec.plan import Plan


def held_by_versions(
    plan: Plan, actions: Iterable[Action], stages: Mapping[int, StageMemory], optim: OptimConfig | None = None
) -> dict[int, StageMemory]:
    """Return the memory of a rank's stages with what the steps of an asynchronous schedule hold in addition; `actions`
    are the rank's.

    A step's gradients wait for the optimizer step while those of the following one accumulate. From the optimizer step
    on, when the former are freed, there are older versions of the weights instead, as the passes use them; both at a
    time are there only within the optimizer step, when one micro-batch less is in flight than at other times. Where
    ranks step alone, no gradients wait; without stashing there are no older versions.

    Weight prediction (`optim.delay_compensation` predict) needs the weights before an update once more, in whose place
    are then, where passes don't use copies anyway, the weights that they use.

    A step that doesn't wait for its validation keeps the state before it, and its gradients, beside those of the next
    one (`plan.post_validation`).
    """
    if plan.post_validation:
        return {stage: _with_second_state(memory) for stage, memory in stages.items()}
    if not plan.schedule_entry.is_asynchronous or plan.flush_every == 1:
        return dict(stages)
    entry = plan.schedule_entry
    stashed, steps_alone = (most_versions(actions) - 1) * entry.stashes_weights, entry.steps_alone
    found = {stage: _with_versions(memory, stashed, steps_alone) for stage, memory in stages.items()}
    if optim is not None and optim.delay_compensation == "predict":
        for stage, memory in stages.items():
            more = MemoryTerms(parameters=memory.resident.parameters)
            found[stage] = replace(found[stage], resident=found[stage].resident + more)
    return found


def _with_second_state(memory: StageMemory) -> StageMemory:
    resident = memory.resident
    more = MemoryTerms(parameters=resident.parameters, optimizer=resident.optimizer, gradients=memory.gradients)
    return replace(memory, resident=resident + more)


def most_versions(actions: Iterable[Action]) -> int:
    """Return the most versions of the weights that the passes between forward and backward use at a time."""
    in_flight: Counter[int] = Counter()
    most = 1
    for action in actions:
        if action.kind in (Kind.F, Kind.B):
            in_flight[action.version] += 1 if action.kind == Kind.F else -1
            most = max(most, sum(count > 0 for count in in_flight.values()))
    return most


def _with_versions(memory: StageMemory, stashed: int, steps_alone: bool) -> StageMemory:
    copies = memory.gathered_params  # of the master weights, in less than their precision
    size = stashed * (copies or memory.resident.parameters)
    beyond = size if steps_alone else max(0, size - memory.saved.total)
    more = MemoryTerms(
        parameters=0 if copies else beyond,
        gathered_parameters=beyond if copies else 0,
        gradients=0 if steps_alone else memory.gradients,
    )
    return replace(memory, resident=memory.resident + more)
