"""Several nodes: their launchers become one job, or each says in one sentence why not."""

import contextlib
import errno
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.checkpoint.checkpoint_dir import find_damage, find_latest
from muster.cli.main import main
from muster.launch import network as addresses
from muster.launch.network import Interface, interfaces, local_address_for, local_interface, resolve, route_interface
from muster.launch.nodes import connection, rendezvous_config
from muster.launch.nodes import launcher_group as teams
from muster.launch.nodes import rendezvous as meeting
from muster.launch.nodes.connection import LauncherConnection
from muster.launch.nodes.connectivity import ProbeListener, find_unreachable, nodes_to_reach
from muster.launch.nodes.handshake import node_differences
from muster.launch.nodes.launcher_group import JobEnded, LauncherGroup, NodeInfo
from muster.launch.nodes.rendezvous import rendezvous
from muster.launch.nodes.rendezvous_config import RendezvousConfig, data_interface, listening_address
from muster.launch.rank_errors import EXIT_STOPPED
from muster.probe import doctor, doctor_nodes
from muster.probe.check_result import CheckResult, problem
from muster.probe.doctor import DoctorRequest
from muster.probe.doctor_nodes import run_node_checks
from muster.spec.errors import ConfigError, MusterError
from tests.nodes import ADDRESSES, HOSTS, Network, network
from tests.test_launch import assert_gone
from tests.test_random_faults import FORKING
from tests.train_runs import AT_ONCE, QUICK, Command, Ended, assert_one_sentence, exit_of, losses, rows_of, train

TINY = ("--preset", "tiny", *QUICK, *AT_ONCE)
HOST = socket.gethostname()
LONG_S = 120.0
"""For what comes at once, on a slow machine too."""


# ----------------------------------------------------------------------------------------------------------------------
# What the command line says

FLAGS = {
    "--nodes 2": "--nodes 2 without --node-rank: expected --nodes N --node-rank R --rendezvous HOST[:PORT]",
    "--nodes 2 --node-rank 0": "--nodes 2 without --rendezvous: expected",
    "--node-rank 1 --rendezvous a": "--node-rank without --nodes would train on one node: expected",
    "--nodes 2 --node-rank 2 --rendezvous a": "--node-rank 2 of 2 nodes: expected 0 to 1, one for each node",
    "--nodes 1 --node-rank 0 --rendezvous a": "--nodes 1 with --node-rank: expected",
    "--nodes 2 --node-rank 0 --rendezvous a:b": "--rendezvous a:b: expected HOST or HOST:PORT, such as node-0:29400",
    "--nodes 2 --node-rank 0 --rendezvous a:70000": "--rendezvous a:70000: expected HOST or HOST:PORT",
    "--nodes 2 --node-rank -1 --rendezvous a": "expected a whole number >= 0, got '-1'",
    "--nnodes 2": "unknown flag '--nnodes'; did you mean '--nodes'?",
    "--master-addr a": "unknown flag '--master-addr'; did you mean '--rendezvous'?",
    "--master_port 1": "unknown flag '--master_port'; did you mean '--rendezvous'?",
    "--rdzv-endpoint=a:1": "unknown flag '--rdzv-endpoint'; did you mean '--rendezvous'?",
    "--nproc-per-node 2": "unknown flag '--nproc-per-node'; did you mean '--nproc'?",
    "--node_rank 1": "unknown flag '--node_rank'; did you mean '--node-rank'?",
}


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_that_make_no_job_are_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--preset", "tiny", *flags.split()]) == 2
    assert FLAGS[flags] in capsys.readouterr().err


def test_copies_that_are_not_one_for_each_node_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--nodes", "2", "--node-rank", "0", "--rendezvous", "127.0.0.1"]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert main(["train", "--preset", "tiny", *place]) == 2
    assert "srun started 8 copies of this command (SLURM_STEP_NUM_TASKS), but --nodes is 2" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# Names and interfaces


def test_this_machine_knows_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ("lo", "127.0.0.1") in [(one.name, one.address) for one in interfaces()]
    assert route_interface("127.0.0.1").name == "lo"
    assert local_interface("192.0.2.1") is None
    assert resolve("localhost") == "127.0.0.1"
    with pytest.raises(MusterError, match=r"the name no\.such\.invalid has no address here \(.*\): give the first"):
        resolve("no.such.invalid")
    with pytest.raises(MusterError, match=r"--rendezvous 192\.0\.2\.1 but this one's addresses are .*start node 0"):
        listening_address(RendezvousConfig(2, 0, "192.0.2.1"))
    monkeypatch.setattr("muster.launch.nodes.rendezvous_config.resolve", lambda host: "127.0.1.1")
    with pytest.raises(MusterError, match=r"--rendezvous box is 127\.0\.1\.1 here, which no other machine can reach"):
        listening_address(RendezvousConfig(2, 0, "box"))
    with pytest.raises(ConfigError, match=r"--interface eth9: there is no such interface .* only 127\.0\.0\.1 on lo"):
        data_interface(RendezvousConfig(2, 0, "box", interface="eth9"), "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth8")
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME eth8: there is no such interface"):
        data_interface(RendezvousConfig(2, 0, "box"), "127.0.0.1")


