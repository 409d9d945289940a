"""Actions, the instructions of a schedule, such as `2F0` (stage 2, forward, micro-batch 0), and their kinds."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat
from types import MappingProxyType
from typing import Literal, NamedTuple

Lane = Literal["compute", "p2p", "collective", "host_copy", "disk", "outer", "host"]
LANES: tuple[Lane, ...] = ("compute", "p2p", "collective", "host_copy", "disk", "outer", "host")
COPY_LANES: tuple[Lane, ...] = ("host_copy", "disk")
"""Lanes of copies, which run beside the passes; those that need their results wait for them."""
BESIDE_LANES: tuple[Lane, ...] = (*COPY_LANES, "outer", "host")
"""Lanes whose instructions no other instruction of the same program needs but those that wait for them."""


class Kind(StrEnum):
    """Kinds of instructions, by their names in program texts and timelines.

    Passes, sends and receives have the names of `torch.distributed.pipelining`; `S` and `T` those of vocabulary
    parallelism (Yeung et al. 2024, arXiv:2411.05288). A member equals the string of its name and hashes like it.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 (the backward for inputs is called I in all papers)
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    EMB_F = "EMB_F"
    EMB_REDUCE = "EMB_REDUCE"
    HIDDEN_BCAST = "HIDDEN_BCAST"
    S = "S"
    LOGIT_STATS = "LOGIT_STATS"
    T = "T"
    EMB_GRAD_BCAST = "EMB_GRAD_BCAST"
    EMB_W = "EMB_W"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"
    OFFLOAD_ACT = "OFFLOAD_ACT"
    RELOAD_ACT = "RELOAD_ACT"
    WRITE_ACT = "WRITE_ACT"
    WRITE_ACT_LATE = "WRITE_ACT_LATE"
    READ_ACT = "READ_ACT"
    LOAD_F = "LOAD_F"
    LOAD_B = "LOAD_B"
    READ_F = "READ_F"
    READ_B = "READ_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    ALL_REDUCE_TP = "ALL_REDUCE_TP"
    ALL_REDUCE_REPLICAS = "ALL_REDUCE_REPLICAS"
    ALL_REDUCE_TIED = "ALL_REDUCE_TIED"
    GRAD_NORM = "GRAD_NORM"
    GRAD_NORM_ASYNC = "GRAD_NORM_ASYNC"
    GRAD_NORM_BESIDE = "GRAD_NORM_BESIDE"
    CLIP = "CLIP"
    OFFLOAD_GRAD = "OFFLOAD_GRAD"
    READ_STATE = "READ_STATE"
    UPDATE = "UPDATE"
    DELAYED_UPDATE = "DELAYED_UPDATE"
    LATE_UPDATE = "LATE_UPDATE"
    BACKWARD_UPDATE = "BACKWARD_UPDATE"
    HOST_UPDATE = "HOST_UPDATE"
    RELOAD_STATE = "RELOAD_STATE"
    DEVICE_UPDATE = "DEVICE_UPDATE"
    OFFLOAD_STATE = "OFFLOAD_STATE"
    RELOAD_PARAM = "RELOAD_PARAM"
    WRITE_STATE = "WRITE_STATE"
    STEP_BUCKET = "STEP_BUCKET"
    UNSHARD_BUCKET = "UNSHARD_BUCKET"
    STEP = "STEP"
    MOVE_EXPERTS = "MOVE_EXPERTS"
    OUTER_REDUCE = "OUTER_REDUCE"
    OUTER_WAIT = "OUTER_WAIT"
    OUTER_STEP = "OUTER_STEP"

    __hash__ = str.__hash__  # Enum's own is a Python function: a large program looks up a million kinds


@dataclass(frozen=True, slots=True)
class KindTraits:
    """Lane of an instruction kind, and the buffers that it reads, makes and frees.

    Each letter is a buffer of one stage and micro-batch:

    | letter | buffer |
    |---|---|
    | `x` | input of the stage |
    | `a` | activations saved by the forward for the backward |
    | `y` | output of the stage |
    | `g` | gradient of the output |
    | `d` | gradient of the input |
    | `w` | activations and gradients saved by a split backward for `W` |
    | `o` | `a` in host memory |
    | `k` | `a` on disk |
    | `p` | unsharded parameters (one for all micro-batches) |
    | `m` | gradients in host memory of one part of a stage's parameters (the slice of its action) |
    | `v` | optimizer state of that part, read from disk |
    | `n` | updated parameters of that part in host memory |
    | `t` | optimizer state of that part on the device, copied from host memory |
    | `u` | the same after its update |
    | `b` | updated parameters of one bucket (the slice of its action), sharded |

    Under vocabulary parallelism each pipeline rank has, for each micro-batch: `e` its shard's word embeddings, `h` the
    hidden state under the head, `s` its part of the logit statistics, `l` the exponentials of its logits, `z` the
    statistics over the whole vocabulary, `q` the gradient of the word embeddings.
    """

    lane: Lane
    explanation: str
    reads: str = ""
    makes: str = ""
    frees: str = ""
    overlapped: bool = False
    """A collective of all pipeline ranks, overlapped with compute: only the readers of its result wait for it."""


