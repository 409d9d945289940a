"""Low-rank layers: parity under parallelism, memory and FLOPs as counted, factors of loaded weights and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from muster.checkpoint.model_directory import model_weights, open_directory
from muster.cli.main import main
from muster.cli.memory_check import _forecast
from muster.config.named_model import load_model
from muster.config.optim_config import OptimConfig
from muster.cost.flops import train_flops_per_token
from muster.model.decoder import Decoder
from muster.spec.low_rank import LowRankSpec
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from muster.train.memory_check import FAKE_KERNELS, measure_fake_rank
from tests.fine_tuning import write_base_model, write_dialogues
from tests.sampling import quick_sample
from tests.test_adapters import check_found, logits
from tests.test_parity import GRADIENT_TOLERANCE, run
from tests.train_runs import QUICK, train

LOW_RANK: dict[str, Any] = {"family": "low rank", "precision": "fp64", "steps": 2}
SOME: dict[str, Any] = {"family": "low rank of some"}
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"plan": "tp2"},
        {"plan": "tp2-sp-rfull", "profile": True},
        {"plan": "tp2-sp-relem"} | SOME,
        {"plan": "dp2-z1", "profile": True},
        {"plan": "dp2-z2"},
        {"plan": "dp2-z3-rfull", "profile": True},
        {"plan": "dp2-z3", "profile": True} | SOME,
        {"plan": "pp2-szbh1", "profile": True},
        {"plan": "pp2v2-szbv-vocab"},
        {"plan": "pp2-slice2"},
        {"plan": "cp2-z3"},
        {"plan": "tp2-sp-tile2"},
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


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", CASES)
def test_low_rank_layers_under_every_plan_train_as_in_one_process(num_ranks: int, cache: Path) -> None:
    cases = [LOW_RANK | case for case in CASES[num_ranks]]
    for case, found in zip(cases, run(num_ranks, cases, cache), strict=True):
        check_found(case, found)


def test_low_rank_layers_train_as_in_one_process(cache: Path) -> None:
    """Under tensor and data parallelism; a gradient that isn't summed over the ranks that hold a factor is found."""
    sound = [LOW_RANK | {"plan": "tp2-sp", "profile": True}, LOW_RANK | SOME | {"plan": "dp2-z3", "profile": True}]
    cases = [*sound, LOW_RANK | {"plan": "tp2", "fault": "lost copies"}]
    *found, bad = run(2, [case | {"layers": 2} for case in cases], cache)
    for case, good in zip(sound, found, strict=True):
        check_found(case, good)
    assert max(rank["gradient_error"] for rank in bad) > 1e4 * GRADIENT_TOLERANCE


@pytest.mark.parametrize("how", quick_sample([{"rank": 16}, {"ratio": 0.3, "target_modules": "o,up,down"}], 1))
def test_parameters_flops_and_memory_are_those_counted(how: dict[str, Any]) -> None:
    low_rank = LowRankSpec.model_validate(how)
    model = load_model("demo").model_copy(update={"low_rank": low_rank, "num_layers": 3})
    decoder = Decoder(model, range(3), first=True, last=True)
    assert [(name, tuple(one.shape)) for name, one in decoder.named_parameters()] == list(parameter_shapes(model))
    tokens = torch.zeros(1, 64, dtype=torch.long)
    whole = model.model_copy(update={"low_rank": None})
    counted: list[int] = []
    for spec in (model, whole):  # attention on a CPU isn't counted: the difference of two models is
        with FlopCounterMode(display=False) as counter:
            Decoder(spec, range(3), first=True, last=True)(tokens).sum().backward()
        counted.append(counter.get_total_flops())
    predicted = [train_flops_per_token(spec, 64) * 64 for spec in (model, whole)]
    assert counted[1] - counted[0] == predicted[1] - predicted[0] > 0
    plan, workload = parse_plan_name("dp1-mb4"), Workload(seq_len=256, global_batch_size=8)
    optim = OptimConfig(lr=1e-3)
    forecasts, measured = [], []
    for spec in (model, whole):
        forecasts.append(_forecast(spec, plan, workload, FAKE_KERNELS, optim).ranks[0].terms.total)
        measured.append(measure_fake_rank(spec, plan, workload, 0, optim).peak_bytes)
    assert forecasts[1] - forecasts[0] == measured[1] - measured[0] > 0
    assert abs(forecasts[0] - measured[0]) < 0.03 * measured[0]


