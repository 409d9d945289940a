"""Paths of micro-batches: the stages that each one passes through, in its order.

Without any, a micro-batch passes through all stages of its replica in turn. With paths it may skip stages between the
first and the last, or see two of them in the other order (SkipPipe, Blagoev, Chen and Ersoy 2025, arXiv:2502.19913).
"""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from muster.schedule.action import Action, Kind
from muster.spec.units import pluralize

Paths = tuple[tuple[int, ...], ...]
"""Stages of each micro-batch in the order of its forwards; empty: all stages of its replica in turn."""

_STEPS = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}
"""Kind of a transfer → steps along the path from its own stage to the other one."""
_OTHER_ENDS = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.RECV_F: Kind.SEND_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_B: Kind.SEND_B,
}


def stage_along(paths: Paths, stage: int, micro_batch: int, steps: int) -> int:
    """Return the stage that a micro-batch passes through so many (1 or −1) steps after `stage`; −1 where there is none,
    or the micro-batch skips `stage`."""
    if not paths:
        return stage + steps
    path = paths[micro_batch]
    if stage not in path:
        return -1
    place = path.index(stage) + steps
    return path[place] if 0 <= place < len(path) else -1


def other_end(action: Action, paths: Paths) -> Action:
    """Return the receive of a send, or the send of a receive: `0SEND_F2` ↔ `1RECV_F2`, or `2RECV_F2` where micro-batch
    2 skips stage 1. Its stage is −1 where the micro-batch passes no stage there."""
    kind, stage, micro_batch, *_ = action
    return Action(_OTHER_ENDS[kind], stage_along(paths, stage, micro_batch, _STEPS[kind]), *action[2:])


def reader_stages(paths: Paths, num_stages: int) -> NDArray[np.int64]:
    """Return the stage that reads the result of each pass: [forward or backward, stage, micro-batch]; the stage itself
    where none does."""
    found = np.repeat(np.arange(num_stages), len(paths)).reshape(1, num_stages, len(paths)).repeat(2, 0)
    for micro_batch, path in enumerate(paths):
        for one, following in pairwise(path):
            found[0, one, micro_batch], found[1, following, micro_batch] = following, one
    return found


def hops(paths: Paths) -> set[tuple[int, int]]:
    """Return the pairs of stages between which a hidden state passes forward."""
    return {pair for path in set(paths) for pair in pairwise(path)}


def visits(paths: Paths, stage: int) -> list[int]:
    """Return the micro-batches that pass through a stage."""
    return [micro_batch for micro_batch, path in enumerate(paths) if stage in path]


def wrong_path(paths: Paths, num_stages: int, num_micro_batches: int) -> str | None:
    """Return what is wrong with the paths, in one sentence; None if nothing is.

    All begin at the first stage, which reads the data, and end at the last one, which has the loss.
    """
    if not paths:
        return None
    if len(paths) != num_micro_batches:
        return (
            f"{pluralize(len(paths), 'path')} for {pluralize(num_micro_batches, 'micro-batch')}, expected one for each"
        )
    for micro_batch, path in enumerate(paths):
        words = f"the path of micro-batch {micro_batch}, {format_path(path)},"
        if not path or (path[0], path[-1]) != (0, num_stages - 1):
            return f"{words} doesn't lead from stage 0 to stage {num_stages - 1}"
        if len(set(path)) < len(path):
            return f"{words} has a stage twice"
        if not set(path) <= set(range(num_stages)):
            return f"{words} has a stage that doesn't exist: there are {num_stages}"
    unseen = sorted(set(range(num_stages)).difference(*paths))
    return f"no micro-batch passes through stage {unseen[0]}, which would not be trained" if unseen else None


def format_path(path: Iterable[int]) -> str:
    """Return a path as text: `0.2.3`."""
    return ".".join(map(str, path))


def format_paths(paths: Paths) -> str:
    """Return paths as text for `parse_paths`: `0.2.3,0.1.3`."""
    return ",".join(map(format_path, paths))


def parse_paths(text: str) -> Paths:
    """Return the paths that print as `text`. Raises ValueError for any other text."""
    return tuple(tuple(int(stage) for stage in path.split(".")) for path in text.split(",")) if text else ()
