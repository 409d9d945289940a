"""Simulator: the timeline of a Program whose instructions take given times."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import numpy as np

from muster.cost.time.op_times import OpTimes
from muster.schedule.action import LANES, Action, Kind, Lane
from muster.schedule.program import Instruction, Program, ProgramError, participants
from muster.simulate.breakdown import spans_of
from muster.simulate.pairs import paired_durations_s
from muster.simulate.shared_cores import simulate_on_shared_cores
from muster.simulate.spans import P2P, Column, RankSpans, merge_spans, time_by_part
from muster.simulate.timeline import Event, Timeline
from muster.simulate.transfers import NO_TRANSFER, SEVERAL_WAITS, Transfers
from muster.spec.gc_pause import gc_paused


def simulate(program: Program, times: OpTimes) -> Timeline:
    """Return the predicted Timeline of one step of a Program that `check` has passed.

    * A compute instruction begins when the previous one and its waits have ended. Passes that run as one take their
      joint time, each its share (`muster.simulate.pairs`).
    * A send begins when its waits have ended, the previous entry of its lane has begun and the rank's outgoing link is
      free (`P2PTime.send_busy_s`). The receiver has the data `P2PTime.total_s` later; the events of the send and of the
      receive both show that transfer.
    * Host copies of a rank run one after another, overlapped with the passes, each when its waits have ended.
    * Collectives of a rank run one after another. They end on all their ranks together, the longest of the ranks'
      durations after the last rank has arrived; each rank's event begins at its arrival.
    * Compute beside gathers of parameters and reductions of gradients is slower by `times.overlap_slowdown`, by as much
      of it as lies beside them without that.
    * With `times.cores` passes, the optimizer step and collectives share CPU cores (`muster.simulate.shared_cores`).

    Deterministic. Raises ProgramError if the Program deadlocks.
    """
    if times.cores is not None or not program.once(_has_simple_waits):
        return simulate_on_shared_cores(program, times)
    with gc_paused():
        return _run(program, times).timeline()


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """A simulated step: its duration, and what takes time to work out, on demand."""

    duration_s: float
    time_by_part: Callable[[], dict[str, float]]
    """Return `muster.simulate.spans.time_by_part` of the step."""
    timeline: Callable[[], Timeline]
    """Return the timeline of all instructions."""


def simulate_step(program: Program, times: OpTimes) -> SimulatedStep:
    """Simulate a step as `simulate` does, without making its events."""
    if times.cores is not None or not program.once(_has_simple_waits):
        timeline = simulate_on_shared_cores(program, times)
        parts = partial(_timeline_parts, timeline)
        return SimulatedStep(timeline.makespan_s, parts, lambda: timeline)
    with gc_paused():
        run = _run(program, times)
        return SimulatedStep(run.last_s(), run.time_by_part, run.timeline)


def _run(program: Program, times: OpTimes) -> "_Simulation":
    """Return the finished simulation, a second one where collectives of the first lie beside compute and slow it."""
    run = _Simulation(program, times)
    run.run()
    if times.overlap_slowdown:
        extra_s = [times.overlap_slowdown * run.hidden_s(rank) for rank in range(program.num_ranks)]
        if any(own_s.any() for own_s in extra_s):
            run = _Simulation(program, times, extra_s)
            run.run()
    return run


def _timeline_parts(timeline: Timeline) -> dict[str, float]:
    return time_by_part(spans_of(timeline), 0.0, timeline.makespan_s)


def _has_simple_waits(program: Program) -> bool:
    """Return True if transfers and host copies wait for compute alone, collectives don't wait for either, and there is
    nothing on disk or beside the passes."""
    return not any(lanes.get("disk") or lanes.get("host") for lanes in program.ranks) and all(
        all(lane == "compute" for _, _, waits in lanes.get("host_copy", ()) for lane, _ in waits)
        and all(lane == "compute" for _, _, waits in lanes.get("p2p", ()) for lane, _ in waits)
        and all(lane not in ("p2p", "host_copy") for _, _, waits in lanes.get("collective", ()) for lane, _ in waits)
        for lanes in program.ranks
    )


def _awaited(program: Program) -> list[list[int]]:
    """Return `Transfers.awaited` of each rank's passes."""
    transfers = program.once(Transfers)
    return [transfers.awaited(rank, lanes.get("compute", ())) for rank, lanes in enumerate(program.ranks)]


