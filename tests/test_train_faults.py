"""Training that can't begin or go on: one clear sentence, the right exit code, and nothing lost."""

import hashlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from muster.checkpoint.checkpoint_dir import find_damage, find_latest, list_checkpoints
from muster.checkpoint.manifest import read_manifest
from muster.cli.main import main
from muster.launch.shared_filesystem import require_shared_run_dir
from muster.report.run_files import read_metrics
from muster.spec.errors import MusterError
from muster.spec.plan import Plan
from muster.train.carried import Carried
from muster.train.config_consistency import require_same_config
from muster.train.loop import TrainingLoop
from muster.train.metrics import MetricsLog
from tests.forks import words_of
from tests.full_disk import files_of_at_most
from tests.parity import small_run
from tests.test_checkpoint import save_one
from tests.train_runs import (
    AT_ONCE,
    LIMIT_S,
    QUICK,
    Command,
    assert_one_sentence,
    assert_same_training,
    copy_of,
    exit_of,
    rows_of,
    steps,
    train,
)

HOST = socket.gethostname()
TINY = ("--preset", "tiny", *QUICK)


def contents(folder: Path) -> dict[str, str]:
    """All that lies in a folder, but for the lock."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tensor_file(run: Path, step: int) -> Path:
    return run / f"checkpoints/step-{step:08}/rank-00000.safetensors"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


# ----------------------------------------------------------------------------------------------------------------------
# Before anything is written


def missing_run_file(folder: Path) -> tuple:
    return ("nowhere.yaml",), 2, "there is no file nowhere.yaml"


def missing_data(folder: Path) -> tuple:
    return ("--data.source", folder / "nowhere"), 2, "data.source: there is no file or directory"


def empty_data(folder: Path) -> tuple:
    (folder / "empty.txt").write_text("")
    return ("--data.source", folder / "empty.txt"), 2, "empty.txt has no text"


def too_little_data(folder: Path) -> tuple:
    (folder / "short.txt").write_text("too short")
    return ("--data.source", folder / "short.txt"), 2, "10 tokens, but one window for training and one for validation"


def wrong_number_of_processes(folder: Path) -> tuple:
    words = "dp2-pp2-mb1-fp32 can't run: it needs 4 processes (pp 2 × dp_shard 2), but there are 3; nearest: dp3"
    return ("--parallel", "dp2-pp2", "--nproc", "3"), 3, words


def run_below_a_file(folder: Path) -> tuple:
    (folder / "file").write_text("")
    return ("--run", folder / "file/run"), 1, f"can't write the run directory {folder}/file/run: Not a directory"


def unwritable_cache(folder: Path) -> tuple:
    (folder / "file").write_text("")
    return ("--data.cache", folder / "file/cache"), 1, f"{folder}/file/cache/python-stdlib-"


@pytest.mark.parametrize(
    "problem",
    [
        missing_run_file,
        missing_data,
        empty_data,
        too_little_data,
        wrong_number_of_processes,
        run_below_a_file,
        unwritable_cache,
    ],
)
def test_what_cannot_begin_leaves_nothing(problem: Callable[[Path], tuple], tmp_path: Path) -> None:
    arguments, code, words = problem(tmp_path)
    run = tmp_path / "run"
    assert_one_sentence(train(*TINY, "--run", run, *arguments), code, words)
    assert not run.exists() or contents(run) == {}


def test_a_stop_before_there_are_ranks_leaves_finished_shards_or_nothing(tmp_path: Path) -> None:
    with Command(*TINY, "--run", tmp_path / "run", "--data.max_bytes", "null", forked=True) as command:
        while not list(tmp_path.glob(".data/*.partial")):
            command.be_patient("no store was begun")
        command.process.send_signal(signal.SIGTERM)
        ended = command.wait()
    assert (ended.code, ended.err) == (75, "")
    left = contents(tmp_path)
    assert all(".partial/" in name for name in left)
    assert not left or any("/shard-" in name for name in left)  # the next run goes on from it


# ----------------------------------------------------------------------------------------------------------------------
# What would spoil a run that is there


def changed_configuration(run: Path) -> tuple:
    return ("--optim.lr", "1", "--seed", "3"), 2, "(optim.lr was 0.003, now 1.0; seed was 0, now 3)"


def fewer_steps(run: Path) -> tuple:
    return ("--train.steps", "19"), 2, "has done 20 steps already: expected train.steps of 20 or more, got 19"


def fresh_without_data(run: Path) -> tuple:
    return ("--fresh", "--data.source", run / "nowhere"), 2, "data.source: there is no file or directory"


def truncated_store(run: Path) -> tuple:
    cache = copy_of(run.with_name(".data"), f"{run.name}-cache")
    cut(next(cache.glob("*/tokens-00000.bin")))
    return ("--train.steps", "22", "--data.cache", cache), 2, "bytes, but store.json says"


def other_data(run: Path) -> tuple:
    manifest = tensor_file(run, 20).with_name("manifest.json")
    manifest.write_text(re.sub(r'"data": "[^"]*"', '"data": "bytes-7-00c0ffee"', manifest.read_text()))
    return ("--train.steps", "22"), 2, f"the text of data.source is not what {run} began with (bytes-7-00c0ffee, now "


def only_damaged_checkpoints(run: Path) -> tuple:
    cut(tensor_file(run, 15))
    tensor_file(run, 20).unlink()
    return (), 1, f"{run} has no checkpoint to resume from"


def later_schema(run: Path) -> tuple:
    manifest = tensor_file(run, 20).with_name("manifest.json")
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 9', 1))
    return (), 2, f"{manifest} has schema 9, but this Muster reads schemas up to 2: use a newer Muster"


@pytest.mark.parametrize(
    "problem",
    [
        changed_configuration,
        fewer_steps,
        fresh_without_data,
        truncated_store,
        other_data,
        only_damaged_checkpoints,
        later_schema,
    ],
)
def test_what_cannot_go_on_loses_nothing(problem: Callable[[Path], tuple], whole: Path) -> None:
    run = copy_of(whole, problem.__name__)
    arguments, code, words = problem(run)
    before = contents(run)
    assert_one_sentence(train(*TINY, "--run", run, *arguments), code, words)
    assert contents(run) == before


def test_changes_can_be_allowed_and_are_shown(whole: Path) -> None:
    run = copy_of(whole, "allowed")
    ended = train(*TINY, "--run", run, "--allow-changes", "--optim.lr", "1e-4", "--train.steps", "21")
    assert (ended.code, ended.err) == (0, "")
    assert "allowed: optim.lr was 0.003, now 0.0001" in ended.out
    assert steps(run) == list(range(1, 22))
    assert rows_of(run)[-1]["train/lr"] < 2e-4


def test_a_rank_that_sees_another_disk_says_so(tmp_path: Path) -> None:
    store = dist.HashStore()
    for name in ("here", "there"):
        (tmp_path / name / "logs").mkdir(parents=True)
    require_shared_run_dir(tmp_path / "here", 0, store)
    require_shared_run_dir(tmp_path / "here", 1, store)
    with pytest.raises(
        MusterError, match=r"rank 1 on .* doesn't see what rank 0 on .* writes in .*there: give a --run"
    ):
        require_shared_run_dir(tmp_path / "there", 1, store, timeout_s=0.2)


def test_a_rank_that_reads_other_data_is_told() -> None:
    store, config, plan = dist.HashStore(), small_run(), Plan()
    require_same_config(config, plan, "bytes-10", store, 0)
    require_same_config(config, plan, "bytes-10", store, 1)
    with pytest.raises(MusterError, match="reads the data bytes-12, but rank 0 on .* reads bytes-10: give all ranks"):
        require_same_config(config, plan, "bytes-12", store, 1)


def test_a_damaged_last_checkpoint_is_passed_over_and_said(whole: Path) -> None:
    run = copy_of(whole, "damaged")
    cut(tensor_file(run, 20))
    ended = train(*TINY, "--run", run)
    assert (ended.code, ended.err) == (0, "")
    assert f"skipped a damaged checkpoint: {tensor_file(run, 20)}" in ended.out
    assert f"resuming {run} after step 15" in ended.out
    assert_same_training(run, whole)
    assert find_damage(tensor_file(run, 20).parent) is None


def test_a_flipped_byte_is_noticed(whole: Path) -> None:
    run = copy_of(whole, "flipped")
    (run / "report.html").unlink()  # as if the run had been killed before its end
    data = bytearray(tensor_file(run, 20).read_bytes())
    data[-1] ^= 1
    tensor_file(run, 20).write_bytes(data)
    older = tensor_file(run, 15).parent
    aside = older.rename(run / "aside")
    before = contents(run / "checkpoints"), (run / "metrics.jsonl").read_bytes()
    ended = train(*TINY, "--run", run)
    damage = f"{tensor_file(run, 20)} is damaged: the checksum of"
    words = f"{run} has no checkpoint to resume from ({damage}"
    assert_one_sentence(ended, 1, f"error: rank 0 on {HOST}: {words}", "--fresh starts anew")
    assert (contents(run / "checkpoints"), (run / "metrics.jsonl").read_bytes()) == before

    aside.rename(older)
    ended = train(*TINY, "--run", run)
    assert (ended.code, ended.err) == (0, "")
    assert f"skipped a damaged checkpoint: {damage}" in ended.out
    assert f"resuming {run} after step 15: steps 16 to 20 are repeated" in ended.out
    assert_same_training(run, whole)


# ----------------------------------------------------------------------------------------------------------------------
# While it trains


def test_losses_that_are_not_finite_stop_it_and_what_led_to_them_is_kept(whole: Path) -> None:
    run = copy_of(whole, "not-finite")
    (run / "notes.txt").write_text("mine")
    command = [*TINY, "--run", run, "--fresh", "--optim.lr", "1e30", "--train.save_every", "1", *AT_ONCE]
    ended = train(*command, "--train.max_consecutive_skips", "2", "--train.keep_last", "9")
    assert_one_sentence(
        ended, 1, f"error: rank 0 on {HOST}: steps 2 to 3 were skipped", f"{run}/failed", "samples 24 to 71"
    )
    assert "step 2 was skipped: its loss is nan (samples 24 to 47)" in ended.out
    assert exit_of(run)["code"] == 1
    assert steps(run) == [1, 2, 3]
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000001", "step-00000002"]
    assert find_damage(run / "checkpoints/step-00000002") is None
    (kept,) = list_checkpoints(run / "failed")
    assert find_damage(kept) is None
    assert read_manifest(kept).counters["samples_consumed"] == 24
    assert not (run / "report.html").exists()
    assert (run / "notes.txt").read_text() == "mine"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds one checkpoint of `tiny`, but not two."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", place], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"can't mount a small file system: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_a_full_disk_keeps_the_last_checkpoint_and_stops_nothing(whole: Path, small_disk: Path) -> None:
    run = small_disk / "run"
    words = ("--data.cache", whole.with_name(".data"), "--train.save_every", "2", *AT_ONCE, "--train.steps", "8")
    ended = train(*TINY, "--run", run, *words)
    assert_one_sentence(
        ended,
        1,
        "error: ",
        "the checkpoint of step 8 was not saved: could not write ",
        "No space left on device",
        "; the last checkpoint is that of step 2: the steps since are lost",
    )
    assert "the checkpoint of step 4 was not saved" in ended.out
    assert "No space left on device (rank 0); training continues, and the save is tried again after step 6" in ended.out
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000002"]
    assert find_damage(run / "checkpoints/step-00000002") is None
    assert steps(run) == list(range(1, 9)), "it trained to the end"


@pytest.mark.soak
def test_a_disk_without_room_for_a_tier_is_a_sentence_and_the_run_goes_on_with_more(small_disk: Path) -> None:
    run = small_disk / "run"
    words = (*TINY, *AT_ONCE, "--train.global_batch_size", "4", "--data.max_bytes", "300000", "--run", run)
    assert (first := train(*words, "--parallel", "dp1-mb2-fp32", "--train.steps", "2")).code == 0, first.err
    words = (*words, "--parallel", "dp1-mb2-fp32-ooptd", "--train.steps", "3")
    ended = train(*words)
    assert_one_sentence(ended, 1, "on disk can't be given", "No space left on device; make room there")
    subprocess.run(["mount", "-o", "remount,size=30m", small_disk], check=True)
    assert "after step 2" in train(*words).out
    assert steps(run) == [1, 2, 3]


def test_a_disk_that_turns_read_only_is_one_sentence_and_loses_nothing(small_disk: Path) -> None:
    root = small_disk / "checkpoints"
    save_one(root, 10)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    try:
        with pytest.raises(
            MusterError, match=r"step 20 was not saved: could not write .*: Read-only file system \(rank"
        ):
            save_one(root, 20)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert find_latest(root) == root / "step-00000010"
    assert find_damage(root / "step-00000010") is None
    save_one(root, 20)
    assert find_latest(root) == root / "step-00000020"


def test_a_folder_that_vanishes_stops_nothing(whole: Path) -> None:
    run = whole.with_name("vanishing")
    with Command(*TINY, "--run", run, "--train.save_every", "1", hold_after=[4, 19], forked=True) as job:
        job.wait_for_step(4)
        job.wait_for(run / "checkpoints/latest")
        (run / "checkpoints").rename(run / "away")
        (run / "checkpoints").write_text("not a folder")
        kept = find_latest(run / "away")
        job.go_on(4)
        (said,) = job.hear("was not saved: could not write ").splitlines()[-1:]
        (run / "checkpoints").unlink()
        job.go_on(19)
        ended = job.wait()
    assert (ended.code, ended.err) == (0, "")
    assert "; training continues, and the save is tried again after step " in said
    assert kept is None or find_damage(kept) is None, "what was saved before is untouched"
    assert find_damage(run / "checkpoints/step-00000020") is None
    assert_same_training(run, whole)


@pytest.mark.parametrize("lost", ["stdout", "stderr"])
def test_a_lost_output_stops_nothing(lost: str, tmp_path: Path) -> None:
    """A reader that has gone (`| head`) on one stream, a full disk under the other."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [*words_of(), "train", *TINY, "--run", str(tmp_path), "--train.steps", "3", "--train.log_every", "1"]
    with os.fdopen(writer, "wb") as pipe, open("/dev/full", "wb") as full:
        streams = {"stdout": pipe, "stderr": full} if lost == "stdout" else {"stdout": full, "stderr": pipe}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False, timeout=LIMIT_S, **streams)
    assert done.returncode == 0
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "report.html").exists()


