"""Ranks that are forked: as interpreters of their own would be, and replaced by these where a fork can't be."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.launch.fork_server import RANK_PYTHON, ForkedProcess, ForkServer
from muster.launch.launcher import launch
from muster.launch.rank_starter import RankStarter

LIMIT_S = 120.0
ENVIRONMENT = {"TEST_WORD": "wörd \udcff"}


def command(*words: str) -> list[str]:
    return [*RANK_PYTHON, "tests.forked_rank", *words]


def ready(environment: dict[str, str] | None = None) -> RankStarter:
    starter = RankStarter()
    limit = time.monotonic() + LIMIT_S
    starter.begin(command(), {**ENVIRONMENT, **(environment or {})})
    starter.await_imports(lambda: time.monotonic() < limit)
    return starter


@pytest.fixture(scope="module")
def forking() -> Iterator[RankStarter]:
    with ready() as starter:
        yield starter


def run(starter: RankStarter, folder: Path, *words: str, is_forked: bool, **environment: str) -> tuple[int, str]:
    """The exit code of a rank and what it wrote."""
    path = folder / "output"
    with open(path, "wb") as output, open(folder / "given", "ab") as given:
        files = {"TEST_FDS": [given.fileno(), os.dup(given.fileno())]}
        process = starter.start(command(*words), {**ENVIRONMENT, **environment}, files, output.fileno())
        assert isinstance(process, ForkedProcess) == is_forked
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it may have ended
            stdin.write(b"a word\n")
        os.close(files["TEST_FDS"][1])
    return process.wait(), path.read_text()


def test_a_fork_sees_what_an_interpreter_sees(forking: RankStarter, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    for starter in (forking, RankStarter()):
        code, said = run(starter, tmp_path, "describe", "more", is_forked=starter is forking, LOCAL_RANK="3")
        assert code == 0, said
        seen.append(json.loads(said))
        assert (tmp_path / "given").read_text() == "given given "
        (tmp_path / "given").unlink()
    assert seen[0] == seen[1]
    assert seen[0]["words"] == command("describe", "more")
    assert seen[0]["parent"] == os.getpid()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("exit", "75"), 75, ""),
        (("exit", "a sentence"), 1, "a sentence\n"),
        (("raise",), 1, "ValueError: on purpose\n"),
        (("kill",), -signal.SIGKILL, ""),
        (("child",), 0, "begun ended "),
    ],
)
def test_a_fork_ends_as_an_interpreter_ends(
    forking: RankStarter, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    for starter in (forking, RankStarter()):
        assert run(starter, tmp_path, *words, is_forked=starter is forking)[0] == code
        assert (tmp_path / "output").read_text().endswith(said)


@pytest.mark.parametrize("what", ["thread", "gpu", "error"])
def test_what_can_not_be_forked_is_an_interpreter(tmp_path: Path, what: str) -> None:
    environment = {"TEST_IMPORT": what}
    with ready(environment) as starter:
        code, said = run(starter, tmp_path, "exit", "3", is_forked=False, **environment)
        assert code == (1 if what == "error" else 3)
        assert said.endswith("ImportError: no such thing\n") == (what == "error")


def test_forks_draw_numbers_of_their_own(forking: RankStarter, tmp_path: Path) -> None:
    drawn = [run(forking, tmp_path, "chance", is_forked=True)[1].split() for _ in range(2)]
    assert len({number for numbers in drawn for number in numbers}) == 4, drawn


def test_a_fork_takes_a_large_environment(forking: RankStarter, tmp_path: Path) -> None:
    large = {f"TEST_{number}": 50_000 * "ü" for number in range(10)}
    code, said = run(forking, tmp_path, "describe", is_forked=True, **large)
    assert code == 0
    assert large.items() <= json.loads(said)["environment"].items()


def test_a_server_that_can_not_be_started_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("muster.launch.rank_starter.ForkServer", fail)
    with ready() as starter:
        assert run(starter, tmp_path, "exit", "3", is_forked=False)[0] == 3


def test_a_module_that_can_not_be_forked_is_not_tried_again() -> None:
    with ready({"TEST_IMPORT": "thread"}) as starter:
        assert starter._server is None
        starter.begin(command(), {**ENVIRONMENT, "TEST_IMPORT": "thread"})
        assert starter._server is None


def test_ranks_may_open_as_many_files_as_their_launcher(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limit[1]))
    try:
        assert launch(lambda *_: command("files"), 2, tmp_path).code == 0
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert int((tmp_path / "logs/rank-1.txt").read_text()) == raised > 100


def test_a_stop_does_not_wait_for_imports(tmp_path: Path) -> None:
    with RankStarter() as starter:
        starter.begin(command(), ENVIRONMENT)
        starter.await_imports(lambda: False)
        assert run(starter, tmp_path, "exit", "3", is_forked=False)[0] == 3


def test_the_loss_of_the_server_costs_nothing_but_time(tmp_path: Path) -> None:
    with ready() as starter:
        server = starter._server
        assert server is not None
        os.kill(server._process.pid, signal.SIGKILL)
        assert run(starter, tmp_path, "exit", "3", is_forked=False)[0] == 3
        starter.begin(command(), ENVIRONMENT)
        starter.await_imports(lambda: True)
        assert run(starter, tmp_path, "exit", "3", is_forked=True)[0] == 3


def test_a_server_that_stands_still_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.launch.fork_server._ANSWER_TIMEOUT_S", 0.5)
    with ready() as starter:
        server = starter._server
        assert server is not None
        os.kill(server._process.pid, signal.SIGSTOP)
        assert run(starter, tmp_path, "exit", "3", is_forked=False)[0] == 3
        assert starter._server is None


def test_the_server_ends_with_its_launcher() -> None:
    start = f"ForkServer('{__name__}', os.environ)._process.pid"
    script = f"import os; from muster.launch.fork_server import ForkServer; print({start})"
    ended = subprocess.run([*RANK_PYTHON[:1], "-c", script], capture_output=True, text=True, check=True)
    pid = int(ended.stdout)
    limit = time.monotonic() + LIMIT_S
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_no_more_processes_is_an_error_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with ready() as starter:
        assert starter._server is not None
        monkeypatch.setattr(ForkServer, "_read_answer", lambda self: {"errno": 11})
        with pytest.raises(OSError, match="temporarily unavailable"):
            starter._server.fork(command("exit", "0"), {}, (1, 2), {})


def test_another_module_or_environment_takes_another_server(tmp_path: Path) -> None:
    with ready() as starter:
        servers = [starter._server]
        for environment in (ENVIRONMENT, {**ENVIRONMENT, "TEST_OTHER": "1"}):
            starter.begin(command(), environment)
            starter.await_imports(lambda: True)
            servers.append(starter._server)
        assert servers[0] is servers[1] is not servers[2]
        assert servers[0]._process.returncode is not None  # type: ignore[union-attr]
        starter.begin(["true"], {})
        assert run(starter, tmp_path, "exit", "0", is_forked=True, TEST_OTHER="1")[0] == 0
