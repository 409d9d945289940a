"""A job that hangs: the rank that the others wait for is named with its cause, and nothing is left running."""

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from muster.config.attempt_files import NEXT_TOKENIZER_FOLDER, adopt_attempt_files, attempt_files, attempt_id
from muster.config.file_writer import write_atomically
from muster.config.load_config import load_run_config
from muster.launch.flight_records import GroupRecord, find_late_rank, format_records, parse_dump, read_records
from muster.launch.hang_diagnosis import _WAITS_IN, RankFault, RankSnapshot, diagnose, is_waiting, main_thread_frames
from muster.launch.heartbeat import HEARTBEAT_FD_VARIABLE, PAGE_BYTES, Heartbeat, HeartbeatPage, RankStatus
from muster.launch.launcher import launch
from muster.launch.launcher_words import Membership
from muster.launch.rank_errors import run_guarded
from muster.launch.rank_monitor import RankMonitor, is_hung, snapshot_from_json, snapshot_to_json
from muster.launch.recovery import Elasticity, ElasticSupervisor
from muster.launch.watchdog import Watchdog, WatchdogConfig
from muster.parallel.world import open_world
from muster.schedule.action import Action, Kind
from muster.spec.errors import MusterError
from muster.spec.plan import Plan
from muster.train import generations
from tests import forks
from tests.nodes import ADDRESSES, network
from tests.train_runs import AT_ONCE, ROOT

HOST = socket.gethostname()

STACKS = """Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 982 in run

Current thread 0x00007f02 (most recent call first):
  File "{}", line 12 in {}
  File "/muster/train/trainer.py", line 120 in step
  File "<frozen runpy>", line 88 in <module>
"""
IN_GATHER = STACKS.format("/site-packages/torch/distributed/fsdp/_collectives.py", "foreach_all_gather")
IN_READ = STACKS.format("/muster/data/store.py", "read")


NOTHING = Action("")


def seen(rank: int, phase: str, action: Action = NOTHING, state: str = "S", **more: object) -> RankSnapshot:
    values = {"still_s": 5.0, "stacks": "", "waiting": False, "step": 6, "lost": "", **more}
    place = RankStatus(40, values["step"], phase, action, values["waiting"])  # type: ignore[arg-type]
    state_of = (rank, f"host-{rank}", 100 + rank, state)
    return RankSnapshot(*state_of, values["still_s"], place, values["stacks"], values["lost"])  # type: ignore[arg-type]


def test_a_page_tells_what_its_rank_said_last() -> None:
    page = HeartbeatPage()
    try:
        assert page.read() is None
        os.pwrite(page.fd, b"\1" + b"\0" * 100, 0)
        assert page.read() == RankStatus(1, 0, "", Action("", 0, 0), False)
    finally:
        page.close()
    memory = bytearray(PAGE_BYTES)
    heartbeat = Heartbeat(memory)
    heartbeat.step = 6
    page = HeartbeatPage()
    kinds = [*Kind, cast(Kind, "A_KIND_WITH_A_LONG_NAME_THAT_IS_NOT_YET_THERE"), Kind.UNSHARD]
    for count, kind in enumerate(kinds, 1):
        heartbeat.begin(Action(kind, 1), waiting=True)
        os.pwrite(page.fd, memory, 0)
        assert page.read() == RankStatus(count, 6, "run", Action(kind, 1), True), "no kind is cut"
    page.close()
    with pytest.raises(ValueError, match="5,?000 bytes"):
        heartbeat.begin(Action(cast(Kind, "K" * 5000)))


UNACKNOWLEDGED = "64 bytes that it sent to 10.0.0.2 have not been acknowledged"