RUN_FILE = """
model: {preset: hf:base, low_rank: {ratio: 0.5}}
data: {source: ./talks.json, tokenizer: base, validation_split: 0.1, packing: next_fit}
train: {steps: 4, global_batch_size: 4, seq_len: 64, init_from: base}
optim: {lr: 1.0e-2}
"""


def test_weights_are_factorized_by_svd_and_exported_whole(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each factor pair is the nearest product of its rank; a run goes on under another plan; the exported model has
    the trained one's logits."""
    base, run_dir, export = (tmp_path / name for name in ("base", "run", "export"))
    write_base_model("llama", base)
    write_dialogues(tmp_path / "talks.json")
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    more = ("--run", run_dir, "--optim.lr", "1e-30", "--train.steps", "1", *QUICK)
    assert train(tmp_path / "run.yaml", *more, "--parallel", "tp2-mb2-fp32").code == 0
    stored = open_directory(run_dir)
    assert stored.model is not None
    assert stored.model.low_rank is not None
    begun, whole = model_weights(stored), model_weights(open_directory(base))
    name = "layers.1.mlp.down"
    a, b, w = (
        source.read(one, source.metas[one].whole)
        for source, one in (
            (begun, f"{name}.low_rank_A.weight"),
            (begun, f"{name}.low_rank_B.weight"),
            (whole, f"{name}.weight"),
        )
    )
    left, values, right = torch.linalg.svd(w, full_matrices=False)
    r = stored.model.low_rank_ranks["down"]
    assert a.shape[0] == r == w.numel() // sum(w.shape) // 2
    torch.testing.assert_close(b @ a, left[:, :r] * values[:r] @ right[:r], rtol=0, atol=1e-5)
    trained = ("--run", run_dir, "--fresh", *QUICK)
    assert train(tmp_path / "run.yaml", *trained, "--parallel", "tp2-mb2-fp32").code == 0
    on = ("--run", run_dir, "--train.steps", "6", "--parallel", "dp2-mb1-z3-fp32", *QUICK)
    assert train(tmp_path / "run.yaml", *on).code == 0
    losses = [json.loads(line)["train/loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.5
    assert main(["checkpoint", "convert", str(run_dir), str(export), "--to", "hf"]) == 0
    ids = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    assert (logits(run_dir, ids) - logits(export, ids)).abs().max() < 1e-5
    more = (tmp_path / "run.yaml", "--run", tmp_path / "more", "--train.init_from", str(run_dir), *QUICK)
    assert train(*more, "--parallel", "dp1-mb2-fp32", "--train.steps", "1").code == 0
    first = json.loads((tmp_path / "more" / "metrics.jsonl").read_text().splitlines()[0])["train/loss"]
    assert first < losses[0] - 0.5


def test_what_cant_be_low_rank_is_said(capsys: pytest.CaptureFixture) -> None:
    known: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    known["intermediate_size"] = 32
    for values, sentence in (
        ({}, "expected one of rank and ratio, but neither is given"),
        ({"rank": 4, "ratio": 0.5}, "both are given"),
        ({"rank": 4, "target_modules": "q_prj"}, "did you mean 'q_proj'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            LowRankSpec.model_validate(values)
    with pytest.raises(ValueError, match="adapters of a model with low_rank aren't known"):
        ModelSpec.model_validate({**known, "low_rank": {"rank": 4}, "adapter": {}})
    with pytest.raises(ValueError, match="rank 16 of low_rank makes none of q, k"):
        ModelSpec.model_validate({**known, "low_rank": {"rank": 16}})
    wide = ModelSpec.model_validate({**known, "low_rank": {"rank": 8}})
    assert wide.low_rank_ranks == {"gate": 8, "up": 8, "down": 8}  # 8 of 16 x 16 would be no smaller
    tiny = ["train", "--preset", "tiny", "--dry-run", "--model.low_rank.rank", "4"]
    assert main([*tiny, "--parallel", "dp1-fp8"]) == 3
    assert "fp8 with low-rank layers" in capsys.readouterr().err
    assert main([*tiny, "--parallel", "dp1"]) == 0
