"""The prediction of a plan and `muster predict`."""

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from muster.api.verbs import predict as predict_input
from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.cost.time.op_times import OpTimes, P2PTime
from muster.cost.time.plan_times import plan_times
from muster.report.prediction import prediction_lines
from muster.schedule.build import build_program
from muster.simulate.breakdown import breakdown
from muster.simulate.predict import predict
from muster.spec.device import LinkSpec, Nics
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.frameworks import framework_named
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload

SMALL = ModelSpec(vocab_size=512, hidden_size=64, num_layers=8, num_heads=4, num_kv_heads=2, intermediate_size=128)
WORKLOAD = Workload(seq_len=64, global_batch_size=32)


@pytest.mark.parametrize(
    "name",
    [
        *("dp8", "dp2-pp4-mb2", "dp2-tp2-sp-pp2-z1", "dp2x2-pp2-z2-rfull", "pp4v2-dp2-sinterleaved"),
        "dp2-pp4-z3-szbh1-oopt-oparam",
    ],
)
def test_the_parts_of_a_step_make_up_the_step(name: str):
    one = predict(SMALL, parse_plan_name(name), WORKLOAD, load_cluster("8xh100"))
    parts = one.parts
    waits_s = sum(parts.communication_s.values())
    total_s = parts.compute_s + waits_s + parts.bubble_s + parts.optimizer_s + parts.data_s
    assert one.step_time_s == pytest.approx(total_s)
    assert min(parts.compute_s, parts.bubble_s, parts.optimizer_s, *parts.communication_s.values()) >= 0
    assert one.bubble_fraction == pytest.approx(breakdown(one.timeline).bubble_fraction)
    assert one.tokens_per_s_per_device * 8 * one.step_time_s == pytest.approx(WORKLOAD.tokens_per_step)
    again = predict(SMALL, one.plan, WORKLOAD, one.cluster, one.program, one.times)
    assert (again.step_time_s, again.parts, again.memory) == (one.step_time_s, parts, one.memory)


def test_each_axis_gets_what_ranks_wait_for_on_it():
    """Two stages, one micro-batch: F 2 (of which 0.5 for tp), hop 1, F 2, B 3 (1 for dp), hop 1, B 3, REDUCE_GRAD 2."""
    plan = Plan(pp=2, dp_shard=2, default_strategy=LayerStrategy(zero="z1"))
    seconds = {("F", -1): 2.0, ("B", -1): 3.0, ("REDUCE_GRAD", -1): 2.0, ("GRAD_NORM", -1): 0.25, ("STEP", -1): 1.0}
    exposed_s = {("F", -1): {"tp": 0.5}, ("B", 0): {"dp": 1.0}}
    times = OpTimes(seconds, p2p_times={(0, 1): P2PTime(1.0), (1, 0): P2PTime(1.0)}, exposed_s=exposed_s, data_s=0.125)
    workload = Workload(seq_len=64, global_batch_size=2)
    one = predict(SMALL, plan, workload, load_cluster("4xh100"), times=times)
    assert one.step_time_s == pytest.approx(12 + 2 + 0.25 + 1 + 0.125)
    parts = one.parts
    assert parts.communication_s == pytest.approx({"dp": 2 + 1 / 2, "pp": 1, "tp": 0.5, "world": 0.25})
    assert (parts.compute_s, parts.optimizer_s, parts.data_s) == pytest.approx((5 - 0.5 - 0.5, 1, 0.125))
    assert parts.bubble_s == pytest.approx(6)


@pytest.mark.parametrize("name", ["dp8-tp2-pp4", "dp8-tp2-pp4-z1", "dp8-tp2-sp-pp4-z2-relem"])
def test_a_slow_network_makes_no_compute_slower(name: str):
    """Nodes over a line of 100 kbit/s: what ranks lose to the slowest of them is a share of waits, too."""
    model, workload = load_model("llama3-8b"), Workload(seq_len=2048, global_batch_size=64)
    fast = load_cluster("64xh100")
    link = LinkSpec(name="line", kind="ethernet", bandwidth_bytes_per_s=12_500, latency_s=1e-3)
    group = fast.groups[0].model_copy(update={"nics": Nics(link=link)})
    plan = parse_plan_name(name)
    near = predict(model, plan, workload, fast)
    far = predict(model, plan, workload, fast.model_copy(update={"groups": (group,)}))
    assert far.step_time_s > 1000 * near.step_time_s
    assert far.parts.compute_s == pytest.approx(near.parts.compute_s, rel=1e-6)
    assert far.parts.optimizer_s == pytest.approx(near.parts.optimizer_s)


