"""Saving beside the training, on real ranks: what fails is told to all and stops nothing."""

import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from muster.checkpoint.async_saver import AsyncSaver, SaveRequest
from muster.checkpoint.checkpoint_dir import RetentionPolicy, find_damage, find_latest, list_checkpoints
from muster.checkpoint.load import read_full
from muster.checkpoint.staging import StagingBuffer
from muster.parallel.offloaded_group import OffloadedGroup
from muster.plugins.registry import PluginComponent
from muster.train import custom_step
from muster.train.custom_step import CustomStep
from muster.train.parameter_updater import ParameterUpdater
from muster.train.step_state import StepHooks, no_step
from tests.ranks import run_ranks, started
from tests.saver_ranks import all_equal
from tests.test_checkpoint import INFO, one_shard


def test_saves_beside_the_training(tmp_path: Path) -> None:
    found = run_ranks(3, "tests.saver_ranks:saves_beside_the_training", {"root": str(tmp_path / "checkpoints")})
    for rank in found:
        assert (rank["first"], rank["again"], rank["after the kill"], rank["after all"]) == (None,) * 4
        assert rank["same writer and memory"], "the copy goes where the one before went"
        assert rank["read"]
        killed = "the checkpoint of step 3 was not saved: the process that writes it was killed by SIGKILL (rank 2)"
        assert rank["killed"] == killed
        assert rank["refused"].startswith("the checkpoint of step 5 was not saved: could not write ")
        assert ": Not a directory (rank " in rank["refused"]
        assert rank["vanished"].startswith("the checkpoint of step 6 was not saved: could not write ")
        assert rank["vanished"].endswith("/gone/checkpoints: No such file or directory (rank 0)")
    assert found[0]["steps"] == [4, 7]
    assert found[0]["rubbish"] == []


def test_tensors_may_change_when_they_are_copied_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, copy_from = threading.Event(), StagingBuffer.copy_from

    def slowly(staging: StagingBuffer, *arguments: Any) -> None:
        assert gate.wait(300)
        copy_from(staging, *arguments)

    monkeypatch.setattr(StagingBuffer, "copy_from", slowly)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    saver = AsyncSaver(0, 1, store)
    shard = one_shard(value=3)
    saver.start(SaveRequest(tmp_path / "checkpoints", 1, INFO, RetentionPolicy()), [shard])
    order: list[str] = []

    def step() -> None:
        optimizer = SimpleNamespace(step=lambda _: (order.append("changed"), shard.tensor.fill_(4)))
        updater = SimpleNamespace(
            hooks=StepHooks(before_update=saver.wait_staged),
            stages={},
            optimizer=optimizer,
            state=no_step(),
            _buckets={},
            _lr_scale=1.0,
            sync_tied_copies=lambda: None,
            balance_experts=lambda: None,
        )
        ParameterUpdater.optimizer_step(cast(Any, updater))

    stepping = threading.Thread(target=step)
    stepping.start()
    stepping.join(0.2)
    assert order == [], "the step waits with its change"
    gate.set()
    stepping.join(300)
    assert order == ["changed"]
    assert saver.wait(300)
    saver.close()
    assert saver.error is None
    assert (read_full(tmp_path / "checkpoints/step-00000001", "model/w") == 3).all()


def test_parameters_and_state_of_the_disk_keep_their_memory_until_they_are_copied() -> None:
    """A checkpoint brings them into memory, which the next pass and update, also a skipped one, would free."""
    weight, order = torch.ones(4), list[str]()

    def copied() -> None:
        order.append(f"copied {weight.untyped_storage().nbytes()} bytes")

    group = SimpleNamespace(on_disk=True, values={"w": weight}, _is_here=True, _is_changed=False)
    files = SimpleNamespace(submit=lambda work: work)
    group._owner = SimpleNamespace(compute_dtype=torch.float32, before_emptying=copied, files=files)
    OffloadedGroup.keep(cast(Any, group))()
    assert order == ["copied 16 bytes"]
    assert weight.untyped_storage().nbytes() == 0
    skipped = SimpleNamespace(state=replace(no_step(), skip_reason="a spike"), hooks=StepHooks(before_update=copied))
    ParameterUpdater.prepare_host_updates(cast(Any, skipped))
    skipped.optimizer = SimpleNamespace(pending=None)
    ParameterUpdater.begin_delayed_step(cast(Any, skipped))
    assert len(order) == 3


def test_a_step_of_a_plugin_waits_for_the_copy_before_it_changes_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def sam(now: custom_step.StepContext) -> None:
        order.append("moved aside")
        now.update()

    updater = SimpleNamespace(
        state=replace(no_step(), grad_norm=1.0),
        hooks=StepHooks(before_update=lambda: order.append("copied")),
        optimizer_step=lambda: order.append("changed"),
        drop_gradients=lambda: None,
    )
    monkeypatch.setattr(custom_step, "find_component", lambda *_: PluginComponent("step", "sam", sam, None))
    CustomStep(cast(Any, updater), "sam").run(lambda: None)
    assert order == ["copied", "moved aside", "changed"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_random_kills_of_savers_lose_nothing(seed: int, tmp_path: Path) -> None:
    """200 kills over four long-lived launches of 2 to 4 ranks."""
    size = 2 + seed % 3
    payload = {"root": str(tmp_path / "checkpoints"), "seed": random.randrange(10**6), "kills": 50}
    found = run_ranks(size, "tests.saver_ranks:random_kills", payload)
    assert sum(rank["kills"] for rank in found) >= 48, found
    assert 5 <= found[0]["failed"] <= 50, f"the kills met saves at work: {found}"


@pytest.mark.soak
def test_kills_of_whole_jobs_lose_nothing(tmp_path: Path) -> None:
    """20 jobs of two ranks, each killed with its writers at a random moment of saving; the next goes on from there."""
    root, said = tmp_path / "checkpoints", tmp_path / "saved"
    said.write_text("0")
    for _ in range(20):
        before = int(said.read_text() or 0)
        kill_a_job(tmp_path, {"root": str(root), "saved": str(said)}, before)
        latest = find_latest(root)
        assert latest is not None
        assert all_equal(latest) >= before + 1, "what was said to be saved is there"
        assert all(find_damage(folder) is None for folder in list_checkpoints(root)), (
            "half a checkpoint under a good name"
        )


def kill_a_job(folder: Path, payload: dict, before: int) -> None:
    with started(folder, 2, "tests.saver_ranks:saves_for_ever", payload) as ranks:
        limit = time.monotonic() + 300
        while int(Path(payload["saved"]).read_text() or 0) <= before:
            assert not ranks.end_within(0.005), (folder / "output-0.txt").read_text()
            assert time.monotonic() < limit
        time.sleep(random.uniform(0, 0.5))