def test_metrics_wait_for_a_full_disk(tmp_path: Path) -> None:
    log = MetricsLog(Path("/dev/full"))
    assert log.append({"step": 1}) == "can't write /dev/full (No space left on device); training continues"
    assert log.append({"step": 2}) is None, "it is said once"
    with pytest.raises(MusterError, match=r"can't write /dev/full \(No space left on device\); when that is fixed"):
        log.flush()
    log.path = tmp_path / "metrics.jsonl"
    log.append({"step": 3})
    assert read_metrics(log.path) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_ranks_that_go_on_write_what_a_full_disk_did_not_take(tmp_path: Path) -> None:
    """Rows that wait outlast their generation, but those of the step that is done again; cutting needs no room."""
    carried, path = Carried(), tmp_path / "metrics.jsonl"
    carried.log(path).append({"step": 1})
    with files_of_at_most(path.stat().st_size):
        for step in (2, 3):
            carried.log(path).append({"step": step})
        carried.log(path).truncate_after(2)
    carried.log(path).append({"step": 3, "again": True})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_a_full_disk_ends_no_training_that_goes_on_after_a_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    world = SimpleNamespace(generation=2)
    log, trainer = MetricsLog(tmp_path / "metrics.jsonl"), SimpleNamespace(step_count=3)
    run = SimpleNamespace(world=world, run_dir=tmp_path, started_at=1.0, metrics=log, trainer=trainer, plan=Plan())
    with files_of_at_most(0):
        TrainingLoop._record_attempt(cast(Any, run))
        assert f"can't write {tmp_path}/attempts.jsonl (File too large); training continues" in capsys.readouterr().out
        world.generation = 0
        with pytest.raises(MusterError, match="can't write the run directory"):
            TrainingLoop._record_attempt(cast(Any, run))