@pytest.mark.parametrize(
    ("sightings", "rank", "words"),
    [
        (
            [seen(0, "run", Action(Kind.UNSHARD, 1)), seen(1, "data"), seen(2, "run", Action(Kind.UNSHARD, 1))],
            1,
            "never entered the all-gather of the parameters of stage 1 of step 7, where ranks 0, 2 wait;"
            " it is loading data for step 7, for 5 s",
        ),
        (
            [seen(0, "run", Action(Kind.F, 0, 0), stacks=IN_GATHER), seen(1, "data", stacks=IN_READ)],
            1,
            "never entered the all-gather in the forward of stage 0, micro-batch 0 of step 7, where rank 0 waits;"
            " it is loading data for step 7 (in read, store.py:12), for 5 s",
        ),
        (
            [seen(0, "run", Action(Kind.RECV_B, 0, 1), waiting=True), seen(1, "run", Action(Kind.F, 1, 1))],
            1,
            "never sent its part of the receive of a gradient of stage 0, micro-batch 1 of step 7, where rank 0 waits;"
            " it computes the forward of stage 1, micro-batch 1 of step 7, for 5 s",
        ),
        (
            [seen(0, "run", Action(Kind.GRAD_NORM)), seen(1, "run", Action(Kind.GRAD_NORM), state="T", still_s=4.0)],
            1,
            "never entered the all-reduce of the gradient norm of step 7, where rank 0 waits; it is stopped (process"
            " 101, as by SIGSTOP or a debugger) while it is in the all-reduce of the gradient norm of step 7, for 4 s",
        ),
        (
            [seen(0, "run", Action(Kind.GRAD_NORM)), seen(1, "run", Action(Kind.RECV_F, 1, 0), waiting=True, step=5)],
            1,
            "waits in the receive of an activation of stage 1, micro-batch 0 of step 6, and all others wait, too:"
            " rank 0 waits in the all-reduce of the gradient norm of step 7; a message that one of them sent has"
            " not arrived",
        ),
        (
            [
                seen(
                    0,
                    "run",
                    Action(Kind.GRAD_NORM),
                    lost=UNACKNOWLEDGED,
                ),
                seen(1, "run", Action(Kind.GRAD_NORM), lost="there is no route to 10.0.0.1 any more"),
            ],
            1,
            "waits in the all-reduce of the gradient norm of step 7, and all others wait, too: rank 0 waits in"
            " the all-reduce of the gradient norm of step 7; its network connection is lost (there is"
            " no route to 10.0.0.1 any more)",
        ),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(sightings: list[RankSnapshot], rank: int, words: str) -> None:
    finding = diagnose(sightings)
    assert (finding.rank, finding.host, finding.sentence) == (rank, f"host-{rank}", words)


def on_gpu(rank: int, device_action: Action, step: int = 6) -> RankSnapshot:
    """A rank whose host has launched a whole step and waits for its norm."""
    found = seen(rank, "run", Action(Kind.GRAD_NORM), waiting=True, stacks=IN_UPDATE, step=step)
    assert found.status is not None
    return replace(found, status=replace(found.status, device_action=device_action))


IN_UPDATE = STACKS.format("/muster/train/parameter_updater.py", "_read_sums")
BACKWARD = """Thread 0x00007f01 (most recent call first):
  File "/muster/parallel/tensor_parallel.py", line 40 in backward
  File "/lib/python3.11/site-packages/torch/autograd/function.py", line 307 in apply

""" + STACKS.format("/lib/python3.11/site-packages/torch/autograd/graph.py", "_engine_run_backward")


@pytest.mark.parametrize(
    ("sightings", "rank", "words"),
    [
        (
            [on_gpu(0, Action(Kind.RECV_B, 0, 1)), seen(1, "data", stacks=IN_READ)],
            1,
            "never sent its part of the receive of a gradient of stage 0, micro-batch 1 of step 7, where rank 0 waits;"
            " it is loading data for step 7 (in read, store.py:12), for 5 s",
        ),
        (
            [on_gpu(0, Action(Kind.RECV_B, 0, 1)), on_gpu(1, Action(Kind.F, 1, 1))],
            1,
            "never sent its part of the receive of a gradient of stage 0, micro-batch 1 of step 7, where rank 0 waits;"
            " it waits for its GPU in the forward of stage 1, micro-batch 1 of step 7, for 5 s",
        ),
        (
            [on_gpu(0, Action(Kind.UNSHARD, 0)), on_gpu(1, Action(Kind.UNSHARD, 0), step=5)],
            1,
            "waits in the all-gather of the parameters of stage 0 of step 6, and all others wait, too: rank 0 waits in"
            " the all-gather of the parameters of stage 0 of step 7; a message that one of them sent has not arrived",
        ),
        (
            [on_gpu(0, Action(Kind.RECV_B, 0, 1)), seen(1, "run", Action(Kind.B, 1, 1), stacks=BACKWARD)],
            1,
            "never sent its part of the receive of a gradient of stage 0, micro-batch 1 of step 7, where rank 0 waits;"
            " it computes the backward of stage 1, micro-batch 1 of step 7 (in backward, tensor_parallel.py:40),"
            " for 5 s",
        ),
    ],
)
def test_hosts_that_run_ahead_of_their_gpus_are_told_apart(
    sightings: list[RankSnapshot], rank: int, words: str
) -> None:
    finding = diagnose(sightings)
    assert (finding.rank, finding.sentence) == (rank, words)
    assert [snapshot_from_json(json.loads(json.dumps(snapshot_to_json(one)))) for one in sightings] == sightings


def collective(number: int, state: str, group: str = "7", kind: str = "tp", **more: object) -> dict[str, object]:
    """An entry of NCCL's flight recorder, as PyTorch writes it."""
    return {
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "process_group": [group, kind],
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 128]],
        "state": state,
        "retired": state == "completed",
        **more,
    }


