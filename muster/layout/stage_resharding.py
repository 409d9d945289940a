"""Resharding between two groups of ranks that shard one tensor differently: between stages, and for tied weights."""

from collections.abc import Mapping
from typing import NamedTuple

from muster.layout.mesh import MeshCoordinates, dp_index_of, ranks_of_pp_rank
from muster.layout.tensor_layout import Box, intersect, stage_layouts
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan


class BoxTransfer(NamedTuple):
    """A box of a global tensor sent from one world rank to another."""

    source: int
    target: int
    box: Box


def box_transfers(held: Mapping[int, Box], wanted: Mapping[int, Box]) -> list[BoxTransfer]:
    """Return the transfers after which ranks have the boxes that they want, given the box that each other rank holds.

    Each element reaches a rank once: of ranks that hold the same box, one sends it, and those that want the same box
    are served by them in turn. Two held boxes are equal or disjoint. The result is ordered by source and target, so
    that all ranks agree on the order.

    Example: ranks 0 and 1 hold rows 0–3 and 4–7, rank 2 wants rows 2–5: two transfers, of rows 2–3 from 0 and of rows
    4–5 from 1.
    """
    holders: dict[Box, list[int]] = {}
    for rank, box in held.items():
        holders.setdefault(box, []).append(rank)
    found = []
    turns = dict.fromkeys(wanted.values(), 0)
    for target, box in wanted.items():
        turn, turns[box] = turns[box], turns[box] + 1
        for whole, ranks in [(box, holders[box])] if box in holders else holders.items():
            if (part := intersect(whole, box)) is not None:
                found.append(BoxTransfer(ranks[turn % len(ranks)], target, part))
    return sorted(found, key=lambda message: message[:2])


def hidden_state_box(spec: ModelSpec, plan: Plan, seq_len: int, stage: int, at: MeshCoordinates) -> Box:
    """Return the sequences, positions and elements of a micro-batch's hidden state that the rank at `at` works on in a
    stage.

    Tensor-parallel ranks all have the same, or under sequence parallelism a part of the positions each; of sub-layers
    side by side the streams of their own ones. Positions are numbered in the order in which context-parallel ranks keep
    them (`kept_positions`), the same on all stages.
    """
    rows = plan.local_micro_batch_size(stage)
    mesh = plan.mesh(stage)
    parts = mesh.tp if plan.strategy(plan.layers(stage, spec.num_layers).start).sp else 1
    length = seq_len // mesh.sequence_shards // parts
    part = at.cp * parts + (at.tp if parts > 1 else 0)
    width = spec.boundary_size(mesh.tp)
    first = at.tp * width if spec.parallel_sublayers > 1 else 0
    return Box((dp_index_of(plan, at) * rows, part * length, first), (rows, length, width))


def stage_transfers(
    spec: ModelSpec, plan: Plan, seq_len: int, source: int, target: int, island: int = 0
) -> list[BoxTransfer]:
    """Return the transfers between neighbouring stages of an island for each micro-batch: the hidden state to the next
    stage, its gradient to the one before.

    Nothing is sent between stages on the same ranks.
    """
    if plan.pp_rank(source) == plan.pp_rank(target):
        return []
    held, wanted = (
        {
            rank: hidden_state_box(spec, plan, seq_len, stage, at)
            for rank, at in ranks_of_pp_rank(plan, plan.pp_rank(stage), island)
        }
        for stage in (source, target)
    )
    return box_transfers(held, wanted)


def tied_grad_transfers(spec: ModelSpec, plan: Plan, source: int, target: int, island: int = 0) -> list[BoxTransfer]:
    """Return the transfers of a tied weight's gradient between the ranks of the first and the last stage of an island,
    in either direction."""
    held, wanted = (
        {
            rank: layout.boxes[0]
            for rank, at in ranks_of_pp_rank(plan, plan.pp_rank(stage), island)
            for layout in stage_layouts(spec, plan, stage, at)
            if layout.name == "embed.weight" and layout.boxes
        }
        for stage in (source, target)
    )
    return box_transfers(held, wanted)
