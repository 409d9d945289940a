"""Versions of the weights in an asynchronous Program: where optimizer steps stand, and the proof of what passes use.

Version 0 is that at the beginning of the Program, and the optimizer step number t, from 0, makes version t + 1. A
forward uses the newest version of its rank; the backward of the same micro-batch uses the same one, which the rank
keeps so long (weight stashing; Narayanan et al. 2019, PipeDream, §3.3), or, in a schedule without stashing, the newest
one. The *delay* of a pass of step t on version v is t − v.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.schedule.action import BACKWARDS, Action, Kind
from muster.schedule.program import Instruction, Program, ProgramError, Wait
from muster.spec.schedules import SCHEDULES

if TYPE_CHECKING:
    from muster.schedule.lower import ProgramDraft


def add_versioned_steps(draft: "ProgramDraft", reductions: Sequence[tuple[int, Kind]] = ()) -> None:
    """Add the gradient norm and the optimizer step of each of several steps without a flush between them, and before
    them the `reductions`, by stage, of the step's gradients over ranks with other data.

    Reductions and the norm are under way beside the passes that follow the step's last backward on a rank; the
    optimizer steps before the first pass that uses the version which it makes, once the norm is there, or, where ranks
    step alone, the reduced gradients. All versions that no pass uses are made at the end.
    """
    schedule = draft.schedule
    entry = SCHEDULES.get(schedule.name)
    steps_alone = entry is not None and entry.steps_alone
    per_step = schedule.num_micro_batches // schedule.num_steps
    for rank, lanes in enumerate(draft.ranks):
        compute = lanes["compute"]
        first_use: dict[int, int] = {}
        last_backward: dict[int, int] = {}
        for index, item in enumerate(compute):
            action = item.action
            first_use.setdefault(action.version, index)
            if action.kind != Kind.F:
                last_backward[action.micro_batch // per_step] = index
        versions = range(1, schedule.num_steps + 1)
        places = [first_use.get(version, len(compute)) for version in versions]

        def moved(index: int, places: list[int] = places) -> int:
            return index + sum(place <= index for place in places)

        for lane in ("compute", "p2p"):
            lanes[lane] = [
                item._replace(
                    waits=tuple(w._replace(index=moved(w.index)) if w.lane == "compute" else w for w in item.waits)
                )
                for item in lanes[lane]
            ]
        steps = []
        for version in versions:
            complete = [_over(moved(last_backward[version - 1]))]
            for stage, kind in reductions:
                if schedule.placement[stage] == rank:
                    complete = [draft.add(rank, Action(kind, stage, version=version), complete)]
            norm = draft.add(rank, Action(Kind.GRAD_NORM_BESIDE, version=version), complete)
            needed = norm if not steps_alone else complete[0]
            step_waits = () if needed.lane == "compute" else (needed,)
            steps.append(Instruction(Action(Kind.STEP, version=version), waits=step_waits))
        with_steps: list[Instruction] = []
        for index, item in enumerate(lanes["compute"]):
            with_steps += [step for step, place in zip(steps, places, strict=True) if place == index]
            with_steps.append(item)
        ends = [step for step, place in zip(steps, places, strict=True) if place == len(compute)]
        lanes["compute"] = with_steps + ends


def _over(index: int) -> Wait:
    return Wait("compute", index)


@dataclass(frozen=True, slots=True)
class VersionReport:
    """Versions on one rank."""

    most_versions: int
    """Most versions of the weights that the rank has at a time, the newest among them."""
    max_delay: int
    """Largest delay of its passes, in steps."""


def report_versions(program: Program, rank: int) -> VersionReport:
    """Return what a rank of a Program does with versions of the weights.

    Raises ProgramError where a forward doesn't use the newest version, a backward not that of its forward (the newest,
    in a schedule without stashing), or where versions are made out of turn.
    """
    newest, most, delay = 0, 1, 0
    entry = SCHEDULES.get(program.schedule)
    stashes = entry is None or entry.stashes_weights
    used: dict[tuple[int, int], int] = {}
    """(stage, micro-batch) between forward and backward → version."""
    in_flight: Counter[int] = Counter()
    for item in program.ranks[rank].get("compute", ()):
        action = item.action
        place = action.stage, action.micro_batch
        if action.kind == Kind.STEP:
            if action.version != newest + 1:
                raise ProgramError(f"{action} on rank {rank} comes after version {newest}: expected {newest + 1}")
            newest = action.version
        elif action.kind == Kind.F or (action.kind in BACKWARDS and not stashes):
            if action.version != newest:
                raise ProgramError(
                    f"{action} on rank {rank} uses version {action.version} of the weights, but the newest is {newest}"
                )
            if stashes:
                used[place] = action.version
                in_flight[action.version] += 1
            delay = max(delay, program.step_of(action) - action.version)
        elif action.kind in BACKWARDS and place in used:
            forward = used.pop(place)
            if action.version != forward:
                raise ProgramError(
                    f"{action} on rank {rank} uses version {action.version} of the weights, but its forward used"
                    f" version {forward}"
                )
            in_flight[forward] -= 1
        most = max(most, sum(count > 0 for version, count in in_flight.items() if version != newest) + 1)
    return VersionReport(most, delay)


def check_versions(program: Program) -> None:
    """Check that passes use the versions that they may, none of which is older than the schedule's bound.

    Raises ProgramError as `report_versions`, for a version in a program of one step, and for a delay beyond the bound.
    """
    if program.num_steps == 1:
        for rank, lanes in enumerate(program.ranks):
            for items in lanes.values():
                wrong = next((action for action, _, _ in items if action[4]), None)
                if wrong is not None:
                    raise ProgramError(f"{wrong} on rank {rank} is of a version, which a program of one step has not")
        return
    if program.num_micro_batches % program.num_steps:
        raise ProgramError(f"{program.num_micro_batches} micro-batches don't spread over {program.num_steps} steps")
    entry = SCHEDULES.get(program.schedule)
    _check_reductions(program)
    for rank in range(program.num_ranks):
        found = report_versions(program, rank)
        if entry is not None and entry.max_delay is not None:
            per_step = program.num_micro_batches // program.num_steps
            bound = entry.max_delay(rank, program.num_ranks, per_step)
            if found.max_delay > bound:
                raise ProgramError(
                    f"rank {rank} computes gradients on weights that are {found.max_delay} steps old, but schedule"
                    f" {program.schedule} promises at most {bound}"
                )


def _check_reductions(program: Program) -> None:
    """Check that gradients are reduced on all stages and in all steps, or nowhere. Raises ProgramError."""
    for kind in (Kind.REDUCE_GRAD, Kind.ALL_REDUCE_TP):
        found = {
            item.action for lanes in program.ranks for item in lanes.get("collective", ()) if item.action.kind == kind
        }
        wanted = {
            Action(kind, stage, version=version)
            for stage in range(program.num_stages)
            for version in range(1, program.num_steps + 1)
        }
        if found and (missing := wanted - found):
            one = min(missing)
            raise ProgramError(
                f"{one} is missing on rank {program.placement[one.stage]}, though the gradients of other stages or"
                " steps are reduced"
            )