def recorded(*entries: dict[str, object]) -> str:
    return IN_UPDATE + format_records(parse_dump({"version": "2.10", "entries": list(entries)}))


def test_a_flight_recorders_dump_tells_what_a_rank_has_entered() -> None:
    entries = [collective(3, "scheduled"), collective(1, "completed"), collective(2, "started")]
    others = [collective(9, "completed", "0", "default_pg"), collective(5, "started", is_p2p=True)]
    records = parse_dump({"entries": [*entries, *others]})
    assert records == [
        GroupRecord("7", "tp", 3, 2, "all_reduce of 4×128", True),
        GroupRecord("0", "default_pg", 9, None),
    ]
    assert list(read_records(IN_UPDATE + format_records(records))) == records
    assert main_thread_frames(IN_UPDATE + format_records(records)) == main_thread_frames(IN_UPDATE)
    cut = format_records(records).rstrip()[:-9]
    assert list(read_records(cut)) == records[:1]


def test_the_rank_that_never_began_a_collective_is_named_from_flight_records() -> None:
    """Rank 3's device is in another group's collective, which rank 2 never entered: rank 2 is what all wait for."""
    waits = recorded(collective(17, "started"))
    late_too = recorded(collective(17, "scheduled"), collective(4, "started", "8", "dp"))
    late = recorded(collective(3, "completed", "8", "dp"))
    stacks = {0: waits, 1: waits, 2: late, 3: late_too}
    found = [replace(on_gpu(rank, Action(Kind.UNSHARD, 0)), stacks=stacks[rank]) for rank in (0, 1, 3, 2)]
    finding = diagnose(found)
    assert finding.rank == 2
    assert "never began all_reduce of 4×128, collective 4 of the group dp, where rank 3 waits" in finding.sentence
    assert find_late_rank({0: waits, 1: waits}) is None
    assert find_late_rank({0: IN_UPDATE, 1: ""}) is None


def test_a_rank_writes_its_flight_record_behind_complete_stacks() -> None:
    page = HeartbeatPage()
    fd = os.dup(page.fd)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    heartbeat = Heartbeat(bytearray(PAGE_BYTES), fd)
    heartbeat._flight_record = lambda: recorded(collective(1, "started"))
    heartbeat.write_flight_record()
    assert not page.read_stacks(), "nobody asked"
    os.write(fd, b"Thread")
    heartbeat.write_flight_record()
    assert page.read_stacks() == "Thread", "which may not be complete"
    for _ in range(3):
        heartbeat.write_flight_record()
    assert [one.entered for one in read_records(page.read_stacks())] == [1]
    assert page.read_stacks().count("Flight recorder:") == 1
    page.close()
    os.close(fd)


