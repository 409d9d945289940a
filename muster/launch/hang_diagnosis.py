"""Diagnosis of a hang: finds, from snapshots of all ranks, the one that the others wait for. Pure functions, no
torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from muster.launch.heartbeat import PHASES, RankStatus
from muster.schedule.action import KINDS, Action, Kind

_KIND_DESCRIPTIONS = {
    Kind.F: "the forward",
    Kind.B: "the backward",
    Kind.I: "the backward for inputs",
    Kind.W: "the backward for weights",
    Kind.SEND_F: "the send of an activation",
    Kind.SEND_B: "the send of a gradient",
    Kind.RECV_F: "the receive of an activation",
    Kind.RECV_B: "the receive of a gradient",
    Kind.UNSHARD: "the all-gather of the parameters",
    Kind.REDUCE_GRAD: "the reduce-scatter of the gradients",
    Kind.ALL_REDUCE_TP: "the sum of shared weights' gradients",
    Kind.ALL_REDUCE_TIED: "the sum of the tied embedding's gradients",
    Kind.ALL_REDUCE_REPLICAS: "the sum of the replicas' gradients",
    Kind.GRAD_NORM: "the sum over all ranks",
    Kind.GRAD_NORM_ASYNC: "the sum over all ranks",
    Kind.STEP: "the optimizer step",
}
_WAITS_IN = re.compile(
    r"/torch/distributed/|/muster/(parallel/(axis|p2p|executor|fsdp|world)|optim/peer_exchange|train/post_validation)\.py$"
)
"""Files in which Python is while C++ waits for another rank."""
_LIBRARY_FILE = re.compile(r"^<|/lib/python[\d.]+/(?!site-packages/muster/)")
"""Files of libraries, which don't tell what a rank does."""
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "barrier")
"""Collectives within a pass, by a part of the function names on the stack; a message shows them with - for _."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True)
class RankSnapshot:
    """One rank as its launcher sees it."""

    rank: int
    host: str
    pid: int
    """Process id on its host."""
    state: str
    """State letter as in /proc: R runs, S sleeps, D waits for a device, T is stopped, X is gone."""
    stalled_s: float
    """Time without progress."""
    status: RankStatus | None
    stacks: str = ""
    """Python stacks of all threads, where they were requested."""
    connection_problem: str = ""
    """Problem of one of its network connections, as a clause; empty without one."""


@dataclass(frozen=True)
class RankFault:
    """Rank that the others wait for, or that failed, and the reason."""

    rank: int
    host: str
    sentence: str
    """Continuation of `rank R on HOST`."""


def diagnose(snapshots: Sequence[RankSnapshot]) -> RankFault:
    """Find the cause of a hang from snapshots of all ranks, none of which makes progress.

    The culprit is a rank whose process is stopped; else one that does something on its own (computes, reads data), as
    the others wait for it; else, when all wait, one that has lost its network connection or is furthest behind. Among
    several it is the one without progress for longest.
    """
    stopped = [seen for seen in snapshots if seen.state in "Tt"]
    alone = [seen for seen in snapshots if not is_waiting(seen)]
    culprit = max(stopped or alone, key=lambda seen: seen.stalled_s, default=None)
    if culprit is None:
        return _diagnose_all_waiting(snapshots)
    if culprit in stopped:
        cause = (
            f"it is stopped (process {culprit.pid}, as by SIGSTOP or a debugger) while it {describe_activity(culprit)}"
        )
    else:
        cause = f"it {describe_activity(culprit)}"
    others = [seen for seen in snapshots if seen is not culprit and is_waiting(seen)]
    return RankFault(
        culprit.rank, culprit.host, f"{_describe_missed_call(culprit, others)}; {cause}, for {culprit.stalled_s:.0f} s"
    )


def is_waiting(snapshot: RankSnapshot) -> bool:
    """Return whether a rank waits for another, by its stack or, without one, by the instruction that it is in."""
    if snapshot.state in "Tt":
        return False
    if frames := main_thread_frames(snapshot.stacks):
        return _WAITS_IN.search(frames[0][0]) is not None
    if snapshot.status is None or snapshot.status.phase != "run":
        return False
    kind = KINDS.get(snapshot.status.action.kind)
    return snapshot.status.waiting or (kind is not None and kind.lane == "collective")


def describe_activity(snapshot: RankSnapshot) -> str:
    """Describe a rank's activity as a verb with its object, and the place in its code where that is known."""
    place = snapshot.status
    if place is None:
        return "has not begun"
    if place.phase == "run" and place.action.kind:
        verb = "waits in" if is_waiting(snapshot) else "computes" if _is_compute(place.action) else "is in"
        said = f"{verb} {_describe_instruction(snapshot, place)}"
    else:
        step = f" for step {place.step + 1}" if place.phase == "data" else ""
        said = PHASES.get(place.phase, "is training") + step
    frames = [frame for frame in main_thread_frames(snapshot.stacks) if not _LIBRARY_FILE.search(frame[0])]
    if frames and not is_waiting(snapshot):
        file, line, function = frames[0]
        said += f" (in {function}, {file.rpartition('/')[2]}:{line})"
    return said


