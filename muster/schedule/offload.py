"""Offload: activations that are saved for long wait in host memory (PipeOffload, Wan et al. 2025, arXiv:2503.01328).

Host copies have a lane of their own, run one after another and are overlapped with passes. Activations leave during the
pass after their forward, and return during the pass before their backward, so that a rank holds those of a few
micro-batches whatever the schedule saves. Activations with a shorter gap stay on the device.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from muster.schedule.action import Action, Kind, Lane
from muster.schedule.program import Instruction, Wait

PASSES_FOR_COPY = 1
"""Passes during which the activations of a micro-batch are copied to the host, and again back."""

MIN_OFFLOAD_GAP = 2 * PASSES_FOR_COPY + 2
"""Passes from a forward to its backward, at least, so that activations are away for one pass or more."""


def offload_intervals(order: Sequence[Action], stages: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield the index of each forward of `stages` whose activations can be offloaded, and of its first backward. Those
    of the last slice of a sequence stay (`muster.layout.sequence_slices.num_offloaded_layers`)."""
    forwards: dict[tuple[int, int, int], int] = {}
    # Looking up a member of an enumeration costs more than the rest of the loop.
    forward = Kind.F
    backwards = (Kind.B, Kind.I)
    last_slice = max((part for kind, _, _, part, _ in order if kind == forward), default=0)
    for place, (kind, stage, micro_batch, part, _) in enumerate(order):
        if kind == forward and stage in stages and not 0 < last_slice == part:
            forwards[stage, micro_batch, part] = place
        elif kind in backwards:
            first = forwards.get((stage, micro_batch, part), place)
            if place - first >= MIN_OFFLOAD_GAP:
                yield first, place


def order_with_copies(order: Sequence[Action], stages: Collection[int]) -> list[Action]:
    """Return one rank's order with OFFLOAD where the device memory is free again, and RELOAD where it is taken
    again."""
    found = list(offload_intervals(order, stages))
    before = {first + PASSES_FOR_COPY + 1: order[first] for first, _ in found}
    after = {reader - PASSES_FOR_COPY - 1: order[reader] for _, reader in found}
    actions = []
    for place, action in enumerate(order):
        if place in before:
            actions.append(before[place]._replace(kind=Kind.OFFLOAD))
        actions.append(action)
        if place in after:
            actions.append(after[place]._replace(kind=Kind.RELOAD))
    return actions


CopyOverlaps = Counter[tuple[tuple[Kind, int], tuple[int, ...]]]
"""((kind, stage) of a pass, stages whose host copies overlap it) → number of such passes on a rank."""


def count_copy_overlaps(order: Sequence[Action], stages: Collection[int]) -> CopyOverlaps:
    """Return the passes that overlap the host copies of one rank's `stages`.

    A copy lasts from the pass before it to the pass after it, or as long as its pass, if that is longer.
    """
    beside: dict[int, list[int]] = {}
    for first, reader in offload_intervals(order, stages):
        beside.setdefault(first + 1, []).append(order[first].stage)
        beside.setdefault(reader - 1, []).append(order[first].stage)
    return Counter((order[place][:2], tuple(sorted(copied))) for place, copied in beside.items())


def add_copy_lane(
    compute: Sequence[Instruction], stages: Collection[int]
) -> tuple[list[Instruction], list[Instruction]]:
    """Return a rank's compute lane with waits for its host copies, and its host copy lane.

    A copy waits for the pass after which it may begin, and the lane is in the order of these passes, so that no copy
    delays another. Device memory of offloaded activations is free from the pass on that waits for the copy.
    """
    found = list(offload_intervals([item.action for item in compute], stages))
    begun = [(forward, Kind.OFFLOAD, forward + PASSES_FOR_COPY + 1, forward) for forward, _ in found]
    begun += [(backward - PASSES_FOR_COPY - 1, Kind.RELOAD, backward, backward) for _, backward in found]
    lane = []
    waiting = list(compute)
    for place, (after, kind, reader, named_by) in enumerate(sorted(begun)):
        action = compute[named_by].action
        lane.append(Instruction(action._replace(kind=kind), None, (Wait("compute", after),)))
        item = waiting[reader]
        waiting[reader] = item._replace(waits=(*item.waits, Wait("host_copy", place)))
    return waiting, lane


