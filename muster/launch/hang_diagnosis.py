"""Diagnosis of a hang: finds, from snapshots of all ranks, the one that the others wait for. Free of torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from muster.launch.flight_records import find_late_rank
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
    Kind.UNSHARD_BUCKET: "the all-gather of the parameters",
    Kind.REDUCE_GRAD: "the reduce-scatter of the gradients",
    Kind.ALL_REDUCE_TP: "the all-reduce of the tensor-parallel copies' gradients",
    Kind.ALL_REDUCE_TIED: "the all-reduce of the tied embedding's gradients",
    Kind.ALL_REDUCE_REPLICAS: "the all-reduce of the replicas' gradients",
    Kind.GRAD_NORM: "the all-reduce of the gradient norm",
    Kind.GRAD_NORM_ASYNC: "the all-reduce of the gradient norm",
    Kind.GRAD_NORM_BESIDE: "the all-reduce of the gradient norm",
    Kind.CLIP: "the optimizer step",
    Kind.UPDATE: "the optimizer step in host memory",
    Kind.DELAYED_UPDATE: "the optimizer step in host memory",
    Kind.LATE_UPDATE: "the optimizer step in host memory",
    Kind.BACKWARD_UPDATE: "the optimizer step in host memory",
    Kind.HOST_UPDATE: "the optimizer step in host memory",
    Kind.DEVICE_UPDATE: "the optimizer step on the device",
    Kind.RELOAD_STATE: "the copy of optimizer state from host memory",
    Kind.OFFLOAD_STATE: "the copy of optimizer state to host memory",
    Kind.OFFLOAD_GRAD: "the copy of gradients to host memory",
    Kind.RELOAD_PARAM: "the copy of parameters from host memory",
    Kind.READ_STATE: "the read of optimizer state from disk",
    Kind.WRITE_STATE: "the write of optimizer state to disk",
    Kind.OFFLOAD_ACT: "the copy of activations to host memory",
    Kind.RELOAD_ACT: "the copy of activations from host memory",
    Kind.WRITE_ACT: "the write of activations to disk",
    Kind.WRITE_ACT_LATE: "the write of activations to disk",
    Kind.READ_ACT: "the read of activations from disk",
    Kind.LOAD_F: "the copy of parameters from host memory",
    Kind.LOAD_B: "the copy of gradients to host memory",
    Kind.READ_F: "the read of parameters from disk",
    Kind.READ_B: "the write of gradients to disk",
    Kind.STEP_BUCKET: "the optimizer step",
    Kind.STEP: "the optimizer step",
    Kind.MOVE_EXPERTS: "the exchange of experts",
    Kind.OUTER_REDUCE: "the exchange with other islands",
    Kind.OUTER_WAIT: "the exchange with other islands",
    Kind.OUTER_STEP: "the outer optimizer step",
}
_MISSED: dict[Kind, str] = {
    Kind.RECV_F: "never sent its part of",
    Kind.RECV_B: "never sent its part of",
    Kind.SEND_F: "never received its part of",
    Kind.SEND_B: "never received its part of",
}
"""Words for the part in a transfer that the rank missed which the others wait for."""
_WAITS_IN = re.compile(
    r"/torch/distributed/|/muster/(parallel/(axis|p2p|executor|fsdp|world)|optim/peer_exchange|train/(post_validation|outer_updater))\.py$"
)
"""Files in which Python is while C++ waits for another rank."""
_LIBRARY_FILE = re.compile(r"^<|/lib/python[\d.]+/(?!site-packages/muster/)")
"""Files of libraries, which don't tell what a rank does."""
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "barrier")
"""Collectives within a pass, by a part of the function names on the stack; a message shows them with - for _."""
_BACKWARD_CALL = "_engine_run_backward"
"""Function of PyTorch in which the main thread waits for a backward."""
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
    the others wait for it; else one whose GPU computes while those of others wait for a message; else, when all wait,
    one that has lost its network connection or is furthest behind. Among several it is the one without progress for
    longest.
    """
    stopped = [snapshot for snapshot in snapshots if snapshot.state in "Tt"]
    independent = [snapshot for snapshot in snapshots if not is_waiting(snapshot)]
    suspects = stopped or independent or _with_busy_gpus(snapshots)
    culprit = max(suspects, key=lambda snapshot: snapshot.stalled_s, default=None)
    late = find_late_rank({snapshot.rank: snapshot.stacks for snapshot in snapshots})
    if late is not None and late.rank in {snapshot.rank for snapshot in suspects or snapshots}:
        culprit = next(snapshot for snapshot in snapshots if snapshot.rank == late.rank)
    if culprit is None:
        return _diagnose_all_waiting(snapshots)
    activity = describe_activity(culprit)
    if culprit in stopped:
        cause = f"it is stopped (process {culprit.pid}, as by SIGSTOP or a debugger) while it {activity}"
    else:
        cause = f"it {activity}"
    waiting = [snapshot for snapshot in snapshots if snapshot is not culprit and is_waiting(snapshot)]
    missed = _describe_missed_call(culprit, waiting)
    if late is not None and late.rank == culprit.rank:
        missed += f", and {late.describe()}" if waiting else late.describe()
    sentence = f"{missed}; {cause}, for {culprit.stalled_s:.0f} s"
    return RankFault(culprit.rank, culprit.host, sentence)


def _with_busy_gpus(snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Return the ranks whose GPU computes, where those of others wait for a message; none where all do the same."""
    actions = [(one, one.status.device_action) for one in snapshots if one.status is not None]
    busy = [snapshot for snapshot, action in actions if action is not None and _is_compute(action)]
    return busy if len(busy) < len(snapshots) else []


