"""Training through the command line, with real ranks: what a run leaves, and that nothing makes it another run."""

import json
import os
import random
import signal
import socket
import time
from contextlib import suppress
from math import cos, pi
from pathlib import Path

import pytest

from muster.checkpoint.checkpoint_dir import find_latest, list_checkpoints
from muster.checkpoint.manifest import read_manifest
from muster.config.load_config import load_plan, load_run_config
from muster.data.dataset import StreamHash, sample_digest
from muster.data.tokenizer import ByteTokenizer
from muster.spec.plan_name import format_plan_name
from muster.train.data import open_dataset
from muster.train.text_generation import sample_prompt
from tests.test_launch import assert_gone
from tests.train_runs import (
    QUICK,
    Command,
    Ended,
    assert_one_sentence,
    assert_same_training,
    copy_of,
    exit_of,
    rows_of,
    sample_hash,
    steps,
    train,
    whole_run,
)

HOST = socket.gethostname()
TINY = ("--preset", "tiny", *QUICK)


@pytest.fixture
def whole_ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return whole_run(tmp_path_factory.getbasetemp())[1]


def plan_of(run: Path) -> str:
    return format_plan_name(load_plan(run / "plan.yaml"))


def ranks_of(run: Path) -> int:
    return load_plan(run / "plan.yaml").world_size


def rates(first: int, last: int, total_steps: int) -> list[float]:
    """The learning rates of some of the preset's steps: four of warm-up, then a cosine down to a tenth."""
    warm_up = [3e-3 * step / 4 for step in range(1, 5)]
    fall = [pi * (step - 4) / (total_steps - 4) for step in range(5, total_steps + 1)]
    return [*warm_up, *(3e-3 * (0.1 + 0.9 * (1 + cos(angle)) / 2) for angle in fall)][first - 1 : last]


# ----------------------------------------------------------------------------------------------------------------------
# A run that nothing disturbs


def test_a_run_leaves_all_that_is_promised(whole: Path, whole_ended: Ended) -> None:
    rows = rows_of(whole)
    assert [row["step"] for row in rows] == list(range(1, 21))
    wanted = {"step", "train/loss", "train/grad_norm", "train/lr", "perf/tokens_per_s", "time/step"}
    assert all(wanted <= row.keys() for row in rows)
    assert rows[-1]["train/loss"] < 0.7 * rows[0]["train/loss"]
    assert all(row["train/grad_norm"] > 0.1 for row in rows)
    assert [row["train/lr"] for row in rows] == pytest.approx(rates(1, 20, 20))
    timelines = json.loads((whole / "timeline.json").read_text())
    assert timelines["predicted"]["events"]
    assert timelines["measured"]["events"]
    result = json.loads((whole / "result.json").read_text())
    assert f"validation loss {result['metrics']['eval/loss']:.4f}" in whole_ended.out
    assert result["comparison"]["memory: parameters"]["measured"] > 0
    assert (whole / "report.html").read_text().startswith("<!doctype html>")
    assert exit_of(whole)["code"] == 0
    assert [path.name for path in list_checkpoints(whole / "checkpoints")] == ["step-00000015", "step-00000020"]
    config = load_run_config(None, whole / "config.yaml", []).config
    assert config.data.add_bos is False, "as the tokenizer does"
    assert config.model_dump() == config.model_dump() | load_run_config(
        "tiny", None, [("data.add_bos", False)]
    ).config.model_dump(exclude={"train": {"save_every"}, "parallel": {"micro_batch_size"}}) | {
        "train": config.train.model_dump(),
        "parallel": config.parallel.model_dump(),
    }
    assert ranks_of(whole) == 1
    dataset = open_dataset(config, whole)
    prompt = sample_prompt(dataset, ByteTokenizer(), config.train.seq_len)
    held_out = dataset.validation_batch(0, dataset.num_validation_samples).tokens_BS.astype("uint8").tobytes()
    assert prompt.encode() in held_out, "the model has not learnt the beginning of its sample by heart"
    for words in (
        f"plan: {plan_of(whole)} for 1 process",
        "predicted step",
        "validation loss",
        f"sample:\n{prompt}",
        f"report: {whole}/report.html",
        "MFU",
    ):
        assert words in whole_ended.out
    assert " a step" not in whole_ended.out, "one time is said of a step: that of the run's own passes"
    assert whole_ended.err == ""


def test_the_hash_is_that_of_the_samples_in_their_order(whole: Path) -> None:
    config = load_run_config(None, whole / "config.yaml", []).config
    batch = open_dataset(config, whole).train_batch(0, 20 * config.train.global_batch_size)
    stream = StreamHash()
    stream.update(sample_digest(row) for row in batch.tokens_BS)
    assert sample_hash(whole) == stream.state + "\n"


