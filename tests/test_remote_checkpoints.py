"""Copies of checkpoints below a URL: whole ones only, brought back where a run directory has none."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from muster.checkpoint import remote_lock
from muster.checkpoint.async_saver import AsyncSaver, SaveRequest
from muster.checkpoint.checkpoint_dir import RetentionPolicy, checkpoint_path, find_damage
from muster.checkpoint.remote import RemoteCheckpoints, upload_in_subprocess
from muster.checkpoint.remote_lock import STALE_AFTER_S, hold_remote_lock
from muster.spec.errors import ConfigError, MusterError
from tests.test_checkpoint import INFO, one_shard, save_one
from tests.test_train_faults import contents
from tests.train_runs import AT_ONCE, train


def mirrored(folder: Path, place: Path, step: int) -> RemoteCheckpoints:
    """Save a checkpoint of `step` and its remote copy."""
    mirror = RemoteCheckpoints(place.as_uri())
    saved = save_one(folder, step)
    mirror.begin_upload(step)
    upload_in_subprocess(saved / "rank-00000.safetensors", step, mirror.url)
    mirror.commit(saved, RetentionPolicy(last=2, permanent_every=10))
    return mirror


def test_whole_copies_are_found_kept_and_fetched(tmp_path: Path) -> None:
    assert RemoteCheckpoints((tmp_path / "there").as_uri()).steps() == []
    for step in (10, 11, 12, 13, 13):
        mirror = mirrored(tmp_path / "here", tmp_path / "there", step)
    assert mirror.steps() == [10, 12, 13], "as keep says"
    fetched = mirror.download(13, tmp_path / "new")
    assert find_damage(fetched) is None
    assert contents(fetched) == contents(checkpoint_path(tmp_path / "here", 13))
    mirror.begin_upload(14)
    upload_in_subprocess(fetched / "rank-00000.safetensors", 14, mirror.url)
    assert mirror.steps() == [10, 12, 13], "without its manifest a checkpoint is none"
    mirror.begin_upload(13)
    assert mirror.steps() == [10, 12]
    for step in (5, 6, 7):  # of a run that went back
        mirrored(tmp_path / "back", tmp_path / "there", step)
    assert mirror.steps() == [6, 7, 10, 12], "what lies above is not counted"
    mirror.delete_all()
    assert mirror.steps() == []


def cut(place: Path) -> None:
    (place / "step-00000003/rank-00000.safetensors").write_bytes(b"half")


def forget(place: Path) -> None:
    (place / "step-00000003/rank-00000.safetensors").unlink()


@pytest.mark.parametrize(("harm", "words"), [(cut, "has 4 bytes instead of"), (forget, "could not access")])
def test_a_damaged_copy_is_one_sentence_and_leaves_nothing(
    harm: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    mirror = mirrored(tmp_path / "here", tmp_path / "there", 3)
    harm(tmp_path / "there")
    with pytest.raises(MusterError, match=words):
        mirror.download(3, tmp_path / "new")
    assert not checkpoint_path(tmp_path / "new", 3).exists()


def test_what_is_no_place_for_copies_is_refused(tmp_path: Path) -> None:
    for url, words in (
        ("bucket/run", "is not a URL"),
        ("memory://x", "would be in the memory of one process"),
        ("nowhere://x", "fsspec doesn't know nowhere:// URLs"),
    ):
        with pytest.raises(ConfigError, match=words):
            RemoteCheckpoints(url)
    with pytest.raises(MusterError, match="could not access"):
        upload_in_subprocess(tmp_path / "nothing", 1, (tmp_path / "there").as_uri())


def test_a_saver_copies_beside_the_training_and_says_when_it_can_not(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    saver = AsyncSaver(0, 1, store)
    (tmp_path / "there").mkdir()
    place = (tmp_path / "there").as_uri()
    for step in (1, 2):
        saver.start(SaveRequest(tmp_path / "here", step, INFO, RetentionPolicy(), place), [one_shard()])
        saver.wait()
        if step == 1:
            assert (saver.pop_error(), saver.on_disk) == (None, True)
            assert RemoteCheckpoints(place).steps() == [1]
            (tmp_path / "there").rename(tmp_path / "gone")
            (tmp_path / "there").write_text("no folder")
    saver.close()
    assert saver.on_disk
    assert (saver.pop_error() or "").startswith(
        "the checkpoint of step 2 was saved, but not uploaded: could not access file:///"
    )
    assert find_damage(checkpoint_path(tmp_path / "here", 2)) is None


def test_a_mirror_is_one_run_s_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, lock = (tmp_path / "there").as_uri(), tmp_path / "there/lock.json"
    holder = rf"{tmp_path}/one on .*, which wrote there \d+ s ago: give another"
    taken = rf"{url} is the remote checkpoint directory of another job, of {holder}"
    with hold_remote_lock(url, tmp_path / "one", recheck_after_s=0):
        said = json.loads(lock.read_text())
        with pytest.raises(MusterError, match=taken), hold_remote_lock(url, tmp_path / "two", recheck_after_s=0):
            pass
        with hold_remote_lock(
            url, tmp_path / "one", recheck_after_s=0
        ):  # started again: its directory is locked by itself
            pass
        with hold_remote_lock(None, tmp_path / "two"):
            pass
    assert not lock.exists()
    for host, pid, age, free in (
        (said["host"], 2**22 + 1, 1, True),  # dead
        (said["host"], said["pid"], STALE_AFTER_S + 1, True),  # dead, and its number is another's
        ("elsewhere", 1, 1, False),
        ("elsewhere", 1, STALE_AFTER_S + 1, True),
    ):
        lock.write_text(json.dumps({**said, "host": host, "pid": pid, "time": time.time() - age}))
        if free:
            with hold_remote_lock(url, tmp_path / "two", recheck_after_s=0):
                pass
            assert not lock.exists()
            continue
        with pytest.raises(MusterError, match=taken), hold_remote_lock(url, tmp_path / "two", recheck_after_s=0):
            pass
        lock.unlink()
    lock.write_text("half")
    other = {**said, "time": time.time()}
    clock = SimpleNamespace(time=time.time, sleep=lambda _: lock.write_text(json.dumps(other)))
    monkeypatch.setattr(remote_lock, "time", clock)
    with pytest.raises(MusterError, match=taken), hold_remote_lock(url, tmp_path / "two"):  # both began at once
        pass


@pytest.mark.soak
def test_a_run_goes_on_where_it_has_never_been(tmp_path: Path) -> None:
    place = (tmp_path / "there").as_uri()
    command = ["--preset", "tiny", "--eval.batches", "0", "--train.sample_tokens", "0", "--parallel", "dp2-mb12"]
    command += ["--train.remote_checkpoint_dir", place, "--data.cache", tmp_path / "data", *AT_ONCE]
    first = train(*command, "--run", tmp_path / "one", "--train.steps", "2", "--train.save_every", "1")
    assert first.code == 0, first.err
    assert RemoteCheckpoints(place).steps() == [1, 2]
    second = train(*command, "--run", tmp_path / "two", "--train.steps", "3", "--parallel", "dp1-mb24")
    assert second.code == 0, second.err
    assert f"fetched the checkpoint of step 2 from {place}" in second.out
    assert f"resuming {tmp_path / 'two'} after step 2" in second.out
    assert RemoteCheckpoints(place).steps() == [2, 3]
    name = "step-00000002"
    assert contents(tmp_path / "two/checkpoints" / name) == contents(tmp_path / "one/checkpoints" / name)
    (tmp_path / "there").rename(tmp_path / "gone")
    (tmp_path / "there").mkdir()
    (tmp_path / "there/step-00000003").write_text("no folder")
    third = train(*command, "--run", tmp_path / "one", "--train.steps", "3", "--parallel", "dp1-mb24")
    assert third.code == 0, third.err
    assert "was saved, but not uploaded" in third.out
    assert "step 3 is complete in the run directory" in third.out