def describe_action(action: Action) -> str:
    """Describe an instruction: `the forward of stage 0, micro-batch 2`."""
    said = _KIND_DESCRIPTIONS.get(
        action.kind, f"{action.kind} ({KINDS[action.kind].explanation})" if action.kind in KINDS else "?"
    )
    if action.stage >= 0:
        said += f" of stage {action.stage}"
    return said + (f", micro-batch {action.micro_batch}" if action.micro_batch >= 0 else "")


def main_thread_frames(stacks: str) -> list[tuple[str, int, str]]:
    """Parse faulthandler's text; returns the main thread's frames, innermost first, as (file, line, function)."""
    threads: list[list[tuple[str, int, str]]] = []
    for line in stacks.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x", "Stack (")):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append((frame[1], int(frame[2]), frame[3]))
    begun = [frames for frames in threads if frames]
    main = [frames for frames in begun if any(function == "<module>" for _, _, function in frames)]
    return (main or begun or [[]])[-1]


def format_snapshots(snapshots: Sequence[RankSnapshot]) -> str:
    """Return a line for each rank with its activity and the time without progress, then the stacks."""
    lines = [
        f"rank {seen.rank} on {seen.host}, {seen.stalled_s:.0f} s: {describe_activity(seen)}" for seen in snapshots
    ]
    stacks = [f"--- rank {seen.rank} on {seen.host} ---\n{seen.stacks}" for seen in snapshots if seen.stacks]
    return "\n".join([*lines, *stacks]) + "\n"


def _is_compute(action: Action) -> bool:
    return action.kind in KINDS and KINDS[action.kind].lane == "compute"


def _describe_instruction(seen: RankSnapshot, place: RankStatus) -> str:
    """Describe the instruction that a rank is in, and the collective that it waits in within a pass."""
    what = f"{describe_action(place.action)} of step {place.step + 1}"
    if not is_waiting(seen) or not _is_compute(place.action) or place.waiting:
        return what
    functions = " ".join(function for _, _, function in main_thread_frames(seen.stacks))
    found = "all_gather" if "unshard" in functions else next((name for name in _COLLECTIVES if name in functions), "")
    return f"the {found.replace('_', '-')} in {what}" if found else what


def _describe_missed_call(culprit: RankSnapshot, others: Sequence[RankSnapshot]) -> str:
    """Describe the instruction that the others wait in and the culprit never reached."""
    places = [(seen, seen.status) for seen in others if seen.status is not None and seen.status.phase == "run"]
    if not places:
        return "stands still"
    # Who waits in what all ranks take part in says most; then who waits first.
    first, place = min(
        places, key=lambda item: (item[1].action.kind not in (Kind.GRAD_NORM, Kind.GRAD_NORM_ASYNC), item[1].step)
    )
    ranks = [seen.rank for seen, other in places if other.action == place.action]
    word = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} wait"
    entered = "never sent its part of" if place.action.kind in (Kind.RECV_F, Kind.RECV_B) else "never entered"
    return f"{entered} {_describe_instruction(first, place)}, where {word}"


def _diagnose_all_waiting(sightings: Sequence[RankSnapshot]) -> RankFault:
    """Diagnose a hang in which all ranks wait: a message that was sent has not arrived.

    A rank that has lost its route to another is named first, then one with unacknowledged data, then the one furthest
    behind.
    """

    def guilt(seen: RankSnapshot) -> tuple[bool, bool, int]:
        return (
            "no route" not in seen.connection_problem,
            not seen.connection_problem,
            seen.status.step if seen.status else -1,
        )

    last = min(sightings, key=guilt)
    told = "; ".join(f"rank {seen.rank} {describe_activity(seen)}" for seen in sightings[:4] if seen is not last)
    more = f", and {len(sightings) - 4} more" if len(sightings) > 4 else ""
    why = f" ({last.connection_problem})" if last.connection_problem else ""
    return RankFault(
        last.rank,
        last.host,
        f"{describe_activity(last)}, and all others wait, too: {told}{more}; its network connection is lost{why}"
        if last.connection_problem
        else (
            f"{describe_activity(last)}, and all others wait, too: {told}{more}; what one of them sent has not arrived"
        ),
    )