def test_again_it_is_finished(whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    again = train("--preset", "tiny", "--run", whole)
    assert (again.code, again.err) == (0, "")
    assert "is finished: all of its 20 steps are done" in again.out
    assert f"report: {whole}/report.html" in again.out
    assert (whole / "metrics.jsonl").read_bytes() == before


# ----------------------------------------------------------------------------------------------------------------------
# Runs that are interrupted


def test_a_run_survives_whatever_ends_its_processes(whole: Path) -> None:
    """Stopped under torchrun, then a rank of three killed, ended with the plan of the whole: the same run."""
    run, draw = whole.with_name("survivor"), random.Random(1)
    command = [*TINY, "--run", run, "--train.save_every", "3"]
    last = draw.randint(4, 6)
    with Command(*command, torchrun=2, hold_after=[last], forked=True) as job:
        job.wait_for(run / "plan.yaml")
        assert_one_sentence(train(*command, "--fresh"), 1, f"another job is running in {run}", "--run")
        job.wait_for_step(last)
        job.process.send_signal(signal.SIGTERM)  # which torchrun passes on, to who is held up too
        assert job.wait().code != 0
    assert exit_of(run)["code"] == 75
    assert last <= steps(run)[-1] < 20
    assert ranks_of(run) == 2
    kill_a_rank(run, [*command, "--nproc", "3"], at_step=draw.randint(8, 10), victim=draw.randrange(3))
    assert ranks_of(run) == 3
    ended = train(*command, "--parallel", whole / "plan.yaml")
    assert (ended.code, ended.err) == (0, "")
    assert plan_of(run) == plan_of(whole)
    assert exit_of(run)["code"] == 0
    assert_same_training(run, whole)


def kill_a_rank(run: Path, command: list, at_step: int, victim: int) -> None:
    with Command(*command, hold_after=[at_step], forked=True) as job:
        job.wait_for_step(at_step)
        ranks = job.ranks()
        assert len(ranks) == 3
        os.kill(ranks[victim], signal.SIGKILL)
        job.go_on(at_step)
        ended = job.wait()
    reason = f"rank {victim} on {HOST} was killed by signal 9 (SIGKILL)"
    assert_one_sentence(ended, 1, f"error: {reason}")
    assert (exit_of(run)["code"], exit_of(run)["reason"]) == (1, reason)
    assert_gone(list(ranks.values()))


def stop(run: Path, command: list, at_step: int, victim: int) -> None:
    """One rank alone is asked to stop, as by the machine that it is on."""
    with Command(*command, hold_after=[at_step]) as job:
        job.wait_for_step(at_step)
        os.kill(job.ranks()[victim], signal.SIGTERM)
        job.go_on(at_step)
        ended = job.wait()
    assert (ended.code, ended.err) == (75, "")
    assert exit_of(run)["code"] == 75
    last = steps(run)[-1]
    assert f"stopped after step {last} on request" in ended.out
    latest = find_latest(run / "checkpoints")
    assert latest is not None
    assert read_manifest(latest).step == last < 20


@pytest.mark.soak
def test_one_rank_that_is_asked_to_stop_stops_all(whole: Path) -> None:
    run = whole.with_name("stopped")
    command = [*TINY, "--run", run, "--train.save_every", "3"]
    stop(run, [*command, "--nproc", "2"], at_step=5, victim=1)
    ended = train(*command)
    assert (ended.code, ended.err) == (0, "")
    assert_same_training(run, whole)


@pytest.mark.soak
def test_torchrun_stops_and_goes_on(whole: Path) -> None:
    run = whole.with_name("torchrun")
    command = [*TINY, "--run", run]
    with Command(*command, torchrun=2, hold_after=[4]) as job:
        job.wait_for(run / "plan.yaml")
        assert_one_sentence(train(*command, "--fresh"), 1, f"another job is running in {run}")
        job.wait_for_step(4)
        job.process.send_signal(signal.SIGTERM)  # which torchrun passes on, to who is held up too
        assert job.wait().code != 0
    assert exit_of(run)["code"] == 75
    assert 4 <= steps(run)[-1] < 20
    ended = train(*command, torchrun=2)
    assert ended.code == 0, ended.err
    assert exit_of(run)["code"] == 0
    assert ranks_of(run) == 2
    assert_same_training(run, whole)


def test_a_run_goes_on_beyond_its_end_and_says_what_that_means(whole: Path) -> None:
    run = copy_of(whole, "longer")
    before = (run / "metrics.jsonl").read_text()
    ended = train(*TINY, "--run", run, "--train.steps", "22")
    assert (ended.code, ended.err) == (0, "")
    assert "train.steps was 20, now 22: from step 21 on, the learning rate is that of 22 steps" in ended.out
    assert (run / "metrics.jsonl").read_text().startswith(before)
    assert steps(run) == list(range(1, 23))
    assert [row["train/lr"] for row in rows_of(run)[20:]] == pytest.approx(rates(21, 22, 22))
    assert (run / "report.html").read_text() != (whole / "report.html").read_text()


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["dp2-mb12-fp32", "dp3-mb8-fp32", "dp4-mb6-fp32", "dp8-mb3-fp32"])
def test_more_processes_train_the_same(plan: str, whole: Path) -> None:
    run = whole.with_name(plan)
    ended = train(*TINY, "--run", run, "--parallel", plan)
    assert (ended.code, ended.err) == (0, "")
    assert plan_of(run) == plan
    assert_same_training(run, whole)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(7))
def test_a_run_survives_any_kill(seed: int, whole: Path) -> None:
    """Killed or asked to stop at three random moments, also while it starts, saves or ends, with other numbers of ranks
    each time."""
    run, draw = whole.with_name(f"killed-{seed}"), random.Random(seed)
    for _ in range(3):
        if (run / "report.html").exists():
            break  # it was faster than the kill
        command = [*TINY, "--run", run, "--train.save_every", str(draw.randint(1, 4))]
        with Command(*command, "--nproc", draw.choice("1234")) as job:
            if draw.random() < 0.3:
                time.sleep(draw.uniform(0, 8))
            else:
                job.wait_for_step(draw.randint(1, 19))
                time.sleep(draw.uniform(0, 0.3))
            ranks = job.ranks()
            if ranks and draw.random() < 0.7:
                with suppress(ProcessLookupError):  # it was faster
                    os.kill(draw.choice(list(ranks.values())), draw.choice([signal.SIGKILL, signal.SIGTERM]))
                job.wait()
        if ranks:
            assert_gone(list(ranks.values()))
    assert train(*TINY, "--run", run, "--train.save_every", "5").code == 0
    assert_same_training(run, whole)
