"""Places of experts: which of a layer's experts lie on which expert-parallel rank.

A layer has a place for each expert; rank r of `ep` has the r-th part of the places. A plan's `expert_placement` says
which expert is in each place, layer by layer; without one, experts lie in their own order. Layouts name rows of stacked
experts by the expert, so that whatever a layout describes (initial values, optimizer state, checkpoints) finds them
wherever they lie, and a run goes on with another placement.
"""

from collections.abc import Sequence

from muster.layout.box import Box
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan


def expert_order(spec: ModelSpec, plan: Plan, name: str) -> tuple[int, ...]:
    """Return the experts by place in the layer that a parameter or module belongs to; empty: in their own order."""
    parts = name.split(".")
    if not plan.expert_placement or parts[0] != "layers" or not parts[1].isdecimal():
        return ()
    layers = spec.expert_layers
    return plan.expert_placement[layers.index(int(parts[1]))] if int(parts[1]) in layers else ()


def placed_boxes(box: Box, order: Sequence[int]) -> tuple[Box, ...]:
    """Return the parts of a tensor of stacked experts that lie in the places of `box`, one for each run of consecutive
    experts.

    Example: places 0 and 1 of the order 3, 0, 1, 2 have the rows of expert 3, then those of expert 0.
    """
    runs: list[list[int]] = []
    for expert in order[box.start[0] : box.start[0] + box.size[0]]:
        if runs and runs[-1][0] + runs[-1][1] == expert:
            runs[-1][1] += 1
        else:
            runs.append([expert, 1])
    return tuple(Box((first, *box.start[1:]), (count, *box.size[1:])) for first, count in runs)