def test_a_page_tells_where_its_device_is() -> None:
    memory, page = bytearray(PAGE_BYTES), HeartbeatPage()
    heartbeat = Heartbeat(memory)
    heartbeat.begin(Action(Kind.GRAD_NORM))
    heartbeat.write_device_action(Action(Kind.RECV_B, 2, 3))
    heartbeat.wait()
    os.pwrite(page.fd, memory, 0)
    status = page.read()
    assert status == RankStatus(1, 0, "run", Action(Kind.GRAD_NORM), True, Action(Kind.RECV_B, 2, 3))
    assert status is not None
    assert status.position == Action(Kind.RECV_B, 2, 3)
    heartbeat.begin(Action(Kind.STEP))
    heartbeat.write_device_action(None)
    os.pwrite(page.fd, memory, 0)
    assert page.read() == RankStatus(2, 0, "run", Action(Kind.STEP), False)
    page.close()


def test_the_files_where_a_rank_waits_are_there() -> None:
    files = [path.as_posix() for path in (ROOT / "muster").rglob("*.py")]
    waiting = sorted(file.partition("/muster/")[2] for file in files if _WAITS_IN.search(file))
    expected = ["axis", "executor", "fsdp", "p2p", "world"]
    assert waiting == [
        "optim/peer_exchange.py",
        *(f"parallel/{name}.py" for name in expected),
        "train/outer_updater.py",
        "train/post_validation.py",
    ]


def test_a_spare_that_is_asked_for_its_stacks_lives_on() -> None:
    page = HeartbeatPage()
    code = "import sys; from muster.launch.heartbeat import tell_ready; tell_ready(); sys.stdin.read()"
    env = {**os.environ, HEARTBEAT_FD_VARIABLE: str(page.fd)}
    spare = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=env, pass_fds=[page.fd])
    while page.read() is None:
        assert spare.poll() is None
        time.sleep(0.002)
    page.request_stacks(spare.pid)
    while "<module>" not in page.read_stacks():
        assert spare.poll() is None
        time.sleep(0.002)
    spare.communicate()
    assert spare.returncode == 0


def test_only_what_should_be_short_can_hang() -> None:
    still, quick = seen(0, "run", Action(Kind.GRAD_NORM)), seen(1, "data", still_s=1.0)
    assert is_hung([still, seen(1, "data")], 4)
    assert not is_hung([still, quick], 4)
    assert not is_hung([still, seen(1, "save")], 4)
    assert is_hung([still, seen(1, "save", state="T")], 4)
    assert not is_hung([still, seen(1, "validate")], 4)
    assert is_hung([seen(0, "load"), seen(1, "load", state="T")], 4), "one that is stopped holds up others everywhere"
    assert not is_hung([], 4)