def test_no_node_tells_others_an_address_that_is_its_own_to_each(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"127.0.1.1": Interface("lo", "127.0.0.1"), "10.0.0.1": Interface("eth1", "10.0.0.9")}

    def towards(address: str) -> Interface:
        if address not in routes:
            raise OSError("Network is unreachable")
        return routes[address]

    monkeypatch.setattr(addresses, "resolve", {"here": "127.0.1.1", "there": "10.0.0.1"}.__getitem__)
    monkeypatch.setattr(addresses, "route_interface", towards)
    monkeypatch.setattr(addresses, "interfaces", lambda: [*routes.values(), Interface("eth0", "10.1.0.9")])
    assert [local_address_for(host) for host in ("localhost", "127.0.0.1", "there")] == ["127.0.0.1"] * 2 + ["10.0.0.9"]
    assert local_address_for("here") == "10.0.0.9", "without a default route any address that others may reach"
    routes["192.0.2.1"] = Interface("eth0", "10.1.0.9")
    assert local_address_for("here") == "10.1.0.9"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1,eth0")
    assert local_address_for("here") == "10.0.0.9"


def test_one_connection_that_fails_closes_no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    problems, accept = [errno.EMFILE, errno.ECONNABORTED], socket.socket.accept

    def accept_in_the_end(listener: socket.socket) -> tuple[socket.socket, Any]:
        if problems:
            raise OSError(problems.pop(), "no")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_in_the_end)
    doorstep = ProbeListener(1, "127.0.0.1")
    try:
        assert find_unreachable({"node 1": (1, "127.0.0.1", doorstep.port)}, "127.0.0.1") == {}
    finally:
        doorstep.close()


def test_lines_are_closed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first can send what it has to say only when the second has been closed."""
    monkeypatch.setattr(connection, "CLOSE_TIMEOUT_S", 30.0)
    (ours, theirs), (ours_too, theirs_too) = socket.socketpair(), socket.socketpair()
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *_: None)  # these are no TCP
    lines = [LauncherConnection(connection, 0, queue.SimpleQueue()) for connection in (ours, ours_too)]
    long = "x" * (8 << 20)
    lines[0].send("long", text=long)
    for one in lines:
        one.send("short")
    with ThreadPoolExecutor(1) as pool:

        def read() -> tuple[int, int]:
            with theirs_too.makefile("rb") as second, theirs.makefile("rb") as first:
                return len(second.read()), len(first.read())

        read_both = pool.submit(read)
        connection.close_connections(lines)
        short = len('{"kind": "short"}\n')
        assert read_both.result(LONG_S) == (short, len('{"kind": "long", "text": ""}\n') + len(long) + short)


# ----------------------------------------------------------------------------------------------------------------------
# Meeting, with launchers that are threads


@pytest.fixture
def port() -> Iterator[int]:
    """One that is this test's own: nobody listens there until a launcher does."""
    with own_port() as number:
        yield number


@contextlib.contextmanager
def own_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as launchers do, who may then listen there
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def request(port: int, rank: int, count: int = 2, limit_s: float = LONG_S, **more: Any) -> RendezvousConfig:
    return RendezvousConfig(count, rank, "127.0.0.1", port, timeout_s=limit_s, **more)


def member(node: int, **facts: object) -> NodeInfo:
    return NodeInfo(node, HOSTS[node], {"job": "train", "ranks": "1 rank", **facts}, ADDRESSES[node], "cable", 1)


def test_what_differs_is_told_with_the_node() -> None:
    a = {"muster": "1 (a)", "torch": "2.7", "python": "3.11", "plan": "dp2 (aa)"}
    config = {"seed": 1, "train": {"steps": 4}, "parallel": {"pp": 2}}
    first = member(0, **a, config=config)
    assert list(node_differences(first, member(1, **a, config=config))) == []
    changes = {
        "muster": ("1 (b)", "node 1 on node-b runs Muster 1 (b), but node 0 on node-a runs Muster 1 (a): install the"),
        "torch": ("2.6", "node 1 on node-b has PyTorch 2.6, but node 0 on node-a has PyTorch 2.7: install the same"),
        "python": ("3.12", "node 1 on node-b runs Python 3.12, but node 0 on node-a runs Python 3.11"),
        "plan": ("pp2 (bb)", "node 1 on node-b has the plan pp2 (bb), but node 0 on node-a has the plan dp2 (aa)"),
        "ranks": ("4 ranks", "node 1 on node-b would start 4 ranks, but node 0 on node-a would start 1 rank: give all"),
        "config": (
            {**config, "train": {"steps": 5}},
            "node 1 on node-b has another configuration than node 0 on node-a (train.steps 5, not 4): give all nodes",
        ),
    }
    changed = [(key, *change) for key, change in changes.items()]
    for config_there, words in (({**config, "swarm": {"stages": 2}}, "with"), ({"seed": 1, "parallel": {}}, "without")):
        section = "swarm" if words == "with" else "train"
        words = f"node 1 on node-b has another configuration than node 0 on node-a ({words} section {section}): give"
        changed.append(("config", config_there, words))
    for key, value, words in changed:
        (said,) = node_differences(first, member(1, **{**a, "config": config, key: value}))
        assert said.startswith(words), said
    assert [*node_differences(first, member(1, job="doctor"))] == [
        "node 1 on node-b was started to doctor, node 0 on node-a to train: start the same on all nodes"
    ]


