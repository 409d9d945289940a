"""Offload: activations that lie long between a forward and its backward wait in the host's memory (PipeOffload,
arXiv:2503.01328).

Copies stand in a lane of their own, one after another, and run beside the passes. The activations leave while the next
pass runs, and come back while the pass before their backward does, so that a rank holds those of a few micro-batches
whatever the schedule keeps. What lies shorter than that stays where it is.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from muster.schedule.action import Action, Kind
from muster.schedule.program import Instruction, Wait

PASSES_FOR_COPY = 1
"""Passes that run while the activations of a micro-batch go to the host, and again while they come back."""

MIN_OFFLOAD_GAP = 2 * PASSES_FOR_COPY + 2
"""From a forward to its backward, so that the activations are away for a pass at least."""


def offload_intervals(order: Sequence[Action], stages: Collection[int]) -> Iterator[tuple[int, int]]:
    """Of one rank's order of passes, the places of the forwards of `stages` whose activations can be away, each with
    the place of the backward that reads them first."""
    forwards: dict[tuple[int, int], int] = {}
    for place, (kind, stage, micro_batch, *_) in enumerate(order):
        if kind == Kind.F and stage in stages:
            forwards[stage, micro_batch] = place
        elif kind in (Kind.B, Kind.I):
            first = forwards.get((stage, micro_batch), place)
            if place - first >= MIN_OFFLOAD_GAP:
                yield first, place


def order_with_copies(order: Sequence[Action], stages: Collection[int]) -> list[Action]:
    """One rank's order of passes, with OFFLOAD where the memory of what went to the host is free, and RELOAD where that
    of what comes back is taken."""
    found = list(offload_intervals(order, stages))
    before = {first + PASSES_FOR_COPY + 1: order[first] for first, _ in found}
    after = {reader - PASSES_FOR_COPY - 1: order[reader] for _, reader in found}
    actions = []
    for place, action in enumerate(order):
        if place in before:
            actions.append(Action(Kind.OFFLOAD, before[place].stage, before[place].micro_batch))
        actions.append(action)
        if place in after:
            actions.append(Action(Kind.RELOAD, after[place].stage, after[place].micro_batch))
    return actions


CopyOverlaps = Counter[tuple[tuple[Kind, int], tuple[int, ...]]]
"""(kind, stage) of a pass and the stages whose copies run beside it → how often that is so on a rank."""


def count_copy_overlaps(order: Sequence[Action], stages: Collection[int]) -> CopyOverlaps:
    """What the copies of one rank's `stages` run beside: as long as they last, or the pass where that is longer, passes
    from the one before it to the one after it."""
    beside: dict[int, list[int]] = {}
    for first, reader in offload_intervals(order, stages):
        beside.setdefault(first + 1, []).append(order[first].stage)
        beside.setdefault(reader - 1, []).append(order[first].stage)
    return Counter((order[place][:2], tuple(sorted(copied))) for place, copied in beside.items())


def add_copy_lane(
    compute: Sequence[Instruction], stages: Collection[int]
) -> tuple[list[Instruction], list[Instruction]]:
    """A rank's compute lane with waits for its copies, and its copy lane.

    A copy waits for the pass after which it may begin, and the lane is in the order of those, so that no copy holds up
    another. The memory of what goes to the host is free from the pass on that waits for it.
    """
    found = list(offload_intervals([item.action for item in compute], stages))
    begun = [(forward, Kind.OFFLOAD, forward + PASSES_FOR_COPY + 1, forward) for forward, _ in found]
    begun += [(backward - PASSES_FOR_COPY - 1, Kind.RELOAD, backward, backward) for _, backward in found]
    lane, waiting = [], list(compute)
    for place, (after, kind, reader, named_by) in enumerate(sorted(begun)):
        action = compute[named_by].action
        lane.append(Instruction(Action(kind, action.stage, action.micro_batch), None, (Wait("compute", after),)))
        item = waiting[reader]
        waiting[reader] = item._replace(waits=(*item.waits, Wait("host_copy", place)))
    return waiting, lane
