"""Generations of a rank: it trains in one World after another, in the same process, when other ranks were lost or come
back.

What connects the generations is the state after each step in the nodes' memory, from which the next one goes on, as a
restart would. Little is carried over in the process itself (`Carried`), so that a spare, which has nothing, is as good
as a rank that was there before.
"""

import gc
import json
import os
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from muster.config.attempt_files import attempt_files, read_plans_for_losses
from muster.config.file_writer import write_atomically
from muster.config.load_config import plan_yaml
from muster.config.run_config import RunConfig
from muster.data.dataset import SampleStream
from muster.launch.heartbeat import open_heartbeat
from muster.launch.launcher_words import WORD_TIMEOUT_S, LauncherWords, Membership
from muster.launch.rank_errors import run_guarded, says_only_that_a_rank_is_lost
from muster.launch.rank_process import exit_process, take_place
from muster.parallel.connections import Connections
from muster.parallel.world import open_world
from muster.spec.errors import MusterError
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.train.carried import Carried
from muster.train.config_consistency import require_same_config
from muster.train.loop import TrainingLoop
from muster.train.memory_limit import limit_of_run

_NOTICE_S = 1.0
"""Time in which a launcher tells of a loss, from which any error may follow, such as that a copy can't be fetched."""
_FIRST_PLAN_KEY = "plan of the first generation"
"""Key in the launcher's store."""


def train_rank(
    config: RunConfig, plan: Plan, run_dir: Path, store: dist.Store, words: LauncherWords, data: SampleStream
) -> int:
    """Train as one rank. Returns 0 at the end, 75 when stopped on request."""
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    if config.train.elastic:
        plan = _first_plan(plan, store)
    rank = _Rank(config, plan, run_dir, store, words, data)
    while (code := rank.train_once(words.current())) is None:
        gc.collect()  # the former generation's tensors, before there are others
    return code


def _first_plan(plan: Plan, store: dist.Store) -> Plan:
    """Return the plan of the first generation, given the one that the run has now: later generations write another one
    there, once their ranks have called this."""
    return Plan.model_validate_json(store.compare_set(_FIRST_PLAN_KEY, "", plan.model_dump_json()))


