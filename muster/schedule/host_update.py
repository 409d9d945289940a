"""Optimizer step by the host: the optimizer's state of some layers stays in host memory (ZeRO-Offload, Ren et al. 2021,
arXiv:2101.06840).

The parameters of a stage are updated in parts, one for each layer. The gradients and parameters of a part go to the
host, whose cores update it, and the parameters return. Copies have a lane of their own, in which a part leaves before
an earlier one returns, so that copies overlap with updates, and host memory holds a few parts beside the state:

    compute    STEP's norm, CLIP   UPDATE.0   UPDATE.1   UPDATE.2   STEP
    host copy              grads.0 grads.1    params.0 grads.2 params.1   params.2
    disk       read.0 read.1                  write.0 read.2 write.1      write.2

A delayed update (ibid., §5.2) takes place beside the passes of the next step, which still read the parameters before
it, in a lane of the host's cores. Once no pass reads them any more, its parameters return, and the gradients of the
step that ends take their place in host memory:

    compute    pass   pass   pass   …   CLIP   STEP
    host       DELAYED_UPDATE.0  DELAYED_UPDATE.1
    host copy                           params.0 grads.0 params.1 grads.1

State on disk (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv:2104.07857) is read before an update and written after it,
in a lane of its own: that of the first parts beside the passes, which don't need it. Where updates are delayed, the
host waits for neither end of the lane: a step reads the state of the next one's first part, and the next one writes
that of its last:

    host       DELAYED_UPDATE.0         DELAYED_UPDATE.1         DELAYED_UPDATE.2
    disk       write.2 read.1           write.0 read.2           write.1 read.0

An update within the last backward (Fuyou, Liao et al. 2024, arXiv:2403.06504) takes place beside it, layer by layer
from the last to the first, each once its gradients are complete; what lies outside of layers is updated after the
passes. Gradients are clipped by a norm that is known before:

    compute    last pass: backward of layers 2, 1, 0               STEP's norm, CLIP   UPDATE.3   STEP
    host                        BACKWARD_UPDATE.2   BACKWARD_UPDATE.1   BACKWARD_UPDATE.0
    disk       read.2 read.1                        write.2 read.0      write.1 read.3 write.0 write.3

Host and device may share the updates (Deep Optimizer States, Maurya et al. 2024, arXiv:2410.21316): while the host
updates some parts, the state of others comes to the device, which has room for it after the passes, and returns. Copies
of the device's parts are spread over the time of the host's updates, two of its parts being there at most:

    compute    STEP's norm, CLIP          DEVICE_UPDATE.1            DEVICE_UPDATE.3       STEP
    host                          HOST_UPDATE.0            HOST_UPDATE.2            HOST_UPDATE.4
    host copy             grads.0 state.1 grads.2 state.3 params.0 state.1 grads.4 params.2 state.3 params.4
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from muster.schedule.action import Action, Kind

PARTS_AHEAD = 1
"""Parts whose gradients are copied, and whose state is read, while an earlier part is updated."""


def copy_order(parts: Sequence[tuple[int, int]], first: Kind, second: Kind) -> Iterator[Action]:
    """Yield the copies of (stage, part) before and after its update, `first` and `second`, in the order of their
    lane."""
    for number, (stage, part) in enumerate(parts):
        yield Action(first, stage, slice=part)
        if number >= PARTS_AHEAD:
            yield Action(second, parts[number - PARTS_AHEAD][0], slice=parts[number - PARTS_AHEAD][1])
    for stage, part in parts[max(0, len(parts) - PARTS_AHEAD) :]:
        yield Action(second, stage, slice=part)


def carried_order(parts: Sequence[tuple[int, int]]) -> list[Action]:
    """Return the reads and writes of delayed updates in the order of their lane: the write of the last part is that of
    the step before, the read of the first that of the next. A single part is read and written in its own step."""
    order = list(copy_order(parts, Kind.READ_STATE, Kind.WRITE_STATE))
    if len(parts) < 2:
        return order
    read_first, *between, write_last = order
    return [write_last, *between, read_first]


def shared_copy_order(
    by_host: Mapping[tuple[int, int], float], by_device: Mapping[tuple[int, int], float]
) -> list[Action]:
    """Return the copies of updates that host and device share in the order of their lane; each has its parts, (stage,
    part), with their sizes.

    Both are taken to need as long: a part is copied when half of the update before it is over, and back at the end of
    its own.
    """
    found: list[tuple[float, int, Action]] = []
    kinds = (
        (by_host, Kind.OFFLOAD_GRAD, 0, Kind.RELOAD_PARAM, 3),
        (by_device, Kind.RELOAD_STATE, 1, Kind.OFFLOAD_STATE, 2),
    )
    for sizes, first, is_first, second, is_second in kinds:
        ends = list(accumulate(sizes.values(), initial=0.0))
        for number, (stage, part) in enumerate(sizes):
            begin, end = ((ends[max(0, number - 1)] + ends[number]) / 2, ends[number + 1])
            found.append((begin / ends[-1], is_first, Action(first, stage, slice=part)))
            found.append((end / ends[-1], is_second, Action(second, stage, slice=part)))
    return [action for *_, action in sorted(found, key=lambda one: one[:2])]
