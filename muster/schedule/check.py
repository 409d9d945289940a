"""Checker: proves before a Program runs that it does all its work, once, in an order without deadlock."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from muster.schedule.action import (
    BACKWARDS,
    BUCKET_KINDS,
    HOST_UPDATE_KINDS,
    KINDS,
    LANES,
    OUTER_KINDS,
    PARAMETER_KINDS,
    PART_UPDATES,
    VOCAB_BACKWARD_KINDS,
    VOCAB_FORWARD_KINDS,
    Action,
    Kind,
    Lane,
)
from muster.schedule.buffer_liveness import PASSES, BufferLiveness
from muster.schedule.dry_run import dry_run
from muster.schedule.paths import wrong_path
from muster.schedule.peer_check import check_collectives, check_outer_steps, check_transfers
from muster.schedule.program import Program, ProgramError, Wait, stages_of_action
from muster.schedule.timing import WHY_AFTER, wrong_pair
from muster.schedule.versions import check_versions
from muster.spec.gc_pause import gc_paused
from muster.spec.units import pluralize

__all__ = ["ProgramError", "CheckReport", "check"]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Facts about a Program that can be run."""

    peak_activations: tuple[int, ...]
    """Per rank, the most activations saved for backwards at once, in micro-batches on one stage, or in slices of
    them."""
    peak_by_stage: tuple[dict[int, int], ...]
    """Per rank, the same peak by stage."""
    peak_logits: tuple[int, ...]
    """Per rank, the most micro-batches whose logits are kept at once, between S and T."""


def check(program: Program, max_activations: int | None = None) -> CheckReport:
    """Prove that the Program can be run on any transport, with at most `max_activations` saved on each rank.

    Raises ProgramError with one sentence that names the wrong action.
    """
    with gc_paused():
        _check_shape(program)
        _check_passes(program)
        _check_slices(program)
        _check_pairs(program)
        check_versions(program)
        _check_vocab_passes(program)
        _check_updates(program)
        for rank in range(program.num_ranks):
            _check_waits(program, rank)
        check_transfers(program)
        check_collectives(program)
        check_outer_steps(program)
        books = [BufferLiveness(program, rank, max_activations) for rank in range(program.num_ranks)]
        dry_run(program, lambda rank, instruction, over: books[rank].record(instruction.action, over))
        for book in books:
            book.check_end()
    return CheckReport(
        tuple(book.peak_activations for book in books),
        tuple(book.peak_by_stage for book in books),
        tuple(book.peak_logits for book in books),
    )


def _check_shape(program: Program) -> None:
    if program.num_micro_batches < 1:
        raise ProgramError("a program needs at least one micro-batch, this one has none")
    if not program.placement:
        raise ProgramError("a program needs at least one stage, this one has none")
    for stage, rank in enumerate(program.placement):
        if not 0 <= rank < program.num_ranks:
            raise ProgramError(f"stage {stage} lies on rank {rank}, but the ranks are 0 to {program.num_ranks - 1}")
    if (fault := wrong_path(program.paths, program.num_stages, program.num_micro_batches)) is not None:
        raise ProgramError(fault)
    for rank, lanes in enumerate(program.ranks):
        seen: set[Action] = set()
        for lane, items in lanes.items():
            actions = [action for action, _, _ in items]
            for kind, stage in {action[:2] for action in actions}:
                _check_lane_and_rank(program, rank, lane, kind, stage)
            late = [one for one in actions if one[2] >= program.num_micro_batches]
            if late:
                raise ProgramError(_out_of_range(program, rank, str(late[0])))
            numbered = (*HOST_UPDATE_KINDS, *OUTER_KINDS, *PARAMETER_KINDS, *BUCKET_KINDS)
            beyond = [one for one in actions if not 0 <= one[3] < program.num_slices and one[0] not in numbered]
            if beyond:
                slices = pluralize(program.num_slices, "slice")
                raise ProgramError(f"{beyond[0]} on rank {rank} is outside of {slices} per sequence")
            if len(seen) + len(actions) > len(seen := seen.union(actions)):
                twice = next(one for one in actions if actions.count(one) > 1)
                raise ProgramError(f"{twice} is on rank {rank} twice")


