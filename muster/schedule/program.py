"""Programs: the instructions of every pipeline rank in a step, lane by lane, with explicit waits."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from muster.config.migrations import INSTRUCTIONS
from muster.config.migrations import LANES as FORMER_LANES
from muster.schedule.action import KINDS, LANES, SENDS, Action, Kind, Lane, parse_action
from muster.schedule.paths import Paths, format_paths, other_end, parse_paths, stage_along
from muster.spec.errors import MusterError

if TYPE_CHECKING:
    from muster.schedule.transfers import Transfers

_Derived = TypeVar("_Derived")

PAIRED = "&"
"""Sign behind a forward that runs as one with the backward after it: `0F5& 3B2`."""

VERSION = 2
"""Version of the text of programs: 2 since instructions have the names of torch.distributed.pipelining."""


class ProgramError(MusterError):
    """Error for a program or schedule that no rank could follow; its sentence names the wrong action."""


class Wait(NamedTuple):
    """Condition on another instruction: the `index`-th of `lane` on the same rank must be over."""

    lane: Lane
    index: int


class Instruction(NamedTuple):
    """Action with its peer and its waits.

    Instructions of one lane begin in order; the order between lanes is given by `waits` alone.
    """

    action: Action
    peer: int | None = None
    waits: tuple[Wait, ...] = ()

    @property
    def lane(self) -> Lane:
        return KINDS[self.action.kind].lane

    def __str__(self) -> str:
        peer = "" if self.peer is None else f"{'>' if self.action.kind in SENDS else '<'}{self.peer}"
        waits = ",".join(f"{wait.lane}:{wait.index}" for wait in self.waits)
        return f"{self.action}{peer}" + (f"@{waits}" if waits else "")


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions of one step, or of several without a flush between them: per pipeline rank and lane, in order.

    A pipeline rank stands for all ranks of its stages' mesh, which do the same on their own shards.
    """

    schedule: str
    placement: tuple[int, ...]
    """Pipeline rank of each stage."""
    num_micro_batches: int
    ranks: tuple[dict[Lane, tuple[Instruction, ...]], ...]
    replicas: int = 1
    """Copies of the model; stages are numbered copy by copy, see `Schedule`."""
    num_slices: int = 1
    """Slices of each sequence, of which each pass and each transfer takes one."""
    pairs: frozenset[Action] = frozenset()
    """Forwards that run as one with the backward after them (`Schedule.pairs`). The waits of both stand at the forward,
    and what needs its result waits for the backward."""
    num_steps: int = 1
    """Optimizer steps, each of as many micro-batches; more than one in an asynchronous program."""
    paths: Paths = ()
    """Stages that each micro-batch passes through, where these aren't all in turn."""
    transfers: "Transfers | None" = field(default=None, compare=False, repr=False)
    """Transfers of the schedule that was lowered, by columns; None where other passes than its own are among them."""
    _derived: dict[Callable[..., Any], Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def once(self, derive: Callable[["Program"], _Derived]) -> _Derived:
        """Return what a function derives from the instructions alone, kept for the next simulation of this Program."""
        if derive not in self._derived:
            self._derived[derive] = derive(self)
        return self._derived[derive]

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages of all replicas."""
        return len(self.placement)

    @property
    def depth(self) -> int:
        """Number of stages of one replica."""
        return len(self.placement) // self.replicas

    def unit(self, action: Action) -> int:
        """Return the number of an action's slice among those of all micro-batches; without slices, its micro-batch."""
        return action.micro_batch * self.num_slices + action.slice

    def next_stage(self, stage: int, action: Action) -> int:
        """Return the stage that reads the output of `stage` for the micro-batch of an action; none after the last."""
        return stage_along(self.paths, stage, action.micro_batch, 1)

    def previous_stage(self, stage: int, action: Action) -> int:
        """Return the stage whose output `stage` reads for the micro-batch of an action; none before the first."""
        return stage_along(self.paths, stage, action.micro_batch, -1)

    def other_end(self, action: Action) -> Action:
        """Return the receive of a send, or the send of a receive."""
        return other_end(action, self.paths)

    def step_of(self, action: Action) -> int:
        """Return the step, from 0, that an instruction belongs to: a pass by its micro-batch, an optimizer step by the
        version that it makes."""
        if action.micro_batch >= 0:
            return action.micro_batch // (self.num_micro_batches // self.num_steps)
        return max(action.version - 1, 0)

    def timed_as(self, instructions: Sequence[Instruction]) -> list[tuple[Any, ...]]:
        """Return for each instruction the fields of an action that takes as long: (kind, stage), and the slice or
        part."""
        if self.num_slices == 1:
            return [action[:2] if not action[3] else (*action[:2], -1, action[3]) for action, _, _ in instructions]
        return [(*action[:2], min(action[2], 0), action[3]) for action, _, _ in instructions]

    def is_first(self, stage: int) -> bool:
        """Return True for a stage that reads the data: none comes before it."""
        return stage % self.depth == 0

    def is_last(self, stage: int) -> bool:
        """Return True for a stage that computes the loss: none comes after it."""
        return stage % self.depth == self.depth - 1

    def __str__(self) -> str:
        return format_program(self)


def participants(instruction: Instruction, rank: int, num_ranks: int) -> tuple[int, ...]:
    """Return the pipeline ranks of a collective on `rank`.

    All ranks take part in GRAD_NORM and in the collectives of vocabulary parallelism, two in ALL_REDUCE_TIED and
    ALL_REDUCE_REPLICAS (one if both stages lie on it), one in any other.
    """
    if instruction.action.kind == Kind.GRAD_NORM or KINDS[instruction.action.kind].overlapped:
        return tuple(range(num_ranks))
    return (rank,) if instruction.peer is None else (min(rank, instruction.peer), max(rank, instruction.peer))


def stages_of_action(program: Program, kind: Kind, stage: int) -> range:
    """Return the stages of an action: `n ALL_REDUCE_REPLICAS` names the n-th stage of each replica, any other action
    its own.

    Empty for a stage number that doesn't exist.
    """
    if kind == Kind.ALL_REDUCE_REPLICAS:
        return range(stage, program.num_stages, program.depth) if stage < program.depth else range(0)
    return range(stage, stage + 1) if 0 <= stage < program.num_stages else range(0)


def has_split_backward(program: Program) -> bool:
    """Return True if any backward is split into I and W."""
    return any(item.action.kind == Kind.W for lanes in program.ranks for item in lanes.get("compute", ()))


# ----------------------------------------------------------------------------------------------------------------------
# Text: one line per rank and lane


def format_program(program: Program) -> str:
    """Return the program as text for `parse_program`: a head line, then one line per rank and lane."""
    placement = ",".join(map(str, program.placement))
    lines = [
        f"program {VERSION} schedule={program.schedule} ranks={program.num_ranks}"
        f" micro_batches={program.num_micro_batches} placement={placement}"
        + (f" replicas={program.replicas}" if program.replicas > 1 else "")
        + (f" slices={program.num_slices}" if program.num_slices > 1 else "")
        + (f" steps={program.num_steps}" if program.num_steps > 1 else "")
        + (f" paths={format_paths(program.paths)}" if program.paths else "")
    ]
    pairs = program.pairs
    for rank, lanes in enumerate(program.ranks):
        for lane in LANES:
            if lanes.get(lane):
                words = (str(item) + PAIRED * (item.action in pairs) for item in lanes[lane])
                lines.append(f"rank {rank} {lane}: " + " ".join(words))
    return "\n".join(lines) + "\n"


_HEAD = re.compile(
    r"program (\d+) schedule=(\S+) ranks=(\d+) micro_batches=(\d+) placement=([\d,]+)(?: replicas=(\d+))?"
    r"(?: slices=(\d+))?(?: steps=(\d+))?(?: paths=([\d.,]+))?"
)
_LINE = re.compile(r"rank (\d+) (\w+):\s*(.*)")
_INSTRUCTION = re.compile(r"([^<>@]+)(?:[<>](\d+))?(?:@(\S+))?")


def parse_program(text: str) -> Program:
    """Return the program that prints as `text`, skipping blank lines and lines that begin with #.

    Texts of version 1 have former names of kinds and lanes. Raises ValueError with the line that is wrong, and for a
    version later than today's.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    head = _HEAD.fullmatch(lines[0]) if lines else None
    if head is None:
        raise ValueError(f"a program begins with 'program {VERSION} schedule=… ranks=… micro_batches=… placement=…'")
    version, name, num_ranks, num_micro_batches, places, copies, slices, steps, paths = head.groups()
    if int(version) > VERSION:
        raise ValueError(f"the program has version {version}, of a newer Muster; this one reads up to {VERSION}")
    is_former = int(version) == 1
    ranks: tuple[dict[Lane, tuple[Instruction, ...]], ...] = tuple({} for _ in range(int(num_ranks)))
    pairs: set[Action] = set()
    for line in lines[1:]:
        match = _LINE.fullmatch(line)
        lane = parse_lane(match[2], is_former) if match else None
        if match is None or lane is None or int(match[1]) >= len(ranks):
            raise ValueError(f"{line[:60]!r} is not 'rank R LANE: instructions' with R < {len(ranks)}")
        words = match[3].split()
        ranks[int(match[1])][lane] = tuple(_parse_instruction(word.removesuffix(PAIRED), is_former) for word in words)
        parsed = zip(words, ranks[int(match[1])][lane], strict=True)
        pairs.update(item.action for word, item in parsed if word.endswith(PAIRED))
    placement = tuple(int(rank) for rank in places.split(","))
    replicas = int(copies or 1)
    if not replicas or len(placement) % replicas:
        raise ValueError(f"{len(placement)} stages don't spread over {replicas} replicas")
    num_steps = int(steps or 1)
    if not num_steps or int(num_micro_batches) % num_steps:
        raise ValueError(f"{num_micro_batches} micro-batches don't spread over {num_steps} steps")
    sizes = int(num_micro_batches), ranks, replicas, int(slices or 1)
    return Program(name, placement, *sizes, frozenset(pairs), num_steps, parse_paths(paths or ""))


def parse_lane(text: str, is_former: bool = False) -> Lane | None:
    """Return the lane of that name, None where there is none; `is_former`: names of version 1 are read."""
    name = FORMER_LANES.get(text, text) if is_former else text
    return next((lane for lane in LANES if lane == name), None)


def _parse_instruction(text: str, is_former: bool) -> Instruction:
    match = _INSTRUCTION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an instruction; one looks like 0SEND_F2>1@compute:4")
    waits = []
    for wait in (match[3] or "").split(","):
        if wait:
            name, _, index = wait.partition(":")
            lane = parse_lane(name, is_former)
            if lane is None or not index.isdigit():
                raise ValueError(f"{text!r}: a wait names a lane and an index, such as compute:4")
            waits.append(Wait(lane, int(index)))
    action = parse_action(match[1], INSTRUCTIONS if is_former else {})
    return Instruction(action, int(match[2]) if match[2] else None, tuple(waits))
