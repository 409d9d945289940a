"""The memory limit of a run: what a CPU rank counts, what exceeds it, and the losses of a plan within it."""

import gc
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from muster.config.named_model import load_model
from muster.cost.memory.forecast import forecast_memory
from muster.parallel.allocation_meter import AllocationMeter, host_memory
from muster.schedule.build import build_program
from muster.spec.cluster import single_node_cluster
from muster.spec.device import DeviceSpec
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from tests import forks
from tests.train_runs import QUICK, assert_one_sentence, copy_of, losses, rows_of, train

PLAN = ("--parallel.precision", "fp32", "--parallel.micro_batch_size", "1")
RUN = ("--preset", "tiny", *QUICK, "--train.steps", "4", "--train.global_batch_size", "2", "--train.save_every", "2")
LEAST = "dp1-mb1-rfull-ooptd-oparamd-oactd-fp32"


class _Excess(Exception):
    pass


def meter(limit_bytes: int = 1 << 40) -> AllocationMeter:
    return AllocationMeter(limit_bytes, _Excess)


def test_storages_count_while_they_live_and_each_once() -> None:
    with meter() as counted:
        one = torch.empty(100)
        views = one[:50], one.view(10, 10), one.detach(), one.add_(1)
        assert counted.held_bytes == 400
        pair = torch.empty(8).split(4)
        assert counted.held_bytes == 432
        del one, views, pair
        gc.collect()
        assert counted.held_bytes == 0
        assert counted.peak_bytes == 432
        counted.start_measuring()
        assert counted.peak_bytes == 0


def test_emptied_storages_count_when_they_are_filled_again() -> None:
    with meter() as counted:
        one = torch.empty(100)
        one.untyped_storage().resize_(0)
        assert counted.held_bytes == 0
        one.untyped_storage().resize_(400)
        assert counted.held_bytes == 400
    assert torch.UntypedStorage.resize_.__name__ == "resize_"


def test_gradients_and_what_autograd_saves_count_and_the_host_s_tensors_do_not() -> None:
    with meter() as counted:
        layer = nn.Linear(10, 10, bias=False)
        with host_memory():
            away = torch.empty(1000)
        assert counted.held_bytes == 400
        loss = layer(torch.empty(5, 10)).relu().sum()
        assert counted.held_bytes > 400
        away[:10].copy_(away[10:20])
        loss.backward()
        del loss
        gc.collect()
        assert counted.held_bytes == 800
    torch.empty(1000)
    assert counted.held_bytes == 800


def test_more_than_the_limit_is_an_error_in_forward_and_backward() -> None:
    weight = torch.ones(100, requires_grad=True)
    with meter(1000) as counted, pytest.raises(_Excess):
        torch.empty(251)
    with meter(1900) as counted, pytest.raises(_Excess):
        (weight * 2).sin().cos().tanh().sum().backward()
    assert counted.peak_bytes > 1900


def forecast_bytes(name: str, batch: int = 2) -> int:
    model, plan, work = load_model("tiny"), parse_plan_name(name), Workload(seq_len=64, global_batch_size=batch)
    cpu = single_node_cluster(DeviceSpec(name="cpu", kind="cpu"), plan.world_size)
    return forecast_memory(model, plan, work, cpu, build_program(plan, model, work)).fullest.terms.total


def assert_held_what_was_forecast(run: Path) -> None:
    row = json.loads((run / "result.json").read_text())["comparison"]["memory: allocated"]
    assert row["measured"] == pytest.approx(row["predicted"], rel=0.05)
    assert rows_of(run)[-1]["memory/allocated_bytes"] == row["measured"]


def limited(run: Path, plan: str, limit_bytes: int, *more: str) -> tuple[str | Path, ...]:
    return (*RUN, *PLAN, "--parallel", plan, "--memory-limit", f"{limit_bytes}B", "--run", run, *more)


def test_a_quarter_of_the_memory_gives_the_same_losses(tmp_path: Path) -> None:
    """A run that exceeds its limit ends with a sentence and goes on under the plan that `auto` finds."""
    whole = tmp_path / "whole"
    assert train(*RUN, *PLAN, "--parallel", "dp1", "--run", whole).code == 0
    run, limit_bytes = copy_of(whole, "run"), forecast_bytes("dp1-mb1-fp32") // 4
    for last in ("checkpoints/step-00000004", "report.html"):
        path = run / last
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    # Refused beforehand by its forecast, and when it is tried all the same, by what it holds.
    ended = train(*limited(run, "dp1", limit_bytes))
    assert_one_sentence(ended, 3, "but the memory limit of a device is", "oopt-oparam", "would fit")
    ended = train(*limited(run, "dp1", limit_bytes, "--ignore-memory"))
    assert ended.code == 3
    assert "Traceback" not in ended.out + ended.err
    assert f"bytes of tensors, more than its memory limit of {limit_bytes:,} bytes (forecast: 9,1" in ended.err
    assert "): recompute full and state oopt-oparam would fit (dp1-mb1-rfull-oopt-oparam-fp32)" in ended.err
    ended = train(*limited(run, "auto", limit_bytes))
    assert ended.code == 0, ended.err
    assert "oopt-oparam" in ended.out
    assert "resuming" in ended.out
    assert losses(run) == losses(whole)
    assert_held_what_was_forecast(run)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_layer_and_its_buffers_are_enough(ranks: int, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    words = ("--train.global_batch_size", "4")
    assert train(*RUN, *PLAN, *words, "--parallel", f"dp{ranks}", "--run", whole).code == 0
    name = LEAST.replace("dp1", f"dp{ranks}")
    limit_bytes = int(1.005 * forecast_bytes(name, 4))  # the counts of a run may be 5 % off, and are 0.2 % here
    ended = train(*limited(run, name, limit_bytes), *words)
    assert ended.code == 0, ended.err
    assert losses(run) == losses(whole)
    assert_held_what_was_forecast(run)


def test_what_no_tier_makes_fit_is_refused(tmp_path: Path) -> None:
    words = limited(tmp_path / "run", "auto", forecast_bytes(LEAST) // 2, "--dry-run")
    refused = forks.run("train", *words)
    assert refused.returncode == 3
    assert "no plan fits; the smallest with every layer recomputed, dp1-mb1-rfull-ooptd-oparamd-fp32" in refused.stderr
