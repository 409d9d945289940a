"""Checkpoints in the memory of nodes: found whatever was lost, or the lost parts are named."""

import errno
import fcntl
import os
import shutil
import threading
from pathlib import Path

import pytest

from muster.checkpoint.checkpoint_dir import find_latest, list_checkpoints, step_of
from muster.checkpoint.in_memory import transport
from muster.checkpoint.in_memory.checkpointer import send_to_partner
from muster.checkpoint.in_memory.directory import (
    InMemoryDirectory,
    StepHeader,
    candidate_directories,
    claim_run_id,
    find_orphaned,
    remove_stale,
)
from muster.checkpoint.in_memory.node_groups import NodeGroups
from muster.checkpoint.rank_file import rank_file_name
from muster.config.run_config import TrainConfig
from muster.launch.rank_errors import make_rank_error
from muster.probe import doctor
from muster.spec.errors import MusterError
from muster.train.prune import prune_run
from muster.train.resume_point import ResumePoint, find_resume_point
from tests.ranks import run_ranks
from tests.saver_ranks import COLUMNS, ROWS
from tests.train_runs import AT_ONCE, QUICK, Command, assert_one_sentence, copy_of, losses, train, whole_run

TINY = ("--preset", "tiny", *QUICK)

NONE = [None, [], None]


def whole(step: int) -> list:
    """Return the outcome of a complete in-memory checkpoint of a step that could be read."""
    return [step, [], step]


