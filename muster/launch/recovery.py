"""Recovery from lost ranks within an attempt: spares take their places, and the other ranks go on in their processes.

The launcher notices the end of a rank and tells the others, who leave what is under way and join it in the next
generation. Nobody waits for a collective to time out. Where that doesn't help, the attempt ends as it would have ended
without (`restarts.py` says what follows). Where fewer ranks went on, new processes take the lost places once they are
ready, from the end of a step on.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from muster.config.file_writer import write_atomically
from muster.launch.exit_status import determine_exit_status
from muster.launch.hang_diagnosis import RankFault, RankSnapshot
from muster.launch.heartbeat import SHORT_PHASES
from muster.launch.launcher_words import Membership, word_of
from muster.launch.rank_errors import error_path
from muster.launch.restarts import wait_before
from muster.launch.supervised_rank import SupervisedRank
from muster.launch.supervisor import RankSupervisor
from muster.report.approximation import Approximation, pop_approximation
from muster.report.recoveries import LossCause
from muster.report.run_files import RECOVERIES_FILE, read_metrics
from muster.spec.errors import MusterError
from muster.spec.units import numbered, pluralize

MAX_RECOVERIES_IN_A_ROW = 3
"""Recoveries without a new step between, after which the attempt ends: what ends the ranks comes again."""
JOIN_TIMEOUT_S = 60.0
"""Longest time from a loss until all ranks have joined the next generation, after which those that haven't are lost,
too."""
START_TIMEOUT_S = 300.0
"""The same where the others wait for processes that import their modules still, which takes long on a busy machine."""


@dataclass(frozen=True)
class Elasticity:
    """Ways in which a job goes on when ranks are lost."""

    num_spares: int
    """Processes that wait to take a lost rank's place; 0: fewer ranks go on, where they can."""
    smaller_sizes: tuple[int, ...] = ()
    """Numbers of ranks, fewer than the job's, with which it can go on."""
    states_by_size: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Number of the state that each rank holds (`layout.mesh.state_numbers`), by the number of ranks; empty where
    copies of all states are kept."""


@dataclass
class Recovery:
    """One recovery from a loss, return of ranks or change of the plan, as it stands in the run's record."""

    time: float
    """Time of the loss, or of the first rank's leaving its generation for one with more ranks, in seconds since
    1970."""
    generation: int
    """Generation that follows."""
    step: int
    """Last step that all ranks had finished, as far as they had told."""
    ranks: list[int]
    """Lost ranks; none where ranks came back or changed their plan."""
    causes: list[LossCause]
    """Cause of the loss of each of `ranks`."""
    reason: str
    world_size: int
    """Ranks of the generation that follows."""
    joined_s: float | None = None
    """Seconds from `time` until all ranks had joined the next generation."""
    recovered_s: float | None = None
    """Seconds from `time` until the next step was finished; None: it never was."""
    changes_plan: bool = False
    """True where as many ranks go on under another plan, since one was slow."""
    approximation: Approximation | None = None
    """In what the state that the ranks go on with is approximate; None: it is that after `step`, to the bit."""


