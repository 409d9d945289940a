"""Cost of a whole training: failures, checkpoints, restarts, the ramp of the batch, energy."""

import json
from dataclasses import replace
from math import exp, expm1

import pytest

from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.planner.failures import FailureModel, best_interval_s, waiting_share
from muster.planner.training_cost import (
    MAX_STORAGE_SHARE,
    PUE,
    RESTART_S,
    STORAGE_BYTES_PER_S_PER_NODE,
    BatchRamp,
    TrainingConditions,
    energy_kwh,
    training_cost,
)
from muster.report.training import training_lines
from muster.simulate.predict import Prediction, predict
from muster.spec.errors import ConfigError
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload


@pytest.fixture(name="one", scope="module")
def _prediction() -> Prediction:
    workload = Workload(seq_len=2048, global_batch_size=256)
    return predict(load_model("llama3-8b"), parse_plan_name("dp16-pp4-z1-relem"), workload, load_cluster("64xh100"))


def test_parts_make_up_the_whole(one):
    cost = training_cost(one, 1e12, TrainingConditions(1000.0, BatchRamp(64, 64, 10_000_000)))
    parts = cost.steps_h, cost.ramp_h, cost.data_h, cost.checkpoints_h, cost.lost_h, cost.restarts_h
    assert cost.hours == pytest.approx(sum(parts))
    assert min(cost.ramp_h, cost.checkpoints_h, cost.lost_h, cost.restarts_h) > 0
    assert cost.failures == pytest.approx(cost.hours / cost.mtbf_h)
    assert cost.mtbf_h == pytest.approx(1000 / 64)
    assert cost.kwh == pytest.approx(energy_kwh(one, 3600 * cost.hours))
    assert one.cluster.usd_per_hour is not None
    assert cost.usd == pytest.approx(one.cluster.usd_per_hour * cost.hours)


def test_a_training_shorter_than_the_interval_is_saved_once(one):
    cost = training_cost(one, 1e9, TrainingConditions(1e300))
    lines = training_lines(cost, one.cluster)
    assert any("once, at the end" in line for line in lines)
    assert max(map(len, lines)) < 90


def test_the_interval_loses_least_and_storage_is_shared(one):
    """Bytes of the state over 64 links to the host at 80 % of 63 GB/s, and over 8 nodes' shares of the storage."""
    size = 12 * one.model.num_parameters
    stall_s, write_s = size / 64 / (0.8 * 63e9), size / 8 / STORAGE_BYTES_PER_S_PER_NODE
    rare = training_cost(one, 1e12, TrainingConditions(1e9))
    assert rare.checkpoint_interval_s == best_interval_s(FailureModel(1e9 * 3600 / 64, stall_s, 0, 0))
    often = training_cost(one, 1e12, TrainingConditions(500.0))
    assert often.checkpoint_interval_s == pytest.approx(write_s / MAX_STORAGE_SHARE)
    mtbf_s, segment_s = 500 * 3600 / 64, often.checkpoint_interval_s + stall_s
    runs = 3600 * often.steps_h / often.checkpoint_interval_s * expm1(segment_s / mtbf_s) * exp(write_s / mtbf_s)
    assert 3600 * often.restarts_h == pytest.approx(runs * mtbf_s * expm1((RESTART_S + write_s) / mtbf_s))
    # For rare failures each costs half a segment, the write on its way, and a restart.
    lost_s = 3600 * often.lost_h / often.failures
    assert lost_s == pytest.approx(segment_s / 2 + write_s, rel=0.05)


def test_copies_in_other_nodes_lose_less_and_a_shorter_restart_too(one):
    """A node of 8 H100 has eight cards of 50 GB/s, which carry 80 % of it."""
    disk = training_cost(one, 1e12, TrainingConditions(500.0))
    memory = training_cost(one, 1e12, TrainingConditions(500.0, recovery="memory"))
    size, mtbf_s = 12 * one.model.num_parameters, 500 * 3600 / 64
    stall_s, write_s = size / 64 / (0.8 * 63e9), size / 8 / (8 * 50e9 * 0.8)
    assert memory.checkpoint_interval_s == best_interval_s(FailureModel(mtbf_s, stall_s, write_s, 0))
    assert memory.lost_h < disk.lost_h / 2
    fast = training_cost(one, 1e12, TrainingConditions(500.0, recovery="memory", restart_s=10))
    assert fast.restarts_h < memory.restarts_h / 50
    assert fast.effective_share > memory.effective_share > disk.effective_share
    alone = predict(one.model, parse_plan_name("dp8-z3-rfull"), one.workload, load_cluster("8xh100"))
    with pytest.raises(ConfigError, match="expected several nodes"):
        training_cost(alone, 1e12, TrainingConditions(recovery="memory"))


def test_nodes_in_repair_are_waited_for_unless_there_are_spares(one):
    """64 devices that fail every 500 h lose a node every 7.8 h; each is away for 24 h."""
    usual = [waiting_share(24 / (500 / 64), spares) for spares in (0, 4, 12)]
    shares = []
    for spares in (0, 4, 12):
        cost = training_cost(one, 1e12, TrainingConditions(500.0, spare_nodes=spares, repair_hours=24))
        shares.append(cost.waiting_h / cost.hours)
        assert cost.usd == pytest.approx(one.cluster.usd_per_hour * (1 + spares / 8) * cost.hours)
        assert cost.kwh == pytest.approx(energy_kwh(one, 3600 * (cost.hours - cost.waiting_h)))
    assert shares == pytest.approx(usual, rel=0.15), "of five days, at the beginning of which all spares are there"
    assert all(share <= most for share, most in zip(shares, usual, strict=True))
    assert training_cost(one, 1e12, TrainingConditions(500.0)).waiting_h == 0