KINDS: dict[Kind, KindTraits] = {
    Kind.F: KindTraits("compute", "forward", reads="x", makes="ay"),
    Kind.B: KindTraits("compute", "full backward", reads="ag", makes="d", frees="xag"),
    Kind.I: KindTraits("compute", "backward for inputs", reads="ag", makes="dw", frees="g"),
    Kind.W: KindTraits("compute", "backward for weights", reads="aw", frees="xaw"),
    Kind.SEND_F: KindTraits("p2p", "send an activation to the next stage", reads="y", frees="y"),
    Kind.RECV_F: KindTraits("p2p", "receive an activation from the previous stage", makes="x"),
    Kind.SEND_B: KindTraits("p2p", "send a gradient to the previous stage", reads="d", frees="d"),
    Kind.RECV_B: KindTraits("p2p", "receive a gradient from the next stage", makes="g"),
    Kind.EMB_F: KindTraits("compute", "embedding lookup in the rank's vocabulary shard", makes="e"),
    Kind.EMB_REDUCE: KindTraits(
        "collective", "sum of word embeddings on the first stage's rank", frees="e", overlapped=True
    ),
    Kind.HIDDEN_BCAST: KindTraits("collective", "broadcast of the last hidden state", makes="h", overlapped=True),
    Kind.S: KindTraits("compute", "logits of the rank's vocabulary shard", reads="h", makes="sl"),
    Kind.LOGIT_STATS: KindTraits(
        "collective", "softmax statistics of all vocabulary shards", reads="s", makes="z", frees="s", overlapped=True
    ),
    Kind.T: KindTraits("compute", "backward of the rank's shard of the head", reads="hlz", frees="hlz"),
    Kind.EMB_GRAD_BCAST: KindTraits(
        "collective", "broadcast of the word embeddings' gradient", makes="q", overlapped=True
    ),
    Kind.EMB_W: KindTraits("compute", "backward of the rank's shard of the embedding", reads="q", frees="q"),
    Kind.OFFLOAD: KindTraits("host_copy", "copy saved activations to host memory", reads="a", makes="o", frees="a"),
    Kind.RELOAD: KindTraits("host_copy", "copy saved activations back to the device", reads="o", makes="a", frees="o"),
    Kind.OFFLOAD_ACT: KindTraits(
        "host_copy", "copy what a forward saves to host memory, layer by layer beside it", makes="j"
    ),
    Kind.RELOAD_ACT: KindTraits(
        "host_copy", "copy saved activations back, layer by layer beside their backward", reads="j", frees="j"
    ),
    Kind.WRITE_ACT: KindTraits("disk", "write what a forward saves to disk, layer by layer beside it", makes="k"),
    Kind.WRITE_ACT_LATE: KindTraits("disk", "write what the last of these layers save, in part beside the next pass"),
    Kind.READ_ACT: KindTraits(
        "disk", "read saved activations from disk, layer by layer beside their backward", reads="k", frees="k"
    ),
    Kind.LOAD_F: KindTraits(
        "host_copy", "copy parameters to the device, layer by layer ahead of a forward's use of them"
    ),
    Kind.LOAD_B: KindTraits(
        "host_copy", "copy parameters to the device ahead of a backward, and its gradients to host memory"
    ),
    Kind.READ_F: KindTraits("disk", "read parameters from disk, layer by layer ahead of a forward's use of them"),
    Kind.READ_B: KindTraits(
        "disk", "read parameters from disk ahead of a backward, and add its gradients to those there"
    ),
    Kind.UNSHARD: KindTraits("collective", "all-gather of a stage's parameters", makes="p"),
    Kind.RESHARD: KindTraits("collective", "drop of a stage's gathered parameters", frees="p"),
    Kind.REDUCE_GRAD: KindTraits("collective", "reduction of a stage's gradients over the data-parallel ranks"),
    Kind.ALL_REDUCE_TP: KindTraits("collective", "all-reduce of the gradients of weights replicated over tp"),
    Kind.ALL_REDUCE_REPLICAS: KindTraits("collective", "all-reduce of a layer's gradients over two model replicas"),
    Kind.ALL_REDUCE_TIED: KindTraits("collective", "all-reduce of the tied embedding's gradients"),
    Kind.GRAD_NORM: KindTraits("collective", "all-reduce of gradient squares and of the step's sums"),
    Kind.GRAD_NORM_ASYNC: KindTraits("collective", "GRAD_NORM whose result is awaited in the next step"),
    Kind.GRAD_NORM_BESIDE: KindTraits(
        "collective", "GRAD_NORM beside the passes of the following step, for which STEP waits", overlapped=True
    ),
    Kind.CLIP: KindTraits("compute", "clipping of the gradients before the host takes them"),
    Kind.OFFLOAD_GRAD: KindTraits("host_copy", "copy a part's gradients and parameters to host memory", makes="m"),
    Kind.UPDATE: KindTraits(
        "compute", "update of a part of the parameters by the host", reads="m", makes="n", frees="m"
    ),
    Kind.DELAYED_UPDATE: KindTraits(
        "host",
        "update of a part of the parameters by the host, with the gradients of the step before, beside the passes",
        reads="m",
        makes="n",
        frees="m",
    ),
    Kind.LATE_UPDATE: KindTraits(
        "host", "update of a part of the parameters by the host, which ends the step before, ahead of its first use"
    ),
    Kind.BACKWARD_UPDATE: KindTraits(
        "host",
        "update of a layer's parameters by the host within the step's last backward, once their gradients are complete",
        reads="m",
        makes="n",
        frees="m",
    ),
    Kind.HOST_UPDATE: KindTraits(
        "host",
        "update of a part of the parameters by the host, beside those of other parts by the device",
        reads="m",
        makes="n",
        frees="m",
    ),
    Kind.RELOAD_STATE: KindTraits("host_copy", "copy a part's optimizer state to the device", makes="t"),
    Kind.DEVICE_UPDATE: KindTraits(
        "compute",
        "update of a part of the parameters by the device, with state that comes from host memory",
        reads="t",
        makes="u",
        frees="t",
    ),
    Kind.OFFLOAD_STATE: KindTraits(
        "host_copy", "copy a part's updated optimizer state back to host memory", reads="u", frees="u"
    ),
    Kind.RELOAD_PARAM: KindTraits("host_copy", "copy a part's parameters back to the device", reads="n", frees="n"),
    Kind.READ_STATE: KindTraits("disk", "read a part's optimizer state from disk", makes="v"),
    Kind.WRITE_STATE: KindTraits("disk", "write a part's optimizer state to disk", reads="v", frees="v"),
    Kind.STEP_BUCKET: KindTraits("compute", "optimizer step of a bucket of a stage's parameters", makes="b"),
    Kind.UNSHARD_BUCKET: KindTraits(
        "collective", "all-gather of a bucket's updated parameters, for the next step's passes", reads="b", frees="b"
    ),
    Kind.STEP: KindTraits("compute", "optimizer step"),
    Kind.MOVE_EXPERTS: KindTraits(
        "collective", "exchange of experts and their optimizer state between ranks, where their load asks for it"
    ),
    Kind.OUTER_REDUCE: KindTraits("outer", "start of the exchange of a fragment's parameter changes between islands"),
    Kind.OUTER_WAIT: KindTraits("outer", "wait for the end of that exchange"),
    Kind.OUTER_STEP: KindTraits("compute", "outer optimizer step of a fragment"),
}

