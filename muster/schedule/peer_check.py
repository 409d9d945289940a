"""Checks of communication: every transfer and collective has its other end, in an order that both ranks share."""

from collections import defaultdict

from muster.schedule.action import OUTER_KINDS, SENDS, Action, Kind
from muster.schedule.program import Instruction, Program, ProgramError, Wait, stages_of_action

PeerOrders = dict[tuple[int, int], list[Action]]
"""(rank, peer) → communication between them in the order of `rank`, by a name that both ends have."""


def check_transfers(program: Program) -> None:
    """Check that each transfer has its other end on the right rank, in one order for each pair of ranks."""
    sends: PeerOrders = defaultdict(list)
    for rank, lanes in enumerate(program.ranks):
        for item in lanes.get("p2p", ()):
            other = program.other_end(item.action)
            sends[rank, _peer(program, rank, item, other)].append(item.action if item.action.kind in SENDS else other)
    for (rank, peer), ours in sends.items():
        theirs = sends.get((peer, rank), [])
        if ours == theirs:
            continue
        known = set(theirs)
        for send in ours:
            if send not in known:
                here = send
                there = program.other_end(send)
                if program.placement[send.stage] != rank:
                    here, there = there, here
                raise ProgramError(f"{here} on rank {rank} has no {there} on rank {peer}")
    for (rank, peer), ours in sends.items():
        for one, other in zip(ours, sends[peer, rank], strict=True):
            if one != other:
                raise ProgramError(
                    f"ranks {rank} and {peer} order their transfers differently:"
                    f" where rank {rank} has {one} → {program.other_end(one)}, rank {peer} has {other} →"
                    f" {program.other_end(other)}"
                )


def _peer(program: Program, rank: int, item: Instruction, other: Action) -> int:
    """Return the rank at the other end of a transfer."""
    stage, depth = other.stage, program.depth
    beyond = not 0 <= stage < program.num_stages or stage // depth != item.action.stage // depth
    if beyond or program.placement[stage] == rank:
        raise ProgramError(f"{item.action} on rank {rank} has no other rank to pass anything to or from")
    if item.peer != program.placement[stage]:
        raise ProgramError(
            f"{item.action} on rank {rank} has rank {item.peer} as its other end,"
            f" but stage {stage} lies on rank {program.placement[stage]}"
        )
    return program.placement[stage]


_OF_ALL_RANKS = (
    *(Kind.GRAD_NORM, Kind.GRAD_NORM_ASYNC, Kind.GRAD_NORM_BESIDE, Kind.STEP),
    *(Kind.MOVE_EXPERTS, *OUTER_KINDS),
)


def check_outer_steps(program: Program) -> None:
    """Check that each rank exchanges fragments with other islands in the same order, as those of other islands do, and
    that each outer step waits for the exchange of its own fragment."""
    orders: list[list[Action]] = []
    for rank, lanes in enumerate(program.ranks):
        lane = lanes.get("outer", ())
        orders.append([item.action for item in lane])
        places = {item.action: Wait("outer", index) for index, item in enumerate(lane)}
        for item in (*lane, *lanes.get("compute", ())):
            kind, fragment = item.action.kind, item.action.slice
            needed = {
                Kind.OUTER_WAIT: Action(Kind.OUTER_REDUCE, slice=fragment),
                Kind.OUTER_STEP: Action(Kind.OUTER_WAIT, slice=fragment),
            }.get(kind)
            if needed is None or (kind == Kind.OUTER_WAIT and needed not in places):
                continue  # an exchange that ends here may have begun after an earlier step
            if places.get(needed) not in item.waits:
                raise ProgramError(f"{item.action} on rank {rank} doesn't wait for {needed}")
    for rank, order in enumerate(orders):
        if order != orders[0]:
            raise ProgramError(f"rank {rank} exchanges fragments with other islands in another order than rank 0")


def check_collectives(program: Program) -> None:
    """Check that collectives are on all their ranks: global ones on all, ALL_REDUCE_TP on all stages or none."""
    found = [{action for items in lanes.values() for action, _, _ in items if action[2] < 0} for lanes in program.ranks]
    synced = {action.stage for actions in found for action in actions if action.kind == Kind.ALL_REDUCE_TP}
    if synced:
        busy = {action[1] for lanes in program.ranks for action, _, _ in lanes.get("compute", ()) if action[2] >= 0}
        if busy - synced:
            stage = min(busy - synced)
            rank = program.placement[stage]
            raise ProgramError(
                f"{stage}{Kind.ALL_REDUCE_TP} is missing on rank {rank}, though other stages have theirs"
            )
    _check_pairwise_collectives(program)
    for action in sorted({one for actions in found for one in actions if one.kind in _OF_ALL_RANKS}):
        for rank, actions in enumerate(found):
            if action not in actions:
                raise ProgramError(f"{action} is missing on rank {rank}")
    if program.replicas > 1 and any(Action(Kind.STEP) in actions for actions in found):
        for stage, rank in enumerate(program.placement):
            if Action(Kind.ALL_REDUCE_REPLICAS, stage % program.depth) not in found[rank]:
                raise ProgramError(
                    f"{Action(Kind.ALL_REDUCE_REPLICAS, stage % program.depth)} is missing on rank {rank}"
                )


def _check_pairwise_collectives(program: Program) -> None:
    """Check that ALL_REDUCE_TIED and ALL_REDUCE_REPLICAS are on both their ranks, in the same order."""
    meetings: PeerOrders = defaultdict(list)
    for rank, lanes in enumerate(program.ranks):
        for action, peer, _ in lanes.get("collective", ()):
            if action.kind not in (Kind.ALL_REDUCE_TIED, Kind.ALL_REDUCE_REPLICAS):
                continue
            partner = _partner(program, rank, action)
            if partner != peer:
                raise ProgramError(f"{action} on rank {rank} has {_rank(peer)} as its partner, not {_rank(partner)}")
            if peer is not None:
                meetings[rank, peer].append(_shared_name(program, action))
    for (rank, peer), ours in meetings.items():
        theirs = meetings.get((peer, rank), [])
        for action in ours:
            if action not in theirs:
                raise ProgramError(f"{action} on rank {rank} has no {action.kind} on its partner, rank {peer}")
        if ours != theirs:
            one, other = next(pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1])
            raise ProgramError(f"where rank {rank} has {one}, its partner, rank {peer}, has {other}")


def _shared_name(program: Program, action: Action) -> Action:
    """Return the name of a collective on both ends: ALL_REDUCE_TIED takes the first stage of its replica."""
    return (
        action._replace(stage=action.stage // program.depth * program.depth)
        if action.kind == Kind.ALL_REDUCE_TIED
        else action
    )


def _partner(program: Program, rank: int, action: Action) -> int | None:
    """Return the peer of `rank` in ALL_REDUCE_TIED or ALL_REDUCE_REPLICAS; None if it is the rank itself."""
    if action.kind == Kind.ALL_REDUCE_REPLICAS:
        holders = {program.placement[stage] for stage in stages_of_action(program, action.kind, action.stage)}
    else:
        first = action.stage // program.depth * program.depth
        holders = {program.placement[first], program.placement[first + program.depth - 1]}
    return next(iter(holders - {rank}), None)


def _rank(rank: int | None) -> str:
    return "no rank" if rank is None else f"rank {rank}"
