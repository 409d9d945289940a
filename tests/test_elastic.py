"""Recovery without leaving the process: a lost rank is replaced, and the run is the same as if nothing had happened."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from itertools import chain, repeat
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from muster.checkpoint.checkpoint_dir import find_latest, list_checkpoints, step_of
from muster.config import local_machine
from muster.config.attempt_files import write_plans_for_losses
from muster.config.load_config import load_run_config
from muster.launch import recovery, supervisor
from muster.launch.exit_status import ExitStatus
from muster.launch.hang_diagnosis import RankFault, RankSnapshot
from muster.launch.heartbeat import RankStatus
from muster.launch.launcher import launch
from muster.launch.launcher_words import LauncherWords, Membership, word_of
from muster.launch.recovery import Elasticity, ElasticSupervisor, Recovery, replacement_text
from muster.launch.supervised_rank import RankProcess, SupervisedRank
from muster.layout.mesh import state_numbers
from muster.parallel.connections import Connections
from muster.parallel.world import open_world
from muster.planner import auto
from muster.planner.plans_for_losses import plans_for_losses
from muster.report.approximation import Approximation, RebuiltStage, write_approximation
from muster.report.recoveries import loss_causes, recoveries_note, recoveries_of
from muster.report.run_files import read_metrics
from muster.schedule.action import Action, Kind
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.train import generations
from muster.train.preflight import require_elastic
from tests.random_faults import status_of
from tests.train_runs import (
    LIMIT_S,
    QUICK,
    Command,
    assert_one_sentence,
    assert_same_training,
    exit_of,
    losses,
    rows_of,
    sample_hash,
    train,
    whole_run,
)

RANK = '''
"""A rank without torch: counts steps in each generation until it may end, or has to die."""
import contextlib, os, signal, sys, threading, time
from pathlib import Path
from muster.launch.heartbeat import open_heartbeat
from muster.launch.launcher_words import LauncherWords, Membership
from muster.launch.rank_errors import run_guarded
from muster.spec.errors import MusterError
folder, size, place = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
words = LauncherWords(Membership(0, place, size) if place >= 0 else None)
words.listen()
if place < 0 and (folder / "slow").exists():
    time.sleep(3)
page, asked = open_heartbeat(), threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())

def body():
    while True:
        now = words.current()
        rank = now.rank
        apart = folder / f"apart-{rank}"
        if now.generation > page.generation:
            page.asks_for_next = False
        if now.generation > 1:
            apart.unlink(missing_ok=True)
        if now.generation == 0 or not apart.exists():
            page.generation = now.generation
            (folder / f"joined-{now.generation}-{rank}").touch()
            page.step += 1
            page.update("data")
        time.sleep(0.002)
        if asked.is_set() and page.generation == now.generation:
            return 75
        if (folder / "end").exists():
            return 0
        with contextlib.suppress(FileNotFoundError):
            (folder / f"asks-{rank}").unlink()
            page.asks_for_next = True
        for word in ("killed", "error", "lasting"):
            order = folder / f"{word}-{rank}"
            if not order.exists():
                continue
            order.unlink()
            if word == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MusterError("not again") if word == "lasting" else ValueError("once")
        if words.next_after(now.generation, 0) is None and words._is_over:
            raise ConnectionError("connection reset by peer")

sys.exit(run_guarded(folder, lambda: words.current().rank, body))
'''


HANGING_CALLBACK = """
import threading
import muster

@muster.register_callback("hanging")
class Hanging:
    def on_step(self, now: muster.CallbackContext) -> None:
        hangs = now.run_dir / "hangs"
        if now.rank == 1 and now.step == 4 and not hangs.exists():
            hangs.touch()
            threading.Event().wait()