@pytest.mark.parametrize(
    ("hang_timeout_s", "all_s", "some_s"), [(180, 300, 1800), (600, 720, 1800), (3600, 3720, 3720)]
)
def test_nobody_gives_up_before_a_hang_is_found(
    hang_timeout_s: float, all_s: float, some_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run's `train.hang_timeout_s` is reaches the time for which ranks wait for each other."""
    wanted: list[float] = []

    def record(*arguments: Any) -> Any:
        wanted.append(arguments[-1])
        raise InterruptedError

    monkeypatch.setattr(generations, "open_world", record)
    monkeypatch.setattr(generations, "require_same_config", lambda *_: None)
    config = load_run_config("tiny", None, [("train.hang_timeout_s", str(hang_timeout_s))]).config
    own = SimpleNamespace(_config=config, _store=dist.HashStore(), _plan=None, _dataset=Mock(), _heartbeat=None)
    with pytest.raises(InterruptedError):
        generations._Rank._train_in(own, Membership(0, 0, 1, False), Mock())  # type: ignore[arg-type]
    with open_world(dist.HashStore(), 0, 1, Plan(), hang_timeout_s=wanted[0]) as world:
        groups = dist.group.WORLD, world.groups._new_group([0])
        found = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    assert found == [all_s, some_s]


def test_survivors_of_a_loss_do_not_hang_for_having_waited_for_the_lost(tmp_path: Path) -> None:
    """They have been told of the next generation, and have yet to leave the one before."""
    supervisor = ElasticSupervisor(tmp_path, 1.0, 4.0, Elasticity(2))
    (tmp_path / "logs").mkdir()
    waiting = [seen(0, "run", waiting=True), seen(1, "run", waiting=True)]
    lost = Mock(rank=2, last_alive=0.0, fault=RankFault(2, HOST, "never entered the all-reduce"))
    supervisor._begin_generation([lost], "rank 2 is replaced", "rank 2 never entered the all-reduce", 2)
    supervisor.diagnose_if_hung(waiting)
    assert supervisor.hang_fault is None
    supervisor._generation_start -= 5
    supervisor.diagnose_if_hung(waiting)
    assert supervisor.hang_fault is not None


def test_time_without_looks_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 101.0, 103.0, 1103.0, 1104.0, 1109.0])
    monkeypatch.setattr("muster.launch.rank_monitor.time", SimpleNamespace(monotonic=lambda: next(times)))
    watched = RankMonitor(0)
    found = [watched.snapshot(None).stalled_s for _ in range(5)]
    watched.page.close()
    assert found == [1.0, 3.0, 8.0, 9.0, 14.0]


def test_a_stack_tells_waiting_from_computing() -> None:
    assert main_thread_frames(IN_READ)[0] == ("/muster/data/store.py", 12, "read")
    assert is_waiting(seen(0, "run", Action(Kind.F, 0, 0), stacks=IN_GATHER))
    assert not is_waiting(seen(0, "run", Action(Kind.GRAD_NORM), stacks=IN_READ))
    assert main_thread_frames("") == []


def test_who_watched_an_earlier_attempt_does_not_say_how_this_one_ended(tmp_path: Path) -> None:
    def watched() -> Watchdog:
        return Watchdog(WatchdogConfig(str(tmp_path), 9.0, 1, 0, 1, HOST, 0, [], attempt_id(tmp_path)), [], None)

    def fail() -> int:
        raise MusterError("the disk is full")

    (tmp_path / "config.yaml").write_text("")
    write_atomically(attempt_files(tmp_path).config, "")
    former = watched()
    assert run_guarded(tmp_path, lambda: 0, fail) == 1
    write_atomically(attempt_files(tmp_path).config, "")  # a launcher has prepared the run and started its ranks again
    (tmp_path / "config.yaml").write_text("")  # a new run's first attempt has both, until it is adopted
    (tmp_path / NEXT_TOKENIZER_FOLDER).mkdir()
    former.run()
    assert not (tmp_path / "exit.json").exists()
    present = watched()
    adopt_attempt_files(tmp_path)
    present.run()
    assert json.loads((tmp_path / "exit.json").read_text())["reason"] == f"rank 0 on {HOST}: the disk is full"


# ----------------------------------------------------------------------------------------------------------------------
# Training ranks


def faulty_run(folder: Path, plan: str, fault: str, rank: int) -> tuple[int, dict, float]:
    """Trains on two processes, of which one goes wrong after three steps: exit code, exit.json, seconds from the first
    process to the end."""
    run = folder / "run"
    script = folder / "prepare.py"
    script.write_text(PREPARE)
    prepared = forks.run(run, plan, program=script, cwd=ROOT)
    assert prepared.returncode == 0, prepared.stderr
    python = [sys.executable, "-m", "tests.hung_rank", fault, "3", str(rank), str(run)]
    begin = time.monotonic()
    code = launch(
        lambda rank, store: [*python, "--rank", str(rank), "--world-size", "2", "--store", store],
        2,
        run,
        hang_timeout_s=3,
    ).report()
    return code, json.loads((run / "exit.json").read_text()), time.monotonic() - begin