def test_metrics_forget_what_is_done_again(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.truncate_after(0)
    for step in (1, 2, 3):
        log.append({"step": step})
    with log.path.open("a") as file:
        file.write('{"step": 4, "train/lo')
    log.truncate_after(2)
    log.append({"step": 3})
    assert log.path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert read_metrics(log.path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    log.path.write_text('{"step": 1}\n{"step"\n{"step": 2}\n{"step": 3}\n{"step": 4}')
    log.truncate_after(4)
    assert log.path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4}\n', "all that is whole"


@pytest.mark.parametrize(("variable", "launcher"), [("SLURM_STEP_NUM_TASKS", "srun"), ("WORLD_SIZE", "a launcher")])
def test_copies_that_know_nothing_of_each_other_are_refused(
    variable: str, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv(variable, "2")
    assert main(["train", "--preset", "tiny", "--run", str(tmp_path / "run")]) == 2
    words = (
        f"muster: {launcher} started 2 copies of this command ({variable}), and each would train a world of its own:"
    )
    assert capsys.readouterr().err.startswith(words)
    assert not (tmp_path / "run").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Under torchrun


def as_torchrun(port: int) -> dict[str, str]:
    """The environment of the only rank that torchrun started."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"TORCHELASTIC_RUN_ID": "test", "RANK": "0", "WORLD_SIZE": "1", **place}


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = train(*TINY, "--run", tmp_path / "run", env=as_torchrun(port))
    assert_one_sentence(ended, 1, f"could not open the store of torchrun on 127.0.0.1:{port}")


def test_a_plan_that_does_not_fit_torchrun_is_in_exit_json(tmp_path: Path) -> None:
    ended = train(*TINY, "--run", tmp_path / "run", "--parallel", "dp2", env=as_torchrun(0))
    assert_one_sentence(ended, 3, "it needs 2 processes", "but there is 1")
    exit_json = exit_of(tmp_path / "run")
    assert (exit_json["code"], f"muster: {exit_json['reason']}\n") == (3, ended.err)
