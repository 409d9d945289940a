"""Units of passes for which a stage's parameters are gathered, and behind which its gradients are reduced.

Under z3 every pass gathers the parameters of its stage. A rank of several stages runs many passes of one before it
turns to the next, and gathers once for all of these instead, as Breadth-First pipelines (arXiv:2211.05953 §4.2) and
ZeroPP (arXiv:2402.03791) do, if the gathered parameters may stay from pass to pass. Of a rank's stages no more than
`max_active_stages` are gathered at a time, as `torch.distributed.pipelining` has it. For another one the stage makes
room whose next pass is furthest away, which makes fewest gathers (Belady 1966, doi:10.1147/sj.52.0078).

Example: two stages, three micro-batches, breadth first, one gathered at a time:

    0UNSHARD  0F0 0F1 0F2  0RESHARD  1UNSHARD  1F0 1F1 1F2 1B0 1B1 1B2  1REDUCE_GRAD 1RESHARD
    0UNSHARD.1  0B0 0B1 0B2  0REDUCE_GRAD 0RESHARD.1

The parameters of a second stage are gathered while the first one computes where two may be: its UNSHARD begins as soon
as the stage before has made room.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from muster.schedule.action import Action, Kind
from muster.schedule.program import Wait

if TYPE_CHECKING:
    from muster.schedule.lower import LoweringOptions, ProgramDraft
    from muster.schedule.program import Program

_USES = (Kind.F, Kind.B, Kind.I)
"""Passes that read parameters; W multiplies what I has left."""


class ActiveUnit(NamedTuple):
    """Passes of one stage for which its parameters stay gathered, by places in the order of a rank's passes."""

    stage: int
    ready: int
    """Pass behind which there is room for its parameters; −1: from the begin on."""
    first: int
    last: int


def active_units(order: Sequence[Action], max_active: int) -> list[ActiveUnit]:
    """Return the units of a rank's passes in the order of their first passes, with at most `max_active` stages gathered
    at a time."""
    places: dict[int, list[int]] = {}
    for place, action in enumerate(order):
        if action.kind in _USES:
            places.setdefault(action.stage, []).append(place)
    following = {one: other for own in places.values() for one, other in zip(own, own[1:], strict=False)}
    units: list[ActiveUnit] = []
    active: dict[int, int] = {}
    """Stage → index of its unit."""
    ready = -1
    for place, action in enumerate(order):
        if action.kind not in _USES:
            continue
        if (number := active.get(action.stage)) is not None:
            units[number] = units[number]._replace(last=place)
            continue
        if len(active) == max_active:
            dropped = max(active, key=lambda stage: following.get(units[active[stage]].last, len(order)))
            ready = max(ready, units[active.pop(dropped)].last)
        active[action.stage] = len(units)
        units.append(ActiveUnit(action.stage, ready, place, place))
    return units


def reduction_places(order: Sequence[Action], units: Sequence[ActiveUnit]) -> list[tuple[int, int]]:
    """Return (place, stage) for each reduction of gradients: it comes behind the pass at that place, in their order.

    That is the last one of a unit with backwards, or the W that makes the last of the gradients that they have left.
    """
    lasts = {unit.first: unit.last for unit in units}
    until: dict[int, int] = {}
    """Stage → last pass of its latest unit."""
    found: list[tuple[int, int]] = []
    unreduced: set[int] = set()
    deferred: dict[int, int] = {}
    for place, (kind, stage, *_) in enumerate(order):
        until[stage] = lasts.get(place, until.get(stage, -1))
        if kind in (Kind.B, Kind.I, Kind.W):
            unreduced.add(stage)
            deferred[stage] = deferred.get(stage, 0) + (kind == Kind.I) - (kind == Kind.W)
        if stage in unreduced and not deferred[stage] and place >= until[stage]:
            found.append((place, stage))
            unreduced.discard(stage)
    return found


def add_active_stages(draft: "ProgramDraft", options: "LoweringOptions") -> None:
    """Add UNSHARD and RESHARD around each unit of passes, and REDUCE_GRAD behind those with backwards, for which the
    next pass waits.

    A unit's parameters are gathered once the stage that makes room has been dropped, so that the lane's order alone
    keeps their number.
    """
    reduces = options.train and options.has_backward
    for rank, lanes in enumerate(draft.ranks):
        compute = lanes["compute"]
        order = [item.action for item in compute]
        units = [unit for unit in active_units(order, options.max_active_stages or 1) if options.is_sharded(unit.stage)]
        numbers: dict[tuple[Kind, int], int] = {}
        events = [(unit.last, 1, Kind.RESHARD, unit.stage, -1) for unit in units]
        events += [(unit.ready, 2, Kind.UNSHARD, unit.stage, unit.first) for unit in units]
        if reduces:
            of_units = ((place, stage) for place, stage in reduction_places(order, units) if options.is_sharded(stage))
            events += [(place, 0, Kind.REDUCE_GRAD, stage, place + 1) for place, stage in of_units]
        for place, _, kind, stage, reader in sorted(events, key=lambda event: event[:2]):
            number = numbers[kind, stage] = numbers.get((kind, stage), -1) + 1
            waits = [] if place < 0 or kind == Kind.UNSHARD else [Wait("compute", place)]
            over = draft.add(rank, Action(kind, stage, slice=number), waits)
            if 0 <= reader < len(compute):
                compute[reader] = compute[reader]._replace(waits=(*compute[reader].waits, over))


def count_units(orders: Sequence[Sequence[Action]], max_active: int) -> dict[int, tuple[int, int]]:
    """Return stage → (gathers, reductions) of a step; `orders`: passes of each rank."""
    found: dict[int, tuple[int, int]] = {}
    for order in orders:
        units = active_units(order, max_active)
        reduced = [stage for _, stage in reduction_places(order, units)]
        for stage in {unit.stage for unit in units}:
            found[stage] = sum(unit.stage == stage for unit in units), reduced.count(stage)
    return found


def backwards_before_reductions(program: "Program", pp_rank: int) -> Mapping[int, frozenset[int]]:
    """Return stage → numbers, from 1, of a step's backwards for weights behind each of which a REDUCE_GRAD comes."""
    lanes = program.ranks[pp_rank]
    numbers: dict[int, int] = {}
    number_at: list[int] = []
    for item in lanes.get("compute", ()):
        stage = item.action.stage
        numbers[stage] = numbers.get(stage, 0) + (item.action.kind in (Kind.B, Kind.W))
        number_at.append(numbers[stage])
    found: dict[int, set[int]] = {}
    for item in lanes.get("collective", ()):
        if item.action.kind == Kind.REDUCE_GRAD and item.waits:
            found.setdefault(item.action.stage, set()).add(number_at[item.waits[0].index])
    return {stage: frozenset(own) for stage, own in found.items()}
