"""Sub-layers that read the residual stream without the output right before (`residual: ladder`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.api.trained_models import generate
from muster.api.verbs import plan as best_plans
from muster.checkpoint.model_directory import model_weights, open_directory
from muster.cli.main import main
from muster.config.named_model import load_model
from muster.cost.time import alternating_turns
from muster.model.decoder import Decoder
from muster.model.init import init_stage
from muster.spec.model import ModelSpec
from muster.spec.plan_name import parse_plan_name
from muster.spec.supported import unsupported_features
from tests.fine_tuning import write_base_model, write_dialogues
from tests.parity import small_run
from tests.plans import unequal
from tests.sampling import quick_sample
from tests.test_adapters import logits
from tests.test_memory_forecast import SHORT_LLAMA, assert_forecast_is_accounting
from tests.test_parity import GRADIENT_TOLERANCE, by_layer, check_parity, run
from tests.train_runs import QUICK, generated, train

CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"plan": "dp1", "profile": True},
        {"plan": "dp1-rfull", "family": "gpt2 ladder", "profile": True},
        {"plan": "dp1-relem", "family": "qwen3 ladder"},
    ],
    2: [
        {"plan": "tp2", "profile": True},
        {"plan": "tp2-rfull", "tied": True, "profile": True},
        {"plan": "tp2-relem-mb2", "family": "gpt2 ladder", "profile": True},
        {"plan": "tp2", "family": "qwen3 ladder", "packing": "document_mask"},
        {"plan": "pp2", "tied": True, "profile": True},
        {"plan": "pp2-rfull", "family": "gpt2 ladder"},
        {"plan": "dp2-z3-rfull", "profile": True},
        {"plan": "dp2-z1", "family": "gpt2 ladder"},
        {"plan": "pp2v2-sdualpipev"},
        {"plan": "cp2", "packing": "next_fit"},
    ],
    4: [
        {"plan": "tp2-pp2", "profile": True},
        {"plan": "tp2-pp2-rfull", "family": "gpt2 ladder", "tied": True, "profile": True},
        {"plan": "tp2-pp2-szbh1", "family": "gpt2 ladder", "profile": True},
        {"plan": "tp2-pp2v2-sinterleaved-relem"},
        {"plan": "tp2-dp2-z3", "profile": True},
        {"plan": "tp2-dp2-z3-rfull", "family": "gpt2 ladder"},
        {"plan": "tp2-dp2-z2", "family": "qwen3 ladder"},
        {"plan": "tp2-dp2-z1", "tied": True, "overlaps": True},
        {"plan": "tp2-dp2-z3", "changes": {"bucket_layers": 2}},
        {"plan": "tp4-rfull"},
        {"plan": "tp2-cp2"},
        {"plan": "tp2-pp2", "changes": by_layer("none", "full", "elementwise", "full")},
        {"plan": "pp2-mb2-z1", "tied": True, "changes": unequal((3, {"tp": 2}), (1, {"dp_shard": 2}))},
    ],
}
SAMPLE = {2: [CASES[2][1] | {"fault": "late sums"}], 4: CASES[4][1:2]}
"""With sums that only begin where they are waited for: nothing reads them before."""
FAULTS = ("missing wait", "pending output twice", "pending output lost", "lost term", "lost copies")


def _ladders(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"family": "llama ladder"} | case | {"precision": "fp64", "steps": 1} for case in cases]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize("num_ranks", quick_sample(list(SAMPLE), 0))
def test_gradients_of_a_ladder_equal_one_process(num_ranks: int, cache: Path) -> None:
    check_parity(num_ranks, _ladders(SAMPLE[num_ranks]), cache)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", CASES)
def test_gradients_of_more_ladders_equal_one_process(num_ranks: int, cache: Path) -> None:
    check_parity(num_ranks, _ladders(CASES[num_ranks]), cache)


@pytest.mark.soak
def test_sown_bugs_are_caught(cache: Path) -> None:
    cases = _ladders([{"plan": "tp2", "fault": fault} for fault in FAULTS])
    for case, found in zip(cases, run(2, cases, cache), strict=True):
        assert max(rank["gradient_error"] for rank in found) > 1e4 * GRADIENT_TOLERANCE, case


@torch.no_grad()
def test_a_sub_layer_reads_the_stream_without_the_output_right_before() -> None:
    """The definition, written out: h_i = f_i(r_{i-2}), r_i = r_{i-1} + h_i."""
    spec = small_run(family="llama ladder").model
    model = Decoder(spec, range(spec.num_layers), first=True, last=True)
    init_stage(model, spec, 0)
    tokens_BS = torch.arange(24).view(2, 12)
    streams = [model.embed_tokens(tokens_BS, model.get_parameter("embed.weight"))] * 2
    constants = list(model._constants(streams[0], dict(enumerate(model.blocks()))))
    for layer, shared in zip(model.blocks(), constants, strict=True):
        streams.append(streams[-1] + layer.attn(streams[-2], layer.attn_norm, *shared))
        streams.append(streams[-1] + layer.mlp(streams[-2], layer.mlp_norm))
    assert model.norm is not None
    torch.testing.assert_close(model(tokens_BS), model.logits(model.norm(streams[-1])), rtol=0, atol=0)


RUN_FILE = """
model: {preset: hf:base, residual: ladder}
data: {source: ./talks.json, tokenizer: base, validation_split: 0.1, packing: next_fit}
train: {steps: 4, global_batch_size: 4, seq_len: 64, init_from: base}
optim: {lr: 1.0e-2}
"""


def test_a_ladder_begins_with_the_weights_of_a_plain_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run says that the function changes, goes on under another plan, and can't be exported; a converted directory
    has the same weights and is the same ladder."""
    base, run_dir, converted = (tmp_path / name for name in ("base", "run", "converted"))
    write_base_model("llama", base)
    write_dialogues(tmp_path / "talks.json")
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    begun = train(tmp_path / "run.yaml", "--run", run_dir, "--parallel", "tp2-pp2-mb2-fp32-rfull", *QUICK)
    assert begun.code == 0, begun.err
    assert "residual is standard there and ladder here" in begun.out
    on = train(tmp_path / "run.yaml", "--run", run_dir, "--train.steps", "6", "--parallel", "dp2-mb1-z3-fp32", *QUICK)
    assert on.code == 0, on.err
    text = generate(run_dir, "the quick", tokens=8, temperature=0).texts
    assert text == generated(run_dir, "the quick", plan="tp2", words=("--tokens", "8")) != ("",)
    losses = [json.loads(line)["train/loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.5
    assert main(["checkpoint", "convert", str(run_dir), str(tmp_path / "export"), "--to", "hf"]) == 3
    assert "can't express its residual" in capsys.readouterr().err
    convert = ["checkpoint", "convert", str(base), str(converted), "--to", "muster"]
    assert main([*convert, "--residual", "ladder"]) == 0
    assert "computes something else" in " ".join(capsys.readouterr().out.split())
    found, plain = open_directory(converted), open_directory(base)
    assert found.model is not None
    assert found.model.residual == "ladder"
    ours, theirs = model_weights(found), model_weights(plain)
    for name, meta in theirs.metas.items():
        assert torch.equal(ours.read(name, meta.whole), theirs.read(name, meta.whole))
    ids = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    assert (logits(converted, ids) - logits(base, ids)).abs().max() > 1e-3


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "seq_len", "micro_batches"),
    [("tp2-pp2", 2048, 2), ("dp4-z3-rfull", 2048, 1), ("tp2-pp2-szbh1", 1024, 3), ("pp4-rfull", 2048, 4)],
)
def test_forecast_is_what_pytorch_counts(name: str, seq_len: int, micro_batches: int) -> None:
    spec = SHORT_LLAMA.model_copy(update={"residual": "ladder"})
    assert_forecast_is_accounting(spec, name, seq_len, micro_batches)