def is_waiting(snapshot: RankSnapshot) -> bool:
    """Return whether a rank waits for another, by its stack or, without one, by the instruction that it is in."""
    if snapshot.state in "Tt":
        return False
    if snapshot.status is not None and snapshot.status.phase == "run" and snapshot.status.waiting:
        return True  # by its own word: a wait for a GPU looks like any other call on the stack
    if frames := working_frames(snapshot.stacks):
        return _WAITS_IN.search(frames[0][0]) is not None
    if snapshot.status is None or snapshot.status.phase != "run":
        return False
    kind = KINDS.get(snapshot.status.action.kind)
    return kind is not None and kind.lane == "collective"


def describe_activity(snapshot: RankSnapshot) -> str:
    """Describe a rank's activity as a verb with its object, and the place in its code where that is known."""
    status = snapshot.status
    if status is None:
        return "has not begun"
    if status.phase == "run" and status.action.kind:
        verb = "waits in" if is_waiting(snapshot) else "computes" if _is_compute(status.action) else "is in"
        if is_waiting(snapshot) and status.device_action is not None and _is_compute(status.device_action):
            verb = "waits for its GPU in"
        activity = f"{verb} {_describe_instruction(snapshot, status)}"
    else:
        step = f" for step {status.step + 1}" if status.phase == "data" else ""
        activity = PHASES.get(status.phase, "is training") + step
    frames = [frame for frame in working_frames(snapshot.stacks) if not _LIBRARY_FILE.search(frame[0])]
    if frames and not is_waiting(snapshot):
        file, line, function = frames[0]
        activity += f" (in {function}, {file.rpartition('/')[2]}:{line})"
    return activity


def describe_action(action: Action) -> str:
    """Describe an instruction: `the forward of stage 0, micro-batch 2`."""
    traits = KINDS.get(action.kind)
    default = "?" if traits is None else f"{action.kind} ({traits.explanation})"
    text = _KIND_DESCRIPTIONS.get(action.kind, default)
    if action.stage >= 0:
        text += f" of stage {action.stage}"
    if action.micro_batch >= 0:
        text += f", micro-batch {action.micro_batch}"
    return text


def main_thread_frames(stacks: str) -> list[tuple[str, int, str]]:
    """Parse faulthandler's text; returns the main thread's frames, innermost first, as (file, line, function)."""
    begun = _threads(stacks)
    main = [frames for frames in begun if any(function == "<module>" for _, _, function in frames)]
    return (main or begun or [[]])[-1]