def test_copies_live_on_in_the_memory_of_the_nodes_that_are_left(tmp_path: Path) -> None:
    ranks = run_ranks(4, "tests.in_memory_ranks:lives_on", {"root": str(tmp_path)})
    kept = [rank.pop("kept") for rank in ranks]
    received = [rank.pop("received") for rank in ranks]
    again = [rank.pop("copied again") for rank in ranks]
    assert [kept for _, kept, _ in again] == [[3], [3], [0, 1, 2], [0, 1, 2, 3]], "each part on two nodes"
    assert all((problem, found) == (None, whole(8)) for problem, _, found in again)
    part = 4 * (ROWS // 4 * COLUMNS + 100_000 // 4)  # of float32, which each of four ranks has written
    assert received == [part * (4 - len(copied)) for _, copied in kept], "what its node hasn't, and no more"
    assert kept == [["step-00000002", copied] for copied in ([0, 1, 3], [0, 1, 3], [0, 1, 2], [2, 3])]
    assert all(rank == ranks[0] for rank in ranks), "all ranks find the same"
    found = ranks[0]
    assert found["nothing"] == NONE
    assert found["saved"] == [None, None]
    assert found["all killed"] == whole(2)
    for node in range(3):
        assert (found[f"node {node} lost"], found[f"after node {node}"]) == (whole(2), None)
    assert found["a byte"] == whole(2)
    assert found["both bytes"] == [None, [[2, [0]]], None]
    assert found["mended"] is None
    why = "the in-memory checkpoint of step 4 was not saved: No space left (rank 3)"
    assert found["half"] == [why, [3, [[4, [3]]], 3], [None, [[3, [0, 1]]], None]]
    why = "the in-memory checkpoint of step 6 was not saved: the process that writes it was killed by SIGKILL (rank 2)"
    assert found["killed"] == [None, why, whole(5)]
    why = "rank 2's part could not be copied to 127.0.0.1: No such file or directory (rank 2)"
    assert found["vanished"] == [f"the in-memory checkpoint of step 7 was not saved: {why}", whole(5)]
    assert found["after all"] == [None, whole(9)]
    assert found["two nodes lost"] == [None, [[9, [0, 1]]], None]
    assert found["too little room"].startswith("train.in_memory_checkpoint_every: the parts of ranks 0 and 1 on ")
    assert found["another run"] == [[], None, False], "it finds nothing, and removes what is left of the one before"
    assert found["left"] == []


def test_who_keeps_whose_copy() -> None:
    nodes = NodeGroups(["a", "b", "a", "c", "a"])
    assert nodes.groups == [[0, 2, 4], [1], [3]]
    assert [nodes.partner(rank) for rank in range(5)] == [1, 3, 1, 0, 1]
    assert [nodes.received_ranks(rank) for rank in range(4)] == [[3], [0, 2, 4], [3], [1]]
    assert NodeGroups(["a", "a"]).partner(0) is None, "a second copy in the same memory would be lost with it"


@pytest.mark.parametrize(
    ("number", "is_away"), [(errno.EHOSTUNREACH, True), (errno.ETIMEDOUT, True), (errno.ENOSPC, False)]
)
def test_a_part_that_cannot_be_sent_as_its_node_is_away_is_no_fault_of_this_rank(
    number: int, is_away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the others go on without that node, or a launcher starts them again; a full memory would be full again."""

    def put(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(transport, "put", put)
    (tmp_path / rank_file_name(1)).touch()
    with pytest.raises(
        MusterError, match=rf"^rank 1's part could not be copied to there: {os.strerror(number)}$"
    ) as found:
        send_to_partner(tmp_path, 1, transport.PeerAddress("there", 1, ""))
    error = make_rank_error(found.value, 1)
    assert (error.primary, error.is_lasting) == (not is_away, not is_away)


def newest(pattern: str) -> int:
    """Return the last step with an in-memory checkpoint."""
    folders = [folder for place in candidate_directories(pattern) for folder in place.glob("muster-*")]
    return max((step_of(step) for folder in folders for step in list_checkpoints(folder)), default=0)


def kill_after(step: int, pattern: str, *command: str | Path) -> None:
    """Kill a run once there is an in-memory checkpoint of this step, before the second step after it."""
    with Command(*command, hold_after=[step + 1]) as job:
        while newest(pattern) < step:
            job.be_patient(f"no copies of step {step}")
        job.kill()
        job.process.wait()


def spoil(run: Path) -> None:
    """Whoever reads from a checkpoint on disk will notice."""
    for path in (run / "checkpoints").glob("*/*.*"):
        path.write_bytes(bytes(path.stat().st_size))


def test_a_killed_run_goes_on_from_memory_and_leaves_nothing_there(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole, run, memory = whole_run(tmp_path_factory.getbasetemp())[0], tmp_path / "run", str(tmp_path / "memory")
    command = [*TINY, "--run", run, "--data.cache", whole.with_name(".data"), "--train.save_every", "3", *AT_ONCE]
    command += ["--train.in_memory_checkpoint_every", "2", "--train.in_memory_checkpoint_dir", memory]
    kill_after(6, memory, *command)
    spoil(run)
    ended = train(*command)
    assert (ended.code, ended.err) == (0, "")
    assert f"resuming {run} after step " in ended.out
    assert " from memory" in ended.out
    assert "damaged" not in ended.out, "no checkpoint on disk was read"
    assert losses(run) == losses(whole), "to the bit"
    assert list(Path(memory).iterdir()) == []


def test_what_a_killed_run_has_left_is_named_and_pruned(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, memory = copy_of(whole_run(tmp_path_factory.getbasetemp())[0], "left"), tmp_path / "memory"
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        config.replace("in_memory_checkpoint_dir: /dev/shm", f"in_memory_checkpoint_dir: {memory}")
    )
    monkeypatch.setattr(doctor, "IN_MEMORY_CHECKPOINT_DIR", memory)
    folder = InMemoryDirectory(memory, run, claim_run_id(run, "settings", resumes=False))

    def leave(step: int) -> None:
        folder.open()
        folder.begin(step, StepHeader(attempt="", world_size=1, about={"step": step}))
        folder.commit(step)
        assert list(find_orphaned(memory)) == [], "a run that holds them is at work"
        folder.release()

    def found() -> list[str]:
        return [finding.sentence for finding in doctor.CHECKS["copies"](doctor.DoctorRequest(run))]

    assert found() == [f"no killed run has left in-memory checkpoints in {memory}"]
    leave(21)
    assert prune_run(run, 2)["removed"] == []
    assert found()[0].endswith("start it again to resume from them")
    leave(20)
    folder.keep_only(20)
    assert prune_run(run, 2)["removed"] == [str(folder.path)], "a checkpoint is as new"
    leave(21)
    claim_run_id(run, "other settings", resumes=False)
    assert found()[0].endswith("no run can resume from them: delete them")
    assert [left.path for left in remove_stale(memory)] == [folder.path]


def test_ranks_of_a_node_open_and_clear_its_memory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, memory = tmp_path / "run", tmp_path / "memory"
    run.mkdir()

    def leave(name: str, step: int) -> InMemoryDirectory:
        folder = InMemoryDirectory(memory, run, name)
        folder.open()
        folder.begin(step, StepHeader(attempt="", world_size=1, about={"step": step}))
        folder.commit(step)
        folder.release()
        return folder

    own, stale = leave(claim_run_id(run, "settings", resumes=False), 2), leave("before", 1)
    with (own.path / "lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_EX)  # as another rank that sees whether somebody holds the folder
        threading.Timer(0.2, lambda: fcntl.flock(looking, fcntl.LOCK_UN)).start()
        own.open()

    is_file = Path.is_file

    def gone(path: Path) -> bool:
        found = is_file(path)
        shutil.rmtree(stale.path, ignore_errors=True)  # by another rank, while this one looks
        return found

    monkeypatch.setattr(Path, "is_file", gone)
    assert list(find_orphaned(memory)) == []
    assert [path for path, _ in own.step_headers()] == [own.path / "step-00000002"]
    own.release()


def test_folders_of_other_users_and_versions_are_left_alone(tmp_path: Path) -> None:
    run, memory = tmp_path / "run", tmp_path / "memory"
    run.mkdir()
    there = InMemoryDirectory(memory, run, "id")
    there.open()
    there.release()
    (run / "copies.json").write_text('{"version": 2}')
    assert [left.is_stale for left in find_orphaned(memory)] == [False], "who can read it may go on from them"
    (run / "copies.json").unlink()
    assert [left.is_stale for left in find_orphaned(memory)] == [True]
    (memory / "muster-link").symlink_to(there.path)
    assert [left.path for left in find_orphaned(memory)] == [there.path]
    moved = there.path.rename(tmp_path / "elsewhere")
    there.path.symlink_to(moved)
    with pytest.raises(OSError, match="another user"):
        there.open()


def test_memory_counts_where_all_newer_checkpoints_are_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, memory = tmp_path / "run", tmp_path / "memory"
    given = {"in_memory_checkpoint_every": 2, "in_memory_checkpoint_dir": str(memory), "steps": 20}
    train = TrainConfig(seq_len=8, global_batch_size=1, **given)
    (damaged := run / "checkpoints/step-00000009").mkdir(parents=True)
    (damaged / "manifest.json").write_bytes(bytes(100))
    folder = InMemoryDirectory(memory, run, claim_run_id(run, "settings", resumes=False))
    folder.open()
    folder.begin(8, StepHeader(attempt="", world_size=1, about={"step": 8, "counters": {"tokens": 3}}))
    folder.commit(8)
    folder.release()
    assert find_resume_point(run, train) == ResumePoint(8, {"tokens": 3})
    assert "skipped a damaged checkpoint: " in capsys.readouterr().out
    folder.delete()
    with pytest.raises(MusterError, match="has no checkpoint to resume from"):
        find_resume_point(run, train)


def test_a_removal_that_is_interrupted_can_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = InMemoryDirectory(tmp_path / "memory", tmp_path, "id")
    folder.open()
    folder.begin(1, StepHeader(attempt="", world_size=1, about={"step": 1}))
    folder.commit(1)
    folder.release()
    removed: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: removed.append(Path(path).name))
    folder.delete()
    assert removed == ["step-00000001", folder.path.name]


@pytest.mark.soak
def test_nodes_may_be_lost_with_their_memory(tmp_path: Path) -> None:
    """Two ranks, each a node of its own. One node after the other loses its memory, then both lose a copy."""
    memory, data = f"{tmp_path}/memory-{{rank}}", tmp_path / "data"
    common = [*TINY, "--data.cache", data, "--parallel", "dp2-mb12", *AT_ONCE, "--train.save_every", "3"]
    assert train(*common, "--run", tmp_path / "whole").code == 0
    run = tmp_path / "run"
    command = [
        *common,
        "--run",
        run,
        "--train.in_memory_checkpoint_every",
        "2",
        "--train.in_memory_checkpoint_dir",
        memory,
    ]
    kill_after(6, memory, *command)
    for node in (0, 1):
        shutil.rmtree(tmp_path / f"memory-{node}")
        spoil(run)  # the checkpoints that it makes from here on are good again
        kill_after(newest(memory) + 6, memory, *command)
    latest = find_latest(run / "checkpoints")
    assert latest is not None
    shutil.rmtree(tmp_path / "memory-0")
    for path in (tmp_path / "memory-1").glob("muster-*/step-*/rank-00000.json"):
        path.unlink()
    shutil.copytree(run / "checkpoints", tmp_path / "kept", symlinks=True)
    spoil(run)
    ended = train(*command)
    assert_one_sentence(ended, 1, "has no checkpoint to resume from", "--fresh")
    shutil.rmtree(run / "checkpoints")
    (tmp_path / "kept").rename(run / "checkpoints")
    ended = train(*command)
    assert (ended.code, ended.err) == (0, "")
    assert "has lost the parts of rank 0: step" in ended.out
    assert f"resuming {run} after step {step_of(latest)}\n" in ended.out
    assert losses(run) == losses(tmp_path / "whole"), "to the bit"
    assert [path for place in candidate_directories(memory) for path in place.iterdir()] == []


@pytest.mark.soak
def test_copies_open_under_another_plan_and_want_room(tmp_path: Path) -> None:
    memory, run = f"{tmp_path}/memory-{{rank}}", tmp_path / "run"
    command = [
        *TINY,
        "--run",
        run,
        "--data.cache",
        tmp_path / "data",
        *AT_ONCE,
        "--train.in_memory_checkpoint_every",
        "2",
    ]
    kill_after(6, memory, *command, "--train.in_memory_checkpoint_dir", memory, "--parallel", "dp2-mb12")
    full = tmp_path / "file"
    full.write_text("")
    ended = train(*command, "--train.in_memory_checkpoint_dir", full / "below", "--parallel", "dp2-mb12")
    assert_one_sentence(
        ended,
        1,
        f"in-memory checkpoints can't be written to {full / 'below'}",
        "Not a directory",
        "train.in_memory_checkpoint_dir",
    )
    ended = train(*command, "--train.in_memory_checkpoint_dir", memory, "--parallel", "pp2-mb12")
    assert (ended.code, ended.err) == (0, "")
    assert " from memory" in ended.out
    assert [path for place in candidate_directories(memory) for path in place.iterdir()] == []
