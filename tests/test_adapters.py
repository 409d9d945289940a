"""Low-rank adapters: parity of every plan with one process, memory, files, and the sentences of wrong requests."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from muster.api.verbs import plan, predict
from muster.checkpoint.initial_weights import load_initial_weights
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.model_directory import open_directory
from muster.cli.main import main
from muster.cli.memory_check import _forecast
from muster.config.load_config import config_yaml, load_run_config
from muster.config.named_model import load_model
from muster.config.optim_config import OptimConfig
from muster.parallel.inference import build_inference_decoder
from muster.spec.adapters import ADAPTER_FREEZE, AdapterSpec
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from muster.train.memory_check import FAKE_KERNELS, measure_fake_rank
from muster.train.resume_check import check_config_unchanged
from tests.fine_tuning import write_base_model, write_dialogues
from tests.sampling import quick_sample
from tests.test_parity import GRADIENT_TOLERANCE, LOSS_TOLERANCE, run
from tests.train_runs import QUICK, train

LORA: dict[str, Any] = {"family": "lora", "precision": "fp64", "steps": 2}
DORA = [
    {"plan": "tp2-sp", "family": "dora", "profile": True},
    {"plan": "pp2-szbh1", "family": "dora everywhere"},
    {"plan": "dp2-z3", "family": "dora everywhere", "profile": True},
    {"plan": "dp2-z1-rfull", "family": "dora everywhere"},
]
DROPOUT: dict[str, Any] = {"family": "lora dropout"}
WITH_DROPOUT = [
    {"plan": "tp2", "profile": True},
    {"plan": "tp2-sp-relem"},
    {"plan": "tp2-sp-rfull"},
    {"plan": "dp2-z1", "profile": True},
    {"plan": "dp2-z3-rfull"},
    {"plan": "pp2v2-sgis-mb2", "profile": True},
    {"plan": "pp2-vocab"},
    {"plan": "cp2-z3"},
]
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"plan": "tp2-sp", "profile": True},
        {"plan": "tp2-relem"},
        {"plan": "dp2-z1", "profile": True},
        {"plan": "dp2-z2"},
        {"plan": "dp2-z3-rfull", "profile": True},
        {"plan": "pp2-szbh1", "profile": True},
        {"plan": "pp2v2-szbv-vocab"},
        {"plan": "cp2-z3"},
        {"plan": "tp2-sp-tile2"},
        {"plan": "pp2-slice2"},
    ],
    4: [
        {"plan": "tp4-sp", "profile": True},
        {"plan": "tp2-pp2-z1", "kv_heads": 4},
        {"plan": "dp2-tp2-sp-z3", "profile": True},
        {"plan": "dp2x2-z2"},
    ],
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def check_found(case: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Losses, gradients, and bytes: exact, but that below the first trained matrix nothing is saved."""
    for rank in found:
        assert rank["fed_right"], case
        assert rank["num_gradients"] > 0, case
        assert rank["loss_error"] < LOSS_TOLERANCE, case
        assert rank["gradient_error"] < GRADIENT_TOLERANCE, case
        for term, (planned, counted) in rank["memory"].items():
            most = 1.1 * counted if term == "activations" else counted
            assert counted <= planned <= most, (case, term)


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", CASES)
def test_adapters_under_every_plan_train_as_in_one_process(num_ranks: int, cache: Path) -> None:
    cases = [case | LORA for case in CASES[num_ranks]] + [LORA | case for case in DORA if num_ranks == 2]
    cases += [LORA | case | DROPOUT for case in WITH_DROPOUT if num_ranks == 2]
    for case, found in zip(cases, run(num_ranks, cases, cache), strict=True):
        check_found(case, found)


def test_adapters_train_as_in_one_process(cache: Path) -> None:
    """Under tensor and data parallelism; a gradient that isn't summed over the copies is found, and so are masks of
    other elements than in one process."""
    plans = [LORA | {"plan": "dp2-z3"} | DROPOUT, LORA | {"plan": "tp2-sp", "profile": True} | DROPOUT]
    faults = [{"plan": "tp2", "fault": "lost copies"}, {"plan": "tp2", "fault": "columns from the first"} | DROPOUT]
    found = run(2, [case | {"layers": 2} for case in (*plans, *(LORA | fault for fault in faults))], cache)
    for case, good in zip(plans, found, strict=False):
        check_found(case, good)
    for bad in found[len(plans) :]:
        assert max(rank["gradient_error"] for rank in bad) > 1e4 * GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    ("targets", "rate"),
    quick_sample([("q,v", 0.0), ("all-linear", 0.0), ("v,down", 0.0), ("all-linear", 0.1)], 1, 2),
)
def test_inputs_that_only_frozen_matrices_would_read_are_neither_saved_nor_forecast(targets: str, rate: float) -> None:
    adapter = AdapterSpec.model_validate({"target_modules": targets, "lora_dropout": rate})
    model = load_model("demo").model_copy(update={"adapter": adapter, "num_layers": 3})
    plan, optim = parse_plan_name("dp1-mb4"), OptimConfig(lr=1e-3, freeze=ADAPTER_FREEZE)
    workload = Workload(seq_len=256, global_batch_size=8)
    (planned,) = _forecast(model, plan, workload, FAKE_KERNELS, optim).ranks
    counted = measure_fake_rank(model, plan, workload, 0, optim).peak_bytes
    assert counted <= planned.terms.total <= (1.05 if rate else 1.03) * counted


