"""Actions: the words in which the order of work is written, such as `2F0` (stage 2, forward, micro-batch 0)."""

import re
from dataclasses import dataclass
from itertools import repeat
from typing import Literal, NamedTuple

Lane = Literal["compute", "p2p", "collective", "copy"]
LANES: tuple[Lane, ...] = ("compute", "p2p", "collective", "copy")


@dataclass(frozen=True, slots=True)
class KindTraits:
    """What a kind of instruction is: the lane it runs on, and the buffers that it reads, makes and frees.

    Buffers are named by a letter: `x` a stage's input, `a` what its forward keeps for its backward, `y` its output,
    `g` the gradient of its output, `d` the gradient of its input, `w` what a split backward keeps for `W`,
    `o` what its forward keeps while that is in the host's memory, `p` the gathered parameters of a stage. Where the
    vocabulary is spread, each rank has of a micro-batch: `e` its part of the word vectors, `h` the hidden state under
    the head, `s` what all need to know of its words, `l` the exponentials of its logits, `z` the sums over all words,
    `q` the gradient of the word vectors.
    """

    name: str
    lane: Lane
    explanation: str
    reads: str = ""
    makes: str = ""
    frees: str = ""
    overlapped: bool = False
    """A collective of all pipeline ranks that runs beside the compute: only who reads its result waits for it."""


KINDS: dict[str, KindTraits] = {}


def register_kind(kind: KindTraits) -> KindTraits:
    """Adds a kind to the vocabulary; names are upper-case words. Raises ValueError on a second meaning."""
    if KINDS.setdefault(kind.name, kind) != kind:
        raise ValueError(f"instruction kind {kind.name} is already registered with another meaning")
    return kind


for _kind in (
    KindTraits("F", "compute", "forward", reads="x", makes="ay"),
    KindTraits("B", "compute", "full backward", reads="ag", makes="d", frees="xag"),
    KindTraits("I", "compute", "backward for inputs", reads="ag", makes="dw", frees="g"),
    KindTraits("W", "compute", "backward for weights", reads="aw", frees="xaw"),
    KindTraits("SF", "p2p", "send a forward activation to the next stage", reads="y", frees="y"),
    KindTraits("RF", "p2p", "receive a forward activation from the stage before", makes="x"),
    KindTraits("SB", "p2p", "send an input gradient to the stage before", reads="d", frees="d"),
    KindTraits("RB", "p2p", "receive an output gradient from the next stage", makes="g"),
    KindTraits("E", "compute", "look up the rank's words", makes="e"),
    KindTraits("EC", "collective", "add up word vectors on the first stage's rank", frees="e", overlapped=True),
    KindTraits("HC", "collective", "hand out the last stage's hidden state", makes="h", overlapped=True),
    KindTraits("S", "compute", "score the rank's words", reads="h", makes="sl"),
    KindTraits("SC", "collective", "sum up over all ranks' words", reads="s", makes="z", frees="s", overlapped=True),
    KindTraits("T", "compute", "backward for the output words", reads="hlz", frees="hlz"),
    KindTraits("DC", "collective", "hand out the gradient of the word vectors", makes="q", overlapped=True),
    KindTraits("EW", "compute", "backward for the input words", reads="q", frees="q"),
    KindTraits("OFFLOAD", "copy", "move what a forward keeps to the host's memory", reads="a", makes="o", frees="a"),
    KindTraits("RELOAD", "copy", "bring back what a forward keeps", reads="o", makes="a", frees="o"),
    KindTraits("UNSHARD", "collective", "gather a stage's parameters", makes="p"),
    KindTraits("REDUCE", "collective", "reduce a stage's gradients over the data-parallel ranks"),
    KindTraits("SYNC", "collective", "add up the gradients of weights that tensor-parallel ranks have copies of"),
    KindTraits("MERGE", "collective", "add up the gradients of the same layers in two replicas"),
    KindTraits("TIE", "collective", "add up the gradients of a weight that lies on two stages"),
    KindTraits("NORM", "collective", "add up the squares of all gradients, and what the step reports"),
    KindTraits("VOTE", "collective", "begin to add up what NORM does, which is known before the next step only"),
    KindTraits("STEP", "compute", "optimizer step"),
):
    register_kind(_kind)


VOCAB_FORWARD_KINDS = ("E", "EC", "HC", "S", "SC")
"""What every pipeline rank does for a micro-batch where the vocabulary is spread over them all; its stage is the rank's
first."""
VOCAB_BACKWARD_KINDS = ("T", "DC", "EW")


class Action(NamedTuple):
    """One thing to do. `stage` or `micro_batch` is −1 where the kind has none; `slice` serves sequence pipelines,
    `version` asynchronous ones."""

    kind: str
    stage: int = -1
    micro_batch: int = -1
    slice: int = 0
    version: int = 0

    def __str__(self) -> str:
        text = f"{self.stage if self.stage >= 0 else ''}{self.kind}{self.micro_batch if self.micro_batch >= 0 else ''}"
        return text + (f".{self.slice}" if self.slice else "") + (f"v{self.version}" if self.version else "")


def actions_of_stage(kind: str, stage: int, micro_batches: int) -> list[Action]:
    """One action for each micro-batch. Made by `tuple.__new__`, which takes a third of the time that Action(…) takes:
    a large schedule has a million."""
    columns = zip(repeat(kind), repeat(stage), range(micro_batches), repeat(0), repeat(0), strict=False)
    return list(map(tuple.__new__, repeat(Action), columns))


_MATCHING_TRANSFERS = {"SF": ("RF", 1), "RF": ("SF", -1), "SB": ("RB", -1), "RB": ("SB", 1)}


def matching_transfer(action: Action) -> Action:
    """The receive of a send, the send of a receive: `0SF2` ↔ `1RF2`, `1SB2` ↔ `0RB2`."""
    kind, step = _MATCHING_TRANSFERS[action.kind]
    return Action(kind, action.stage + step, *action[2:])


_ACTION = re.compile(r"(\d*)([A-Z_]+)(\d*)(?:\.(\d+))?(?:v(\d+))?")


def parse_action(text: str) -> Action:
    """The action that prints as `text`. Raises ValueError where the text is none or its kind is unknown."""
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an action; one looks like 2F0: stage 2, forward, micro-batch 0")
    stage, kind, micro_batch, part, version = match.groups()
    if kind not in KINDS:
        raise ValueError(f"{text!r}: unknown instruction kind {kind}; known: {', '.join(KINDS)}")
    return Action(
        kind,
        int(stage) if stage else -1,
        int(micro_batch) if micro_batch else -1,
        int(part or 0),
        int(version or 0),
    )