ACTIVATION_COPIES = (
    *(Kind.OFFLOAD, Kind.RELOAD),
    *(Kind.OFFLOAD_ACT, Kind.RELOAD_ACT, Kind.WRITE_ACT, Kind.WRITE_ACT_LATE, Kind.READ_ACT),
)
"""Copies of saved activations: of whole passes, and layer by layer beside a pass."""

COPIES = (
    *ACTIVATION_COPIES,
    *(Kind.LOAD_F, Kind.LOAD_B, Kind.READ_F, Kind.READ_B),
    *(Kind.OFFLOAD_GRAD, Kind.RELOAD_PARAM, Kind.READ_STATE, Kind.WRITE_STATE, Kind.RELOAD_STATE, Kind.OFFLOAD_STATE),
)
"""Kinds of the lanes of copies."""

PASSES = (Kind.F, Kind.B, Kind.I, Kind.W)
"""Kinds of a schedule: forward, full backward, and the two halves of a split backward."""
BACKWARDS = (Kind.B, Kind.I)
"""Passes that make the gradient of a stage's input."""
SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)

HOST_LANE_UPDATES = (Kind.DELAYED_UPDATE, Kind.LATE_UPDATE, Kind.BACKWARD_UPDATE, Kind.HOST_UPDATE)
"""Updates of a part of a stage's parameters in the lane of the host's cores: UPDATE beside the device's work."""
PART_UPDATES = (Kind.UPDATE, *HOST_LANE_UPDATES, Kind.DEVICE_UPDATE)
"""All updates of a part of a stage's parameters."""
HOST_UPDATE_KINDS = (
    *(Kind.OFFLOAD_GRAD, Kind.READ_STATE, *PART_UPDATES),
    *(Kind.RELOAD_PARAM, Kind.WRITE_STATE, Kind.RELOAD_STATE, Kind.OFFLOAD_STATE),
)
"""Instructions on one part of a stage's parameters, which is the slice of their action."""
PARAMETER_KINDS = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)
"""Instructions on a stage's parameters or gradients for a unit of its passes, whose number is the slice of their
action."""
BUCKET_KINDS = (Kind.STEP_BUCKET, Kind.UNSHARD_BUCKET)
"""Instructions on one bucket of a stage's parameters, which is the slice of their action."""
OUTER_KINDS = (Kind.OUTER_REDUCE, Kind.OUTER_WAIT, Kind.OUTER_STEP)
"""Instructions between islands on one fragment of the parameters, which is the slice of their action."""