class ElasticSupervisor(RankSupervisor):
    """Supervisor that replaces lost ranks by spares, or lets fewer ranks go on until others are ready. Its ranks run on
    this machine."""

    def __init__(self, run_dir: Path, grace_s: float, hang_timeout_s: float | None, elastic: Elasticity) -> None:
        super().__init__(run_dir, grace_s, hang_timeout_s)
        self._elastic = elastic
        self.terminal_fds = os.dup(1), os.dup(2)
        self._spares: list[SupervisedRank] = []
        self._generation = self._in_a_row = 0
        self._generation_start = 0.0
        """Time of the last loss, on this machine's monotonic clock."""
        self._under_way: Recovery | None = None
        self._announced: Recovery | None = None
        """Return of ranks that begins when the others have finished a step."""
        self._states: dict[SupervisedRank, int] = {}
        """Number of the state that each process holds since the last step that all ranks have finished together; empty
        where copies of all are kept."""
        self._lacks_spares = False
        """True where processes could not be started, for which it is tried again."""
        self._num_starts, self._next_start = 0, 0.0
        """Times at which new processes were started for lost ranks, and the earliest time of the next."""
        self._last_start = 0.0
        """Time at which a rank that the others wait for was last seen to import its modules."""
        self._first_steps: dict[int, int] = {}
        """Steps that each rank had finished when it began to train in the newest generation."""
        self._recoveries: list[Recovery] = []
        self._earlier = read_metrics(run_dir / RECOVERIES_FILE)
        self._is_over = False

    def start(
        self, command_for_rank: Callable[[int], list[str]], ranks: range, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the ranks and their spares."""
        self._command_for_rank, self._num_ranks = command_for_rank, len(ranks)
        self._environment = {"LOCAL_WORLD_SIZE": str(len(ranks)), **(environment or {})}
        super().start(command_for_rank, ranks, environment)
        self._note_states()
        self._start_spares()

    def _note_states(self) -> None:
        """Note the states that the ranks hold now."""
        states = self._elastic.states_by_size.get(len(self.ranks))
        self._states = {} if states is None else {rank: states[rank.rank] for rank in self.ranks}

    def _start_spares(self) -> int:
        """Start the spares that are missing, and processes for the places of lost ranks that nobody has taken; return
        how many."""
        for spare in self._spares:
            if spare.exit_code is not None:
                spare.close()
        self._spares = [spare for spare in self._spares if spare.exit_code is None]
        missing = self._elastic.num_spares + self._num_ranks - len(self.ranks) - len(self._spares)
        count = max(0, min(missing, self._room()))
        for _ in range(count):
            self._spares.append(self._start_spare())
        return count

    def _start_spare(self) -> SupervisedRank:
        """Start a process that waits for a place."""
        return self._start_process(-1, self._command_for_rank(-1), self._environment)

    def _room(self) -> int:
        """Return how many more processes there may be."""
        alive = [*self.running(), *self._waiting_spares()]
        return self._num_ranks + self._elastic.num_spares - len(alive)

    def _waiting_spares(self) -> list[SupervisedRank]:
        """Return the processes that wait for a place, or will once they have started."""
        return [spare for spare in self._spares if spare.exit_code is None]

    def _recover(self) -> None:
        """Replace the ranks that have failed, if the others can go on; otherwise tell these that nothing follows."""
        for spare in self._waiting_spares():
            spare.poll()
        self._follow()
        failed = [rank for rank in self.ranks if rank.failed]
        if self._is_over:
            return
        if not failed:
            self._let_ranks_leave()
        elif (reason := self._reason_to_go_on(failed)) is None:
            self._is_over = True
            for rank in self.running():
                rank.tell(word_of(None))
        elif (size := self._smaller_size(failed)) is None:
            self._replace(failed, reason)
        else:
            self._shrink(failed, reason, size)

    def _reason_to_go_on(self, failed: list[SupervisedRank]) -> str | None:
        """Return the reason why ranks were lost; None where the others can't go on, or would only lose more."""
        if self.stop_requested or self.kill_requested or self.hang_fault is not None:
            return None
        if len(failed) + len(self.running()) < len(self.ranks):
            return None  # some have ended well
        if self._in_a_row == MAX_RECOVERIES_IN_A_ROW:
            return None
        hang = next((rank.fault for rank in failed if rank.fault is not None), None)
        status = determine_exit_status(self.rank_exits(failed), False, False, hang)
        return status.reason if status.restartable else None

    def _smaller_size(self, failed: list[SupervisedRank]) -> int | None:
        """Return the most ranks that can go on without the failed ones; None where these are replaced, by processes
        that are started if need be and this machine allows it."""
        ready = len(self._ready_spares())
        possible = len(self._waiting_spares()) + self._room() if self._elastic.num_spares else ready
        if possible >= len(failed) and self._provide_spares(len(failed)):
            return None
        left = len(self.running()) + ready
        return max((size for size in self._elastic.smaller_sizes if size <= left), default=None)

    def _provide_spares(self, count: int) -> bool:
        """Start processes until so many wait for a place; returns False where this machine refuses one."""
        try:
            while len(self._waiting_spares()) < count:
                self._spares.append(self._start_spare())
        except (MusterError, OSError) as error:
            self._say_no_start(error)
            return False
        return True

    def _say_no_start(self, error: Exception) -> None:
        """Say that a process can't be started, and remember to try again."""
        print(f"no other process can be started for now: {error}", flush=True)
        self._lacks_spares = True

    def _let_ranks_leave(self) -> None:
        """Let ranks go on in another generation from the end of a step, where they ask for one or others are ready to
        come back."""
        if self._announced is not None:
            statuses = [rank.status() for rank in self.ranks]
            if any(s is not None and (s.phase == "join" or s.generation == self._generation) for s in statuses):
                self._admit(self._announced)
            return
        if self._under_way is not None or len(self.running()) < len(self.ranks):
            return
        if self.stop_requested or self.kill_requested:
            return
        statuses = (rank.status() for rank in self.ranks)
        if any(s is not None and s.asks_for_next and s.generation == self._generation for s in statuses):
            self._announce(len(self.ranks), "another plan was chosen around slow ranks", changes_plan=True)
        elif len(self.ranks) < self._num_ranks:
            self._let_ranks_return()
        elif self._lacks_spares:
            self._start_missing()

    def _let_ranks_return(self) -> None:
        """Let more ranks go on from the end of a step, once there are processes for the places of lost ones."""
        self._start_missing()
        ready = self._ready_spares()
        if len(ready) < len(self._waiting_spares()):
            return  # one larger generation after the other would cost more than to wait for all
        sizes = *self._elastic.smaller_sizes, self._num_ranks
        size = max((size for size in sizes if size <= len(self.ranks) + len(ready)), default=0)
        if size > len(self.ranks):
            self._announce(size, f"{pluralize(size - len(self.ranks), 'rank')} came back")

    def _start_missing(self) -> None:
        """Start processes for the places of lost ranks and of spares, with longer and longer pauses."""
        if time.monotonic() >= self._next_start and self._try_to_start_spares():
            self._num_starts += 1
            self._next_start = time.monotonic() + wait_before(self._num_starts + 1)

    def _try_to_start_spares(self) -> bool:
        """Start processes for the places of lost ranks and of spares; returns False where there are none to start. The
        ranks that are left go on without them, where this machine refuses more for a while."""
        self._lacks_spares = False
        try:
            return self._start_spares() > 0
        except (MusterError, OSError) as error:
            self._say_no_start(error)
            return True

    def _announce(self, size: int, reason: str, changes_plan: bool = False) -> None:
        """Tell the ranks that `size` of them go on after a step."""
        self._generation += 1
        self._announced = Recovery(
            time.time(), self._generation, self._last_step(), [], [], reason, size, changes_plan=changes_plan
        )
        print(f"{reason}: {pluralize(size, 'rank')} go on after this step (generation {self._generation})", flush=True)
        for rank in self.ranks:
            rank.tell(word_of(self._membership(rank, size, at_step_end=True)))

    def _admit(self, announced: Recovery) -> None:
        """Give ready processes their places, now that the ranks have left the generation before."""
        announced.time, announced.step = time.time(), self._last_step()
        self._recoveries.append(announced)
        self._under_way, self._announced, self._first_steps = announced, None, {}
        for number in range(len(self.ranks), announced.world_size):
            spare = self._take_spare()
            spare.renumber(number)
            self.ranks.append(spare)
            error_path(self.run_dir, number).unlink(missing_ok=True)
            spare.tell(word_of(self._membership(spare, announced.world_size)))
        self._write_record()

    def _membership(self, rank: SupervisedRank, size: int, at_step_end: bool = False) -> Membership:
        """Return a rank's place in the newest generation, which has `size` ranks."""
        return Membership(self._generation, rank.rank, size, at_step_end)

    def _replace(self, failed: list[SupervisedRank], reason: str) -> None:
        """Give the places of failed ranks to spares, and tell all ranks of the next generation."""
        lost = [rank.rank for rank in failed]
        who = replacement_text(lost, len(self._ready_spares()))
        others = ", and the other ranks go on" if self.running() else ""
        causes = self._begin_generation(failed, f"{reason}: {who}{others}", reason, len(self.ranks))
        for rank, cause in zip(failed, causes, strict=True):
            spare = self._take_spare(rank.node, elsewhere=cause == "slow")
            spare.renumber(rank.rank)
            self.ranks[self.ranks.index(rank)] = spare
            rank.close()
        self._tell_places()

    def _shrink(self, failed: list[SupervisedRank], reason: str, size: int) -> None:
        """Let `size` of the ranks that are left go on; others wait as spares."""
        left = self.running()
        staying = self._choose(left, size)
        waiting = [rank for rank in left if rank not in staying]
        word = f"{reason}: {pluralize(size, 'rank')} {'goes' if size == 1 else 'go'} on"
        if waiting:
            word += ", another waits as a spare" if len(waiting) == 1 else f", {len(waiting)} others wait as spares"
        self._begin_generation(failed, word, reason, size)
        for rank in failed:
            rank.close()
        self.ranks = staying
        for _ in range(size - len(left)):
            self.ranks.append(self._take_spare())
        self.ranks.sort(key=lambda rank: rank.node)
        for number, rank in enumerate(self.ranks):
            rank.renumber(number)
        for rank in waiting:
            rank.renumber(-1)
            rank.tell(word_of(self._membership(rank, size)))
        self._spares += waiting
        self._tell_places()

    def _choose(self, left: list[SupervisedRank], size: int) -> list[SupervisedRank]:
        """Return those of the ranks that are left which go on where only `size` do: the first; where no copies are
        kept, one that holds each state before others, and last those that hold none yet."""
        num_seen = Counter[int | None]()
        turns = []
        for state in map(self._states.get, left):
            turns.append((state is None, num_seen[state]))
            num_seen[state] += 1
        chosen = sorted(range(len(left)), key=turns.__getitem__)[:size]
        return [left[place] for place in sorted(chosen)]

    def _begin_generation(self, failed: list[SupervisedRank], word: str, reason: str, size: int) -> Sequence[LossCause]:
        """Record that ranks were lost, and say what follows; return why each of them was."""
        self._generation += 1
        self._generation_start = time.monotonic()
        self._in_a_row += 1
        lost = [rank.rank for rank in failed]
        begin = min(rank.last_alive for rank in failed)
        causes: list[LossCause] = [self._cause(rank) for rank in failed]
        self._use_up_oom_kills(failed)
        self._under_way = Recovery(begin, self._generation, self._last_step(), lost, causes, reason, size)
        self._announced = None
        self._recoveries.append(self._under_way)
        self._first_steps = {}
        print(f"{word} (generation {self._generation})", flush=True)
        for rank in lost:
            error_path(self.run_dir, rank).unlink(missing_ok=True)
        return causes

    def _cause(self, failed: SupervisedRank) -> LossCause:
        """Return why a rank is lost."""
        if failed.fault is not None:
            return "hung"
        (end,) = self.rank_exits([failed])
        error = end.reported or end.observed
        return "dead" if error is None else error.cause

    def _tell_places(self) -> None:
        """Tell all ranks their places in the newest generation."""
        for rank in self.running():
            rank.tell(word_of(self._membership(rank, len(self.ranks))))
        self._write_record()

    def _take_spare(self, node: int = 0, elsewhere: bool = False) -> SupervisedRank:
        """Return a spare that is ready, one that starts, or a new one; of several the first on `node`, but before that
        one with a state that no rank holds any more. With `elsewhere` the first on another node, even if it has still
        to start."""
        ready, waiting = self._ready_spares(), self._waiting_spares()
        if not waiting:
            return self._start_spare()
        held = {None, *map(self._states.get, self.running())}
        spare = max(
            waiting if elsewhere else ready or waiting,
            key=lambda one: (self._states.get(one) not in held, (one.node == node) != elsewhere, one in ready),
        )
        self._spares.remove(spare)
        return spare

    def _ready_spares(self) -> list[SupervisedRank]:
        """Return the processes that have started and wait for a place."""
        return [spare for spare in self._waiting_spares() if spare.status() is not None]

    def _follow(self) -> None:
        """Notice when all ranks have joined the newest generation, and when they have finished a step in it."""
        if (under_way := self._under_way) is None:
            return
        passed_s = time.time() - under_way.time
        joined = {
            rank.rank: status
            for rank in self.ranks
            if (status := rank.status()) is not None and status.generation == self._generation
        }
        if len(joined) < len(self.ranks):
            if self._stop_time is not None and time.monotonic() - self._stop_time > self._grace_s:
                self._is_over = True  # ranks that are not together can't finish a step, after which they would stop
                self.kill()
                return
            late = [rank for rank in self.running() if rank.rank not in joined]
            if any(rank.status() is None for rank in late):
                self._last_start = time.time()
                limit_s, waited_s = START_TIMEOUT_S, passed_s
            else:
                limit_s, waited_s = JOIN_TIMEOUT_S, time.time() - max(self._last_start, under_way.time)
            if waited_s > limit_s and not self.failed:  # those that have ended are replaced first
                self._give_up_waiting(late, limit_s, under_way.reason)
            return
        if under_way.joined_s is None:
            under_way.joined_s = passed_s
        for rank, status in joined.items():
            if status.phase in SHORT_PHASES:
                self._first_steps.setdefault(rank, status.step)
        # After the last step there is no other.
        if all(
            status.phase == "finish" or status.step > self._first_steps.get(rank, status.step)
            for rank, status in joined.items()
        ):
            under_way.recovered_s = passed_s
            if not under_way.ranks:
                under_way.step = min(self._first_steps.values(), default=under_way.step)
            self._under_way, self._in_a_row = None, 0
            self._note_states()
            since = "the loss" if under_way.ranks else "the one before ended"
            print(
                f"generation {self._generation} has finished a step {passed_s:.1f} s after {since}"
                f" (all ranks together after {under_way.joined_s:.1f} s)",
                flush=True,
            )
            self._write_record()
            if self._elastic.num_spares:
                self._try_to_start_spares()

    def _give_up_waiting(self, late: list[SupervisedRank], limit_s: float, reason: str) -> None:
        """Kill ranks that have not joined the newest generation in time, so that they are replaced: those that the
        others wait for, if they can be told apart."""
        self._write_activity([rank.snapshot(self.hang_timeout_s) for rank in self.running()])
        sentence = f"did not join the other ranks within {limit_s:.0f} s after {reason}"
        absent = [rank for rank in late if (status := rank.status()) is None or status.phase != "join"]
        for rank in absent or late:
            fault = RankFault(rank.rank, rank.snapshot(self.hang_timeout_s).host, sentence)
            if self._in_a_row == MAX_RECOVERIES_IN_A_ROW:
                self.hang_fault = self.hang_fault or fault
            else:
                self._kill_hung(rank, fault)

    def _kill_hung(self, rank: SupervisedRank, fault: RankFault) -> None:
        """Kill a rank that the others wait for, so that it is replaced."""
        rank.fault = fault
        rank.kill()

    def diagnose_if_hung(self, snapshots: list[RankSnapshot]) -> None:
        """Diagnose a hang if there is one; the rank that the others wait for is killed, and so replaced.

        Ranks that have just been told of a new generation may have waited long in the one before: they get as much time
        again.
        """
        if time.monotonic() - self._generation_start < (self.hang_timeout_s or 0.0):
            return
        super().diagnose_if_hung(snapshots)
        if self.hang_fault is None or self._in_a_row == MAX_RECOVERIES_IN_A_ROW:
            return
        held_up = [rank for rank in self.running() if rank.rank == self.hang_fault.rank]
        for rank in held_up:
            self._kill_hung(rank, self.hang_fault)
        if held_up:
            self.hang_fault = None

    def _write_record(self) -> None:
        """Write the run's recoveries, those of earlier attempts first, with what ranks have told of them by now."""
        for one in self._recoveries:
            one.approximation = one.approximation or pop_approximation(self.run_dir, one.generation)
        try:
            rows = [*self._earlier, *map(asdict, self._recoveries)]
            write_atomically(self.run_dir / RECOVERIES_FILE, "".join(json.dumps(row) + "\n" for row in rows))
        except OSError as error:
            print(f"{self.run_dir / RECOVERIES_FILE} can't be written ({error.strerror})", flush=True)

    def shut_down(self) -> None:
        """Kill the processes that still run, the spares, too, and wait until they are gone."""
        self.ranks += self._spares  # they end with the ranks, and have no part in how the job ended
        super().shut_down()
        del self.ranks[len(self.ranks) - len(self._spares) :]
        for number in self.terminal_fds:
            os.close(number)


def replacement_text(lost: Sequence[int], num_ready: int) -> str:
    """Return who takes the places of lost ranks, where so many spares have started."""
    if len(lost) == 1:
        return "a spare takes its place" + ("" if num_ready else ", once it has started")
    waits = "" if num_ready >= len(lost) else ", once they have started"
    return f"spares take the places of {numbered('rank', lost)}{waits}"
