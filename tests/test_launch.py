"""The launcher: one cause is named, nobody waits in vain, nothing is left running."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.launch.launcher import launch, open_store
from muster.launch.rank_errors import EXIT_STOPPED, make_rank_error, read_rank_error, run_guarded
from muster.launch.rank_monitor import RankMonitor, process_state
from muster.launch.supervised_rank import RankProcess
from muster.spec.errors import ConfigError, MusterError
from tests.ranks import run_ranks
from tests.train_runs import LIMIT_S

HOST = socket.gethostname()

RANK = '''
"""A rank without torch: writes its process numbers, then does what its mode says."""
import os, signal, subprocess, sys, time
from pathlib import Path
mode, run_dir, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
if mode == "no handler" and rank == 1:
    (run_dir / f"ready-{rank}").write_text(str(os.getpid()))
    time.sleep(1000)
from muster.spec.errors import ConfigError, MusterError
from muster.launch.launcher_words import LauncherWords
from muster.launch.rank_errors import run_guarded
LauncherWords().listen()
asked = []

def on_stop(*_):
    asked.append(1)
    (run_dir / f"asked-{rank}").touch()

signal.signal(signal.SIGTERM, on_stop)

def wait_for(path):
    while not path.exists():
        time.sleep(0.001)

def state_of(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"

def body():
    child = subprocess.Popen(["sleep", "1000"]) if mode in ("wait", "child") else None
    (run_dir / "ready.tmp").with_suffix(f".{rank}").write_text(f"{os.getpid()} {child.pid if child else os.getpid()}")
    os.rename(run_dir / f"ready.{rank}", run_dir / f"ready-{rank}")
    print("rank", rank, "of", mode, "OMP", os.environ["OMP_NUM_THREADS"], flush=True)
    if mode == "child":
        return 0
    if mode in ("wait", "deaf"):
        while not asked or mode == "deaf":
            time.sleep(0.01)
        return 75
    if mode == "misconfigured" and rank == 1:
        raise ConfigError("lr must be positive: choose 0.001")
    if mode == "bug" and rank == 1:
        {}["missing"]
    if mode == "secondary first":
        if rank == 0:
            wait_for(run_dir / "ready-1")
            raise ConnectionResetError("Connection reset by peer")
        wait_for(run_dir / "logs/rank-0.error.json")
        raise MusterError("the disk is full")
    if mode == "felt":
        wait_for(run_dir / "ready-0" if rank else run_dir / "ready-1")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        number = (run_dir / "ready-1").read_text().split()[0]
        # A dying process loses its memory and files before the launcher can see that it is dead: wait for that.
        while state_of(number) not in "ZX":
            time.sleep(0.001)
        raise MusterError("something is odd")
    if mode == "exits" and rank == 1:
        os._exit(7)
    if mode == "stalled" and rank == 0:
        raise RuntimeError("[gloo/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete")
    if mode == "finish":
        return 0
    if mode == "no handler":
        while not asked:
            time.sleep(0.01)
        raise ConnectionResetError("Connection reset by peer")
    time.sleep(1000)

sys.exit(run_guarded(run_dir, lambda: rank, body))
'''

GLOO = '''
"""Ranks that wait for each other in an all_reduce, until the last kills itself."""
import os, signal, sys
from datetime import timedelta
from pathlib import Path
from muster.launch.launcher_words import LauncherWords
from muster.launch.rank_errors import run_guarded
LauncherWords().listen()
import torch, torch.distributed as dist
run_dir, rank, (host, port) = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(":")

def body():
    store = dist.TCPStore(host, int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(hours=1))
    dist.all_reduce(torch.ones(3))
    (run_dir / f"pid-{rank}").write_text(str(os.getpid()))
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        dist.recv(torch.ones(3), 0)  # its neighbour lives, but never sends: only the launcher can end this
    dist.all_reduce(torch.ones(3))
    return 0

sys.exit(run_guarded(run_dir, lambda: rank, body))
'''

LAUNCHER = """
import sys
from pathlib import Path
from muster.launch.launcher import launch
script, mode, run_dir = sys.argv[1:]
launch(lambda rank, _: [sys.executable, script, mode, run_dir, str(rank)], 2, Path(run_dir)).report()
"""


@pytest.fixture(autouse=True)
def _ranks_find_muster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return path


def start(script: Path, mode: str, run_dir: Path, num_ranks: int = 2, grace_s: float = 0.5) -> int:
    run_dir.mkdir(exist_ok=True)
    return launch(
        lambda rank, _: [sys.executable, str(script), mode, str(run_dir), str(rank)], num_ranks, run_dir, grace_s
    ).report()


def numbers(run_dir: Path) -> list[int]:
    """All processes that the ranks wrote down."""
    return [int(number) for path in run_dir.glob("ready-*") for number in path.read_text().split()]


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def assert_gone(processes: list[int]) -> None:
    """They end, though perhaps not yet: one that still starts hears of its launcher's end once it runs."""
    assert processes
    limit = time.monotonic() + 60
    while alive := [number for number in processes if is_running(number)]:
        assert time.monotonic() < limit, f"{alive} still run"
        time.sleep(0.01)