VOCAB_FORWARD_KINDS = (
    Kind.EMB_F,
    Kind.EMB_REDUCE,
    Kind.HIDDEN_BCAST,
    Kind.S,
    Kind.LOGIT_STATS,
)
"""Instructions of every pipeline rank for each micro-batch under vocabulary parallelism; they name the rank's first
stage."""
VOCAB_BACKWARD_KINDS = (Kind.T, Kind.EMB_GRAD_BCAST, Kind.EMB_W)


class Action(NamedTuple):
    """Kind, stage and micro-batch of an instruction; it prints as `2F0`.

    `stage` or `micro_batch` is −1 for kinds without one; `slice` is for sequence pipelines, `version` for asynchronous
    ones: the version of the weights that a pass uses, or that an optimizer step makes (with GRAD_NORM_BESIDE,
    REDUCE_GRAD and ALL_REDUCE_TP, whose gradients it is made with). Version 0 is that at the beginning of the program.
    """

    kind: Kind
    stage: int = -1
    micro_batch: int = -1
    slice: int = 0
    version: int = 0

    def __str__(self) -> str:
        text = f"{self.stage if self.stage >= 0 else ''}{self.kind}{self.micro_batch if self.micro_batch >= 0 else ''}"
        return text + (f".{self.slice}" if self.slice else "") + (f"v{self.version}" if self.version else "")


def unit_label(action: Action, has_slices: bool) -> str:
    """Return the micro-batch of a pass in a picture, or micro-batch and slice: `2`, `2.0`."""
    return f"{action.micro_batch}.{action.slice}" if has_slices else str(action.micro_batch)


def actions_of_stage(kind: Kind, stage: int, micro_batches: int) -> list[Action]:
    """Return one action for each micro-batch.

    `tuple.__new__` takes a third of the time of Action(…): a large schedule has a million actions.
    """
    columns = zip(repeat(kind), repeat(stage), range(micro_batches), repeat(0), repeat(0), strict=False)
    return list(map(tuple.__new__, repeat(Action), columns))


def most_in_flight(actions: Iterable[Action]) -> dict[int, int]:
    """Return, for each stage of a rank, the most micro-batches at a time between their forward and their backward."""
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for kind, stage, *_ in actions:
        if kind in (Kind.F, Kind.B, Kind.I):
            now[stage] = now.get(stage, 0) + (1 if kind == Kind.F else -1)
            most[stage] = max(most.get(stage, 0), now[stage])
    return most


_KIND_BY_NAME = {kind.value: kind for kind in Kind}
"""A dictionary finds a kind in a tenth of the time of Kind(…)."""
_ACTION = re.compile(r"(\d*)([A-Z_]+)(\d*)(?:\.(\d+))?(?:v(\d+))?")


def parse_action(text: str, former_kinds: Mapping[str, str] = MappingProxyType({})) -> Action:
    """Return the action that prints as `text`, whose kind may be one of `former_kinds` (former → today's).

    Raises ValueError for any other text and for an unknown kind.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an action; one looks like 2F0: stage 2, forward, micro-batch 0")
    stage, kind, micro_batch, part, version = match.groups()
    kind = former_kinds.get(kind, kind)
    if kind not in _KIND_BY_NAME:
        raise ValueError(f"{text!r}: unknown instruction kind {kind}; known: {', '.join(KINDS)}")
    return Action(
        _KIND_BY_NAME[kind],
        int(stage) if stage else -1,
        int(micro_batch) if micro_batch else -1,
        int(part or 0),
        int(version or 0),
    )
