"""Frozen weights in 4 bits: numbers, parity of plans with a plain model of these, memory, files, sentences."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from muster.api.verbs import plan, predict
from muster.checkpoint.model_directory import model_weights, open_directory
from muster.cli.main import main
from muster.cli.memory_check import _forecast
from muster.config.named_model import load_model
from muster.config.optim_config import OptimConfig
from muster.layout.tensor_layout import Box
from muster.model.dynamic_map import dynamic_values
from muster.model.four_bit import NF4, dequantize, hold_in_four_bits, quantize
from muster.spec.adapters import ADAPTER_FREEZE, AdapterSpec
from muster.spec.four_bit import has_four_bits
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from muster.train.memory_check import FAKE_KERNELS, measure_fake_rank
from tests.fine_tuning import write_base_model, write_dialogues
from tests.nf4 import codebook, dynamic_book, rounded
from tests.sampling import quick_sample
from tests.test_adapters import check_found, logits
from tests.test_parity import GRADIENT_TOLERANCE, run
from tests.train_runs import QUICK, train

FOUR_BIT: dict[str, Any] = {"family": "lora 4-bit", "precision": "fp64", "steps": 2, "layers": 2}
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"plan": "tp2-sp", "profile": True},
        {"plan": "dp2-z1", "profile": True},
        {"plan": "dp2-z2-rfull"},
        {"plan": "dp2-z3", "profile": True},
        {"plan": "pp2-szbh1", "profile": True},
        {"plan": "pp2v2-szbv-vocab", "layers": 4},
        {"plan": "cp2-z3"},
        {"plan": "tp2-sp-tile2"},
        {"plan": "pp2-slice2"},
        {"plan": "dp2-z3", "family": "dora 4-bit"},
        {"plan": "tp2-sp", "family": "dora 4-bit"},
    ],
    4: [{"plan": name, "kv_heads": 4} for name in ("tp4-sp", "dp2-tp2-sp-z3", "tp2-pp2-z1", "dp2x2-z2")],
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


# ----------------------------------------------------------------------------------------------------------------------
# Numbers


def test_a_weight_has_the_numbers_of_the_papers_formulas() -> None:
    assert np.abs(codebook() - np.array(NF4)).max() < 1e-6
    assert np.abs(dynamic_book() - dynamic_values(is_signed=True).numpy()).max() < 1e-7
    weight = torch.randn(300, 192, generator=torch.Generator().manual_seed(1)) * 0.02
    weight[7, 64:128] = 0  # a block without an absolute maximum
    weight[8] *= 100
    codes, absmax, nested = quantize(weight)
    assert (codes.dtype, absmax.dtype, nested.dtype) == (torch.uint8, torch.uint8, torch.int32)
    held = sum(part.nbytes for part in (codes, absmax, nested)) / weight.numel()
    assert held == pytest.approx(0.5 + 1 / 64 + 4 / 64 / 256, abs=2e-4)
    assert (dequantize(codes, absmax, nested).double() - rounded(weight)).abs().max() < 1e-6 * weight.abs().max()


def test_the_error_is_within_half_a_step_of_the_codebook_and_that_of_the_maximum() -> None:
    """Of a normal distribution a tenth in all, and most at the widest gap; blocks of one number keep it."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(2))
    made = dequantize(*quantize(weight))
    assert 0.08 < (made - weight).norm() / weight.norm() < 0.1
    largest = weight.view(-1, 64).abs().amax(1)
    gap = max(after - before for before, after in zip(NF4, NF4[1:], strict=False)) / 2
    stored = (made.view(-1, 64).abs().amax(1) - largest).abs()
    assert ((made - weight).view(-1, 64).abs().amax(1) <= gap * largest + stored + 1e-6).all()
    assert stored.max() < 0.02 * largest.max()
    alike = torch.full((4, 64), -0.25)
    assert torch.equal(dequantize(*quantize(alike)), alike)