def test_one_device_waits_for_no_world(capsys):
    one = predict(SMALL, Plan(), Workload(seq_len=64, global_batch_size=2), load_cluster("1xh100"))
    assert one.parts.communication_s == {}
    assert one.parts.optimizer_s > 0
    assert main(["predict", "--model", "tiny", "--cluster", "1xh100", "--plan", "dp1"]) == 0
    assert "waiting for" not in capsys.readouterr().out


def test_nodes_get_their_ranks_in_the_order_that_is_said():
    question = {"plan": "dp8-pp2-l4.8", "seq_len": 512, "global_batch": 16}
    step_s = {
        (cluster, order): predict_input("gpt2", cluster, **question, node_order=order).step_time_s
        for cluster, order in (("8xh100+8xa100", None), ("8xh100+8xa100", "1,0"))
    }
    assert step_s["8xh100+8xa100", "1,0"] == predict_input("gpt2", "8xa100+8xh100", **question).step_time_s
    assert len(set(step_s.values())) > 1
    for order in ("0", "0,0", "0,2", "a,b"):
        with pytest.raises(ConfigError, match="expected each node from 0 to 1 once, got"):
            predict_input("gpt2", "8xh100+8xa100", **question, node_order=order)


def test_a_refused_plan_says_why():
    """The cluster is named only where it is a reason."""
    advice = "; give a plan for 8 devices, or --cluster 4xh100"
    for name, refusal, words in (
        ("dp4", "doesn't fit 8xh100", f"it needs 4 devices (dp_shard 4), but there are 8{advice}"),
        ("tp2-pp2-pv-cp3", "doesn't fit 8xh100", "seq_len 64 is not a multiple of 6"),
        ("tp8", "can't be used", "tp 8 doesn't divide the model's 4 heads"),
        ("cp8u-mb1", "can't be used", "or p2p and all_gather with any cp; nearest: cp8u4-mb1-bf16, "),
        ("cp8-mb1-pv", "can't be used", "post_validation lets pipeline ranks step"),
        ("dp8-mb3", "can't be used", "global_batch_size 32 is not a multiple of 24"),
        ("pp8v2-sinterleaved", "can't be used", "it has 16 stages, but the model has only 8 layers"),
    ):
        with pytest.raises(InfeasibleError, match=f" {refusal}: ") as error:
            predict(SMALL, parse_plan_name(name), WORKLOAD, load_cluster("8xh100"))
        assert words in str(error.value)


def test_what_the_runtime_cannot_run_yet_is_said():
    ask = (SMALL, Plan(cp=8, compile=True), WORKLOAD, load_cluster("8xh100"))
    one = predict(*ask)
    assert any("compile with context parallelism" in sentence for sentence in one.to_json()["not_yet"])
    assert f"not yet   {one.not_yet[0]}" in prediction_lines(one)
    assert predict(*ask, framework=framework_named("torchtitan")).not_yet == []
    assert "not yet" not in "".join(prediction_lines(predict(SMALL, Plan(dp_shard=8), *ask[2:])))


def test_what_is_unknown_is_none():
    one = predict(SMALL, parse_plan_name("dp1-fp32"), WORKLOAD, load_cluster("1xcpu"))
    assert (one.usd_per_step, one.joules_per_step) == (None, None)


# ----------------------------------------------------------------------------------------------------------------------
# The verb

ASK = ["predict", "--model", "llama3-8b", "--cluster", "64xh100", "--plan", "dp8-tp2-pp4-relem"]