def test_what_a_ladder_is_without_is_said() -> None:
    known: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    known |= {"intermediate_size": 32, "residual": "ladder"}
    for field, value in (
        ("parallel_residual", True),
        ("norm_placement", "post"),
        ("mtp_layers", 1),
        ("hidden_dropout", 0.1),
        ("moe", {"num_experts": 4, "top_k": 2, "expert_size": 8}),
    ):
        with pytest.raises(ValueError, match=f"residual ladder with {field}"):
            ModelSpec.model_validate({**known, field: value})
    spec = ModelSpec.model_validate(known)
    for name, sentence in (
        ("tp2-sp-fp32", "sp of a model with residual ladder (the all-gather before a sub-layer would queue"),
        (
            "tp2-domino-mb2-fp32",
            "tp_overlap domino of a model with residual ladder (whose collectives travel beside the next",
        ),
        ("dp1-tile2-fp32", "sequence_tiles of a model with residual ladder"),
        ("pp2-oact-fp32", "offload of activations of a model with residual ladder (not tested yet)"),
    ):
        assert any(found.startswith(sentence) for found in unsupported_features(parse_plan_name(name), spec)), name


def test_a_sum_is_hidden_by_the_next_sub_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternating_turns, "OVERLAP_SLOWDOWN", 0.0)
    assert alternating_turns.alternating_s([(2, 1, 0), (2, 1, 0)]) == (4, 1)
    assert alternating_turns.alternating_s([(2, 3, 0), (2, 3, 0)]) == (6, 2)


@pytest.mark.parametrize(("layers", "batch"), quick_sample([(8, 8), (32, 64)], 0))
def test_the_planner_knows_that_sums_of_a_ladder_are_hidden(layers: int, batch: int) -> None:
    asked: dict[str, Any] = {"global_batch": batch, "require": "tp8-mb8", "top": 1}
    model = load_model("llama3-8b").model_copy(update={"num_layers": layers})
    plain, ladder = (
        best_plans(model.model_copy(update={"residual": residual}), "8xa100", **asked)
        for residual in ("standard", "ladder")
    )
    plain_s, ladder_s = (found.predictions[0].parts.communication_s["tp"] for found in (plain, ladder))
    assert ladder_s < 0.5 * plain_s
    assert ladder.predictions[0].step_time_s < plain.predictions[0].step_time_s  # though it may recompute layers
