"""Discrete-event simulation of ranks that share the CPU cores of their machine.

All processes that want a core of a machine get the same share: with c cores and p processes every job runs at the rate
min(1, c / p). Rates change whenever a job begins or ends. Example: 2 cores, four ranks of one process, each with a pass
of 1 s. All four begin at once, at a rate of 1/2, and would end at 2 s. If two of the ranks have passes of 0.5 s
instead, these end at 1 s (0.5 s of work at half the rate), the other two continue at the full rate with 0.5 s of work
left, and end at 1.5 s.

Since all jobs of a machine run at one rate, the order of their ends never changes once they have begun. So a machine
needs a single clock, of the work done per job, and a heap of jobs by the value of that clock at their end.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from muster.cost.time.op_times import OpTimes
from muster.schedule.action import LANES, RECEIVES, SENDS, Action, Kind, Lane
from muster.schedule.program import Instruction, Program, ProgramError, participants
from muster.simulate.pairs import paired_durations_s
from muster.simulate.timeline import Event, Timeline

InstructionIndex = tuple[int, Lane, int]
"""Pipeline rank, lane, and index in the lane of an instruction."""


def simulate_on_shared_cores(program: Program, times: OpTimes) -> Timeline:
    """Return the timeline of `simulate` for ranks that share `times.cores` cores of their machine (None: unlimited).

    Passes, the optimizer step and collectives need a core for each process that takes part: on one machine collectives
    are memory copies and additions. P2p transfers and GRAD_NORM are latency and need no core, nor do reads and
    writes of files, nor host copies and updates beside the passes where cores aren't shared.
    """
    machine = _SharedCoreSimulation(program, times)
    machine.run()
    return Timeline("predicted", program.num_ranks, tuple(machine.events()), program.pairs)


@dataclass(slots=True)
class _CorePool:
    """Cores of one machine, and the jobs that run on them."""

    cores: int | None
    work_s: float = 0.0
    """Clock of the machine: seconds of work that a job has done that runs since the begin."""
    running: int = 0
    """Number of processes that need a core."""
    jobs: list[tuple[float, int, int, list[InstructionIndex]]] = field(default_factory=list)
    """Heap of (`work_s` at the end, order of beginning, processes, instructions that end)."""

    @property
    def rate(self) -> float:
        """Seconds of work per second of each job."""
        return 1.0 if self.cores is None or self.running <= self.cores else self.cores / self.running

    def end_s(self, now_s: float) -> float:
        """Return the time at which the next job ends if none begins; infinite without jobs."""
        return now_s + (self.jobs[0][0] - self.work_s) / self.rate if self.jobs else inf


class _SharedCoreSimulation:
    """State of all machines and ranks at the time `now_s`."""

    def __init__(self, program: Program, times: OpTimes) -> None:
        self.program, self.times, self.num_ranks = program, times, program.num_ranks
        self.lanes: list[dict[Lane, tuple[Instruction, ...]]] = [
            {lane: ranks.get(lane, ()) for lane in LANES} for ranks in program.ranks
        ]
        self.paired_s = [paired_durations_s(program, times, rank) for rank in range(program.num_ranks)]
        """Per rank, place → seconds of the passes of pairs."""
        self.cursor: list[dict[Lane, int]] = [dict.fromkeys(LANES, 0) for _ in program.ranks]
        self.begin_s: dict[InstructionIndex, float] = {}
        self.end_s: dict[InstructionIndex, float] = {}
        self.now_s = 0.0
        self.pool_of = times.machines or (0,) * program.num_ranks
        self.pools = {number: _CorePool(times.cores) for number in self.pool_of}
        self.timers: list[tuple[float, int, list[InstructionIndex]]] = []
        """Heap of (time of the end, order of beginning, instructions that end), for instructions without cores."""
        self.num_started = 0
        self.arrived: dict[tuple, list[InstructionIndex]] = {}
        """(kind, ranks) of a collective → instructions of the ranks that have arrived."""
        self.out_free_s = [0.0] * program.num_ranks
        """Time from which each rank can send again."""
        self.receives: dict[tuple[int, int], list[int]] = {}
        """(source, target) → indices in the target's p2p lane that receive from the source, last first."""
        for rank, lanes in enumerate(self.lanes):
            for index, instruction in reversed(list(enumerate(lanes["p2p"]))):
                if instruction.action.kind in RECEIVES and instruction.peer is not None:
                    self.receives.setdefault((instruction.peer, rank), []).append(index)

    def run(self) -> None:
        """Run all instructions. Raises ProgramError if one never begins."""
        for rank in range(self.num_ranks):
            self._start_ready(rank)
        while self.timers or any(pool.jobs for pool in self.pools.values()):
            for rank in sorted({rank for rank, _, _ in self._advance()}):
                self._start_ready(rank)
        for rank, lanes in enumerate(self.lanes):
            for lane, instructions in lanes.items():
                if self.cursor[rank][lane] < len(instructions):
                    action = instructions[self.cursor[rank][lane]].action
                    raise ProgramError(f"{action} on rank {rank} never begins; muster.schedule.check.check says why")

    def events(self) -> list[Event]:
        """Return all events by rank, lane and order in the lane."""
        return [
            Event(rank, lane, instruction.action, self.begin_s[rank, lane, index], self.end_s[rank, lane, index])
            for rank, lanes in enumerate(self.lanes)
            for lane, instructions in lanes.items()
            for index, instruction in enumerate(instructions)
        ]

    def _advance(self) -> list[InstructionIndex]:
        """Advance the time to the next end, and return the instructions that end."""
        first = min(self.pools.values(), key=lambda pool: pool.end_s(self.now_s))
        job_s, timer_s = first.end_s(self.now_s), self.timers[0][0] if self.timers else inf
        time_s = min(timer_s, job_s)
        for pool in self.pools.values():
            if pool is not first or timer_s <= job_s:
                pool.work_s += (time_s - self.now_s) * pool.rate
        if timer_s <= job_s:
            _, _, places = heappop(self.timers)
        else:
            first.work_s, _, processes, places = heappop(first.jobs)
            first.running -= processes
        self.now_s = time_s
        for place in places:
            self.end_s[place] = time_s
        return places

    def _start_ready(self, rank: int) -> None:
        for lane in LANES:
            instructions, cursor = self.lanes[rank][lane], self.cursor[rank]
            while cursor[lane] < len(instructions):
                index = cursor[lane]
                if lane != "p2p" and index and (rank, lane, index - 1) not in self.end_s:
                    break
                if not all((rank, *wait) in self.end_s for wait in instructions[index].waits):
                    break
                cursor[lane] += 1
                self._start((rank, lane, index))

    def _start(self, place: InstructionIndex) -> None:
        rank, lane, index = place
        instruction = self.lanes[rank][lane][index]
        if lane == "p2p":
            if instruction.action.kind in SENDS:
                assert instruction.peer is not None
                receive: InstructionIndex = (instruction.peer, lane, self.receives[rank, instruction.peer].pop())
                ends = instruction.action.stage, self.program.other_end(instruction.action).stage
                transfer = self.times.p2p_time(*ends, instruction.action.slice)
                begin_s = max(self.now_s, self.out_free_s[rank])
                self.begin_s[place] = self.begin_s[receive] = begin_s
                self.out_free_s[rank] = begin_s + transfer.send_busy_s
                self._add_timer(begin_s - self.now_s + transfer.total_s, [place, receive])
            return
        self.begin_s[place] = self.now_s
        places = self._collective_members(place) if lane == "collective" else [place]
        if not places:
            return
        duration_s = self.paired_s[rank].get(index) if lane == "compute" else None
        if duration_s is None:
            duration_s = max(self.times.duration_s(self._action(one)) for one in places)
        if (
            lane == "disk"
            or (lane in ("host_copy", "host") and self.times.cores is None)
            or instruction.action.kind in (Kind.GRAD_NORM, Kind.GRAD_NORM_BESIDE)
        ):
            self._add_timer(duration_s, places)
        else:
            self._add_job(duration_s, places)

    def _collective_members(self, place: InstructionIndex) -> list[InstructionIndex]:
        """Return the instructions of all ranks of the collective at `place`; none while a rank is missing."""
        rank, lane, index = place
        instruction = self.lanes[rank][lane][index]
        ranks = participants(instruction, rank, self.num_ranks)
        key = (instruction.action.kind, ranks)
        self.arrived.setdefault(key, []).append(place)
        return self.arrived.pop(key) if len(self.arrived[key]) == len(ranks) else []

    def _action(self, place: InstructionIndex) -> Action:
        rank, lane, index = place
        return self.lanes[rank][lane][index].action

    def _add_timer(self, duration_s: float, places: list[InstructionIndex]) -> None:
        self.num_started += 1
        heappush(self.timers, (self.now_s + duration_s, self.num_started, places))

    def _add_job(self, duration_s: float, places: list[InstructionIndex]) -> None:
        """Start a job on the machine of its first rank, with the processes of the ranks on that machine."""
        self.num_started += 1
        each, number = self.times.processes_per_rank, self.pool_of[places[0][0]]
        pool = self.pools[number]
        processes = sum(each[rank] if each else 1 for rank, _, _ in places if self.pool_of[rank] == number)
        pool.running += processes
        heappush(pool.jobs, (pool.work_s + duration_s, self.num_started, processes, places))
