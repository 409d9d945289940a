"""The simulator: how a Program runs if its instructions take given times."""

from collections import Counter
from collections.abc import Iterator
from itertools import repeat

import numpy as np

from muster.cost.op_times import OpTimes
from muster.schedule.action import LANES, Action, Lane
from muster.schedule.collector import collector_paused
from muster.schedule.program import Instruction, Program, ProgramError, meeting
from muster.simulate.cores import simulate_on_shared_cores
from muster.simulate.flights import NONE, SEVERAL, Flights
from muster.simulate.timeline import Event, Timeline


def simulate(program: Program, times: OpTimes) -> Timeline:
    """The predicted Timeline of one round of a Program that `check` has passed.

    * A compute instruction begins when the one before it and its waits are over.
    * A send begins when its waits are over and the entry before it in its lane has begun; the receiver has the data
      `times.hop_s` later, and both events, the send's and the receive's, show that flight.
    * Collectives of a rank run one after another. TIE and NORM end on all their ranks together, their longest
      duration after the last of them has come; their events begin when each rank comes.
    * Where `times.cores` is given, passes, the step and collectives share the cores (see `cores`).

    Deterministic. Raises ProgramError when the Program doesn't come to its end.
    """
    if times.cores is not None or not _has_plain_lanes(program):
        return simulate_on_shared_cores(program, times)
    with collector_paused():
        return _Simulation(program, times).run()


def _has_plain_lanes(program: Program) -> bool:
    """Whether no wait joins transfers with each other or with collectives, and the copy lane is empty."""
    return all(
        not lanes.get("copy")
        and all(lane == "compute" for _, _, waits in lanes.get("p2p", ()) for lane, _ in waits)
        and all(lane != "p2p" for _, _, waits in lanes.get("collective", ()) for lane, _ in waits)
        for lanes in program.ranks
    )


Walk = Iterator[int]
"""Goes on until it needs a time that isn't known; yields the transfer that it waits for, NONE where it is another
thing."""


class _Simulation:
    """Follows the data from rank to rank, not the clock.

    Ranks that each have a device of their own influence each other through transfers and collectives alone: each
    one's walk goes on until it needs a time that isn't known yet, and the cost of an instruction is constant.
    """

    def __init__(self, program: Program, times: OpTimes) -> None:
        self.program, self.times = program, times
        self.begin_s: list[dict[Lane, list[float]]] = [{lane: [] for lane in LANES} for _ in program.ranks]
        self.end_s: list[dict[Lane, list[float]]] = [{lane: [] for lane in LANES} for _ in program.ranks]
        self.flights = Flights(program)
        self.sent_s = [-1.0] * self.flights.count
        """When each transfer begins; −1: not yet."""
        self.waiting: dict[int, Walk] = {}
        """Transfer → the walk that waits for it."""
        self.meetings: dict[tuple, list[tuple[float, float]]] = {}
        """(kind, ranks, how many before it) → when each rank came, and how long it takes the rank by itself."""
        self.ready: list[Walk] = []

    def run(self) -> Timeline:
        """Raises ProgramError when a walk never comes to its end."""
        for rank in range(self.program.num_ranks):
            self.ready += (self._walk_compute(rank), self._walk_collectives(rank))
        others: list[Walk] = []
        unfinished, known = len(self.ready), -1
        while unfinished:
            if not self.ready:
                known, before = sum(len(times_s) for lanes in self.end_s for times_s in lanes.values()), known
                if known == before:
                    raise ProgramError("the program never comes to its end; the checker says why")
                self.ready += others
                others.clear()
                continue
            walk = self.ready.pop()
            obstacle = next(walk, None)
            if obstacle is None:
                unfinished -= 1
            elif obstacle == NONE:
                others.append(walk)
            else:
                self.waiting[obstacle] = walk
        return Timeline("predicted", self.program.num_ranks, tuple(self._events()))

    def _walk_compute(self, rank: int) -> Walk:
        compute = self.program.ranks[rank].get("compute", ())
        begin, end = self.begin_s[rank]["compute"].append, self.end_s[rank]["compute"].append
        collective_end_s = self.end_s[rank]["collective"]
        sent_s, hop_s, time_s = self.sent_s, self.times.hop_s, 0.0
        sends, next_send = self.flights.sent[rank], 0
        sends_after = [*self.flights.sent_after[rank], len(compute)]
        while sends_after[next_send] < 0:
            self._send(sends[next_send], time_s)
            next_send += 1
        awaited = self.flights.awaited(rank, compute)
        for number, (transfer, duration_s) in enumerate(zip(awaited, self._durations_s(compute), strict=True)):
            if transfer >= 0:
                while sent_s[transfer] < 0:
                    yield transfer
                if sent_s[transfer] + hop_s > time_s:
                    time_s = sent_s[transfer] + hop_s
            elif transfer == SEVERAL:
                for lane, index in compute[number].waits:
                    if lane == "p2p":
                        transfer = int(self.flights.numbers[rank][index])
                        while sent_s[transfer] < 0:
                            yield transfer
                        time_s = max(time_s, sent_s[transfer] + hop_s)
                    elif lane == "collective":
                        while len(collective_end_s) <= index:
                            yield NONE
                        time_s = max(time_s, collective_end_s[index])
            begin(time_s)
            time_s += duration_s
            end(time_s)
            while sends_after[next_send] == number:
                self._send(sends[next_send], time_s)
                next_send += 1

    def _send(self, transfer: int, begin_s: float) -> None:
        self.sent_s[transfer] = begin_s
        if transfer in self.waiting:
            self.ready.append(self.waiting.pop(transfer))

    def _walk_collectives(self, rank: int) -> Walk:
        collectives = self.program.ranks[rank].get("collective", ())
        end_s = self.end_s[rank]
        time_s = 0.0
        count: Counter[tuple] = Counter()
        for instruction, duration_s in zip(collectives, self._durations_s(collectives), strict=True):
            for lane, index in instruction.waits:
                while len(end_s[lane]) <= index:
                    yield NONE
                time_s = max(time_s, end_s[lane][index])
            self.begin_s[rank]["collective"].append(time_s)
            ranks = meeting(instruction, rank, self.program.num_ranks)
            key = (instruction.action.kind, ranks)
            present = self.meetings.setdefault((*key, count[key]), [])
            count[key] += 1
            present.append((time_s, duration_s))
            while len(present) < len(ranks):
                yield NONE
            time_s = max(came_s for came_s, _ in present) + max(takes_s for _, takes_s in present)
            end_s["collective"].append(time_s)

    def _durations_s(self, instructions: tuple[Instruction, ...]) -> list[float]:
        kinds = [action[:2] for action, _, _ in instructions]
        known_s = {kind: self.times.of(Action(*kind)) for kind in set(kinds)}
        return [known_s[kind] for kind in kinds]

    def _events(self) -> Iterator[Event]:
        """By rank, lane and order in the lane."""
        sent_s = np.array(self.sent_s)
        make_event = tuple.__new__  # a third of the time that Event(…) takes, and there are very many
        for rank, lanes in enumerate(self.program.ranks):
            begin_s = sent_s[self.flights.numbers[rank]]
            self.begin_s[rank]["p2p"] = begin_s.tolist()
            self.end_s[rank]["p2p"] = (begin_s + self.times.hop_s).tolist()
            for lane in LANES:
                actions = [action for action, _, _ in lanes.get(lane, ())]
                rows = zip(repeat(rank), repeat(lane), actions, self.begin_s[rank][lane], self.end_s[rank][lane])
                yield from map(make_event, repeat(Event), rows)