"""

ONE_SPARE = Elasticity(1)


def run_job(folder: Path, orders: Iterator[str], elastic: Elasticity = ONE_SPARE, size: int = 3) -> ExitStatus:
    """The end of a job of a few ranks, which gets an order whenever it has recovered from that before."""
    script = folder / "rank.py"
    script.write_text(RANK)

    def give_orders() -> None:
        for number, order in enumerate(orders):
            for word in order.split():
                (folder / word).touch()
            limit = time.monotonic() + LIMIT_S
            while order != "end" and not is_whole(folder, number + 1, size):
                if time.monotonic() > limit or (folder / "exit.json").exists():
                    return
                time.sleep(0.01)

    thread = threading.Thread(target=give_orders)
    thread.start()
    command = [sys.executable, str(script), str(folder), str(size)]
    status = launch(lambda rank, _: [*command, str(rank)], size, folder, grace_s=1, elastic=elastic)
    thread.join()
    return status


def is_whole(folder: Path, losses: int, size: int) -> bool:
    """Tell whether the job has recovered from as many losses, or changes of its plan, and again has all its ranks."""
    rows = recoveries(folder)
    recovered = sum(row["recovered_s"] is not None and (bool(row["ranks"]) or row["changes_plan"]) for row in rows)
    return recovered >= losses and rows[-1]["world_size"] == size and rows[-1]["recovered_s"] is not None


def recoveries(folder: Path) -> list[dict]:
    return read_metrics(folder / "recoveries.jsonl")


def test_a_rank_asks_for_another_plan_without_a_loss(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = run_job(tmp_path, iter(["asks-0", "asks-2", "killed-1", "end"]))
    assert status.code == 0
    changes = recoveries(tmp_path)
    assert [row["changes_plan"] for row in changes] == [True, True, False]
    assert [row["ranks"] for row in changes] == [[], [], [1]]
    assert [row["world_size"] for row in changes] == [3, 3, 3]
    out = capfd.readouterr().out
    assert out.count("another plan was chosen around slow ranks: 3 ranks go on after this step (generation ") == 2
    assert "1 recovery and 2 changes of the plan without a restart" in (recoveries_note(tmp_path) or "")


def test_lost_ranks_are_replaced_while_the_others_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = run_job(tmp_path, iter(["killed-1", "error-0", "killed-0 killed-2", "end"]))
    assert (status.code, status.reason) == (0, "finished")
    assert [(row["generation"], row["ranks"]) for row in recoveries(tmp_path)][:2] == [(1, [1]), (2, [0])]
    assert {rank for row in recoveries(tmp_path)[2:] for rank in row["ranks"]} == {0, 2}, "in one generation or two"
    assert {cause for row in recoveries(tmp_path) for cause in row["causes"]} == {"dead"}
    assert (recoveries_note(tmp_path) or "").startswith("3 recoveries without a restart: "), "two at once are one"
    out, err = capfd.readouterr()
    assert "rank 1 on " in out
    assert "was killed by signal 9 (SIGKILL): a spare takes its place" in out
    assert "ValueError: once" in out
    assert "error:" not in err
    assert "without a restart: after step " in (recoveries_note(tmp_path) or "")


def test_a_job_whose_last_rank_is_lost_goes_on_with_new_ones(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = run_job(tmp_path, iter(["killed-0", "killed-0", "end"]), size=1)
    assert (status.code, status.reason) == (0, "finished")
    assert [row["ranks"] for row in recoveries(tmp_path)] == [[0], [0]]
    word = r"was killed by signal 9 \(SIGKILL\): a spare takes its place(, once [a-z ]+)? \(generation 2\)"
    assert re.search(word, capfd.readouterr().out)


def test_spares_that_have_not_started_are_said_to() -> None:
    assert replacement_text([3], 2) == "a spare takes its place"
    assert replacement_text([3], 0) == "a spare takes its place, once it has started"
    assert replacement_text([1, 2], 2) == "spares take the places of ranks 1 and 2"
    assert replacement_text([1, 2], 1) == "spares take the places of ranks 1 and 2, once they have started"


def test_ranks_that_are_lost_in_a_recovery_belong_to_it() -> None:
    lost = {"ranks": [1], "recovered_s": None, "reason": "rank 1 takes 1.40 times as long as the others to compute"}
    rows = [
        lost | {"generation": 1},
        {"generation": 2, "ranks": [0], "recovered_s": 1.0, "causes": ["hung"]},
        {"generation": 3, "ranks": [], "recovered_s": 1.0, "causes": []},
        lost | {"generation": 4},
        lost | {"generation": 1},  # of another attempt
    ]
    assert [len(one) for one in recoveries_of(rows)] == [2, 1, 1, 1]
    assert [loss_causes(row) for row in rows[:3]] == [{1: "slow"}, {0: "hung"}, {}]


def test_fewer_ranks_go_on_where_there_is_no_spare(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = run_job(tmp_path, iter(["killed-0", "killed-1", "end"]), Elasticity(0, (2,)))
    assert (status.code, status.reason) == (0, "finished")
    sizes = [(row["ranks"], row["world_size"]) for row in recoveries(tmp_path)]
    assert sizes == [([0], 2), ([], 3), ([1], 2), ([], 3)], "others come for those that are lost"
    out = capfd.readouterr().out
    assert ": 2 ranks go on (generation 1)" in out
    assert "1 rank came back: 3 ranks go on after this step (generation 2)" in out
    assert "when rank 1 on " in (told := recoveries_note(tmp_path) or "")
    assert told.startswith("2 recoveries and 2 returns of ranks without a restart: after step ")
    assert "when 1 rank came back (next step finished after " in told


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ("dp4-z3", {1: "dp1", 2: "dp2"}),  # a third rank would make the batch of 8 uneven
        ("pp2-dp2-z1", {2: "pp2"}),
        ("pp2", {1: "dp1"}),  # without other data-parallel ranks all degrees may change
        ("tp4", {1: "dp1", 2: "dp2"}),
    ],
)
def test_the_planner_names_plans_for_the_ranks_that_are_left(
    plan: str, wanted: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(auto, "nvidia_gpu_names", lambda: ())
    monkeypatch.setattr(local_machine, "nvidia_gpu_names", lambda: ())
    given = ("parallel", plan), ("train.global_batch_size", 8)
    resolved = load_run_config("tiny", None, given)
    found = plans_for_losses(resolved, parallel := resolved.config.parallel)
    assert {number: format_plan_name(one).partition("-mb")[0] for number, one in found.items()} == wanted
    assert all(one.world_size == number for number, one in found.items())
    checkfree = load_run_config("tiny", None, [*given, ("train.elastic", True), ("train.recovery", "checkfree")])
    kept = plans_for_losses(checkfree, checkfree.config.parallel)
    assert all((one.tp, one.pp) == (parallel.tp, parallel.pp) for one in kept.values()), "nothing is cut anew"


def test_nothing_is_held_for_lost_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are tried again for days where their processes fail, so what is held for each would run out."""
    closed: list[SupervisedRank] = []
    close = RankProcess.close
    monkeypatch.setattr(RankProcess, "close", lambda rank: (closed.append(rank), close(rank))[1])
    held_at_end: list[int] = []
    shut_down = ElasticSupervisor.shut_down
    monkeypatch.setattr(
        ElasticSupervisor, "shut_down", lambda job: (held_at_end.append(len(closed)), shut_down(job))[1]
    )
    assert run_job(tmp_path, iter(["killed-1", "killed-0 killed-2", "end"])).code == 0
    assert held_at_end == [3], "those of the three that were lost are closed before the end"
    assert len(set(map(id, closed))) == len(closed), "each once"


