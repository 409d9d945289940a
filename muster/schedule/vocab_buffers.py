"""Hidden states that a rank holds for the collectives of vocabulary parallelism, by the time of its compute lane.

Only full hidden states are counted, of which a micro-batch has several on every rank: the partial embedding until it is
summed, the output of the last layer until pass S, the terms of its gradient until LOGIT_STATS ends (the last stage's
rank gathers those of all ranks), and the embedding's gradient until EMB_W. See `muster.parallel.vocab_parallel`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from muster.schedule.action import Kind, Lane
from muster.schedule.program import Instruction, Program

Counts = NDArray[np.intp]
TERMS_OF_GRADIENT = 2
"""Hidden states in a rank's terms of the hidden state's gradient."""


def vocab_buffer_counts(program: Program, pp_rank: int) -> Counts:
    """Return the number of hidden states before and during each compute instruction of a rank, and after the last.

    Element 2i is the time before instruction i, 2i + 1 the time during it, as in `program_message_counts`.
    """
    lanes = program.ranks[pp_rank]
    compute = lanes.get("compute", ())
    change = np.zeros(2 * len(compute) + 2, np.intp)
    last_stage = program.num_stages - 1
    has_first, has_last = (program.placement[stage] == pp_rank for stage in (0, last_stage))
    place = {(item.action.kind, item.action.stage, item.action.micro_batch): i for i, item in enumerate(compute)}
    of_any_stage = {(kind, micro_batch): i for (kind, _, micro_batch), i in place.items()}

    def hold(count: int, begin: int, end: int) -> None:
        change[begin] += count
        change[max(begin, end)] -= count

    for (action, _, _), start, end in zip(lanes.get("collective", ()), *_times(lanes), strict=True):
        kind, micro_batch = action.kind, action.micro_batch
        if kind == Kind.EMB_REDUCE:
            read = 2 * place[Kind.F, 0, micro_batch] + 1 if has_first else end
            hold(1, 2 * of_any_stage[Kind.EMB_F, micro_batch] + 1, read)
        elif kind == Kind.HIDDEN_BCAST:
            begin = 2 * place[Kind.F, last_stage, micro_batch] + 2 if has_last else start
            hold(1, begin, 2 * of_any_stage[Kind.S, micro_batch] + 1)
        elif kind == Kind.LOGIT_STATS:
            hold(TERMS_OF_GRADIENT, 2 * of_any_stage[Kind.S, micro_batch] + 2, end)
            if has_last:
                hold(TERMS_OF_GRADIENT * len(program.ranks), start, end)
                backward = max(place.get((one, last_stage, micro_batch), -1) for one in (Kind.B, Kind.I))
                hold(1, end, 2 * backward + 2)
        elif kind == Kind.EMB_GRAD_BCAST:
            backward = max(place.get((one, 0, micro_batch), -1) for one in (Kind.B, Kind.I))
            hold(1, 2 * backward + 2 if has_first else start, 2 * of_any_stage[Kind.EMB_W, micro_batch] + 2)
    return np.cumsum(change)[:-1]


def _times(lanes: Mapping[Lane, Sequence[Instruction]]) -> tuple[list[int], list[int]]:
    """Return when each collective of a rank begins and ends: as soon as its waits allow and those before it have begun;
    when an instruction waits for it, or for a later one."""
    collectives, compute = lanes.get("collective", ()), lanes.get("compute", ())
    ends = [2 * len(compute) + 1] * len(collectives)
    for index, item in reversed(list(enumerate(compute))):
        for wait in item.waits:
            if wait.lane == "collective":
                ends[wait.index] = 2 * index
    for index in reversed(range(len(ends) - 1)):
        ends[index] = min(ends[index], ends[index + 1])
    starts, begin = [], 0
    for item in collectives:
        waits = (2 * wait.index + 2 for wait in item.waits if wait.lane == "compute")
        begin = max(begin, *waits, *(ends[wait.index] for wait in item.waits if wait.lane == "collective"), 0)
        starts.append(min(begin, 2 * len(compute)))
    return starts, ends