def _threads(stacks: str) -> list[list[tuple[str, int, str]]]:
    threads: list[list[tuple[str, int, str]]] = []
    for line in stacks.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x", "Stack (")):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append((frame[1], int(frame[2]), frame[3]))
    return [frames for frames in threads if frames]


def working_frames(stacks: str) -> list[tuple[str, int, str]]:
    """Return the frames of the thread that does the rank's work: the main one, or the one that runs its backward.

    The autograd engine runs the backward of a GPU's operations in a thread of its own, for which the main one waits.
    """
    main = main_thread_frames(stacks)
    if not main or main[0][2] != _BACKWARD_CALL:
        return main
    others = [frames for frames in _threads(stacks) if frames != main]
    return next((frames for frames in others if any("/muster/" in file for file, _, _ in frames)), main)


def format_snapshots(snapshots: Sequence[RankSnapshot]) -> str:
    """Return a line for each rank with its activity and the time without progress, then the stacks."""
    lines = []
    stacks = []
    for snapshot in snapshots:
        rank = f"rank {snapshot.rank} on {snapshot.host}"
        lines.append(f"{rank}, {snapshot.stalled_s:.0f} s: {describe_activity(snapshot)}")
        if snapshot.stacks:
            stacks.append(f"--- {rank} ---\n{snapshot.stacks}")
    return "\n".join([*lines, *stacks]) + "\n"


def _is_compute(action: Action) -> bool:
    return action.kind in KINDS and KINDS[action.kind].lane == "compute"


def _describe_instruction(snapshot: RankSnapshot, status: RankStatus) -> str:
    """Describe the instruction that a rank is in, and the collective that it waits in within a pass."""
    instruction = f"{describe_action(status.position)} of step {status.step + 1}"
    if not is_waiting(snapshot) or not _is_compute(status.action) or status.waiting:
        return instruction
    functions = " ".join(function for _, _, function in working_frames(snapshot.stacks))
    if "unshard" in functions:
        collective = "all_gather"
    else:
        collective = next((name for name in _COLLECTIVES if name in functions), "")
    return f"the {collective.replace('_', '-')} in {instruction}" if collective else instruction


def _describe_missed_call(culprit: RankSnapshot, waiting: Sequence[RankSnapshot]) -> str:
    """Describe the instruction that the others wait in and the culprit never reached."""
    in_steps = [(one, one.status) for one in waiting if one.status is not None and one.status.phase == "run"]
    if not in_steps:
        return "stalls"
    # A rank that waits in a collective of all ranks says most; after that, the rank in the earliest step.
    global_kinds = (Kind.GRAD_NORM, Kind.GRAD_NORM_ASYNC, Kind.GRAD_NORM_BESIDE)
    first, status = min(in_steps, key=lambda item: (item[1].position.kind not in global_kinds, item[1].step))
    ranks = [snapshot.rank for snapshot, other in in_steps if other.position == status.position]
    who = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} wait"
    missed = _MISSED.get(status.position.kind, "never entered")
    return f"{missed} {_describe_instruction(first, status)}, where {who}"


def _diagnose_all_waiting(snapshots: Sequence[RankSnapshot]) -> RankFault:
    """Diagnose a hang in which all ranks wait: a message that was sent has not arrived.

    A rank that has lost its route to another is named first, then one with unacknowledged data, then the one furthest
    behind.
    """

    def order(snapshot: RankSnapshot) -> tuple[bool, bool, int]:
        problem = snapshot.connection_problem
        return "no route" not in problem, not problem, snapshot.status.step if snapshot.status else -1

    culprit = min(snapshots, key=order)
    problem = culprit.connection_problem
    others = "; ".join(f"rank {one.rank} {describe_activity(one)}" for one in snapshots[:4] if one is not culprit)
    more = f", and {len(snapshots) - 4} more" if len(snapshots) > 4 else ""
    cause = "a message that one of them sent has not arrived"
    if problem:
        cause = f"its network connection is lost ({problem})"
    sentence = f"{describe_activity(culprit)}, and all others wait, too: {others}{more}; {cause}"
    return RankFault(culprit.rank, culprit.host, sentence)