def exit_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "exit.json").read_text())


def wait_for(run_dir: Path, pattern: str, count: int) -> bool:
    """Waits until the ranks have made so many files; whether they have in time."""
    limit = time.monotonic() + LIMIT_S
    while len(list(run_dir.glob(pattern))) < count:
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def when_ready(run_dir: Path, action: Callable[[], None], num_ranks: int = 2) -> None:
    """Acts from another thread, once the ranks run: then the launcher's handlers are in place."""

    def wait() -> None:
        if wait_for(run_dir, "ready-*", num_ranks):
            action()

    threading.Thread(target=wait, daemon=True).start()


# ----------------------------------------------------------------------------------------------------------------------
# Ends


def test_all_finish(script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert start(script, "finish", run) == 0
    assert exit_of(run) | {"time": 0} == {"code": 0, "reason": "finished", "rank": None, "host": None, "time": 0}
    output = capfd.readouterr()
    assert (output.out, output.err) == ("rank 0 of finish OMP 1\n", "")
    assert (run / "logs/rank-1.txt").read_text() == "rank 1 of finish OMP 1\n"


FAILURES = {
    "misconfigured": (2, 1, ": lr must be positive: choose 0.001"),
    "bug": (1, 1, ": KeyError: 'missing' (traceback in logs/rank-1.txt)"),
    "secondary first": (1, 1, ": the disk is full"),
    "felt": (1, 1, " was killed by signal 9 (SIGKILL)"),
    "exits": (1, 1, " ended with exit code 7 and no reason; {run}/logs/rank-1.txt may say more"),
    "stalled": (
        1,
        1,
        " stopped responding, according to rank 0: lost the connection to another rank"
        " ([gloo/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete)",
    ),
}


END_BY_THEMSELVES = ("secondary first", "felt")


@pytest.mark.parametrize("mode", FAILURES)
def test_the_first_cause_is_named_once(
    mode: str, script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, rank, sentence = FAILURES[mode]
    run = tmp_path / "run"
    assert start(script, mode, run, grace_s=LIMIT_S if mode in END_BY_THEMSELVES else 0.5) == code
    reason = f"rank {rank} on {HOST}{sentence.format(run=run)}"
    assert capfd.readouterr().err == f"error: {reason}\n"
    assert exit_of(run) | {"time": 0} == {"code": code, "reason": reason, "rank": rank, "host": HOST, "time": 0}
    assert_gone(numbers(run))
    if mode == "bug":
        assert "Traceback" in (run / "logs/rank-1.txt").read_text()
        assert start(script, "finish", run) == 0
        assert not list(run.glob("logs/*.error.json")), "what an earlier attempt said must not be blamed again"


def test_a_killed_rank_ends_all_who_would_wait_for_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script, run = tmp_path / "rank.py", tmp_path / "run"
    script.write_text(GLOO)
    run.mkdir()
    code = launch(
        lambda rank, store: [sys.executable, str(script), str(run), str(rank), store], 3, run, grace_s=1
    ).report()
    pids = [int(path.read_text()) for path in run.glob("pid-*")]
    assert len(pids) == 3
    assert_gone(pids)
    assert code == 1
    assert exit_of(run)["reason"] == f"rank 2 on {HOST} was killed by signal 9 (SIGKILL)"
    assert capfd.readouterr().err.splitlines()[-1] == f"error: rank 2 on {HOST} was killed by signal 9 (SIGKILL)"


DYING = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=[1000]).start()
input()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_that_still_dies_is_not_seen_alive() -> None:
    """Its main thread has ended, as when it is killed, and another has not yet."""
    process, watched = subprocess.Popen([sys.executable, "-c", DYING], stdin=subprocess.PIPE), RankMonitor(0)
    assert process.stdin is not None
    rank = RankProcess(0, process, watched, last_alive=0.0)
    try:
        rank.poll()
        assert rank.last_alive > 0
        process.stdin.write(b"\n")
        process.stdin.close()
        while (state := process_state(process.pid)) != "Z":
            assert state != "X"
            time.sleep(0.001)
        rank.last_alive = 0.0
        rank.poll()
        assert (rank.last_alive, rank.exit_code) == (0.0, None)
    finally:
        process.kill()
        process.wait()
        watched.page.close()


def test_children_of_ranks_end_with_them(script: Path, tmp_path: Path) -> None:
    assert start(script, "child", tmp_path / "run") == 0
    assert_gone(numbers(tmp_path / "run"))


# ----------------------------------------------------------------------------------------------------------------------
# Being asked to stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_is_passed_on(number: int, script: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    when_ready(run, lambda: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    assert start(script, "wait", run) == EXIT_STOPPED
    assert exit_of(run)["code"] == 75
    assert signal.getsignal(number) == before
    assert_gone(numbers(run))


def test_a_request_before_the_ranks_listen_stops_too(script: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    when_ready(run, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert start(script, "no handler", run) == EXIT_STOPPED


def test_a_second_interrupt_kills(script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"

    def interrupt_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        if wait_for(run, "asked-*", 2):  # two at once would be one
            os.kill(os.getpid(), signal.SIGINT)

    when_ready(run, interrupt_twice)
    assert start(script, "deaf", run) == 1
    assert capfd.readouterr().err == "error: killed on request: the steps since the last checkpoint are lost\n"
    assert_gone(numbers(run))


def test_no_rank_outlives_a_killed_launcher(script: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    command = [sys.executable, "-c", LAUNCHER, str(script), "wait", str(run)]
    launcher = subprocess.Popen(command)
    try:
        assert wait_for(run, "ready-*", 2)
        processes = numbers(run)
        assert all(is_running(number) for number in processes)
    finally:
        launcher.kill()
        launcher.wait()
    assert_gone(processes)


# ----------------------------------------------------------------------------------------------------------------------
# What can't start


def test_a_taken_port_is_one_sentence() -> None:
    store = open_store()
    with pytest.raises(MusterError, match=rf"port {store.port} of 127.0.0.1 \(Address already in use\): give another"):
        open_store(store.port)
    with pytest.raises(MusterError, match="could not listen on port 70000"):
        open_store(70000)


def test_a_run_directory_that_cannot_be_written_is_one_sentence(script: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MusterError, match="can't write the run directory .*file/run: Not a directory"):
        launch(lambda rank, _: ["true"], 1, tmp_path / "file" / "run")


def test_a_command_that_cannot_start_ends_the_started_ones(script: Path, tmp_path: Path) -> None:
    def command(rank: int, _: str) -> list[str]:
        return ["/no/such/program"] if rank else [sys.executable, str(script), "wait", str(tmp_path), "0"]

    with pytest.raises(MusterError, match=r"could not start rank 1 \(/no/such/program: No such file or directory\)"):
        launch(command, 2, tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# What a rank says


def test_guard_keeps_the_error_and_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ConfigError("steps must be positive")

    assert run_guarded(tmp_path, lambda: 3, lambda: 75) == 75
    assert read_rank_error(tmp_path, 3) is None
    assert run_guarded(tmp_path, lambda: 3, fail) == 2
    error = read_rank_error(tmp_path, 3)
    assert error is not None
    assert (error.rank, error.host, error.kind) == (3, HOST, "ConfigError")
    assert (error.sentence, error.primary, error.exit_code) == ("steps must be positive", True, 2)
    assert "raise ConfigError" in error.traceback
    assert (tmp_path / "logs/rank-3.txt").read_text() == error.traceback
    assert capsys.readouterr().err == ""
    assert run_guarded(tmp_path, lambda: 3, fail, announce=True) == 2
    assert capsys.readouterr().err == f"error: rank 3 on {HOST}: steps must be positive\n"
    (tmp_path / "file").write_text("")
    assert run_guarded(tmp_path / "file", lambda: 3, fail) == 2
    assert "steps must be positive" in capsys.readouterr().err, "what can't be written down is said"
    (tmp_path / "full/logs/rank-3.txt").mkdir(parents=True)  # no room for the traceback
    assert run_guarded(tmp_path / "full", lambda: 3, fail) == 2
    assert read_rank_error(tmp_path / "full", 3) is not None
    assert capsys.readouterr().err == "", "the launcher says it"


def test_an_error_that_follows_from_a_lost_peer_is_secondary() -> None:
    def raised(inner: Exception, outer: Exception) -> Exception:
        try:
            try:
                raise inner
            except Exception:
                raise outer from None
        except Exception as error:
            return error

    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41099")
    assert not make_rank_error(lost, 0).primary
    assert not make_rank_error(raised(lost, MusterError("the step failed")), 0).primary
    assert not make_rank_error(raised(ValueError("x"), BrokenPipeError("Broken pipe")), 0).primary
    assert make_rank_error(raised(ValueError("x"), MusterError("no")), 0).primary
    assert make_rank_error(RuntimeError("shape mismatch"), 0).primary


# ----------------------------------------------------------------------------------------------------------------------
# The harness of all tests with real ranks


def on_rank(rank: int, world_size: int, store, payload: str) -> list:
    if payload == "fail" and rank == 1:
        raise ValueError("seeded failure")
    store.set(str(rank), payload)
    return [rank, store.get(str(world_size - 1 - rank)).decode()]


def test_the_harness_brings_back_results_and_shows_failures() -> None:
    assert run_ranks(2, "tests.test_launch:on_rank", "é") == [[0, "é"], [1, "é"]]
    with pytest.raises(AssertionError, match=r"(?s)rank 1 ended with 1.*--- rank 1 ---.*seeded failure"):
        run_ranks(2, f"{__file__}:on_rank", "fail")