def count_passes_with_layers(order: Sequence[Action], stages: Collection[int]) -> CopyOverlaps:
    """Return the passes that overlap the copies of one rank's `stages` where these go layer by layer beside them."""
    kinds = Kind.F, Kind.B, Kind.I
    return Counter((action[:2], (action.stage,)) for action in order if action.kind in kinds and action.stage in stages)


LAYER_COPIES: dict[Lane, tuple[Kind, Kind]] = {
    "host_copy": (Kind.OFFLOAD_ACT, Kind.RELOAD_ACT),
    "disk": (Kind.WRITE_ACT, Kind.READ_ACT),
}
"""Lane → kinds of the copies of layers' activations beside a forward and beside a backward."""


@dataclass(frozen=True, slots=True)
class PassCopies:
    """Stages whose passes have copies beside them, layer by layer, in one lane."""

    activations: Collection[int] = ()
    """Stages whose layers' activations go to the tier of the lane: to disk (SSDTrain, arXiv:2408.10013), or to host
    memory where there is no pipeline (ALST, arXiv:2506.13996 §3.3)."""
    late: Collection[int] = ()
    """Stages of `activations` that may write some of the layers while the next pass runs."""
    params: Collection[int] = ()
    """Stages whose parameters come from host memory or disk (ZeRO-Infinity, arXiv:2104.07857)."""

    def kinds_beside(self, kind: Kind, stage: int, lane: Lane) -> Iterator[Kind]:
        """Yield the kinds of the copies beside a pass."""
        if kind not in (Kind.F, Kind.B, Kind.I):
            return
        is_forward = kind == Kind.F
        if stage in self.params:
            names = (Kind.LOAD_F, Kind.LOAD_B) if lane == "host_copy" else (Kind.READ_F, Kind.READ_B)
            yield names[0] if is_forward else names[1]
        if stage in self.activations:
            leave, come = LAYER_COPIES[lane]
            yield leave if is_forward else come


def add_pass_copies(
    compute: Sequence[Instruction], copies: PassCopies, lane: Lane
) -> tuple[list[Instruction], list[Instruction]]:
    """Return a rank's compute lane with waits for the copies beside its passes, and the lane of these.

    Within each pass the copies go layer by layer beside the computation of other layers. So a copy begins with its
    pass; the pass after that waits for its end. Late writes come after the others in their lane, and it is the pass
    after the next that waits for them.
    """
    found: list[Instruction] = []
    waiting = list(compute)
    left: dict[tuple[int, int, int], Wait] = {}
    leave, come = LAYER_COPIES[lane]
    for place, (action, _, _) in enumerate(compute):
        own = []
        for kind in copies.kinds_beside(action.kind, action.stage, lane):
            waits = [Wait("compute", place - 1)] if place else []
            unit = action[1:4]
            own.append(Wait(lane, len(found)))
            if kind == leave:
                left[unit] = own[-1]
            elif kind == come:
                waits.append(left[unit])
            found.append(Instruction(action._replace(kind=kind), None, tuple(waits)))
        _let_wait(waiting, place + 1, own)
        if lane == "disk" and action.kind == Kind.F and action.stage in copies.late:
            _let_wait(waiting, place + 2, [Wait(lane, len(found))])
            found.append(found[-1]._replace(action=action._replace(kind=Kind.WRITE_ACT_LATE)))
    return waiting, found


def _let_wait(compute: list[Instruction], place: int, waits: Sequence[Wait]) -> None:
    """Let the instruction at a place, if there is one, wait for others, too."""
    if waits and place < len(compute):
        compute[place] = compute[place]._replace(waits=(*compute[place].waits, *waits))