def _check_lane_and_rank(program: Program, rank: int, lane: Lane, kind: Kind, stage: int) -> None:
    """Raise ProgramError unless actions of this kind and stage belong in this lane and on this rank."""
    if KINDS[kind].lane != lane:
        found = next(str(action) for action, _, _ in program.ranks[rank][lane] if action[:2] == (kind, stage))
        raise ProgramError(f"{found} on rank {rank} is in lane {lane}, but belongs in lane {KINDS[kind].lane}")
    holders = [program.placement[one] for one in stages_of_action(program, kind, stage)]
    if stage >= 0 and rank not in holders:
        found = next(str(action) for action, _, _ in program.ranks[rank][lane] if action[:2] == (kind, stage))
        if not holders:
            raise ProgramError(_out_of_range(program, rank, found))
        where = " and ".join(map(str, holders))
        raise ProgramError(f"{found} is on rank {rank}, but stage {stage} lies on rank {where}")


def _out_of_range(program: Program, rank: int, action: str) -> str:
    stages, micro_batches = program.num_stages, program.num_micro_batches
    return f"{action} on rank {rank} is outside of {stages} stages and {micro_batches} micro-batches"


def _check_passes(program: Program) -> None:
    """Check that every micro-batch runs through all stages of one replica: F and, in training, B or both I and W.

    Duplicates on a rank and passes on the wrong rank are already refused.
    """
    passes: dict[str, set[tuple[int, int]]] = {kind: set() for kind in PASSES}
    slices = program.num_slices
    for lanes in program.ranks:
        for (kind, stage, micro_batch, part, _), _, _ in lanes.get("compute", ()):
            if kind in passes:
                passes[kind].add((micro_batch * slices + part, stage))
    split = passes[Kind.I] | passes[Kind.W]
    if both := passes[Kind.B] & split:
        unit, stage = min(both)
        one, other = (
            Action(kind, stage, *divmod(unit, slices))
            for kind in (Kind.B, Kind.I if (unit, stage) in passes[Kind.I] else Kind.W)
        )
        raise ProgramError(f"rank {program.placement[stage]} has both {one} and {other}")
    wanted = {(unit, stage) for unit, stages in _stage_routes(program, passes) for stage in stages}
    missing = [(Kind.F, wanted - passes[Kind.F])]
    if passes[Kind.B] or split:
        missing += [
            (Kind.B, wanted - passes[Kind.B] - split),
            (Kind.I, split - passes[Kind.I]),
            (Kind.W, split - passes[Kind.W]),
        ]
    if program.paths and (beyond := set().union(*passes.values()) - wanted):
        unit, stage = min(beyond)
        action = next(Action(kind, stage, unit) for kind in PASSES if (unit, stage) in passes[kind])
        raise ProgramError(f"{action} is on rank {program.placement[stage]}, but micro-batch {unit} skips its stage")
    for kind, places in missing:
        if places:
            unit, stage = min(places)
            missed = Action(kind, stage, *divmod(unit, slices))
            raise ProgramError(f"{missed} is missing on rank {program.placement[stage]}")


def _check_slices(program: Program) -> None:
    """Check that forwards of a sequence's slices run from the first to the last, and backwards from the last to the
    first."""
    for rank, lanes in enumerate(program.ranks if program.num_slices > 1 else ()):
        done: set[Action] = set()
        for action, _, _ in lanes.get("compute", ()):
            is_backward = action.kind in BACKWARDS
            other = action.slice + (1 if is_backward else -1)
            if (is_backward or action.kind == Kind.F) and 0 <= other < program.num_slices:
                kinds = BACKWARDS if is_backward else (Kind.F,)
                needed = [action._replace(kind=kind, slice=other) for kind in kinds]
                if not done.intersection(needed):
                    raise ProgramError(f"{action} on rank {rank} comes before {needed[0]}{WHY_AFTER[is_backward]}")
            done.add(action)