def waits_for_a_copy(frame: FrameType | None) -> bool:
    """Return whether a thread, by its innermost frame, waits in code that saves or fetches state, which has limits of
    its own, and not for a message of another rank."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("muster.", "torch.distributed")):
            return name.startswith("muster.checkpoint.")
        frame = frame.f_back
    return False


class _Rank:
    """A process that trains as one rank, generation by generation."""

    def __init__(
        self, config: RunConfig, plan: Plan, run_dir: Path, store: dist.Store, words: LauncherWords, data: SampleStream
    ) -> None:
        self._config, self._plan, self._run_dir, self._store, self._words = config, plan, run_dir, store, words
        fewer = read_plans_for_losses(run_dir) if config.train.elastic else {}
        self._plans = {plan.world_size: plan, **fewer}
        """Plans by their numbers of ranks."""
        self._dataset = data
        self._heartbeat = open_heartbeat()
        self._carried = Carried(plan_refined=self._tell_spares, ask_for_plan=self._ask_for_plan)
        self._is_around = False
        """True while ranks follow a plan around slow ones, which isn't kept for other generations of as many."""
        self._asked_plan: Plan | None = None
        """Plan of the next generation, on the rank 0 that has asked for it."""
        self._number: int | None = None
        """Number among the ranks of the generation before."""
        self._has_trained = False
        """True where this process was a rank in a generation before."""
        self._loop: TrainingLoop | None = None
        self._has_left = False
        """True once all ranks have finished the step after which they leave the present generation."""

    def train_once(self, place: Membership) -> int | None:
        """Train in one generation; returns the exit code, or None where another one follows."""
        if self._number not in (None, place.rank):
            take_place(self._run_dir, place)
        self._has_trained, self._number, self._has_left = self._number is not None, place.rank, False
        if self._asked_plan is not None or place.world_size != self._plan.world_size:
            self._take_plan(place)
        self._heartbeat.asks_for_next = False
        self._carried.leave_requested = lambda: self._words.has_next(place.generation)
        connections = Connections(place.world_size)
        self._words.when_next(
            place.generation, partial(connections.break_until_left, partial(self._give_up, place.rank))
        )
        try:
            if (code := self._train_in(place, connections)) is not None:
                return code
            if self._words.next_after(place.generation) is None:
                raise MusterError(f"the launcher has told no place in the generation after {place.generation}")
        except Exception as error:
            if not self._is_followed(place.generation, error):
                raise
            connections.leave(break_first=not self._has_left)
        finally:
            connections.leave()
        self._abandon()
        return None

    def _take_plan(self, place: Membership) -> None:
        """Take the plan that this rank has asked for, or that for as many ranks as there are now."""
        asked, self._asked_plan = self._asked_plan, None
        if asked is not None and asked.world_size == place.world_size and place.rank == 0:
            self._plan, self._is_around = asked, True
        else:
            self._plan, self._is_around = self._plans[place.world_size], False
        os.environ["LOCAL_WORLD_SIZE"] = str(place.local_world_size or place.world_size)
        if place.rank == 0:
            path = attempt_files(self._run_dir).plan
            try:
                write_atomically(path, plan_yaml(self._plan))
            except OSError as error:  # it is for people: ranks learn the plan from one another
                print(f"can't write {path} ({error.strerror}); training continues", flush=True)
            print(f"plan      {format_plan_name(self._plan)}", flush=True)

    def _ask_for_plan(self, plan: Plan) -> None:
        """Ask the launcher for another generation after a step, in which ranks follow this plan."""
        self._asked_plan, self._heartbeat.asks_for_next = plan, True

    def _tell_spares(self, plan: Plan) -> None:
        """Tell processes that take a place later the plan of the first generation, whose schedule was refined."""
        self._store.set(_FIRST_PLAN_KEY, plan.model_dump_json())

    def _agree_on_plan(self, place: Membership, store: dist.Store) -> None:
        """Take the plan of the first rank that was in a generation before: it may have changed it, or a loss may have
        come before all had the refined one. A process that was a spare knows the run's first plan only."""
        own = [self._plan.model_dump(mode="json"), self._is_around, self._carried.num_plan_changes]
        store.set(f"plan of rank {place.rank}", json.dumps([self._has_trained, own]))
        for rank in range(place.world_size if place.rank == 0 else 0):
            has_trained, told = json.loads(store.get(f"plan of rank {rank}"))
            if has_trained:
                own = told
                break
        if place.rank == 0:
            store.set("plan of all", json.dumps(own))
        fields, self._is_around, self._carried.num_plan_changes = json.loads(store.get("plan of all"))
        self._plan = Plan.model_validate(fields)
        if not self._is_around:
            self._plans[place.world_size] = self._plan

    def _train_in(self, place: Membership, connections: Connections) -> int | None:
        store = self._store
        if self._config.train.elastic and isinstance(store, dist.TCPStore):
            # A connection of its own, so that breaking it ends the waits for keys of this generation alone.
            store = dist.TCPStore(store.host, store.port, is_master=False)
        own = dist.PrefixStore(f"configuration-{place.generation}", store)
        if place.generation:
            self._agree_on_plan(place, own)
        require_same_config(self._config, self._plan, self._dataset.fingerprint, own, place.rank)
        beside = place.generation, None, self._heartbeat, self._config.train.hang_timeout_s
        with (
            open_world(store, place.rank, place.world_size, self._plan, *beside) as world,
            limit_of_run(self._config, self._plan, world) as limit,
        ):
            connections.seal()
            own = self._config, self._plan, world, self._dataset, self._run_dir, limit
            self._carried.usual_plan = self._plans.get(place.world_size)
            self._loop = TrainingLoop(*own, self._carried)
            code = self._loop.run()
            self._has_left = code is None
            return code

    def _give_up(self, rank: int) -> None:
        """End this process, whose threads wait for ever on broken connections, so that it is replaced."""
        if waits_for_a_copy(sys._current_frames().get(threading.main_thread().ident or 0)):
            return

        def fail() -> NoReturn:
            raise ConnectionError("it was lost in the midst of a message, of which gloo doesn't tell those who wait")

        exit_process(run_guarded(self._run_dir, lambda: rank, fail))

    def _is_followed(self, generation: int, error: Exception) -> bool:
        """Return whether the error only follows from the loss of another rank, or its leaving, after which another
        generation comes.

        One that begins at the end of a step follows on no error before: nobody would leave this one with a rank that
        has failed in it.
        """
        if not self._config.train.elastic:
            return False
        is_by_others = says_only_that_a_rank_is_lost(error)
        if is_by_others and self._has_left:
            return self._words.next_after(generation) is not None
        return self._words.is_lost_after(generation, WORD_TIMEOUT_S if is_by_others else _NOTICE_S)

    def _abandon(self) -> None:
        """Leave the former generation's training, and take over its plan, whose schedule it may have refined."""
        loop, self._loop = self._loop, None
        if loop is not None:
            self._plan = loop.plan
            if not self._is_around:
                self._plans[loop.plan.world_size] = loop.plan
            loop.abandon()