def test_json_has_every_key(capsys):
    assert main([*ASK, "--seq-len", "2048", "--global-batch", "128", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    figures = {"step_time_s", "tokens_per_s", "tokens_per_s_per_device", "tflops_per_device", "mfu", "bubble_fraction"}
    assert figures | {"breakdown", "memory", "fits", "usd_per_step", "joules_per_step"} <= found.keys()
    assert found["breakdown"].keys() == {"compute_s", "communication_s", "bubble_s", "optimizer_s", "data_s"}
    assert (found["seq_len"], found["global_batch_size"], found["devices"]) == (2048, 128, 64)
    assert found["memory"].keys() == {"0", "16", "32", "48"}
    for terms in found["memory"].values():
        pp_rank, total = terms.pop("pp_rank"), terms.pop("total")
        assert 0 <= pp_rank < 4
        assert total == sum(terms.values())
    assert found["fits"] is True
    assert found["memory_reserve_bytes"] == int(0.12 * found["memory_capacity_bytes"])
    assert found["mfu_causal"] < found["mfu"]
    interval = found["step_time_interval"]
    assert interval["low_s"] < found["step_time_s"] < interval["high_s"]
    assert (interval["coverage"], "configurations of h100-sxm" in interval["source"]) == (0.9, True)
    assert 0.1 < found["mfu"] < 1


def test_pictures(tmp_path: Path, capsys):
    assert main([*ASK, "--trace", str(tmp_path / "step.json"), "--html", str(tmp_path / "step.html")]) == 0
    shown = capsys.readouterr().out
    assert "MFU" in shown
    assert "a row for each pipeline rank" in shown
    trace = json.loads((tmp_path / "step.json").read_text())
    assert {event["cat"] for event in trace["traceEvents"] if event["ph"] == "X"} >= {
        "F",
        "B",
        "SEND_F",
        "RECV_B",
        "STEP",
    }
    page = (tmp_path / "step.html").read_text()
    HTMLParser().feed(page)
    assert "Where the time goes" in page
    assert "timeline-predicted" in page


def test_what_does_not_fit_is_predicted_and_infeasible(capsys):
    assert main(["predict", "--model", "llama3-70b", "--cluster", "2xa100", "--plan", "dp2", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_a_hugging_face_directory_is_a_model(tmp_path: Path, capsys):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["predict", "--model", str(tmp_path), "--cluster", "2xa100", "--plan", "dp2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seq_len"] == 512


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"--model": "lama3-8b"}, 2, "there is no model 'lama3-8b'; did you mean 'llama3-8b'?"),
        ({"--model": "nowhere/config"}, 2, "there is no file nowhere/config"),
        ({"--cluster": "64xh1000"}, 2, "there is no device 'h1000'; did you mean 'h100'?"),
        ({"--cluster": "0xh100"}, 2, "a cluster has at least one device, got 0xh100"),
        ({"--cluster": "-4xh100"}, 2, "a cluster has at least one device, got -4xh100"),
        ({"--cluster": "nothing.yaml"}, 2, "can't read cluster file nothing.yaml: no such file or directory"),
        ({"--plan": "dp8-tp4"}, 3, "it needs 32 devices (dp_shard 8 × tp 4), but there are 64"),
        ({"--plan": "dp0"}, 2, "'dp0' is 0, but degrees and sizes start at 1"),
        ({"--plan": "dp64-zz"}, 2, "unknown part 'zz'"),
        ({"--plan": "DP64-Z3"}, 2, "unknown part 'DP64'; did you mean 'dp64'?"),
        ({"--plan": "dp99999999999999999999"}, 2, "has a number of more than 9 digits"),
        ({"--cluster": "this"}, 2, "here first"),
        ({"--plan": "nothing.yaml"}, 2, "there is no file nothing.yaml"),
        ({"--seq-len": "0"}, 2, "expected tokens such as 8192, 128k (131,072) or 1M, got '0'"),
        ({"--seq-len": "-5"}, 2, "expected tokens such as 8192, 128k (131,072) or 1M, got '-5'"),
        ({"--global-batch": "100"}, 3, "global_batch_size 100 is not a multiple of 8"),
        ({"--plan": None}, 2, "--plan is missing"),
        ({"--trace": "/nowhere/trace.json"}, 2, "/nowhere/trace.json can't be written: there is no directory"),
    ],
)
def test_bad_input_is_one_sentence(changed: dict[str, str | None], code: int, words: str, capsys):
    flags = dict(zip(ASK[1::2], ASK[2::2], strict=True)) | changed
    assert main(["predict", *(f"{flag}={value}" for flag, value in flags.items() if value is not None)]) == code
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_no_torch_and_little_else_is_imported():
    """The JSON of a prediction needs neither torch nor what draws."""
    code = "import sys; from muster.cli.main import main; main(sys.argv[1:]); print([*sys.modules], file=sys.stderr)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-c", code, *ASK, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=True)
    assert not [name for name in ("torch", "rich", "scipy", "ortools") if f"'{name}'" in done.stderr]


def test_a_run_file_brings_its_optimizer(tmp_path):
    """AdamW stores two numbers for each parameter, Lion one; so its update moves fewer bytes, too."""
    found = {}
    for name in ("adamw", "lion"):
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"parallel: dp4-z1\noptim: {{name: {name}}}\n")
        found[name] = predict_input("llama3-8b", "4xh100", file)
    adamw, lion = (found[name].forecast.fullest.terms.optimizer for name in ("adamw", "lion"))
    assert adamw == 2 * lion
    assert found["lion"].parts.optimizer_s < found["adamw"].parts.optimizer_s
    assert found["adamw"].step_time_s == predict_input("llama3-8b", "4xh100", "dp4-z1").step_time_s


RUN_FILE = """
model: tiny
parallel: dp4-mb1-z1-fp32
data: {source: python-stdlib}
train: {steps: 9, seq_len: 64, global_batch_size: 4}
optim: {lr: 1e-3, ema_decay: 0.9, freeze: "embed.*,layers.[01].*"}
"""