_HIDDEN_KINDS = (Kind.UNSHARD, Kind.UNSHARD_BUCKET, Kind.REDUCE_GRAD, Kind.ALL_REDUCE_REPLICAS)
"""Collectives of parameters and gradients, which lie beside compute where a Program has them early or in parts."""

_DEADLOCK = "the program deadlocks; muster.schedule.check.check says why"

RankProcess = Iterator[int]
"""Generator that runs one lane until it needs an unknown time; yields the transfer that it waits for, or NO_TRANSFER if
it waits for something else."""


class _Simulation:
    """Dataflow simulation: follows dependencies from rank to rank instead of a global clock.

    Ranks with a device each influence each other only through transfers and collectives. So each rank runs ahead until
    it needs a time that isn't known yet, in constant time per instruction. Example: rank 0 runs F0 F1 of a pipeline and
    knows when its sends begin; rank 1 then runs F0, B0, and rank 0 resumes at its B0.
    """

    def __init__(self, program: Program, times: OpTimes, extra_s: Sequence[Column] = ()) -> None:
        """`extra_s`: per rank, the seconds that each of its compute instructions takes in addition."""
        self.program, self.times, self.extra_s = program, times, extra_s
        self.begin_s: list[dict[Lane, list[float]]] = [{lane: [] for lane in LANES} for _ in program.ranks]
        self.end_s: list[dict[Lane, list[float]]] = [{lane: [] for lane in LANES} for _ in program.ranks]
        self.transfers = program.once(Transfers)
        self.sent_s = [-1.0] * self.transfers.count
        """Begin of each transfer; −1 if unknown yet."""
        self.transfer_s, self.send_busy_s = self.transfers.durations_s(times)
        self.out_free_s = [0.0] * program.num_ranks
        """Time from which each rank can send again."""
        self.waiting: dict[int, RankProcess] = {}
        """Transfer → process that waits for it."""
        self.collective_arrivals: dict[tuple, list[tuple[float, float]]] = {}
        """(kind, ranks, number of earlier ones) → (arrival, duration) of each rank."""
        self.ready: list[RankProcess] = []
        self.awaited_transfers = program.once(_awaited)
        """Per rank and pass, the transfer that it waits for."""
        self.awaited_copies: list[list[tuple[int, int]]] = [[] for _ in program.ranks]
        """Per rank, pairs (pass, host copy that it waits for)."""
        self.collective_spans_s: list[list[tuple[float, float]]] = [[] for _ in program.ranks]
        """Per rank and collective, (begin, end) of the time with all ranks present."""

    def run(self) -> None:
        """Run all lanes of all ranks. Raises ProgramError if a lane never ends."""
        for rank in range(self.program.num_ranks):
            self.ready += (self._run_compute(rank), self._run_collectives(rank))
        blocked: list[RankProcess] = []
        unfinished = len(self.ready)
        num_ended = -1
        while unfinished:
            if not self.ready:
                # Resume all processes that wait for something else than a transfer, unless nothing has ended since.
                before = num_ended
                num_ended = sum(len(times_s) for lanes in self.end_s for times_s in lanes.values())
                if num_ended == before:
                    raise ProgramError(_DEADLOCK)
                self.ready += blocked
                blocked.clear()
                continue
            process = self.ready.pop()
            awaited = next(process, None)
            if awaited is None:
                unfinished -= 1
            elif awaited == NO_TRANSFER:
                blocked.append(process)
            else:
                self.waiting[awaited] = process

    def timeline(self) -> Timeline:
        """Return the timeline of the finished simulation."""
        with gc_paused():
            return Timeline("predicted", self.program.num_ranks, tuple(self._events()), self.program.pairs)

    def last_s(self) -> float:
        """Return the end of the last instruction on any rank."""
        return max((end_s[-1] for lanes in self.end_s for end_s in lanes.values() if end_s), default=0.0)

    def time_by_part(self) -> dict[str, float]:
        """Return the parts of the step as means over the ranks."""
        with gc_paused():
            return time_by_part(self._spans(), 0.0, self.last_s())

    def hidden_s(self, rank: int) -> Column:
        """Return the seconds of each compute instruction of a rank beside which parameters or gradients travel."""
        begin_s, end_s = (np.array(times_s[rank]["compute"]) for times_s in (self.begin_s, self.end_s))
        collectives = zip(self.program.ranks[rank].get("collective", ()), self.collective_spans_s[rank], strict=True)
        spans = np.array([span for item, span in collectives if item.action.kind in _HIDDEN_KINDS]).reshape(-1, 2)
        begun_s, over_s = merge_spans(*spans.T)
        if not len(begun_s):
            return np.zeros(len(begin_s))
        edges = np.column_stack((begun_s, over_s)).ravel()
        travelled_s = np.column_stack((np.append(0.0, np.cumsum(over_s - begun_s)[:-1]), np.cumsum(over_s - begun_s)))
        return np.interp(end_s, edges, travelled_s.ravel()) - np.interp(begin_s, edges, travelled_s.ravel())

    def _spans(self) -> Iterator[RankSpans]:
        """Yield the spans of each rank."""
        sent_s = np.array(self.sent_s)
        transfer_s = np.array(self.transfer_s)
        for rank, lanes in enumerate(self.program.ranks):
            compute = lanes.get("compute", ())
            begin_s, end_s = (np.array(times_s[rank]["compute"]) for times_s in (self.begin_s, self.end_s))
            compute_s: defaultdict[str, float] = defaultdict(float)
            for action, count in Counter(self.program.timed_as(compute)).items():
                compute_s[action[0]] += count * self.times.duration_s(Action(*action))
            for index, time_s in paired_durations_s(self.program, self.times, rank).items():
                action = compute[index].action
                compute_s[action.kind] += time_s - self.times.duration_s(action)
            for item, time_s in zip(compute, self.extra_s[rank], strict=True) if self.extra_s else ():
                compute_s[item.action.kind] += time_s
            together = zip(lanes.get("collective", ()), self.collective_spans_s[rank], strict=True)
            waits: list[tuple[str, Column, Column]] = [
                (item.action.kind, np.array([begin]), np.array([end])) for item, (begin, end) in together
            ]
            readers, transfers = self._receives(rank)
            idle_since_s = np.append(0.0, end_s)[readers]
            waits.append((P2P, np.maximum(sent_s[transfers], idle_since_s), (sent_s + transfer_s)[transfers]))
            waits += self._copy_waits(rank, idle_since_s=np.append(0.0, end_s))
            yield RankSpans(compute_s, begin_s, end_s, waits)

    def _copy_waits(self, rank: int, idle_since_s: Column) -> Iterator[tuple[str, Column, Column]]:
        """Yield by kind the spans in which a rank was idle before a pass that waits for a host copy."""
        copies = self.program.ranks[rank].get("host_copy", ())
        begin_s, end_s = (np.array(times_s[rank]["host_copy"]) for times_s in (self.begin_s, self.end_s))
        for kind in dict.fromkeys(item.action.kind for item in copies):
            found = [pair for pair in self.awaited_copies[rank] if copies[pair[1]].action.kind == kind]
            readers, own = np.array(found, int).reshape(-1, 2).T
            yield kind, np.maximum(begin_s[own], idle_since_s[readers]), end_s[own]

    def _receives(self, rank: int) -> tuple[list[int], list[int]]:
        """Return (passes, transfers): the passes of a rank that wait for a transfer, one entry for each transfer."""
        readers, transfers = [], []
        for number, transfer in enumerate(self.awaited_transfers[rank]):
            if transfer >= 0:
                readers.append(number)
                transfers.append(transfer)
            elif transfer == SEVERAL_WAITS:
                waits = self.program.ranks[rank]["compute"][number].waits
                found = [int(self.transfers.numbers[rank][index]) for lane, index in waits if lane == "p2p"]
                readers += [number] * len(found)
                transfers += found
        return readers, transfers

    def _run_compute(self, rank: int) -> RankProcess:
        compute = self.program.ranks[rank].get("compute", ())
        begin, end = self.begin_s[rank]["compute"].append, self.end_s[rank]["compute"].append
        collective_end_s = self.end_s[rank]["collective"]
        sent_s = self.sent_s
        transfer_s = self.transfer_s
        time_s = 0.0
        sends = self.transfers.sends[rank]
        next_send = 0
        sends_after = [*self.transfers.send_after[rank], len(compute)]
        while sends_after[next_send] < 0:
            self._send(rank, sends[next_send], time_s)
            next_send += 1
        copy_end_s = self.end_s[rank]["host_copy"]
        for number, (transfer, duration_s) in enumerate(
            zip(self.awaited_transfers[rank], self._pass_durations_s(rank), strict=True)
        ):
            if transfer >= 0:
                while sent_s[transfer] < 0:
                    yield transfer
                if sent_s[transfer] + transfer_s[transfer] > time_s:
                    time_s = sent_s[transfer] + transfer_s[transfer]
            elif transfer == SEVERAL_WAITS:
                for lane, index in compute[number].waits:
                    if lane == "p2p":
                        transfer = int(self.transfers.numbers[rank][index])
                        while sent_s[transfer] < 0:
                            yield transfer
                        time_s = max(time_s, sent_s[transfer] + transfer_s[transfer])
                    elif lane == "collective":
                        while len(collective_end_s) <= index:
                            yield NO_TRANSFER
                        time_s = max(time_s, collective_end_s[index])
                    elif lane == "host_copy":
                        self.awaited_copies[rank].append((number, index))
                        self._run_copies(rank, index + 1)
                        time_s = max(time_s, copy_end_s[index])
            begin(time_s)
            time_s += duration_s
            end(time_s)
            while sends_after[next_send] == number:
                self._send(rank, sends[next_send], time_s)
                next_send += 1
        self._run_copies(rank, len(self.program.ranks[rank].get("host_copy", ())))

    def _run_copies(self, rank: int, count: int) -> None:
        """Run the remaining ones of a rank's first `count` host copies; the passes that they wait for have ended."""
        begin_s, end_s = self.begin_s[rank]["host_copy"], self.end_s[rank]["host_copy"]
        compute_end_s = self.end_s[rank]["compute"]
        for action, _, waits in self.program.ranks[rank].get("host_copy", ())[len(end_s) : count]:
            if any(index >= len(compute_end_s) for _, index in waits):
                raise ProgramError(_DEADLOCK)
            begin_s.append(max([0.0, *end_s[-1:], *(compute_end_s[index] for _, index in waits)]))
            end_s.append(begin_s[-1] + self.times.duration_s(action))

    def _send(self, rank: int, transfer: int, ready_s: float) -> None:
        begin_s = max(ready_s, self.out_free_s[rank])
        self.sent_s[transfer], self.out_free_s[rank] = begin_s, begin_s + self.send_busy_s[transfer]
        if transfer in self.waiting:
            self.ready.append(self.waiting.pop(transfer))

    def _run_collectives(self, rank: int) -> RankProcess:
        collectives = self.program.ranks[rank].get("collective", ())
        end_s = self.end_s[rank]
        time_s = 0.0
        count: Counter[tuple] = Counter()
        for instruction, duration_s in zip(collectives, self._durations_s(collectives), strict=True):
            for lane, index in instruction.waits:
                while len(end_s[lane]) <= index:
                    yield NO_TRANSFER
                time_s = max(time_s, end_s[lane][index])
            self.begin_s[rank]["collective"].append(time_s)
            ranks = participants(instruction, rank, self.program.num_ranks)
            key = (instruction.action.kind, ranks)
            present = self.collective_arrivals.setdefault((*key, count[key]), [])
            count[key] += 1
            present.append((time_s, duration_s))
            while len(present) < len(ranks):
                yield NO_TRANSFER
            last_arrival_s = max(arrival_s for arrival_s, _ in present)
            time_s = last_arrival_s + max(rank_s for _, rank_s in present)
            self.collective_spans_s[rank].append((last_arrival_s, time_s))
            end_s["collective"].append(time_s)

    def _pass_durations_s(self, rank: int) -> list[float]:
        durations_s = self._durations_s(self.program.ranks[rank].get("compute", ()))
        for index, time_s in paired_durations_s(self.program, self.times, rank).items():
            durations_s[index] = time_s
        if not self.extra_s:
            return durations_s
        return [own + more for own, more in zip(durations_s, self.extra_s[rank].tolist(), strict=True)]

    def _durations_s(self, instructions: tuple[Instruction, ...]) -> list[float]:
        kinds = self.program.timed_as(instructions)
        known_s = {kind: self.times.duration_s(Action(*kind)) for kind in set(kinds)}
        return [known_s[kind] for kind in kinds]

    def _events(self) -> Iterator[Event]:
        """Yield all events by rank, lane and order in the lane."""
        sent_s = np.array(self.sent_s)
        arrive_s = sent_s + np.array(self.transfer_s)
        make_event = tuple.__new__  # three times as fast as Event(…), for a great number of events
        for rank, lanes in enumerate(self.program.ranks):
            numbers = self.transfers.numbers[rank]
            self.begin_s[rank]["p2p"] = sent_s[numbers].tolist()
            self.end_s[rank]["p2p"] = arrive_s[numbers].tolist()
            for lane in LANES:
                actions = [action for action, _, _ in lanes.get(lane, ())]
                rows = zip(repeat(rank), repeat(lane), actions, self.begin_s[rank][lane], self.end_s[rank][lane])
                yield from map(make_event, repeat(Event), rows)