PREPARE = f"""
import sys
from pathlib import Path
from muster.config.load_config import load_run_config
from muster.train.prepare import TrainOptions, prepare
from muster.planner.auto import choose_plan
changes = [("train.steps", "400"), ("parallel", sys.argv[2]), ("{AT_ONCE[0][2:]}", "{AT_ONCE[1]}")]
resolved = load_run_config("tiny", None, changes)
prepare(resolved, choose_plan(resolved, 2), TrainOptions(Path(sys.argv[1])))
"""

FAULTS = {
    "data": ("dp2-mb12", 1, r"never entered the all-gather in the forward .* rank 0 waits; it is loading data"),
    "compute": ("pp2-mb12", 1, r"never sent .* receive of a gradient .* it computes the forward of stage 1"),
    "stopped": ("pp2-mb12", 0, r".* where rank 1 waits; it is stopped \(process \d+, as by SIGSTOP"),
    "dead": ("dp2-mb12", 1, r"was killed by signal 9 \(SIGKILL\)"),
    "plan": ("dp2-mb12", 1, r"has the plan dp2-mb6.*, but rank 0 on \S+ has dp2-mb12"),
    "network": ("pp2-mb12", 1, r"waits in .* its network connection is lost \(there is no route to 10\.77\.0\.1"),
}


UNDER_NCCL = {
    "data": ("pp2-mb12", 1, r"never (sent|received) its part of .* rank 0 waits; it is loading data"),
    "compute": ("pp2-mb12", 1, r"never (sent|received) .* rank 0 waits; it computes the forward of stage 1"),
    "kernel": ("pp2-mb12", 1, r"never (sent|received) .* rank 0 waits; it waits for its GPU in the forward of"),
    "stopped": ("pp2-mb12", 0, r".* where rank 1 waits; it is stopped \(process \d+, as by SIGSTOP"),
    "dead": ("pp2-mb12", 1, r"was killed by signal 9 \(SIGKILL\)"),
    "network": FAULTS["network"],
}
"""The same where the host runs ahead of its device, and a kernel that never ends."""


def check(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch, under_nccl: bool = False) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if under_nccl:
        monkeypatch.setenv("NCCL_LIKE", "1")
    plan, rank, words = (UNDER_NCCL if under_nccl else FAULTS)[fault]
    code, end, seconds = faulty_run(folder, plan, fault, rank)
    assert (code, end["code"], end["rank"], end["host"]) == (1, 1, rank, HOST), end
    assert re.search(rf"^rank {rank} on {HOST}:? {words}", end["reason"]), end["reason"]
    hung = fault in ("data", "compute", "kernel", "stopped", "network")
    assert (folder / "run/logs/hang.txt").exists() == hung
    print(f"{fault}: named within {seconds:.1f} s of the start, of which the hang's limit was 3 s")


