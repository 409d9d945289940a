"""Restarts by the launcher: when, after how long, and that a run that lost ranks becomes the same run."""

import errno
import json
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.config.load_config import load_run_config
from muster.launch import restarts as module
from muster.launch.exit_status import ExitStatus, RankExit, determine_exit_status, make_observed_error
from muster.launch.heartbeat import RankStatus
from muster.launch.launcher import launch
from muster.launch.nodes.node_supervisor import NodeSupervisor
from muster.launch.rank_errors import make_rank_error
from muster.launch.restarts import Restarts
from muster.report.run_files import last_step, read_metrics, restarts_note
from muster.schedule.action import Action, Kind
from muster.spec.errors import MusterError
from muster.train.preflight import notes
from tests.train_runs import QUICK, Command, assert_same_training, whole_run

LOST = ExitStatus(1, "rank 1 on here was killed by signal 9 (SIGKILL)", 1, "here", restartable=True)


def waits_of(attempts: list[int], limit: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits before further attempts, when these have come to the given steps."""
    waits: list[float] = []
    clock = SimpleNamespace(time=time.time, sleep=waits.append)  # of this module alone: other threads sleep, too
    monkeypatch.setattr(module, "time", clock)
    steps = iter(attempts)
    restarts = Restarts(folder, limit, lambda: next(steps))
    while restarts.wait_for_next(LOST):
        pass
    assert next(steps, None) is None, "the last attempt is that after which it gives up"
    return waits


@pytest.mark.parametrize(
    ("attempts", "limit", "waits"),
    [
        ([5, 5, 5, 5], 3, [0, 1, 2]),
        ([5, 7, 7, 9, 9, 9], 2, [0, 0, 1, 0, 1]),  # each new step counts anew
        ([0] * 10, 9, [0, 1, 2, 4, 8, 16, 32, 60, 60]),
        ([4, 2, 4, 3], 3, [0, 1, 2]),  # what is done again is no progress
    ],
)
def test_restarts_are_limited_and_wait_longer_the_less_they_help(
    attempts: list[int], limit: int, waits: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert waits_of(attempts, limit, tmp_path, monkeypatch) == waits
    rows = [json.loads(line) for line in (tmp_path / "restarts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == attempts[:-1]
    assert f"{len(waits)} restart" in (restarts_note(tmp_path) or "")


RANK = """
import os, signal, sys, time
from pathlib import Path
from muster.launch.heartbeat import open_heartbeat
folder, rank, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
page = open_heartbeat()
page.step = step + (rank == 0)
page.update("data")
(folder / f"{step}-{rank}").touch()
while rank == 0 or not (folder / f"{step}-0").exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A rank 0 that has finished one step more than rank 1, which dies."""


def test_steps_count_that_ranks_have_finished_but_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    restarts = Restarts(tmp_path, 1, lambda: last_step(tmp_path))
    goes_on = []
    for number, step in enumerate((10, 20, 20)):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = [sys.executable, "-c", RANK, str(folder)]
        status = launch(lambda rank, _, command=command, step=step: [*command, str(rank), str(step)], 2, tmp_path, 0.1)
        goes_on.append(restarts.wait_for_next(status))
    assert goes_on == [True, True, False]
    assert [row["step"] for row in read_metrics(tmp_path / "restarts.jsonl")] == [10, 20]
    assert "restart 1 of 1, after step 20: rank 1 on " in capsys.readouterr().out


def test_all_launchers_count_the_step_that_node_0_tells(tmp_path: Path) -> None:
    """They see their own ranks at other steps."""
    messages: list[Any] = []
    nodes = []
    for node, step in enumerate((12, 11, 13)):
        group = SimpleNamespace(
            is_coordinator=node == 0,
            num_nodes=1,
            send=lambda kind, **content: messages.append({"kind": kind, **content}),
            receive=list,
            put_back=lambda _: None,
        )
        nodes.append(NodeSupervisor(tmp_path, 1.0, None, group, 1))  # type: ignore[arg-type]
        end = RankExit(node, "here", -9, False, None, make_observed_error(node, "here", "ended"))
        status = RankStatus(1, step, "data", Action(Kind.F), False)
        rank = {"exit_code": -9, "failed": True, "status": lambda status=status: status}
        nodes[node].ranks = [SimpleNamespace(**rank, end=lambda *_, end=end: end)]  # type: ignore[list-item]
        nodes[node].poll()
    assert [node.exit_status().step for node in nodes[1:]] == [0, 0], "where node 0 is gone, nobody tells"
    told = [nodes[0].exit_status()]
    for node in nodes[1:]:
        node._handle(0, messages[-1])
        told.append(node.exit_status())
    assert told == [told[0]] * 3
    assert (told[0].step, told[0].restartable) == (12, True)


class Group:
    """The launchers of two nodes, as one of them sees them."""

    num_nodes, clock_offset_s = 2, {1: 0.0}

    def __init__(self, node: int, inboxes: Sequence["queue.SimpleQueue[Any]"]) -> None:
        self.is_coordinator, self._node, self._inboxes = node == 0, node, inboxes

    def send(self, kind: str, **content: Any) -> None:
        self._inboxes[1 - self._node].put((self._node, {"kind": kind, **content}))

    def receive(self) -> list[Any]:
        return [self._inboxes[self._node].get() for _ in range(self._inboxes[self._node].qsize())]

    def put_back(self, messages: Sequence[Any]) -> None:
        assert not messages


class RunningRank(SimpleNamespace):
    """A rank that runs until it is killed."""

    exit_code, killed, failed = None, False, False

    def poll(self) -> None:
        pass

    def status(self) -> None:
        pass

    def kill(self) -> None:
        self.exit_code = -9

    def end(self, *_: object) -> RankExit:
        return RankExit(self.rank, "here", -9, self.killed, None, None)


@pytest.mark.parametrize("fails", [0, 1])
def test_what_fails_in_one_launcher_ends_the_attempt_on_all_nodes(
    fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    def run(node: NodeSupervisor) -> ExitStatus:
        while node.poll():
            assert time.monotonic() < limit
            time.sleep(0.01)
        return node.exit_status()

    inboxes = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
    nodes = [NodeSupervisor(tmp_path, 0.1, None, Group(node, inboxes), 1) for node in (0, 1)]  # type: ignore[arg-type]
    for number, node in enumerate(nodes):
        node.ranks = [RunningRank(rank=number)]  # type: ignore[list-item]
        assert node.poll()
    monkeypatch.setattr(nodes[fails], "_take_snapshots", fail)
    limit = time.monotonic() + 20
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(run, nodes)
    assert first == second
    reason = f"the launcher on {socket.gethostname()}: [Errno 24] Too many open files"
    assert (first.code, first.reason, first.rank, first.restartable) == (1, reason, None, True)


def test_what_would_only_come_again_is_no_reason_to_start_again(tmp_path: Path) -> None:
    def status(error: Exception | None, code: int = 1, stop: bool = False, kill: bool = False) -> ExitStatus:
        reported = None if error is None else make_rank_error(error, 0)
        return determine_exit_status([RankExit(0, "here", code, kill, reported, None)], stop, kill)

    assert status(ValueError("CUDA error")).restartable
    assert status(ConnectionResetError("connection reset by peer")).restartable
    assert not status(MusterError("10 steps in a row were skipped")).restartable
    assert not status(None, 0).restartable
    assert not status(None, 75, stop=True).restartable
    assert not status(ValueError("late"), stop=True).restartable
    assert not status(None, -9, kill=True).restartable
    assert not Restarts(tmp_path, 0, lambda: 1).wait_for_next(LOST)
    assert restarts_note(tmp_path) is None


def test_spares_that_would_not_wait_are_told() -> None:
    told = {
        (spares, elastic): list(
            notes(load_run_config("tiny", None, [("train.spares", spares), ("train.elastic", elastic)]).config)
        )
        for spares, elastic in (("1", "false"), ("3", "false"), ("3", "true"))
    }
    words = "spares: none of the 3 (train.spares) waits for lost ranks, since train.elastic is false"
    assert told == {("1", "false"): [], ("3", "false"): [words], ("3", "true"): []}


def test_a_stop_before_ranks_could_tell_of_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    ends = {
        "early": [RankExit(rank, "here", -15, False, None, None) for rank in (0, 1)],
        "later": [RankExit(0, "here", 75, False, None, None), RankExit(1, "here", -15, False, None, None)],
    }
    said = {}
    for when, found in ends.items():
        assert determine_exit_status(found, stop_requested=True, kill_requested=False).report_training() == 75
        said[when] = capsys.readouterr().out
    assert said == {"early": "stopped on request while its ranks started; the same command goes on\n", "later": ""}


def test_a_run_that_loses_a_rank_starts_again_and_is_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = whole_run(tmp_path_factory.getbasetemp())[0]
    run = whole.with_name("restarted")
    command = ["--preset", "tiny", *QUICK, "--run", run, "--train.save_every", "3", "--train.restarts", "1"]
    with Command(*command, "--parallel", whole / "plan.yaml", hold_after=[8], forked=True) as job:
        job.wait_for_step(8)
        os.kill(job.ranks()[0], signal.SIGKILL)
        job.go_on(8)
        ended = job.wait()
    assert (ended.code, ended.err) == (0, "")
    assert "restart 1 of 1, after step 8: rank 0 on " in ended.out
    assert f"resuming {run} after step 6" in ended.out
    assert "1 restart: after step 8, when rank 0 on " in ended.out
    page = (run / "report.html").read_text()
    assert "was killed by signal 9" in page
    assert "lost (steps done again)" in page
    attempts = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert [(one["step"], one["lost_steps"]) for one in attempts] == [(0, 0), (6, 2)]
    (restart,) = read_metrics(run / "restarts.jsonl")
    assert attempts[0]["launched"] == attempts[1]["launched"] == restart["launched"] < attempts[0]["started"]
    time = json.loads((run / "result.json").read_text())["wall_time"]
    parts = time["productive_s"], time["lost_s"], time["recovering_s"], time["other_s"]
    assert min(parts) > 0
    assert time["total_s"] == pytest.approx(sum(parts))
    assert (time["stopped_s"], time["restarts"]) == (0, 1)
    assert_same_training(run, whole)
