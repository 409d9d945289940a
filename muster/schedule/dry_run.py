"""Dry run of a Program: every rank walks its lanes as the executor does, on the strictest possible transport.

The rules, which any executor may relax but none may tighten:

* A rank is one thread that walks the compute lane. Before each compute instruction it begins, lane by lane, the
  instructions at the head of the other lanes whose waits are over; then it completes the instruction's own waits, which
  may mean to begin the entries before them in their lanes. After the compute lane it finishes all the others.
* A transfer is over when both ends have begun it and all transfers before it, of whatever ranks, are over on both:
  sends are not buffered, and a rank's transfers run one after another.
* A collective of several pipeline ranks blocks the thread until all of them have begun it; an overlapped one only at a
  wait for it, as does one within a pipeline rank. A rank's collectives end in the order in which they began.
* A copy between device and host memory is over when its rank has waited for it.
* The result of a receive, a collective or a copy may be used only after a wait for it.

Nothing in these rules is a choice, so a run that ends once always ends.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

from muster.schedule.action import BESIDE_LANES, KINDS, LANES, Action, Kind, Lane
from muster.schedule.program import Instruction, Program, ProgramError, Wait, participants

Observer = Callable[[int, Instruction, bool], None]
"""Callback (rank, instruction, over): when an instruction begins (False) and when its rank may rely on it (True)."""


def dry_run(program: Program, observe: Observer) -> None:
    """Walk the whole Program, whose transfers and collectives have matching ends (see `peer_check`).

    Raises ProgramError naming who waits for whom if the walk doesn't reach its end.
    """
    ranks: list[_RankState] = []
    ready: list[_RankState] = []
    ranks += (_RankState(program, rank, ranks, ready, observe) for rank in range(program.num_ranks))
    walks = [rank.walk() for rank in ranks]
    ready += reversed(ranks)
    while ready:
        rank = ready.pop()
        rank.blocked_on = next(walks[rank.rank], None)
    blocked = [rank for rank in ranks if rank.blocked_on]
    if blocked:
        raise ProgramError(f"deadlock: {_wait_cycle(blocked[0])}")


class _RankState:
    """Position of one rank in each of its lanes: `begun` and `completed` count instructions of a lane."""

    def __init__(
        self, program: Program, rank: int, ranks: "list[_RankState]", ready: "list[_RankState]", observe: Observer
    ) -> None:
        self.rank, self.ranks, self.ready, self.observe = rank, ranks, ready, observe
        self.lanes: dict[Lane, tuple[Instruction, ...]] = {lane: program.ranks[rank].get(lane, ()) for lane in LANES}
        self.begun: dict[Lane, int] = dict.fromkeys(LANES, 0)
        self.completed: dict[Lane, int] = dict.fromkeys(LANES, 0)
        self.awaited: set[Wait] = set()
        """Transfers, collectives and copies that the rank has waited for."""
        self.starting: list[Instruction] = []
        """Instructions that are about to begin and complete their waits, outermost first."""
        self.wait_target: Instruction | None = None
        """Instruction that the last of them waits for."""
        self.blocked_on: Wait | None = None

    def walk(self) -> Iterator[Wait]:
        """Walk until the end; yield each blocking wait, and resume when it is over."""
        others: list[Lane] = [lane for lane in LANES[1:] if self.lanes[lane]]
        for instruction in self.lanes["compute"]:
            for lane in others:
                items = self.lanes[lane]
                begun = self.begun
                while begun[lane] < len(items) and self._is_ready(items[begun[lane]]):
                    if lane in ("p2p", *BESIDE_LANES):
                        self._start(lane)
                    else:
                        yield from self._begin_next(lane)
            if instruction.waits:
                yield from self._begin_next("compute")
            else:
                self._start("compute")
        for lane in LANES:
            for index in range(len(self.lanes[lane])):
                yield from self._complete(Wait(lane, index))

    def head(self, lane: Lane) -> Instruction | None:
        """Return the first instruction of a lane that has begun and is not over."""
        return self.lanes[lane][self.completed[lane]] if self.completed[lane] < self.begun[lane] else None

    def _is_ready(self, instruction: Instruction) -> bool:
        """Return True if all waits of the instruction are over."""
        for wait in instruction.waits:
            beside = wait[0] in ("p2p", *BESIDE_LANES) or _is_overlapped(self.lanes[wait[0]][wait[1]].action)
            if not (wait in self.awaited if beside else wait[1] < self.completed[wait[0]]):
                return False
        return True

    def _begin_next(self, lane: Lane) -> Iterator[Wait]:
        index = self.begun[lane]
        instruction = self.lanes[lane][index]
        if instruction in self.starting:
            raise ProgramError(f"deadlock: on rank {self.rank}, {self._self_cycle(instruction)}")
        self.starting.append(instruction)
        for wait in instruction.waits:
            if wait.lane != "compute" or wait.index >= self.completed["compute"]:
                yield from self._complete(wait)
        self.starting.pop()
        self._start(lane)
        is_alone = participants(instruction, self.rank, len(self.ranks)) == (self.rank,)
        if lane == "collective" and not is_alone and not _is_overlapped(instruction.action):
            while self.completed[lane] <= index:
                yield Wait(lane, index)

    def _start(self, lane: Lane) -> None:
        """Begin the next instruction of a lane, all its waits being over; a pass is over at once."""
        instruction = self.lanes[lane][self.begun[lane]]
        self.begun[lane] += 1
        self.observe(self.rank, instruction, False)
        if lane == "compute":
            self.completed[lane] += 1
            self.observe(self.rank, instruction, True)
        elif lane in BESIDE_LANES:
            self.completed[lane] += 1
        else:
            self._advance(lane)

    def _complete(self, wait: Wait) -> Iterator[Wait]:
        lane, index = wait
        while self.begun[lane] <= index:
            self.wait_target = self.lanes[lane][index]
            yield from self._begin_next(lane)
        while self.completed[lane] <= index:
            yield wait
        if lane != "compute" and wait not in self.awaited:
            self.awaited.add(wait)
            self.observe(self.rank, self.lanes[lane][index], True)

    def _advance(self, lane: Lane) -> None:
        """End the transfers and collectives at the head of the lane that all their ranks have reached."""
        pending = [self]
        while pending:
            one = pending.pop()
            while (head := one.head(lane)) is not None and (partners := one._peers_at_head(head, lane)) is not None:
                for partner in (one, *partners):
                    partner.completed[lane] += 1
                    if partner.blocked_on is not None:
                        partner.blocked_on = None
                        self.ready.append(partner)
                pending += partners

    def _peers_at_head(self, head: Instruction, lane: Lane) -> "list[_RankState] | None":
        """Return the other ranks of `head`; None while one of them has not reached it."""
        if head.peer is not None:
            partner = self.ranks[head.peer]
            return [partner] if self._matches(head, partner.head(lane)) else None
        partners = [self.ranks[rank] for rank in participants(head, self.rank, len(self.ranks)) if rank != self.rank]
        return partners if all(self._matches(head, partner.head(lane)) for partner in partners) else None

    def _matches(self, head: Instruction, other: Instruction | None) -> bool:
        """Return True if `other` of another rank is the other end of `head`, or the same collective.

        Two ranks have the same transfers between them in the same order, so the peer alone identifies one.
        """
        if other is None:
            return False
        return other.peer == self.rank if head.peer is not None else other.action[::2] == head.action[::2]

    def _self_cycle(self, instruction: Instruction) -> str:
        """Return a sentence about the circle of waits if `instruction` has to begin before it can."""
        assert self.wait_target is not None
        circle = [*self.starting[self.starting.index(instruction) :], self.wait_target]
        words = ", ".join(f"{_name(one)} waits for {_name(other)}" for one, other in pairwise(circle))
        return words if self.wait_target == instruction else f"{words}, which comes after {_name(instruction)}"

    def describe_block(self) -> tuple[str, int]:
        """Return why the rank is blocked, in words, and the rank that it waits for."""
        assert self.blocked_on is not None
        lane, index = self.blocked_on
        target = self.lanes[lane][index]
        head = self.lanes[lane][self.completed[lane]]
        stalled_at = self.starting[0] if self.starting else target
        words = f"rank {self.rank} stalls at {_name(stalled_at)}"
        if stalled_at is not target:
            words += f", which waits for {_name(target)}"
        if head is not target:
            words += f", behind {_name(head)}"
        absent = next(
            rank
            for rank in participants(head, self.rank, len(self.ranks))
            if rank != self.rank and not self._matches(head, self.ranks[rank].head(lane))
        )
        return f"{words}, held up by rank {absent}", absent


def _name(instruction: Instruction) -> str:
    return str(instruction).partition("@")[0]


def _wait_cycle(rank: _RankState) -> str:
    """Return who waits for whom, in words, until the circle closes."""
    seen: dict[int, str] = {}
    while rank.rank not in seen:
        seen[rank.rank], following = rank.describe_block()
        rank = rank.ranks[following]
    return "; ".join(list(seen.values())[list(seen).index(rank.rank) :])


def _is_overlapped(action: Action) -> bool:
    """Return True if a collective is known to be over only where something waits for it: those that run beside passes,
    as reductions of the gradients of a version and those over replicas do."""
    beside = action.kind == Kind.ALL_REDUCE_REPLICAS or (action.kind == Kind.REDUCE_GRAD and action.version > 0)
    return beside or KINDS[action.kind].overlapped
