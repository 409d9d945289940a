"""Completion of sends: the receives after which a rank knows that a send is over and frees its buffer."""

from bisect import bisect_left

from muster.schedule.action import RECEIVES, SENDS
from muster.schedule.program import Instruction, Program


def completed_sends(program: Program, rank: int) -> dict[int, tuple[int, ...]]:
    """Return the index of a receive in a rank's p2p lane → indices of the sends that are over when it is.

    A receiver reads a message in a pass. A message that it sends back after that pass proves that it had the first one:
    no transport has to be asked, no rank waits, and the memory held doesn't depend on the speed of messages. A send
    without such a proof is left out; it is over at the end of the step.
    """
    completed: dict[int, list[int]] = {}
    lanes = program.ranks[rank].get("p2p", ())
    for peer in sorted({item.peer for item in lanes if item.peer is not None}):
        reader, sent = _reads_and_sends(program, peer, rank)
        receives = {item.action: index for index, item in enumerate(lanes) if item.action.kind in RECEIVES}
        after = [producer for producer, _ in sent]
        for index, item in enumerate(lanes):
            if item.peer != peer or item.action.kind not in SENDS:
                continue
            place = bisect_left(after, reader.get(program.other_end(item.action), len(after) and after[-1] + 1))
            if place < len(sent):
                completed.setdefault(receives[program.other_end(sent[place][1].action)], []).append(index)
    return {index: tuple(places) for index, places in completed.items()}


def _reads_and_sends(program: Program, rank: int, peer: int) -> tuple[dict, list[tuple[int, Instruction]]]:
    """Return each receive from `peer` → index of the pass that waits for it, and the sends to `peer` in order.

    Each send comes with the index of the last pass that it, or one before it in its lane, waits for.
    """
    lanes = program.ranks[rank]
    p2p = lanes.get("p2p", ())
    reader = {
        p2p[wait.index].action: place
        for place, item in enumerate(lanes.get("compute", ()))
        for wait in item.waits
        if wait.lane == "p2p" and p2p[wait.index].peer == peer
    }
    sent = []
    last = -1
    for item in p2p:
        last = max([last, *(wait.index for wait in item.waits if wait.lane == "compute")])
        if item.peer == peer and item.action.kind in SENDS:
            sent.append((last, item))
    return reader, sent