def test_a_training_that_fails_faster_than_it_restarts_is_refused(one):
    with pytest.raises(ConfigError, match="the training would never end"):
        training_cost(one, 1e12, TrainingConditions(1.0))


def test_a_ramp_is_the_sum_of_its_batches(one):
    """Three sizes, of which each is predicted: 64, 128 and 192 sequences, 1,920 of them each."""
    cost = training_cost(one, 1e12, TrainingConditions(batch_ramp=BatchRamp(64, 64, 5760)))
    expected_s = -5760 / 256 * one.step_time_s
    for size in (64, 128, 192):
        smaller = one.workload.model_copy(update={"global_batch_size": size})
        expected_s += 1920 / size * predict(one.model, one.plan, smaller, one.cluster).step_time_s
    assert 3600 * cost.ramp_h == pytest.approx(expected_s, rel=0.02)
    assert cost.steps == training_cost(one, 1e12).steps + round(1920 / 64 + 1920 / 128 + 1920 / 192 - 5760 / 256)


def test_llama_3_trained_effectively_for_more_than_90_percent():
    """16,384 H100: a failure every 3 hours, 54 days (arXiv:2407.21783 §3.3.4)."""
    workload = Workload(seq_len=8192, global_batch_size=2048)
    plan = parse_plan_name("dp128-tp8-pp16-z1-relem")
    one = predict(load_model("llama3.1-405b"), plan, workload, load_cluster("16384xh100"))
    cost = training_cost(one, 15.6e12)
    assert cost.mtbf_h == pytest.approx(54 * 24 / 419, rel=0.02)
    assert 0.9 < cost.effective_share < 0.97


def test_megascale_trained_effectively_for_more_than_90_percent():
    """175B parameters on 12,288 devices, with more than 100 restarts in several weeks (arXiv:2402.15627 §6.3)."""
    workload = Workload(seq_len=2048, global_batch_size=6144)
    plan = parse_plan_name("dp192-tp8-sp-pp8v6-sinterleaved-z1")
    one = predict(load_model("gpt3-175b"), plan, workload, load_cluster("12288xa100"))
    cost = training_cost(one, 3e12)
    assert 100 < cost.failures / (cost.days / 7) * 4 < 200
    assert 0.9 < cost.effective_share < 0.97


def test_reading_that_takes_longer_than_a_step_is_waited_for(one):
    fast = replace(one, step_time_s=1e-9)
    read_s = 4 * one.workload.tokens_per_step / 8 / STORAGE_BYTES_PER_S_PER_NODE
    assert training_cost(fast, 1e12).data_h * 3600 / training_cost(fast, 1e12).steps == pytest.approx(read_s, rel=1e-3)
    assert training_cost(one, 1e12).data_h == 0


def test_plan_and_predict_agree_on_energy_and_cost(capsys):
    asked = ["--model", "tiny", "--cluster", "4xa100-40", "--seq-len", "256", "--global-batch", "16"]
    asked += ["--tokens", "3B", "--mtbf", "2000", "--json"]
    assert main(["plan", *asked, "--top", "1", "--effort", "0.2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    best = plan["plans"][0]
    assert main(["predict", *asked, "--plan", best["plan"]]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["training"] == pytest.approx(best["training"])
    assert best["days"] == pytest.approx(best["training"]["days"])
    assert alone["prices"] == plan["prices"] != []
    watts = load_cluster("4xa100-40").watts
    assert watts is not None
    assert alone["kwh_per_1b_tokens"] == pytest.approx(PUE * watts * 1e9 / alone["tokens_per_s"] / 3.6e6)
    assert alone["step_time_interval"] == best["step_time_interval"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tokens", "15"], "--tokens 15 is less than one sequence of 4,096 tokens: 15 trillion are 15T"),
        (["--mtbf", "100"], "--mtbf 100.0 is of a whole training: add its --tokens"),
        (["--tokens", "1T", "--mtbf", "-1"], "expected a finite number of hours above 0"),
        (["--spares", "2"], "--spares 2 is of a whole training: add its --tokens"),
        (["--tokens", "1T", "--spares", "2"], "--spares 2: say how long a repair takes, such as --repair-time 24"),
        (["--tokens", "1T", "--spares", "-1", "--repair-time", "24"], "--spares: expected a whole number, got '-1'"),
        (["--tokens", "1T", "--repair-time", "0"], "--repair-time 0: expected a finite number of hours above 0"),
        (["--tokens", "1T", "--restart-time", "nan"], "expected a finite number of seconds above 0, such as 60"),
        (["--tokens", "1T", "--recovery", "memry"], "expected one of disk, memory; did you mean 'memory'?"),
        (["--tokens", "1T", "--recovery", "memory"], "expected several nodes"),
        (["--tokens", "1T", "--batch-ramp", "32"], "expected START,STEP,SAMPLES"),
        (["--tokens", "1T", "--batch-ramp", "0.5,32,1M"], "expected whole sequences"),
    ],
)
def test_flags_of_a_training_are_checked(capsys, flags, words):
    assert main(["predict", "--model", "tiny", "--cluster", "2xa100", "--plan", "dp2", *flags]) == 2
    assert words in capsys.readouterr().err


def test_lines_name_the_date_of_the_price(one):
    lines = training_lines(training_cost(one, 1e12), one.cluster)
    assert any("(price of 2024-12-01)" in line for line in lines)
    assert any("Young and Daly" in line for line in lines)