def test_a_training_that_hangs_is_ended_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path, "data", monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ("data", "network")])
def test_every_fault_is_named(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path, fault, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("fault", [fault for fault in UNDER_NCCL if fault != "network"])
def test_every_fault_is_named_where_the_host_runs_ahead(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path, fault, monkeypatch, under_nccl=True)


@pytest.mark.soak
@pytest.mark.parametrize("under_nccl", [False, True])
def test_a_lost_network_is_named(under_nccl: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a network namespace of its own, and the link of one goes down: no packet says so to the other."""
    name = f"muster-{os.getpid()}"
    spaces = [f"{name}-{rank}" for rank in range(2)]

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], check=False, capture_output=True).returncode == 0

    if not ip("netns", "add", spaces[0]):
        pytest.skip("network namespaces need root")
    try:
        made = ip("netns", "add", spaces[1])
        made &= ip("link", "add", "veth0", "netns", spaces[0], "type", "veth", "peer", "veth1", "netns", spaces[1])
        for rank, space in enumerate(spaces):
            made &= ip("-n", space, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", f"veth{rank}")
            made &= ip("-n", space, "link", "set", f"veth{rank}", "up")
            made &= ip("-n", space, "link", "set", "lo", "up")
        assert made
        monkeypatch.setenv("TEST_NAMESPACES", name)
        check(tmp_path, "network", monkeypatch, under_nccl)
    finally:
        for space in spaces:
            ip("netns", "del", space)


# ----------------------------------------------------------------------------------------------------------------------
# Ranks that torchrun has started

ON_NODE_B = {
    "data": FAULTS["data"][2],
    "compute": FAULTS["compute"][2],
    "stopped": r"never .* where rank 0 waits; it is stopped \(process \d+, as by SIGSTOP",
    "dead": r"ended without an error, as if killed, while it .* of step 3$",
    "plan": FAULTS["plan"][2],
    "network": r"is gone with node 1 on node-b: its launcher has been silent for 15 s",
}


UNDER_TORCHRUN = [fault for fault in FAULTS if fault not in ("dead", "network")]
"""Faults that soak tries under torchrun, beside `dead`, which is always tried."""


def end_under_torchrun(run: Path, process: subprocess.Popen) -> dict:
    """exit.json, once the ranks and all who watched them have ended: they hold the ends of its output."""
    out, _ = process.communicate(timeout=600)
    assert (run / "exit.json").exists(), out[-3000:]
    return json.loads((run / "exit.json").read_text())


@pytest.mark.parametrize("fault", ["dead", *(pytest.param(fault, marks=pytest.mark.soak) for fault in UNDER_TORCHRUN)])
def test_faults_under_torchrun_are_named(fault: str, tmp_path: Path) -> None:
    plan, rank, words = FAULTS[fault]
    if fault == "dead":
        words = ON_NODE_B["dead"]
    run = tmp_path / "run"
    elastic = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--"]
    changes = ["--parallel", plan, "--train.steps", "400", "--train.hang_timeout_s", "3", *AT_ONCE]
    training = ["tests.hung_rank", fault, "3", str(rank), "train", "--preset", "tiny", "--run", str(run), *changes]
    process = subprocess.Popen(
        [sys.executable, *elastic, *training],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    end = end_under_torchrun(run, process)
    assert (process.returncode, end["code"], end["rank"], end["host"]) == (1, 1, rank, HOST), end
    assert re.search(rf"^rank {rank} on {HOST}:? {words}", end["reason"]), end["reason"]


@pytest.mark.soak
@pytest.mark.parametrize("fault", ON_NODE_B)
def test_faults_on_another_node_that_another_launcher_started_are_named(fault: str, tmp_path: Path) -> None:
    """Two ranks, each on a node of its own, with the environment that torchrun gives them; rank 1 goes wrong."""
    plan = "pp2-mb12" if fault == "compute" else "dp2-mb12"
    run = tmp_path / "run"
    changes = ["--parallel", plan, "--train.steps", "400", "--train.hang_timeout_s", "3", *AT_ONCE]
    training = ["train", "--preset", "tiny", "--run", str(run), *changes]
    with network() as nodes:
        ranks = []
        for rank in range(2):
            place = {"RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            place |= {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511"}
            command = [*nodes.inside(rank), sys.executable, "-m", "tests.hung_rank", fault, "3", "1", *training]
            place |= {"TORCHELASTIC_RUN_ID": "x", "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
            environment, pipe = {**os.environ, **place, "CUT": "cable"}, subprocess.PIPE
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True))
        end = end_under_torchrun(run, ranks[0])
        assert (end["code"], end["rank"], end["host"]) == (1, 1, "node-b"), end
        assert re.search(rf"^rank 1 on node-b:? {ON_NODE_B[fault].replace(HOST, 'node-a')}", end["reason"]), end
        if fault == "dead":
            ranks[1].kill()
        ranks[1].communicate(timeout=600)