def together(*bodies: Any) -> list[Any]:
    """Run the bodies in threads; returns what each returned or raised."""

    def run(body: Any) -> Any:
        try:
            return body()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(bodies)) as pool:
        return [future.result() for future in [pool.submit(run, body) for body in bodies]]


def joined(wanted: RendezvousConfig, use: Any = lambda team: None, **facts: object) -> Any:
    def body() -> Any:
        with rendezvous(wanted, dict(facts)) as team:
            return use(team)

    return body


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> "queue.SimpleQueue[str]":
    """Lines that launchers print while they meet."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(meeting, "print", lambda line, **_: lines.put(line), raising=False)
    return lines


def test_two_launchers_meet_reach_each_other_and_compare_clocks(port: int, said: "queue.SimpleQueue[str]") -> None:
    def hub(team: LauncherGroup) -> tuple:
        begin = time.monotonic()
        team.measure_clocks()
        off_at_most_s = time.monotonic() - begin  # the clocks are one, seen with the delay of a message
        problems = team.check_connectivity()
        team.send("start", store="x")
        return sorted(team.nodes), problems, abs(team.clock_offset_s[1]) <= off_at_most_s

    def other(team: LauncherGroup) -> tuple:
        problems = team.check_connectivity()
        return sorted(team.nodes), problems, team.wait_for("start", LONG_S)[0]["store"]

    def late() -> Any:
        assert said.get(timeout=LONG_S) == "waiting for 1 of 2 nodes: node 1"
        return joined(request(port, 1), other, torch="2")()

    assert together(joined(request(port, 0), hub), late) == [([0, 1], [], True), ([0, 1], [], "x")]


@settings(deadline=None)
@given(st.sets(st.integers(0, 5000), min_size=1, max_size=300))
def test_many_nodes_try_few_others_and_each_is_tried(nodes: set[int]) -> None:
    tries = {node: nodes_to_reach(node, nodes) for node in nodes}
    if len(nodes) <= 16:
        assert all(set(others) == nodes - {node} for node, others in tries.items())
        return
    most = (len(nodes) - 1).bit_length()
    for node, others in tries.items():
        assert len(set(others) - {node}) == len(others) == most
        assert sum(node in tries[other] for other in nodes) == most


def test_a_node_that_nobody_reaches_is_named_by_some_of_many(port: int, said: "queue.SimpleQueue[str]") -> None:
    """18 launchers, of which the last answers at no port."""
    count = 18

    def check(team: LauncherGroup) -> list[str]:
        if team.node_rank == count - 1:
            team.probe_listener.close()
        problems = team.check_connectivity(LONG_S)
        if team.is_coordinator:
            team.send("start")
        else:
            team.wait_for("start", LONG_S)
        return problems

    problems, *_ = together(*(joined(request(port, node, count), check) for node in range(count)))
    named = [one for one in problems if f"does not reach node {count - 1} on " in one]
    assert problems == named
    assert 1 <= len(named) <= 5


class Ticks:
    """The module `time` for launchers that meet: whenever its clock is looked at, 0.3 s have passed."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.3
        return self.now_s

    def sleep(self, _: float) -> None:
        pass