def test_predict_and_plan_take_adapters_as_a_run_file_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trainable parameters, optimizer state, gradients, activations and times are those of the run."""
    run_file = tmp_path / "run.yaml"
    step = "train: {seq_len: 128, global_batch_size: 4}\n"
    run_file.write_text(f"model: tiny\nparallel: dp1-mb2\nadapter: {{r: 4, target_modules: [q, down]}}\n{step}")
    of_run = predict(None, "1xa100", run_file)
    named = {"seq_len": 128, "global_batch": 4, "adapter": "lora:r=4,target_modules=q+down"}
    of_flag = predict("tiny", "1xa100", "dp1-mb2", **named)
    assert of_flag.forecast == of_run.forecast
    assert of_flag.step_time_s == of_run.step_time_s
    whole = predict("tiny", "1xa100", "dp1-mb2", seq_len=128, global_batch=4)
    for term in ("optimizer", "gradients"):
        assert of_run.memory[0].terms[term] < 0.1 * whole.memory[0].terms[term]
    found = plan("tiny", "1xa100", **named)
    assert found.predictions[0].forecast.ranks[0].terms.optimizer == of_run.memory[0].terms["optimizer"]
    for text, expected in (("lora:rank=4", "rank"), ("lore", "kind"), ("lora:r", "expected key=value")):
        assert main(["plan", "--model", "tiny", "--cluster", "1xa100", "--adapter", text]) == 2
        assert expected in capsys.readouterr().err


def test_memory_check_takes_a_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its model, step, optimizer and adapter are checked."""
    run_file = tmp_path / "run.yaml"
    step = "train: {seq_len: 128, global_batch_size: 4}\n"
    run_file.write_text(f"model: tiny\nparallel: dp1-mb2\nadapter: {{r: 4}}\noptim: {{lr: 1.0e-3}}\n{step}")
    assert main(["memory-check", "--plan", str(run_file)]) == 0
    assert "tiny, plan dp1-mb2-bf16, sequences of 128 tokens" in capsys.readouterr().out
    run_file.write_text("model: tiny\nparallel: auto\n")
    assert main(["memory-check", "--plan", str(run_file)]) == 2


# ----------------------------------------------------------------------------------------------------------------------
# Files

RUN_FILE = """
model: hf:base
adapter: {r: 4, lora_alpha: 16, target_modules: [q_proj, v_proj, down_proj]}
data: {source: ./talks.json, tokenizer: base, validation_split: 0.1, packing: next_fit}
train: {steps: 6, global_batch_size: 4, seq_len: 64, init_from: base}
optim: {lr: 1.0e-2}
"""


def logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the model in a directory of any format."""
    spec = open_directory(path).model
    assert spec is not None
    decoder, layouts = build_inference_decoder(spec, "fp32", torch.device("cpu"), None)
    parts = [LocalShard(f"model/{name}", layouts[name], one.data) for name, one in decoder.named_parameters()]
    load_initial_weights(path, spec, parts)
    with torch.no_grad():
        return decoder(tokens)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("lora", "tp2-mb2-fp32"),
        pytest.param("pissa", "tp2-mb2-fp32", marks=pytest.mark.soak),
        pytest.param("dora", "dp2-mb1-z3-fp32", marks=pytest.mark.soak),
        pytest.param("pissa", "dp2-mb1-z3-fp32", marks=pytest.mark.soak),
    ],
)
def test_an_adapter_is_the_same_in_peft(kind: str, plan: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Trained on an imported model, whose loss falls; exported and opened by PEFT; merged; read again; continued."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base, run, export, merged = (tmp_path / name for name in ("base", "run", "export", "merged"))
    write_base_model("llama", base)
    write_dialogues(tmp_path / "talks.json")
    (tmp_path / "lora.yaml").write_text(RUN_FILE)
    ended = train(tmp_path / "lora.yaml", "--run", run, "--parallel", plan, "--adapter.kind", kind, *QUICK)
    assert ended.code == 0, ended.err
    losses = [json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.5
    assert main(["checkpoint", "convert", str(run), str(export), "--to", "peft"]) == 0
    assert main(["checkpoint", "convert", str(run), str(merged), "--to", "hf"]) == 0
    ids = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    assert (export / "base").exists() == (kind == "pissa")
    start = export / "base" if kind == "pissa" else base
    theirs = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    with torch.no_grad():
        plain = theirs(ids).logits
        model = peft.PeftModel.from_pretrained(theirs, export)
        adapted = model(ids).logits
        joined = model.merge_and_unload()(ids).logits
    assert (adapted - plain).abs().max() > 0.1
    for found in (joined, logits(run, ids), logits(export, ids), logits(merged, ids)):
        assert (found - adapted).abs().max() < 1e-5
    if kind == "pissa":  # before the first step, weights and adapters together are the base model
        began = train(tmp_path / "lora.yaml", "--run", tmp_path / "lora", "--parallel", "dp1-mb2-fp32", *QUICK)
        assert began.code == 0, began.err
        first = json.loads((tmp_path / "lora" / "metrics.jsonl").read_text().splitlines()[0])["train/loss"]
        assert losses[0] == pytest.approx(first, abs=1e-4)
        return
    (tmp_path / "more.yaml").write_text(RUN_FILE.replace("init_from: base", "init_from: export"))
    ended = train(tmp_path / "more.yaml", "--run", tmp_path / "more", "--parallel", "dp1-mb2-fp32", *QUICK)
    more = [json.loads(line)["train/loss"] for line in (tmp_path / "more" / "metrics.jsonl").read_text().splitlines()]
    assert more[0] < losses[0] - 0.5


def test_parameters_trained_beside_adapters_are_in_what_is_exported(tmp_path: Path, capsys) -> None:
    """Norms that a pattern trains are in the base model beside PEFT's files; a comparison sees adapters."""
    write_base_model("llama", tmp_path / "base")
    write_dialogues(tmp_path / "talks.json")
    (tmp_path / "lora.yaml").write_text(RUN_FILE)
    more = ("--parallel", "dp1-mb2-fp32", "--optim.freeze", "!*norm.weight", "--train.steps", "2", *QUICK)
    assert train(tmp_path / "lora.yaml", "--run", tmp_path / "run", *more).code == 0
    assert main(["checkpoint", "convert", str(tmp_path / "run"), str(tmp_path / "export"), "--to", "peft"]) == 0
    ids = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits(tmp_path / "run", ids), logits(tmp_path / "export", ids))
    assert main(["checkpoint", "diff", str(tmp_path / "run"), str(tmp_path / "export")]) == 0
    weights = tmp_path / "export" / "adapter_model.safetensors"
    save_file({name: 2 * one for name, one in load_file(weights).items()}, weights)
    capsys.readouterr()
    assert main(["checkpoint", "diff", str(tmp_path / "run"), str(tmp_path / "export")]) == 1
    assert "lora_A.weight: relative difference" in capsys.readouterr().out


def test_what_muster_does_not_know_of_adapters_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    known: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "intermediate_size": 32,
    }
    with pytest.raises(ValueError, match=r"no linear layer is called 'q_prj', expected .*; did you mean 'q_proj'"):
        AdapterSpec(target_modules=("q_prj",))
    with pytest.raises(ValueError, match="adapter.target_modules names gate, but the MLP of this model has none"):
        ModelSpec(**known, gated=False, adapter=AdapterSpec(target_modules=("gate",)))
    assert AdapterSpec(target_modules="all-linear").target_modules == ("q", "k", "v", "o", "gate", "up", "down")
    tiny = ["train", "--preset", "tiny", "--dry-run"]
    assert main([*tiny, "--adapter.r", "0"]) == 2
    assert "adapter.r: expected a whole number >= 1, got 0" in capsys.readouterr().err
    assert main([*tiny, "--adapter.r", "4", "--parallel", "dp1-fp8"]) == 3
    assert "fp8 with adapters" in capsys.readouterr().err
    assert main([*tiny, "--adapter.kind", "pissa"]) == 2
    assert "adapter.kind pissa decomposes given weights: give train.init_from" in capsys.readouterr().err
    assert main([*tiny, "--adapter.kind", "dora", "--adapter.lora_dropout", "0.1"]) == 2
    assert "lora_dropout 0.1 is for kinds lora and pissa, but dora is chosen" in capsys.readouterr().err
    assert main([*tiny, "--adapter.lora_dropout", "0.1", "--parallel", "pp2-szbh1"]) == 3
    assert "a schedule whose backward is split with lora_dropout" in capsys.readouterr().err
    assert main([*tiny, "--adapter.lora_alpha", "inf"]) == 2
    assert "adapter.lora_alpha: expected a number > 0, got inf" in capsys.readouterr().err
    assert main([*tiny, "--adapter.r", "65"]) == 2
    assert "adapter.r 65 is more than the shorter side of q" in capsys.readouterr().err
    trained, other = (
        load_run_config("tiny", None, [("adapter.r", rank), ("adapter.target_modules", "q,v")]) for rank in "48"
    )
    plain = load_run_config("tiny", None, [])
    (folder := tmp_path / "run").mkdir()
    (folder / "config.yaml").write_text(config_yaml(trained, parse_plan_name("dp1")))
    for changed in (other, plain):
        with pytest.raises(ConfigError, match=r"has trained adapters \(lora of rank 4 at q, v\), which don't go on"):
            check_config_unchanged(folder, changed.config, 2, allow=True)
    check_config_unchanged(folder, trained.config, 2)
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "meta/llama"})
    )
    with pytest.raises(ConfigError, match="adapters of the model meta/llama, which is no directory here"):
        open_directory(tmp_path)
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    )
    with pytest.raises(ConfigError, match="modules_to_save .* isn't known to Muster"):
        open_directory(tmp_path)