def _check_pairs(program: Program) -> None:
    """Check that each pair is a forward and a backward of another stage, and that both begin and end together."""
    if not program.pairs:
        return
    orders = [[item.action for item in lanes.get("compute", ())] for lanes in program.ranks]
    if (fault := wrong_pair(orders, program.pairs)) is not None:
        raise ProgramError(fault)
    for rank, lanes in enumerate(program.ranks):
        for index, (forward, backward) in enumerate(pairwise(lanes.get("compute", ()))):
            if forward.action not in program.pairs:
                continue
            if backward.waits:
                lane, place = backward.waits[0]
                raise ProgramError(
                    f"{backward.action} on rank {rank} waits for {lane}:{place}, but runs as one with"
                    f" {forward.action}: expected the wait there"
                )
            early = [
                other.action for items in lanes.values() for other in items if Wait("compute", index) in other.waits
            ]
            if early:
                raise ProgramError(
                    f"{early[0]} on rank {rank} waits for {forward.action}, which is over with {backward.action}:"
                    f" expected a wait for compute:{index + 1}"
                )


def _check_vocab_passes(program: Program) -> None:
    """Check the passes of vocabulary parallelism: if any rank has them, all have them for every micro-batch.

    Backward passes are required too, if the Program has any backward.
    """
    vocab = (*VOCAB_FORWARD_KINDS, *VOCAB_BACKWARD_KINDS)
    if not any(action[0] in vocab for lanes in program.ranks for action, _, _ in lanes.get("collective", ())):
        return
    found = [{action[:3] for items in lanes.values() for action, _, _ in items} for lanes in program.ranks]
    kinds = {action[0] for actions in found for action in actions}
    for kind in VOCAB_FORWARD_KINDS + (VOCAB_BACKWARD_KINDS if kinds.intersection(BACKWARDS) else ()):
        for rank, actions in enumerate(found):
            for micro_batch in range(program.num_micro_batches):
                action = Action(kind, program.placement.index(rank), micro_batch)
                if action[:3] not in actions:
                    raise ProgramError(f"{action} is missing on rank {rank}")


def _check_updates(program: Program) -> None:
    """Check that no part of a stage's parameters is updated twice, by the host and by the device."""
    for rank, lanes in enumerate(program.ranks):
        made: dict[tuple[int, int], Action] = {}
        for item in (*lanes.get("host", ()), *lanes.get("compute", ())):
            kind, stage, _, part, _ = item.action
            if kind in PART_UPDATES and made.setdefault((stage, part), item.action) is not item.action:
                raise ProgramError(f"{made[stage, part]} and {item.action} on rank {rank} update the same part")


def _stage_routes(program: Program, passes: Mapping[str, set[tuple[int, int]]]) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield each slice of a micro-batch, by its number among all, with its stages: those of its path, or of the replica
    that any of its passes is in."""
    if program.paths:
        yield from enumerate(program.paths)
        return
    depth = program.depth
    found = {place for places in passes.values() for place in places}
    replicas: dict[int, dict[int, int]] = {unit: {} for unit in range(program.num_micro_batches * program.num_slices)}
    for unit, stage in found:
        replicas[unit][stage // depth] = stage
    for unit, stages in replicas.items():
        if len(stages) > 1:
            one, other, *_ = (f"stage {stage} on rank {program.placement[stage]}" for stage in sorted(stages.values()))
            raise ProgramError(f"micro-batch {unit // program.num_slices} runs through two replicas: {one}, {other}")
        first = min(stages, default=0) * depth
        yield unit, range(first, first + depth)


def _check_waits(program: Program, rank: int) -> None:
    lanes = program.ranks[rank]
    length = {lane: len(lanes.get(lane, ())) for lane in LANES}
    for items in lanes.values():
        for action, _, waits in items:
            for lane, index in waits:
                if not 0 <= index < length[lane]:
                    raise ProgramError(
                        f"{action} on rank {rank} waits for {lane}:{index},"
                        f" but its {lane} lane has {length[lane]} instructions"
                    )