def test_a_run_file_is_its_own_step(tmp_path, capsys):
    """Model, lengths, precision, average and frozen layers are the run's; a flag goes before its value."""
    file = tmp_path / "config.yaml"
    file.write_text(RUN_FILE)
    ask = ["predict", "--cluster", "4xh100", "--plan", str(file), "--json"]
    found = {}
    for name, flags in {"own": [], "same": ["--model", "tiny"], "other": ["--seq-len=32", "--global-batch=8"]}.items():
        assert main([*ask, *flags]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    own = found["own"]
    assert (own["model"], own["seq_len"], own["global_batch_size"], own["plan"]) == ("tiny", 64, 4, "dp4-mb1-z1-fp32")
    assert found["same"] == own
    assert (found["other"]["seq_len"], found["other"]["global_batch_size"]) == (32, 8)
    frozen = predict_input(None, "4xh100", file).forecast.fullest.terms.optimizer
    file.write_text(RUN_FILE.replace(", freeze:", "}\n#"))
    trained = predict_input(None, "4xh100", file).forecast.fullest.terms.optimizer
    file.write_text(RUN_FILE.replace("ema_decay: 0.9, ", ""))
    assert predict_input(None, "4xh100", file).forecast.fullest.terms.optimizer < frozen < trained


@pytest.mark.parametrize(
    ("flags", "content", "words"),
    [
        (
            ["--model", "llama3-8b"],
            RUN_FILE,
            "--model llama3-8b is not the model that {file} trains, tiny: leave --model",
        ),
        ([], "parallel: dp4", "--model is missing: expected for example --model llama3-8b, or a run file"),
        ([], RUN_FILE.replace("seq_len", "seqlen"), "train.seqlen: unknown key; did you mean 'seq_len'?"),
        (
            [],
            RUN_FILE.replace("source:", "seq_len: 9, source:"),
            "data.seq_len: unknown key; did you mean 'train.seq_len'?",
        ),
        ([], RUN_FILE.replace("embed.*", "nothing.*"), "optim.freeze: no parameter is called 'nothing.*'"),
    ],
)
def test_a_run_file_that_is_no_step_is_one_sentence(flags, content, words, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    assert main(["predict", "--cluster", "4xh100", "--plan", str(file), *flags]) == 2
    said = capsys.readouterr().err
    assert words.format(file=file) in said
    assert said.count("\n") == 1


def test_times_are_made_once_for_many_predictions():
    """The planner's way: the same program under several times."""
    plan, cluster = parse_plan_name("dp2-pp4"), load_cluster("8xh100")
    program = build_program(plan, SMALL, WORKLOAD)
    times = plan_times(SMALL, plan, WORKLOAD, cluster)
    slower = OpTimes({key: 2 * time_s for key, time_s in times.seconds.items()}, p2p_times=times.p2p_times)
    assert predict(SMALL, plan, WORKLOAD, cluster, program, slower).parts.compute_s > 1.9 * (
        predict(SMALL, plan, WORKLOAD, cluster, program, times).parts.compute_s
    )


@pytest.mark.parametrize(
    ("devices", "precision", "framework", "recipe", "sentence"),
    [
        (
            "8xa100",
            "fp8",
            "muster",
            "tensorwise",
            "a100-80-sxm is not known to compute in fp8: times are those of bf16",
        ),
        (
            "8xh100",
            "nvfp4",
            "megatron",
            "tensorwise",
            "h100-sxm is not known to compute in nvfp4: times are those of fp8",
        ),
        ("8xh100", "fp8", "muster", "mxfp8", "h100-sxm is not known to compute in mxfp8: times are those of bf16"),
        ("8xh100", "fp8", "muster", "rowwise", ""),
        ("8xb200", "nvfp4", "megatron", "tensorwise", ""),
    ],
)
def test_a_precision_that_devices_lack_is_told(devices, precision, framework, recipe, sentence):
    plan = parse_plan_name(f"dp8-{precision}").model_copy(update={"fp8_recipe": recipe})
    own = load_model("llama3-8b"), Workload(seq_len=4096, global_batch_size=8), load_cluster(devices)
    one = predict(own[0], plan, *own[1:], framework=framework_named(framework))
    told = [line for line in prediction_lines(one) if line.startswith("precision")]
    assert told == ([f"precision {sentence}"] if sentence else [])
    assert one.to_json()["substitutions"] == ([sentence] if sentence else [])
    if sentence.endswith("of bf16"):  # and so is the interval
        plain = predict(own[0], parse_plan_name("dp8-bf16"), *own[1:], framework=framework_named(framework))
        assert one.interval == plain.interval