@pytest.mark.parametrize(
    ("wanted", "waiting", "late"),
    [
        (
            {"rank": 1},
            "waiting for node 0 at {place} (Connection refused)",
            "node 0 did not answer at {place} within 1 s (Connection refused): start it",
        ),
        (
            {"rank": 0, "count": 3},
            "waiting for 2 of 3 nodes: nodes 1, 2",
            "nodes 1, 2 did not come to {place} within 1 s: start there the same",
        ),
    ],
)
def test_who_does_not_come_is_waited_for_a_while_only(
    wanted: dict[str, int],
    waiting: str,
    late: str,
    port: int,
    said: "queue.SimpleQueue[str]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = f"127.0.0.1:{port}"
    monkeypatch.setattr(meeting, "time", Ticks())
    (found,) = together(joined(request(port, limit_s=1, **wanted)))
    assert late.format(place=place) in str(found)
    assert said.get_nowait() == waiting.format(place=place)


def test_two_that_take_one_place_are_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_DEPARTURE_TIMEOUT_S", 0.0)
    go, begun = threading.Event(), threading.Event()

    def hub(team: LauncherGroup) -> str:
        begun.set()
        go.wait(LONG_S)
        return "ok"

    def intruders() -> list[str]:
        begun.wait(LONG_S)
        wrong = [request(port, 1), request(port, 1, count=3), request(port, 0)]
        found = [str(one) for body in wrong for one in together(joined(body))]
        go.set()
        return found

    first, _, (twice, other_count, also_first) = together(
        joined(request(port, 0), hub), joined(request(port, 1), lambda _: go.wait(LONG_S)), intruders
    )
    assert first == "ok"
    assert (
        twice
        == f"--node-rank 1 is already that of the launcher on {HOST}: give each node a number of its own, from 0 to 1"
    )
    assert other_count == f"--nodes is 3 here, but 2 on node 0 on {HOST}: give all nodes the same"
    assert (
        f"could not listen on 127.0.0.1:{port} (Address already in use): another launcher may be node 0" in also_first
    )


def test_a_launcher_may_come_before_the_end_of_the_one_before_is_noticed(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 stands still meanwhile, and then sees the next one first."""
    begun, left, come, seen = (threading.Event() for _ in range(4))

    def sleep(duration_s: float) -> None:
        come.set()
        time.sleep(duration_s)

    monkeypatch.setattr(meeting, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))

    def hub(team: LauncherGroup) -> list[str]:
        begun.set()
        left.wait(LONG_S)
        come.wait(LONG_S)
        ((node, gone),) = team.receive(LONG_S)
        team.connections.pop(node).close()
        try:
            return [gone["kind"], *(message["kind"] for _, message in team.receive(LONG_S))]
        finally:
            seen.set()

    def one_after_the_other() -> bool:
        joined(request(port, 1), lambda _: begun.wait(LONG_S))()
        come.clear()
        left.set()
        try:
            return joined(request(port, 1), lambda _: seen.wait(LONG_S))()
        finally:
            come.set()

    assert together(joined(request(port, 0), hub), one_after_the_other) == [["gone", "came"], True]


def test_what_listens_there_must_be_a_launcher(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        (found, _) = together(joined(request(port, 1)), answer)
    assert str(found) == (
        f"what listens at 127.0.0.1:{port} is no launcher of Muster: give all nodes another --rendezvous"
    )


def test_a_route_that_is_missing_after_a_loss_of_the_network_is_waited_for(
    port: int, said: "queue.SimpleQueue[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = OSError(errno.ENETUNREACH, "Network is unreachable")
    found = iter([problem, problem, problem, route_interface("127.0.0.1")])

    def route(_: str) -> Interface:
        if isinstance(answer := next(found), OSError):
            raise answer
        return answer

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(meeting, "time", Ticks())
    monkeypatch.setattr(rendezvous_config, "route_interface", route)
    (lost,) = together(joined(request(port, 1, limit_s=4)))
    assert "waiting for a way to node 0: there is no route from here to node 0 at 127.0.0.1" in said.get_nowait()
    assert "did not answer" in str(lost)


def test_a_node_0_that_ends_or_stands_still_before_it_answers_is_asked_again(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaks = iter([True, False, True])

    def wait(readers: list, _: list, __: list, limit_s: float) -> tuple:
        return select.select(readers, [], [], LONG_S) if next(speaks) else ([], [], [])

    monkeypatch.setattr(meeting, "select", SimpleNamespace(select=wait))
    with socket.create_server(("127.0.0.1", port)) as server:

        def answer() -> None:
            server.accept()[0].close()
            (silent, _), (connection, _) = server.accept(), server.accept()
            with silent, connection:
                welcome = {"kind": "welcome", "member": vars(member(0))}
                connection.sendall(json.dumps(welcome).encode() + b'\n{"kind": "start"}\n')
                connection.recv(1 << 16)

        found, _ = together(joined(request(port, 1), lambda team: team.wait_for("start", LONG_S)), answer)
    assert found == {0: {"kind": "start"}}


def test_strangers_at_the_door_disturb_nobody(port: int) -> None:
    def knock() -> socket.socket:
        """Once somebody listens."""
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", port), LONG_S)
            time.sleep(0.01)

    def stranger() -> None:
        with knock() as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with knock() as connection:
            connection.sendall(b'{"kind": "hello", "member": {"node": "one"}}\n')
            assert connection.recv(1) == b""
        joined(request(port, 1), lambda team: team.wait_for("start", LONG_S))()

    def hub(team: LauncherGroup) -> list[int]:
        team.send("start")
        return sorted(team.nodes)

    assert together(joined(request(port, 0), hub), stranger)[0] == [0, 1]


def test_what_ends_one_launcher_is_told_to_the_others(port: int) -> None:
    def fail(team: LauncherGroup) -> None:
        raise ConfigError("the run file is bad")

    def wait(team: LauncherGroup) -> None:
        team.wait_for("start", LONG_S)

    hub, other = together(joined(request(port, 0), fail), joined(request(port, 1), wait))
    assert isinstance(other, JobEnded)
    assert (str(hub), other.code, other.reason) == (
        "the run file is bad",
        2,
        f"node 0 on {HOST}: the run file is bad",
    )
    hub, other = together(joined(request(port, 0), wait), joined(request(port, 1), fail))
    assert isinstance(hub, ConfigError)
    assert str(hub) == f"node 1 on {HOST}: the run file is bad"


@pytest.mark.parametrize("end", [SystemExit(EXIT_STOPPED), KeyboardInterrupt()], ids=["SIGTERM", "Ctrl-C"])
def test_who_is_asked_to_stop_before_there_are_ranks_stops_all(port: int, end: BaseException) -> None:
    def stop(team: LauncherGroup) -> None:
        raise end

    def wait(team: LauncherGroup) -> None:
        team.wait_for("start", LONG_S)

    hub, other = together(joined(request(port, 0), wait), joined(request(port, 1), stop))
    assert (hub.exit_code, other) == (EXIT_STOPPED, end)
    assert str(hub).endswith(f"node 1 on {HOST} was asked to stop")
    hub, other = together(joined(request(port, 0), stop), joined(request(port, 1), wait))
    assert teams.error_for_code(other.code, other.reason).exit_code == EXIT_STOPPED


def test_a_launcher_is_welcomed_before_it_is_told_anything(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    say = LauncherConnection.send

    def slowly(line: LauncherConnection, kind: str, **content: Any) -> None:
        if kind == "welcome":
            time.sleep(0.3)
        say(line, kind, **content)

    monkeypatch.setattr(LauncherConnection, "send", slowly)
    monkeypatch.setattr(teams, "HEARTBEAT_INTERVAL_S", 0.05)
    first = joined(request(port, 0), lambda team: team.send("start"))
    second = joined(request(port, 1), lambda team: sorted(team.wait_for("start", LONG_S)))  # stays until it is heard
    assert together(first, second) == [None, [0]]


def test_who_says_nothing_any_more_is_gone(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def mute(team: LauncherGroup) -> None:
        monkeypatch.setattr(team, "send", lambda *_, **__: None)
        over.wait(LONG_S)

    def hub(team: LauncherGroup) -> None:
        monkeypatch.setattr(teams, "SILENCE_TIMEOUT_S", 1.0)
        try:
            team.wait_for("ready", LONG_S)
        finally:
            over.set()

    found, _ = together(joined(request(port, 0), hub), joined(request(port, 1), mute))
    assert str(found) == (
        f"node 1 on {HOST} is gone: its launcher has been silent for 1 s, so its machine or the network between is down"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Training, each node a network namespace with a host name and a working directory of its own


@pytest.fixture
def nodes() -> Iterator[Network]:
    with network() as found:
        yield found


def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in HOSTS]
    for folder in made:
        folder.mkdir(exist_ok=True)
    return made


def both(nodes: Network, tmp_path: Path, *words: str | Path, late: str = "", **more: Any) -> list[Ended]:
    """The same command on both nodes, from its start to its end; node 1 starts once node 0 has said `late`."""
    places = folders(tmp_path)
    with nodes.launcher(0, *words, cwd=places[0], **more) as first:
        heard = first.hear(late) if late else ""
        with nodes.launcher(1, *words, cwd=places[1], **more) as second:
            ended = first.wait()
            return [replace(ended, out=heard + ended.out), second.wait()]


def test_two_nodes_train_as_one_launcher_does(nodes: Network, tmp_path: Path) -> None:
    words = (*TINY, "--parallel", "dp2-mb12", "--train.steps", "4", "--data.cache", tmp_path / "cache")
    waiting = "waiting for 1 of 2 nodes: node 1"
    alone = train(*words, "--run", tmp_path / "alone")
    assert alone.code == 0, alone.err
    forking = () if torch.cuda.is_available() else FORKING
    first, second = both(nodes, tmp_path, *words, "--run", tmp_path / "run", late=waiting, before=forking)
    assert (first.code, second.code, first.err, second.err) == (0, 0, "", ""), (first, second)
    assert first.out.startswith(waiting)
    assert "nodes: node 0 on node-a, node 1 on node-b; ranks meet through 10.77.1.1 on cable" in first.out
    assert second.out.splitlines() == ["node 1 on node-b has joined node 0 on node-a, which shows the job's progress"]
    assert losses(tmp_path / "run") == losses(tmp_path / "alone"), "bit for bit"
    assert len(losses(tmp_path / "run")) == 4


# What goes wrong before there are ranks

WRONG = {
    # name → flags of both nodes, of node 1 alone, what node 0 and what node 1 say, the exit code
    "separate directories": (
        (),
        ("--run", "{folder}/elsewhere"),
        "node 1 on node-b doesn't see what node 0 on node-a writes in {folder}/elsewhere: give a --run",
        "node 1 on node-b doesn't see what node 0 on node-a writes in {folder}/elsewhere: give a --run on a disk that",
        1,
    ),
    "another interface": (
        (),
        ("--interface", "stray"),
        "node 0 on node-a (through 10.77.1.1 on cable) does not reach node 1 on node-b at 10.99.0.1:",
        "node 0 on node-a (through 10.77.1.1 on cable) does not reach node 1 on node-b at 10.99.0.1:",
        1,
    ),
    "another plan": (
        (),
        ("--parallel", "dp2-mb6"),
        "node 1 on node-b has the plan dp2-mb6-fp32 (",
        "node 1 on node-b has the plan dp2-mb6-fp32 (",
        2,
    ),
    "another configuration": (
        (),
        ("--optim.lr", "0.5"),
        "node 1 on node-b has another configuration than node 0 on node-a (optim.lr 0.5, not 0.003): give all nodes",
        "node 1 on node-b has another configuration than node 0 on node-a (optim.lr 0.5, not 0.003): give all nodes",
        2,
    ),
    "more ranks": (
        (),
        ("--nproc", "3"),
        "node 1 on node-b would start 3 ranks, but node 0 on node-a would start 1 rank: give all nodes",
        "node 1 on node-b would start 3 ranks, but node 0 on node-a would start 1 rank: give all nodes",
        2,
    ),
    "two worlds of one": (
        (),
        ("--node-rank", "0"),
        "node 1 did not come to 10.77.1.1:29400 within 8 s: start there the same command with its own --node-rank",
        "node 0 has to be the machine of --rendezvous 10.77.1.1 but this one's addresses are 10.77.1.2 on cable",
        1,
    ),
    "unreachable": (
        (),
        ("--rendezvous", "10.77.1.9"),
        "node 1 did not come to 10.77.1.1:29400 within 8 s: start there the same command with its own --node-rank",
        "node 0 did not answer at 10.77.1.9:29400 within 8 s (",
        1,
    ),
    "no route": (
        (),
        ("--rendezvous", "192.0.2.1"),
        "node 1 did not come to",
        "there is no route from here to node 0 at 192.0.2.1:29400 (Network is unreachable): this machine's addresses",
        1,
    ),
    "another port": (
        (),
        ("--rendezvous", "10.77.1.1:29555"),
        "node 1 did not come to",
        "node 0 did not answer at 10.77.1.1:29555 within 8 s (Connection refused): start it there",
        1,
    ),
    "data that is not there": (
        ("--data.source", "{folder}/nowhere"),
        (),
        "data.source: there is no file or directory",
        "node 0 on node-a: data.source: there is no file or directory",
        2,
    ),
}


def refused(nodes: Network, folder: Path, problem: str) -> None:
    """Starts both nodes so that neither can train, and holds what they say to what they should."""
    common, own, first_says, second_says, code = WRONG[problem]
    places = folders(folder)
    limit = "8" if "did not come" in first_says else "120"  # who doesn't come is waited for in vain
    formatted = (word.format(folder=folder) for word in common)
    words = (*TINY, "--parallel", "dp2-mb12", "--rendezvous-timeout", limit, *formatted)
    second_own = dict(zip(own[::2], own[1::2], strict=True))
    second_words = [*words, *([] if "--run" in second_own else ["--run", str(folder / "run")])]
    with (
        nodes.launcher(0, *words, "--run", folder / "run", cwd=places[0]) as first,
        nodes.launcher(1, *second_words, *(w.format(folder=folder) for w in own), cwd=places[1]) as second,
    ):
        ended = [first.wait(), second.wait()]
    assert_one_sentence(ended[0], code, f"muster: {first_says.format(folder=folder)}")
    assert_one_sentence(ended[1], code, f"muster: {second_says.format(folder=folder)}")
    assert not rows_of(folder / "run")


def test_nodes_that_differ_are_refused(nodes: Network, tmp_path: Path) -> None:
    refused(nodes, tmp_path, "another configuration")


@pytest.mark.soak
@pytest.mark.parametrize("problem", [problem for problem in WRONG if problem != "another configuration"])
def test_nodes_that_make_no_job_are_refused(problem: str, nodes: Network, tmp_path: Path) -> None:
    refused(nodes, tmp_path, problem)


# What goes wrong while they train

LONG = (
    *TINY,
    "--parallel",
    "dp2-mb12",
    "--train.steps",
    "400",
    "--train.save_every",
    "2",
    "--train.hang_timeout_s",
    "3",
)


def rank_of(command: Command) -> int:
    """The process of the only rank of a launcher."""
    (process,) = command.ranks().values()
    return process


def kill_launcher(nodes: Network, second: Command) -> None:
    second.kill()


def kill_rank(nodes: Network, second: Command) -> None:
    os.kill(rank_of(second), signal.SIGKILL)


def stop_rank(nodes: Network, second: Command) -> None:
    os.kill(rank_of(second), signal.SIGSTOP)


def cut(nodes: Network, second: Command) -> None:
    nodes.cut(1)


def ask_to_stop(nodes: Network, second: Command) -> None:
    second.process.send_signal(signal.SIGTERM)


FAULTS = {
    kill_launcher: (1, "rank 1 on node-b is gone with node 1 on node-b: the connection to its launcher closed without"),
    kill_rank: (1, "rank 1 on node-b was killed by signal 9 (SIGKILL)"),
    stop_rank: (1, "rank 1 on node-b never entered "),
    cut: (1, "rank 1 on node-b is gone with node 1 on node-b: its launcher has been silent for 15 s"),
    ask_to_stop: (75, "stopped on request; the same command continues the run"),
}


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_what_happens_on_one_node_ends_all_with_one_sentence(fault: Any, nodes: Network, tmp_path: Path) -> None:
    code, words = FAULTS[fault]
    run, places = tmp_path / "run", folders(tmp_path)
    with (
        nodes.launcher(0, *LONG, "--run", run, cwd=places[0]) as first,
        nodes.launcher(1, *LONG, "--run", run, cwd=places[1]) as second,
    ):
        first.wait_for_step(5)
        ranks = [rank_of(first), rank_of(second)]
        begin = time.monotonic()
        fault(nodes, second)
        ended = [first.wait(), second.wait()]
        took_s = time.monotonic() - begin
    end = exit_of(run)
    assert (ended[0].code, end["code"]) == (code, code), ended
    assert end["reason"].startswith(words), end
    if code == 1:
        assert (end["rank"], end["host"]) == (1, "node-b")
        assert ended[0].err == f"error: {end['reason']}\n"
    if fault in (kill_rank, stop_rank):
        assert ended[1].err == ended[0].err, "all say the same"
    if fault is stop_rank:
        assert "where rank 0 waits; it is stopped (process" in end["reason"]
        assert (run / "logs/hang.txt").exists()
    if fault is cut:
        assert (
            "error: rank 0 on node-a is gone with node 0 on node-a: its launcher has been silent for 15 s"
            in ended[1].err
        )
    assert_gone(ranks)
    latest = find_latest(run / "checkpoints")
    assert latest is not None
    assert find_damage(latest) is None
    print(f"{fault.__name__}: both ended within {took_s:.1f} s")
    if fault in (kill_launcher, ask_to_stop):
        steps = str(max(row["step"] for row in rows_of(run)) + 2)
        again = both(nodes, tmp_path, *LONG, "--train.steps", steps, "--run", run)
        assert [one.code for one in again] == [0, 0], again
        assert f"resuming {run} after step" in again[0].out


@pytest.mark.soak
@pytest.mark.parametrize("fault", [kill_rank, kill_launcher])
def test_restarts_begin_on_all_nodes_together(fault: Any, nodes: Network, tmp_path: Path) -> None:
    """A rank is lost, or a node with its launcher, for which another one comes."""
    run, places = tmp_path / "run", folders(tmp_path)
    words = (*LONG, "--train.steps", "30", "--train.restarts", "1", "--run", run)
    with (
        nodes.launcher(0, *words, cwd=places[0]) as first,
        nodes.launcher(1, *words, cwd=places[1]) as second,
    ):
        first.wait_for_step(5)
        fault(nodes, second)
        if fault is kill_launcher:
            first.hear("restart 1 of 1, after step ")
            second.wait()
            with nodes.launcher(1, *words, cwd=places[1]) as replacement:
                ended = [first.wait(), replacement.wait()]
        else:
            ended = [first.wait(), second.wait()]
    assert [one.code for one in ended] == [0, 0], ended
    assert len(losses(run)) == 30
    assert f"resuming {run} after step" in ended[0].out


@pytest.mark.soak
def test_the_first_node_is_missed_too(nodes: Network, tmp_path: Path) -> None:
    run, places = tmp_path / "run", folders(tmp_path)
    with (
        nodes.launcher(0, *LONG, "--run", run, cwd=places[0]) as first,
        nodes.launcher(1, *LONG, "--run", run, cwd=places[1]) as second,
    ):
        first.wait_for_step(3)
        ranks = [rank_of(first), rank_of(second)]
        first.kill()
        ended = second.wait()
    assert ended.code == 1
    words = "rank 0 on node-a is gone with node 0 on node-a: the connection to its launcher closed without a word"
    assert ended.err == f"error: {words}\n"
    assert exit_of(run)["reason"] == words
    assert_gone(ranks)


@pytest.mark.soak
def test_four_ranks_on_two_nodes_train_as_one_launcher_does(nodes: Network, tmp_path: Path) -> None:
    words = (*TINY, "--parallel", "dp2-pp2-mb6", "--train.steps", "6", "--data.cache", tmp_path / "cache")
    assert train(*words, "--run", tmp_path / "alone").code == 0
    ended = both(nodes, tmp_path, *words, "--run", tmp_path / "run", "--nproc", "2")
    assert [one.code for one in ended] == [0, 0], ended
    assert losses(tmp_path / "run") == losses(tmp_path / "alone")
    assert len(losses(tmp_path / "run")) == 6


# ----------------------------------------------------------------------------------------------------------------------
# Doctor


def examined(nodes: Network, tmp_path: Path, *second: str, ranks: bool = True) -> list[dict[str, Any]]:
    """Run `muster doctor --json` on both nodes, on the second with more arguments; returns the outputs."""
    places = folders(tmp_path)
    words = ("--time-limit", "40", "--json", "--run", tmp_path)
    with (
        nodes.launcher(0, *words, cwd=places[0], verb="doctor") as one,
        nodes.launcher(1, *words, *second, cwd=places[1], verb="doctor") as other,
    ):
        ended = [one.wait(), other.wait()]
    assert all(one.out for one in ended), ended
    said = [json.loads(one.out.splitlines()[-1]) for one in ended]
    assert [one.code for one in ended] == [int(not one["ok"]) for one in said]
    return said


@pytest.mark.soak
def test_doctor_sees_that_nodes_are_sound(nodes: Network, tmp_path: Path) -> None:
    first, second = examined(nodes, tmp_path)
    assert first["ok"], [row for row in first["findings"] if row["level"] != "ok"]
    assert second["ok"], second
    found = {row["check"]: row["sentence"] for row in first["findings"]}
    assert found["nodes"] == "node 0 on node-a, node 1 on node-b connected at 10.77.1.1:29400"
    assert found["reach"] == "every node reaches every other through cable"
    assert found["ranks"].startswith("2 ranks on 2 nodes connected and all-reduced")
    assert "GiB/s" in found["bandwidth"]
    shared = ("nodes", "reach", "ranks", "bandwidth", "devices", "links")
    assert [row for row in second["findings"] if row["check"] in shared] == [
        row for row in first["findings"] if row["check"] in shared
    ]


@pytest.mark.soak
def test_doctor_finds_a_wrong_interface_on_another_node(nodes: Network, tmp_path: Path) -> None:
    for said in examined(nodes, tmp_path, "--interface", "stray"):
        problems = [row["sentence"] for row in said["findings"] if row["check"] == "reach"]
        words = "does not reach node 1 on node-b at 10.99.0.1:"
        assert any(words in sentence for sentence in problems), said
        assert not said["ok"]


def test_doctor_finds_other_clocks_and_versions_and_a_closed_port(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = iter(["the disk is full", "the clock is off"])
    lock = threading.Lock()

    def find(asked: DoctorRequest) -> Iterator[CheckResult]:
        with lock:
            yield problem("disk", next(full))

    monkeypatch.setattr(doctor, "CHECKS", {"disk": find})
    monkeypatch.setattr(doctor_nodes, "CHECKS", {"disk": find})
    monkeypatch.setattr(connection, "time", Shifted())
    own = iter([{"muster": "1", "python": "3", "torch": "none"}, {"muster": "2", "python": "3", "torch": "none"}])
    monkeypatch.setattr(doctor_nodes, "software_versions", lambda: next(own))
    seen = together(
        *(lambda rank=rank: [*run_node_checks(DoctorRequest(tmp_path), request(port, rank))] for rank in range(2))
    )
    own, others = ([[one.sentence for one in rows if one.check == "disk"][place] for rows in seen] for place in (0, 1))
    assert others == [f"node {1 - rank} on {HOST}: {own[1 - rank]}" for rank in range(2)], "each is told of the other"
    together_seen = [[one for one in rows if one.check != "disk"] for rows in seen]
    assert together_seen[0] == together_seen[1]
    found = {finding.check: finding for finding in seen[0]}
    assert found["versions"].level == "problem"
    assert "runs Muster" in found["versions"].sentence
    assert found["clocks"].level == "problem"
    assert f"the clocks of node 0 on {HOST} and node 1 on {HOST} differ by +100." in found["clocks"].sentence
    assert found["clocks"].sentence.endswith("s: start NTP on both")
    assert found["ranks"].sentence == "ranks can't be started without PyTorch on all nodes"
    monkeypatch.setattr(doctor_nodes, "software_versions", lambda: {"torch": "none"})
    for module in (doctor, doctor_nodes):
        monkeypatch.setattr(module, "CHECKS", {})
    (alone,) = run_node_checks(DoctorRequest(tmp_path, limit_s=1), request(port, 1))
    assert (alone.check, alone.level) == ("nodes", "problem")
    assert f"node 0 did not answer at 127.0.0.1:{port} within 1 s (Connection refused)" in alone.sentence


class Shifted:
    """The module `time` for the lines of launchers, of which the one that is asked for its clock is 100.5 s ahead."""

    monotonic = staticmethod(time.monotonic)

    def time(self) -> float:
        asked = sys._getframe(1).f_locals["message"]["kind"] == "clock"
        return time.time() + (100.5 if asked else 0)