def fail_once(error: Exception, is_due: Callable[[ElasticSupervisor], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first start of a process that is due fail, and the next be tried at once."""
    start, failures = ElasticSupervisor._start_spare, iter([error])

    def start_or_fail(job: ElasticSupervisor) -> SupervisedRank:
        if is_due(job) and (failure := next(failures, None)) is not None:
            raise failure
        return start(job)

    monkeypatch.setattr(recovery, "wait_before", lambda number: 0.0)
    monkeypatch.setattr(ElasticSupervisor, "_start_spare", start_or_fail)


def test_ranks_go_on_where_no_process_can_be_started_for_lost_ones(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(OSError(24, "Too many open files"), lambda job: bool(job._recoveries), monkeypatch)
    status = run_job(tmp_path, iter(["killed-2", "end"]), Elasticity(0, (2,)))
    assert status.code == 0
    assert [(row["ranks"], row["world_size"]) for row in recoveries(tmp_path)] == [([2], 2), ([], 3)]
    said = capfd.readouterr().out
    assert "no other process can be started for now: [Errno 24] Too many open files" in said


def test_fewer_ranks_go_on_where_no_process_can_be_started_for_one_of_two(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One spare waits; a second one, for which there is room, can't be started just then."""
    error = MusterError("could not start a spare (x: no memory)")
    fail_once(error, lambda job: any(rank.failed for rank in job.ranks), monkeypatch)
    status = run_job(tmp_path, iter(["killed-1 killed-2", "end"]), Elasticity(1, (2,)))
    assert status.code == 0
    sizes = [row["world_size"] for row in recoveries(tmp_path)]
    assert sizes[-2:] == [2, 3], "the second of two may be noticed after the first has been replaced"
    said = capfd.readouterr().out
    assert "no other process can be started for now: could not start a spare (x: no memory)" in said


def test_lost_ranks_are_replaced_where_there_is_no_smaller_number(tmp_path: Path) -> None:
    status = run_job(tmp_path, iter(["killed-0", "end"]), Elasticity(0))
    assert status.code == 0
    assert [(row["ranks"], row["world_size"]) for row in recoveries(tmp_path)] == [([0], 3)]


def test_ranks_beyond_the_smaller_number_wait_as_spares(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = run_job(tmp_path, iter(["killed-2", "killed-0", "end"]), Elasticity(0, (2,)), size=4)
    assert status.code == 0
    sizes = [(row["ranks"], row["world_size"]) for row in recoveries(tmp_path)]
    assert sizes == [([2], 2), ([], 4), ([0], 2), ([], 4)], "the spare comes back with a new process"
    assert ": 2 ranks go on, another waits as a spare (generation 1)" in capfd.readouterr().out


@pytest.mark.parametrize("error", [MusterError("no more processes"), OSError(24, "Too many open files")])
def test_a_launcher_that_cannot_replace_a_rank_ends_an_attempt_that_can_be_restarted(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: ElasticSupervisor) -> SupervisedRank:
        raise error

    monkeypatch.setattr(ElasticSupervisor, "_start_spare", fail)
    status = run_job(tmp_path, iter(["killed-1"]), Elasticity(0))
    host = socket.gethostname()
    reason = f"rank 1 on {host} was killed by signal 9 (SIGKILL); the launcher on {host}: {error}"
    assert (status.code, status.reason, status.rank, status.host) == (1, reason, 1, host)
    assert status.restartable
    assert status.step > 0
    assert exit_of(tmp_path)["reason"] == reason


class MadeUpRank(SimpleNamespace):
    """A rank without a process, known again by its identity like real ones."""

    node, exit_code = 0, None
    __eq__, __hash__ = object.__eq__, object.__hash__

    def status(self) -> str:
        return "ready"

    def close(self) -> None:
        pass


def test_of_states_without_copies_one_of_each_goes_on(tmp_path: Path) -> None:
    """Two replicas of four stages, under CheckFree: which of them are left decides, not their numbers."""
    plans = [parse_plan_name(name) for name in ("dp2x1-pp4", "pp4")]
    states = {plan.world_size: state_numbers(plan) for plan in plans}
    assert states == {8: (0, 0, 1, 1, 2, 2, 3, 3), 4: (0, 1, 2, 3)}
    for keeps, expected in ((states, [1, 2, 4, 6]), ({}, [1, 2, 3, 4])):
        job = ElasticSupervisor(tmp_path, 1.0, None, Elasticity(0, (4,), keeps))
        job.ranks = [MadeUpRank(rank=rank) for rank in range(8)]  # type: ignore[misc]
        job._note_states()
        chosen = job._choose([rank for rank in job.ranks if rank.rank not in (0, 7)], 4)
        assert [rank.rank for rank in chosen] == expected
        job._spares, job.ranks = job.ranks[3:6], chosen[:2] + chosen[3:]
        assert job._take_spare().rank == (4 if keeps else 3), "of the stage that nobody holds"
        job.ranks = [MadeUpRank(rank=rank) for rank in range(4)]  # type: ignore[misc]
        job._note_states()
        came = [MadeUpRank(rank=rank) for rank in range(4, 7)]
        chosen = job._choose([came[0], *job.ranks, *came[1:]], 4)  # type: ignore[list-item]
        assert [rank.rank for rank in chosen] == ([0, 1, 2, 3] if keeps else [4, 0, 1, 2]), "before they hold any state"
        job.ranks = job._spares = []
        job.shut_down()


def test_only_the_loss_after_an_oom_kill_is_explained_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = chain([0], repeat(1))
    monkeypatch.setattr(supervisor, "oom_kill_count", lambda: next(counts))
    assert run_job(tmp_path, iter(["killed-1", "killed-2", "end"])).code == 0
    reasons = [row["reason"] for row in recoveries(tmp_path)]
    assert ["the kernel ran out of memory" in reason for reason in reasons] == [True, False], reasons


def test_a_return_that_a_loss_forestalls_is_not_in_the_record(tmp_path: Path) -> None:
    job = ElasticSupervisor(tmp_path, 1.0, None, Elasticity(0, (2,)))
    job._announce(4, "2 ranks came back")
    lost = SimpleNamespace(rank=1, last_alive=0.0, exit_code=-9, fault=RankFault(1, "a", "hangs"))
    job._begin_generation([lost], "rank 1 hangs", "rank 1 hangs", 2)  # type: ignore[list-item]
    job._write_record()
    assert [row["reason"] for row in recoveries(tmp_path)] == ["rank 1 hangs"]


def test_a_stage_that_is_rebuilt_before_another_loss_stays_in_the_record(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    job = ElasticSupervisor(tmp_path, 1.0, None, ONE_SPARE)
    approximations = [Approximation((RebuiltStage(rank, (rank - 1, rank + 1), (0.5, 0.5)),)) for rank in (2, 1)]
    for generation, rank in ((1, 2), (2, 1), (3, 0)):
        lost = SimpleNamespace(rank=rank, last_alive=0.0, exit_code=-9, fault=RankFault(rank, "a", "hangs"))
        job._begin_generation([lost], "a loss", "a loss", 4)  # type: ignore[list-item]
        if generation < 3:
            write_approximation(tmp_path, generation, approximations[generation - 1])
    job._write_record()
    assert [one.approximation for one in job._recoveries] == [*approximations, None]


def test_a_stage_that_was_rebuilt_before_another_loss_is_told(tmp_path: Path) -> None:
    rows = [
        asdict(Recovery(1.0, number, 5, [rank], ["dead"], f"rank {rank} ended", 4, None, recovered_s))
        | {"approximation": asdict(Approximation((RebuiltStage(rank, (rank - 1, rank + 1), (0.5, 0.5)),)))}
        for number, rank, recovered_s in ((1, 2, None), (2, 1, 1.0))
    ]
    (tmp_path / "recoveries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    note = recoveries_note(tmp_path) or ""
    assert "stage 2 is approximated by 0.50 x stage 1 + 0.50 x stage 3, stage 1 is approximated by" in note


def test_what_would_come_again_ends_the_job_at_once(tmp_path: Path) -> None:
    status = run_job(tmp_path, iter(["killed-1", "lasting-2"]))
    assert (status.code, status.rank) == (1, 2)
    assert status.reason.endswith(": not again")
    assert not status.restartable
    assert len(recoveries(tmp_path)) == 1


def test_a_rank_that_does_not_join_again_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "JOIN_TIMEOUT_S", 1.0)
    monkeypatch.setattr(recovery, "MAX_RECOVERIES_IN_A_ROW", 20)
    status = run_job(tmp_path, iter(["apart-0 killed-1", "end"]))
    assert (status.code, status.reason) == (0, "finished")
    rows = recoveries(tmp_path)
    assert any((row["ranks"], row["causes"]) == ([0], ["hung"]) for row in rows), rows
    assert any("did not join the other ranks within 1 s after rank 1 on " in row["reason"] for row in rows)


def test_a_process_that_starts_slowly_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "JOIN_TIMEOUT_S", 1.0)
    status = run_job(tmp_path, iter(["slow killed-1", "end"]), Elasticity(0))
    assert (status.code, status.reason) == (0, "finished")
    assert [(row["ranks"], row["causes"]) for row in recoveries(tmp_path)] == [([1], ["dead"])]


def test_ranks_in_the_midst_of_joining_are_not_replaced_with_late_ones(tmp_path: Path) -> None:
    killed: list[int] = []

    def rank(number: int, phase: str, failed: bool = False) -> SimpleNamespace:
        status = RankStatus(1, 3, phase, Action(Kind.F), False)
        seen = RankSnapshot(number, "a", 0, "R", 0.0, status, "", "")
        return SimpleNamespace(
            rank=number,
            exit_code=-9 if failed else None,
            failed=failed,
            status=lambda: status,
            snapshot=lambda _: seen,
            kill=lambda: killed.append(number),
        )

    job = ElasticSupervisor(tmp_path, 1.0, None, Elasticity(1))
    job._generation, job._under_way = 1, Recovery(0.0, 1, 3, [2], ["dead"], "a loss", 2)
    (tmp_path / "logs").mkdir()
    for late in (rank(1, "run"), rank(1, "run", failed=True)):
        job.ranks = [rank(0, "join"), late]  # type: ignore[list-item]
        job._follow()
        if not late.failed:
            assert late.fault.host == "a", "the node that it runs on"
    assert killed == [1], "and once it has ended, nobody else is"
    assert "rank 1 on a, 0 s: " in (tmp_path / "logs" / "hang.txt").read_text()
    job.ranks = []
    job.shut_down()


def test_ranks_that_never_join_again_end_the_job_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "JOIN_TIMEOUT_S", 1.0)
    monkeypatch.setattr(recovery, "MAX_RECOVERIES_IN_A_ROW", 1)
    status = run_job(tmp_path, iter(["apart-0 apart-1 apart-2 killed-1"]))
    assert status.rank in (0, 1, 2)
    assert "did not join the other ranks within 1 s after rank 1 on " in status.reason
    assert status.restartable


def test_a_job_whose_ranks_never_join_again_stops_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before they are given up."""
    monkeypatch.setattr(recovery, "JOIN_TIMEOUT_S", LIMIT_S)

    def stop() -> None:
        while not all((tmp_path / f"joined-1-{rank}").exists() for rank in (1, 2)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    status = run_job(tmp_path, iter(["apart-0 killed-1"]))
    stopping.join()
    assert (status.code, status.restartable) == (75, False), status


def test_words_of_the_launcher() -> None:
    words, called = LauncherWords(Membership(0, 2, 4)), threading.Event()
    assert words.current() == Membership(0, 2, 4)
    assert words.next_after(0, 0) is None
    words.when_next(0, called.set)
    assert not called.is_set()
    words.hear(word_of(Membership(1, 2, 4)))
    assert called.wait(LIMIT_S)
    assert words.next_after(0, LIMIT_S) == words.current() == Membership(1, 2, 4)
    again = threading.Event()
    words.when_next(0, again.set)
    assert again.wait(LIMIT_S), "it is called for a word that has come before"
    words.when_next(1, called.clear)
    words.hear(word_of(Membership(2, 2, 5, at_step_end=True)))
    assert words.has_next(1)
    assert words.next_after(1, 0) == Membership(2, 2, 5, at_step_end=True)
    assert called.is_set(), "nothing is left at once for ranks that come back"
    assert words.is_lost_after(0, 0) is False, "the newest generation comes after all have finished a step"
    words.hear(word_of(Membership(3, 1, 3)))
    assert words.is_lost_after(2, LIMIT_S)
    words.hear(word_of(None))
    assert words.next_after(3, LIMIT_S) is None
    assert not words.is_lost_after(3, LIMIT_S)
    assert words.current().generation == 3


@pytest.mark.parametrize(("error", "limit_s"), [(ValueError("a fault"), 1), (ConnectionResetError("by a peer"), 30)])
def test_a_rank_that_fails_before_lost_ones_come_back_ends_and_is_lost_itself(
    error: Exception, limit_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others leave together, after a step that it will never finish. After a loss it goes on."""
    config = load_run_config("tiny", None, [("parallel", "dp2"), ("train.elastic", True)]).config
    words, limits = LauncherWords(Membership(0, 1, 2)), list[float]()
    write_plans_for_losses(tmp_path, {})
    rank = generations._Rank(config, config.parallel, tmp_path, dist.HashStore(), words, None)  # type: ignore[arg-type]
    is_lost_after = words.is_lost_after

    def ask(generation: int, limit_s: float) -> bool:
        limits.append(limit_s)
        return is_lost_after(generation, 0)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(words, "is_lost_after", ask)
    monkeypatch.setattr(rank, "_train_in", fail)
    words.hear(word_of(Membership(1, 1, 4, at_step_end=True)))
    with pytest.raises(type(error)):
        rank.train_once(Membership(0, 1, 2))
    words.hear(word_of(Membership(2, 1, 2)))
    assert rank.train_once(Membership(0, 1, 2)) is None
    assert limits == [limit_s, limit_s]


def test_only_connections_of_a_world_are_broken() -> None:
    def connected() -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            return ours, server.accept()[0]

    before = connected()
    connections = Connections(2)
    own = connected()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connections.seal()
        later = connected()
        got: list[bytes] = []
        waiting = threading.Thread(target=lambda: got.append(own[0].recv(1)))
        waiting.start()
        breaking = threading.Thread(target=connections.break_until_left)
        breaking.start()
        waiting.join(LIMIT_S)
        connections.leave()
        breaking.join(LIMIT_S)
        assert (got, own[1].recv(1)) == ([b""], b""), "both ends see it"
        for ours, theirs in (before, later):
            theirs.sendall(b"x")
            assert ours.recv(1) == b"x"
        socket.create_connection(listening.getsockname()).close()
    left = Connections(2)
    left.leave()
    next_ones = connected()
    left.break_until_left()  # as a thread does that begins late on a busy machine
    next_ones[0].sendall(b"x")
    assert next_ones[1].recv(1) == b"x"
    broken = Connections(2)
    last_ones = connected()
    broken.leave(break_first=True)
    assert last_ones[1].recv(1) == b"", "and what is left after a loss is broken, whether or not the thread has begun"
    for one in (*before, *own, *later, *next_ones, *last_ones):
        one.close()


def test_who_waits_on_broken_connections_for_ever_is_told_apart_from_who_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.parallel.connections.STUCK_S", 0.3)
    has_given_up, may_end = threading.Event(), threading.Event()
    both = Connections(2)

    def compute() -> None:
        while not may_end.is_set():
            sum(range(1000))

    computing = threading.Thread(target=compute)
    computing.start()
    breaking = threading.Thread(target=both.break_until_left, args=(has_given_up.set,))
    breaking.start()
    assert not has_given_up.wait(1.5)
    may_end.set()
    computing.join()
    assert has_given_up.wait(LIMIT_S), "the others wait, as this thread does"
    both.leave()
    breaking.join(LIMIT_S)


@pytest.mark.parametrize(
    ("modules", "is_copy"),
    [
        (["muster.train.loop", "muster.checkpoint.in_memory.transport", "socket"], True),
        (["muster.checkpoint.in_memory.recovery", "torch.distributed.distributed_c10d"], False),
        (["muster.checkpoint.load", "muster.parallel.axis"], False),
    ],
)
def test_a_rank_that_waits_for_a_copy_is_told_apart_from_one_that_waits_for_others(
    modules: list[str], is_copy: bool
) -> None:
    def call(names: list[str]) -> bool:
        if not names:
            return generations.waits_for_a_copy(sys._getframe(1))
        return FunctionType(run.__code__, {"__name__": names[0], "call": call})(names[1:])

    def run(names: list[str]) -> bool:
        return globals()["call"](names)

    assert call(modules) is is_copy


@pytest.mark.soak
def test_a_rank_that_cannot_leave_a_generation_is_lost_too(tmp_path: Path) -> None:
    """gloo doesn't tell those who wait for a message in the midst of which a connection broke. Here a callback waits
    for ever."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    common = ["--preset", "tiny", *QUICK, "--parallel", "dp3-z1-fp64", "--train.steps", "8"]
    hook = tmp_path / "hook.py"
    hook.write_text(HANGING_CALLBACK)
    assert train(*common, "--run", whole).code == 0
    elastic = [
        "--train.elastic",
        "true",
        "--train.spares",
        "2",
        "--train.callbacks",
        "[hanging]",
        "--plugins",
        str(hook),
    ]
    with Command(*common, *elastic, "--run", run, output=run) as job:
        job.wait_for(run / "hangs")
        os.kill(job.ranks()[2], signal.SIGKILL)
        ended = job.wait()
    assert (ended.code, ended.err) == (0, ""), ended.out
    assert [row["ranks"] for row in recoveries(run)] == [[2], [1]]
    assert "lost the connection to another rank (it was lost in the midst of a message" in ended.out
    for ours, theirs in zip(rows_of(run), rows_of(whole), strict=True):
        assert (ours["step"], ours["train/loss"]) == (theirs["step"], theirs["train/loss"])


class Unreachable(dist.Store):
    """A store for a rank that stops, as if it were dead, once it has told where it listens."""

    def __init__(self, store: dist.Store, may_go_on: threading.Event) -> None:
        super().__init__()
        self._store, self._may_go_on = store, may_go_on

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        self._may_go_on.wait(LIMIT_S)
        raise ConnectionError("dead")


def test_a_rank_stops_waiting_for_ranks_that_never_connect() -> None:
    """Of two ranks the one with the larger address connects: of these, most will wait for one that doesn't."""
    size, store, may_go_on = 4, dist.HashStore(), threading.Event()
    told: list[int] = []

    def join(rank: int, where: dist.Store) -> None:
        with contextlib.suppress(Exception):
            dist.ProcessGroupGloo(where, rank, size, timedelta(seconds=LIMIT_S))
        told.append(rank)

    connections = Connections(size)
    ranks = [threading.Thread(target=join, args=(0, store), daemon=True)]
    ranks += [threading.Thread(target=join, args=(n, Unreachable(store, may_go_on)), daemon=True) for n in (1, 2, 3)]
    for rank in ranks:
        rank.start()
    breaking = threading.Thread(target=connections.break_until_left)
    breaking.start()
    ranks[0].join(LIMIT_S)
    assert told == [0]
    connections.leave()
    breaking.join(LIMIT_S)
    may_go_on.set()
    for rank in ranks:
        rank.join(LIMIT_S)


class Recording(dist.Store):
    """A store that notes its keys, and fails if it shall."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.keys: list[str] = []
        self._store, self._fails = dist.HashStore(), fails

    def set(self, key: str, value: str) -> None:
        if self._fails:
            raise ConnectionError("lost")
        self.keys.append(key)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str], *_: object) -> None:
        self._store.wait(keys)


def test_ranks_that_failed_to_join_meet_those_that_never_tried() -> None:
    def joined(store: Recording) -> list[str]:
        with open_world(store, 0, 1, Plan()):
            return store.keys

    fresh = joined(Recording())
    with pytest.raises(Exception, match="lost"):
        joined(Recording(fails=True))
    assert fresh == joined(Recording())
    assert fresh


def test_a_run_that_loses_ranks_goes_on_and_is_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = whole_run(tmp_path_factory.getbasetemp())[0]
    run = whole.with_name("elastic")
    command = ["--preset", "tiny", *QUICK, "--run", run, "--train.elastic", "true"]
    with Command(*command, "--parallel", "dp2-mb12", hold_after=[6], forked=True) as job:
        while 0 not in (ranks := job.ranks()):
            job.be_patient("no ranks")
        os.kill(ranks[0], signal.SIGKILL)  # while it starts
        job.wait_for_step(6)
        os.kill(job.ranks()[1], signal.SIGKILL)
        job.go_on(6)
        ended = job.wait()
    assert (ended.code, ended.err) == (0, "")
    rows = recoveries(run)
    assert [row["ranks"] for row in rows] == [[0], [1]]
    assert all(0 < row["joined_s"] < row["recovered_s"] for row in rows)
    assert "2 recoveries without a restart: after step 0, when rank 0 on " in ended.out
    assert "2 recoveries without a restart: after step 0, when rank 0 on " in (run / "report.html").read_text()
    attempts = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert [one["generation"] for one in attempts] == [1, 2]
    assert all(one["lost_steps"] <= 1 for one in attempts)
    left = [owner for owner in Path("/dev/shm").glob("muster-*/owner.json") if str(run) in owner.read_text()]
    assert not left, "copies in memory end with the run"
    assert_same_training(run, whole)


KILLS_WHILE_SAVING = """
import os, signal
from pathlib import Path
from muster.train.checkpoint_manager import CheckpointManager

def killing(method, which):
    def replaced(self, *arguments, **named):
        step = self._trainer.step_count
        mark = Path(os.environ["MARKS"]) / f"{which} {step}"
        if self._world.rank == 1 and step in (2, 5) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *arguments, **named)
    return replaced

CheckpointManager._start_save = killing(CheckpointManager._start_save, "start")
CheckpointManager.save_and_wait = killing(CheckpointManager.save_and_wait, "end")
"""


def test_a_save_that_a_loss_cuts_short_is_made_when_ranks_go_on(tmp_path: Path) -> None:
    """A rank is lost as the save after step 2 starts, and twice in the save after the last step, of which the others
    have copies in memory: no step is left that would save it."""
    plugin, run = tmp_path / "killing.py", tmp_path / "run"
    plugin.write_text(KILLS_WHILE_SAVING)
    common = ["--preset", "tiny", *QUICK, "--parallel", "dp2-mb12", "--train.steps", "5"]
    saves = ["--train.save_every", "2", "--train.keep_last", "9", "--train.elastic", "true", "--plugins", plugin]
    with Command(*common, *saves, "--run", run, env={"MARKS": str(tmp_path)}, forked=True) as job:
        ended = job.wait()
    assert (ended.code, ended.err) == (0, "")
    assert {path.name for path in tmp_path.glob("* ?")} == {"start 2", "start 5", "end 5"}
    assert [row["ranks"] for row in recoveries(run)] == [[1], [1], [1]]
    assert [step_of(path) for path in list_checkpoints(run / "checkpoints")] == [2, 4, 5]
    assert find_latest(run / "checkpoints") == run / "checkpoints/step-00000005"
    assert losses(run) == losses(whole_beside(run, common))


@pytest.mark.soak
def test_a_run_without_spares_goes_on_with_fewer_ranks_until_all_are_back(tmp_path: Path) -> None:
    common = ["--preset", "tiny", *QUICK, "--parallel", "dp3-z1-fp64", "--train.steps", "9"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert train(*common, "--run", whole).code == 0
    elastic = ["--train.elastic", "true", "--train.spares", "0"]
    with Command(*common, *elastic, "--run", run, hold_after=[3, 6], output=run) as job:
        job.wait_for_step(3)
        os.kill(job.ranks()[0], signal.SIGKILL)
        job.go_on(3)
        while "1 rank came back" not in run.with_name("run.out").read_text():  # step 6 is held until one is ready
            job.be_patient("nobody came back")
        job.go_on(6)
        ended = job.wait()
    assert (ended.code, ended.err) == (0, "")
    assert [(row["ranks"], row["world_size"]) for row in recoveries(run)] == [([0], 2), ([], 3)]
    assert "plan      dp2-mb1-z1-fp64" in ended.out, "the rank that is first now prints to the terminal"
    assert "1 rank came back: 3 ranks go on after this step (generation 2)\n" in ended.out
    assert ended.out.count("plan      dp3-mb1-z1-fp64") == 2
    assert "step 9/9" in ended.out
    attempts = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert [one["generation"] for one in attempts] == [0, 1, 2]
    assert attempts[2]["lost_steps"] == 0, "no step is done again for ranks that come back"
    for ours, theirs in zip(rows_of(run), rows_of(whole), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-10)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-9)
    assert sample_hash(run) == sample_hash(whole)


def whole_beside(run: Path, common: list[str]) -> Path:
    """The same run, undisturbed."""
    assert train(*common, "--run", whole := run.with_name("whole")).code == 0
    return whole


SMALL = ("--preset", "tiny", *QUICK, "--train.seq_len", "32", "--train.global_batch_size", "12")


@pytest.mark.soak
def test_a_spare_takes_the_place_of_a_slow_rank(tmp_path: Path) -> None:
    """One rank is stopped for three quarters of the time until its place is taken."""
    common = ["--preset", "tiny", *QUICK, "--parallel", "dp3-z1-fp64", "--train.steps", "60"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert train(*common, "--run", whole).code == 0
    checks = ["--train.straggler_check_every", "2", "--train.straggler_action", "replace"]
    with Command(*common, *checks, "--run", run, "--train.elastic", "true") as job:
        job.wait_for_step(3)
        slow = job.ranks()[1]
        while not any(1 in row["ranks"] for row in recoveries(run)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(slow, signal.SIGSTOP)
                time.sleep(0.03)
                os.kill(slow, signal.SIGCONT)
            job.be_patient("nobody took its place")
            time.sleep(0.007)
        ended = job.wait()
    assert (ended.code, ended.err) == (0, ""), ended.out
    word = r"the others to compute: a spare takes its place(, once [a-z ]+)?, and the other ranks go on \(generation "
    assert re.search(word, ended.out)
    for ours, theirs in zip(rows_of(run), rows_of(whole), strict=True):
        assert (ours["step"], ours["train/loss"]) == (theirs["step"], theirs["train/loss"])
    assert all(row["perf/stragglers"] >= 0 for row in rows_of(run)), "the slow rank is lost before its step is logged"
    assert "perf/stragglers" not in rows_of(whole)[0]
    assert sample_hash(run) == sample_hash(whole)


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["dp2-mb1-z1-fp64", "pp2-mb1-fp64"])
def test_the_plan_changes_around_a_slow_rank(plan: str, tmp_path: Path) -> None:
    """One rank is stopped for nine tenths of the time until the plan has changed; later it may change back."""
    common = [*SMALL, "--parallel", plan, "--train.steps", "60"]
    whole = whole_beside(run := tmp_path / "run", common)
    checks = ["--train.straggler_check_every", "2", "--train.straggler_action", "replan"]
    with Command(*common, *checks, "--run", run, "--train.elastic", "true") as job:
        job.wait_for_step(3)
        slow = job.ranks()[1]
        while not recoveries(run):
            os.kill(slow, signal.SIGSTOP)
            time.sleep(0.09)
            os.kill(slow, signal.SIGCONT)
            job.be_patient("the plan did not change")
            time.sleep(0.01)
        ended = job.wait()
    assert (ended.code, ended.err) == (0, ""), ended.out
    assert all(row["changes_plan"] and not row["ranks"] for row in recoveries(run))
    assert " times as fast\n" in ended.out
    assert "\nanother plan was chosen around slow ranks: 2 ranks go on after this step" in ended.out
    assert "uneven" in ended.out if plan.startswith("dp2") else "-l" in ended.out
    assert "of the plan without a restart" in ended.out
    for ours, theirs in zip(rows_of(run), rows_of(whole), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-9)
    assert sample_hash(run) == sample_hash(whole)


PHASES = ("join", "profile", "load")


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["dp4", "pp2-dp2"])
def test_a_rank_that_is_lost_while_all_start_is_replaced(plan: str, tmp_path: Path) -> None:
    common = ["--preset", "tiny", *QUICK, "--parallel", plan, "--train.steps", "2"]
    whole = whole_beside(tmp_path / "run", common)
    for phase in PHASES:
        run = tmp_path / phase
        with Command(*common, "--run", run, "--train.elastic", "true") as job:
            while not (ranks := [pid for pid in job.children() if (s := status_of(pid)) and s.phase == phase]):
                job.be_patient(f"nobody in {phase}")
            os.kill(ranks[0], signal.SIGKILL)
            ended = job.wait()
        assert (ended.code, ended.err) == (0, ""), ended.out
        assert [len(row["ranks"]) for row in recoveries(run)] == [1]
        assert [row["train/loss"] for row in rows_of(run)] == [row["train/loss"] for row in rows_of(whole)]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--parallel", "dp1"], 3, "a single rank leaves none that could go on"),
        (["--parallel", "isl2-dp2"], 3, "islands are steps apart"),
        (["--train.in_memory_checkpoint_every", "2"], 2, "leave in_memory_checkpoint_every out"),
    ],
)
def test_what_elastic_does_not_go_with(arguments: list[str], code: int, words: str, tmp_path: Path) -> None:
    ended = train("--preset", "tiny", "--train.elastic", "true", "--run", tmp_path / "run", *arguments)
    assert_one_sentence(ended, code, words)


def test_elastic_is_refused_on_gpus_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run_config("tiny", None, [("parallel", "dp2"), ("train.elastic", True)]).config
    require_elastic(config, config.parallel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InfeasibleError, match="train.elastic needs ranks on CPUs"):
        require_elastic(config, config.parallel)