def test_a_part_of_a_weight_is_that_part_of_its_numbers() -> None:
    """Rows and columns of a rank, whose blocks are in groups of 256 that begin elsewhere; in pieces and at once."""
    weight = torch.randn(96, 1024, generator=torch.Generator().manual_seed(3))
    parts = quantize(weight)
    whole = dequantize(*parts)
    for row, end, column, last in ((0, 96, 0, 1024), (37, 90, 0, 1024), (5, 9, 256, 704)):
        rows, columns = slice(row, end), slice(column, last)
        linear = nn.Linear(1024, 96, bias=False)
        hold_in_four_bits(linear)
        linear.weight.place(rows.start, columns.start)  # type: ignore[operator]
        cut = (
            parts[0][rows, columns.start // 2 : columns.stop // 2],
            parts[1][rows, columns.start // 64 : columns.stop // 64],
            parts[2],
        )
        for name, part in zip(("weight_4bit", "weight_absmax", "weight_nested_absmax"), cut, strict=True):
            setattr(linear, name, nn.Parameter(part.clone(), requires_grad=False))
        assert torch.equal(linear.weight.dense(torch.float32), whole[rows, columns])  # type: ignore[operator]
        assert torch.equal(linear.weight.dense(torch.bfloat16), whole[rows, columns].bfloat16())  # type: ignore[operator]


# ----------------------------------------------------------------------------------------------------------------------
# Plans


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", CASES)
def test_every_plan_trains_as_a_plain_model_with_these_numbers(num_ranks: int, cache: Path) -> None:
    cases = [FOUR_BIT | case for case in CASES[num_ranks]]
    for case, found in zip(cases, run(num_ranks, cases, cache), strict=True):
        check_found(case, found)


def test_plans_train_as_a_plain_model_with_these_numbers(cache: Path) -> None:
    """Under tensor and sharded data parallelism; a rank that takes another part's scales is found."""
    common = FOUR_BIT | {"steps": 1}
    cases = [common | {"plan": plan, "profile": True} for plan in ("tp2-sp", "dp2-z3")]
    faulty = common | {"plan": "tp2", "fault": "scales from the first"}
    *good, bad = run(2, [*cases, faulty], cache)
    for case, found in zip(cases, good, strict=True):
        check_found(case, found)
    assert max(rank["gradient_error"] for rank in bad) > 1e4 * GRADIENT_TOLERANCE


@pytest.mark.parametrize("targets", quick_sample(["q,v", "all-linear"], 0))
@pytest.mark.parametrize(
    "name", quick_sample(["dp1-mb4", "dp1-mb4-fp32", "dp1-mb1-rfull", "dp2-z1-mb1", "dp2-z3-mb2", "pp2-mb1"], 0)
)
def test_memory_is_forecast_within_5_percent(name: str, targets: str) -> None:
    """And takes at most 0.6 of what the same adapters take beside whole weights."""
    optim, sizes = OptimConfig(lr=1e-3, freeze=ADAPTER_FREEZE), {"hidden_size": 1024, "intermediate_size": 3072}
    sizes |= {"num_heads": 16, "num_kv_heads": 4, "head_dim": 64, "vocab_size": 512, "num_layers": 4}
    plan, workload = parse_plan_name(name), Workload(seq_len=128, global_batch_size=8)

    def planned(four_bits: bool) -> tuple[Any, int]:
        adapter = AdapterSpec.model_validate({"target_modules": targets, "load_in_4bit": four_bits})
        model = load_model("demo").model_copy(update={"adapter": adapter, **sizes})
        return model, _forecast(model, plan, workload, FAKE_KERNELS, optim).ranks[0].terms.total

    model, forecast = planned(four_bits=True)
    counted = measure_fake_rank(model, plan, workload, 0, optim).peak_bytes
    assert 0.999 * counted <= forecast <= (1.06 if "fp32" in name else 1.05) * counted
    assert forecast < 0.6 * planned(four_bits=False)[1]


def test_predict_and_plan_count_weights_in_4_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory falls by what weights take, and a step is longer, for passes over them."""
    named: dict[str, Any] = {"seq_len": 2048, "global_batch": 8}
    whole, small = (
        predict("llama3-8b", "1xh100", "dp1-mb1-rfull", **named, adapter=f"lora:r=8{more}")
        for more in ("", ",load_in_4bit=true")
    )
    weights = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    terms = ("parameters", "gathered_parameters")
    saved = sum(whole.memory[0].terms[term] - small.memory[0].terms[term] for term in terms)
    assert saved == pytest.approx(weights * (4 + 2 - 0.516), rel=1e-3)
    assert 1.0 < small.step_time_s / whole.step_time_s < 1.25
    assert plan("llama3-8b", "1xrtx4090", **named, adapter="lora:r=8,load_in_4bit=true").predictions
    for model, text, expected in (
        (
            "mixtral-8x7b",
            "lora:load_in_4bit=true",
            "isn't known for a model with experts (moe): leave load_in_4bit",
        ),
        ("llama3-8b", "qlora", "qlora is kind lora with load_in_4bit true: give these"),
        ("llama3-8b", "hd_pissa:load_in_4bit=true", "load_in_4bit is for frozen weights, which hd_pissa changes"),
    ):
        assert main(["plan", "--model", model, "--cluster", "8xh100", "--adapter", text]) == 2
        assert expected in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# Files

RUN_FILE = """
model: hf:base
adapter: {r: 4, lora_alpha: 16, load_in_4bit: true, target_modules: [q_proj, v_proj, down_proj]}
data: {source: ./talks.json, tokenizer: base, validation_split: 0.1, packing: next_fit}
train: {steps: 6, global_batch_size: 4, seq_len: 64, init_from: base, async_save: false}
optim: {lr: 1.0e-2}
"""


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """All stored tensors of a run's last checkpoint."""
    stored = open_directory(path).stored
    return {name: stored.read(name, Box((0,) * len(meta.shape), meta.shape)) for name, meta in stored.metas.items()}


def test_a_run_is_exported_merged_and_resumed_under_another_plan(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """PEFT on the quantized base model, the merged model and the checkpoint have the same logits; codes stay as they
    were to the bit, from plan to plan."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base, run, export, merged = (tmp_path / name for name in ("base", "run", "export", "merged"))
    write_base_model("llama", base, hidden_size=64, intermediate_size=128)
    write_dialogues(tmp_path / "talks.json")
    (tmp_path / "qlora.yaml").write_text(RUN_FILE)
    first: dict[str, torch.Tensor] = {}
    for steps, name in (("3", "dp2-mb1-z3-fp32"), ("6", "dp1-mb2-fp32")):
        ended = train(tmp_path / "qlora.yaml", "--run", run, "--parallel", name, "--train.steps", steps, *QUICK, *ALLOW)
        assert ended.code == 0, ended.err
        held = {name: one for name, one in weights_of(run).items() if ".weight_" in name}
        assert len(held) % (3 * 7) == 0 < len(held)
        assert all(torch.equal(one, first.setdefault(name, one)) for name, one in held.items())
    opened = open_directory(run).model
    assert opened is not None
    losses = [json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.5
    assert main(["checkpoint", "convert", str(run), str(export), "--to", "peft"]) == 0
    assert main(["checkpoint", "convert", str(run), str(merged), "--to", "hf"]) == 0
    ids = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for layer in theirs.model.layers:  # as `load_in_4bit` would hold them
        for linear in (one for one in layer.modules() if isinstance(one, nn.Linear)):
            linear.weight.data = dequantize(*quantize(linear.weight.data))
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(theirs, export)(ids).logits
    for found in (logits(run, ids), logits(merged, ids)):
        assert (found - adapted).abs().max() < 1e-4
    begun, dense = (model_weights(open_directory(path)) for path in (base, run))
    for name, meta in begun.metas.items():
        weight = begun.read(name, meta.whole)
        expected = rounded(weight) if has_four_bits(opened, name) else weight
        # An element halfway between two numbers of the codebook may become either; a block has 64 elements.
        differs = (dense.read(name, meta.whole) - expected).abs() > 1e-6 * weight.abs().max()
        assert differs.sum() < 8, name


ALLOW = ("--allow-changes",)


def test_what_cannot_be_held_in_4_bits_is_said_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["train", "--preset", "tiny", "--dry-run", "--adapter.load_in_4bit", "true"]
    for flags, code, expected in (
        (["--model.intermediate_size", "250"], 2, "but those of down have 250: leave load_in_4bit out"),
        (
            ["--optim.freeze", "!*.q.weight"],
            2,
            "optim.freeze trains layers.0.attn.q.weight, which adapter.",
        ),
        (["--parallel", "tp2"], 3, "columns of o and the 192 of down into multiples of 64"),
        (["--adapter.load_in_8bit", "true"], 2, "there is no 8-bit form of them"),
        (["--adapter.quantize_base", "true"], 2, "that is adapter.load_in_4bit"),
        (["--adapter.kind", "qlora"], 2, "qlora is kind lora with load_in_4bit true: give these"),
        (["--adapter.load_in_4bit", "4"], 2, "adapter.load_in_4bit: expected true or false, got '4'"),
    ):
        assert main([*tiny, *flags]) == code, flags
        assert expected in capsys.readouterr().err, flags
