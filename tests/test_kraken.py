"""Layers of sub-layers side by side (`parallel_sublayers`, Kraken)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from muster.api.trained_models import generate
from muster.api.verbs import plan as best_plans
from muster.cli.main import main
from muster.config.named_model import load_model
from muster.model.decoder import Decoder
from muster.model.init import init_stage, initial_value
from muster.spec.errors import InfeasibleError
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.supported import unsupported_features
from muster.spec.workload import Workload
from tests import test_resume
from tests.parity import small_run
from tests.plans import unequal
from tests.sampling import quick_sample
from tests.test_memory_forecast import SHORT_LLAMA, assert_forecast_is_accounting
from tests.test_parity import GRADIENT_TOLERANCE, by_layer, check_parity, run
from tests.train_runs import QUICK, generated, train

FOUR: dict[str, Any] = {"family": "llama kraken4"}
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"plan": "dp1", "profile": True},
        {"plan": "dp1-rfull", "family": "gpt2 kraken2", "profile": True},
        {"plan": "dp1-relem", "family": "qwen3 kraken2"},
    ],
    2: [
        {"plan": "tp2", "profile": True},
        {"plan": "tp2-rfull", "tied": True, "profile": True} | FOUR,
        {"plan": "tp2-relem-mb2", "family": "gpt2 kraken2", "profile": True},
        {"plan": "tp2", "family": "qwen3 kraken2", "packing": "document_mask"},
        {"plan": "pp2", "tied": True, "profile": True} | FOUR,
        {"plan": "pp2-rfull", "family": "gpt2 kraken2"},
        {"plan": "dp2-z3-rfull", "profile": True},
        {"plan": "dp2-z1", "family": "gpt2 kraken2"},
        {"plan": "pp2v2-sdualpipev"},
        {"plan": "cp2", "packing": "next_fit"},
    ],
    4: [
        {"plan": "tp2-pp2", "profile": True},
        {"plan": "tp2-pp2-rfull", "family": "gpt2 kraken2", "tied": True, "profile": True},
        {"plan": "tp2-pp2-szbh1", "family": "gpt2 kraken4", "profile": True},
        {"plan": "tp2-pp2v2-sinterleaved-relem"},
        {"plan": "tp2-dp2-z3", "profile": True} | FOUR,
        {"plan": "tp2-dp2-z3-rfull", "family": "gpt2 kraken2"},
        {"plan": "tp2-dp2-z2", "family": "qwen3 kraken4"},
        {"plan": "tp2-dp2-z1", "tied": True, "overlaps": True},
        {"plan": "tp2-dp2-z3", "changes": {"bucket_layers": 2}},
        {"plan": "tp4-rfull"} | FOUR,
        {"plan": "tp2-cp2"},
        {"plan": "tp2-pp2", "changes": by_layer("none", "full", "elementwise", "full")},
        {"plan": "pp2-mb2-z1", "tied": True, "changes": unequal((3, {"tp": 2}), (1, {"dp_shard": 2}))},
    ],
}


SAMPLE = {2: [CASES[2][1] | {"fault": "late sums"}], 4: CASES[4][2:3]}
"""With sums that only begin where they are waited for: nothing reads them before."""
FAULTS = (
    "missing wait for streams",
    "missing wait for gradients",
    "sum of streams twice",
    "sum of streams lost",
    "lost first streams",
    "lost copies",
)


def _krakens(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"family": "llama kraken2"} | case | {"precision": "fp64", "steps": 1} for case in cases]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize("num_ranks", quick_sample(list(SAMPLE), 0))
def test_gradients_of_sub_layers_equal_one_process(num_ranks: int, cache: Path) -> None:
    check_parity(num_ranks, _krakens(SAMPLE[num_ranks]), cache)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", CASES)
def test_gradients_of_more_krakens_equal_one_process(num_ranks: int, cache: Path) -> None:
    check_parity(num_ranks, _krakens(CASES[num_ranks]), cache)


@pytest.mark.soak
def test_sown_bugs_are_caught(cache: Path) -> None:
    """The last is of norms of queries and keys, of which both ranks have copies."""
    cases = _krakens([{"plan": "tp2", "family": "qwen3 kraken2", "fault": fault} for fault in FAULTS])
    for case, found in zip(cases, run(2, cases, cache), strict=True):
        assert max(rank["gradient_error"] for rank in found) > 1e4 * GRADIENT_TOLERANCE, case


@torch.no_grad()
def test_sub_layers_meet_in_the_sum_of_streams_before_the_mlp() -> None:
    """The definition, written out in the published program's form: an MLP reads its own stream, with attention, and the
    others' streams as they were before the layer."""
    spec = small_run(family="gpt2 kraken2").model
    model = Decoder(spec, range(spec.num_layers), first=True, last=True)
    init_stage(model, spec, 0)
    for parameter in model.parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    tokens_BS = torch.arange(24).view(2, 12)
    embedded = model.embed_tokens(tokens_BS, model.get_parameter("embed.weight")) + model.positions.weight[:12]  # type: ignore[union-attr]
    narrow = spec.model_copy(
        update={"num_heads": 2, "num_kv_heads": 2 if spec.num_kv_heads == 4 else 1, "intermediate_size": 24}
        | {"parallel_sublayers": 1, "num_layers": 1}
    )
    streams = [embedded] * 2
    for layer in range(spec.num_layers):
        before = streams
        streams = []
        for own in range(2):
            sublayer = _sublayer(model, f"layers.{layer}", narrow, own)
            x = before[own] + sublayer.attn(before[own], sublayer.attn_norm, None, None)
            read = x + (before[1 - own] if layer else 0)
            streams.append(x + sublayer.mlp(read, sublayer.mlp_norm))
    assert model.norm is not None
    assert model.conjunction is not None
    expected = model.logits(model.norm(model.conjunction(torch.cat(streams, -1))))
    torch.testing.assert_close(model(tokens_BS), expected, rtol=1e-4, atol=1e-6)


def _sublayer(model: Decoder, prefix: str, narrow: Any, own: int) -> Any:
    """An ordinary layer with the weights of one sub-layer of a model: its rows, columns, or part of a vector."""
    layer = Decoder(narrow, range(1), first=True, last=True).blocks()[0]
    for name, parameter in layer.named_parameters():
        whole = model.get_parameter(f"{prefix}.{name}")
        dim = 1 if name in ("attn.o.weight", "mlp.down.weight") else 0
        parameter.copy_(whole.chunk(2, dim)[own])
    return layer


def test_weights_into_a_stream_begin_smaller_by_the_number_of_sub_layers() -> None:
    """Those of one model with two sub-layers side by side and one without: 1 / √(2 · layers · k), as in the program of
    Kraken's authors."""
    wide = small_run(family="gpt2 kraken2").model
    plain = wide.model_copy(update={"parallel_sublayers": 1})
    for name in ("layers.0.attn.o.weight", "layers.1.mlp.down.weight"):
        shape = dict(parameter_shapes(wide))[name]
        ours, theirs = (initial_value(spec, name, shape, 0) for spec in (wide, plain))
        torch.testing.assert_close(ours, theirs / 2**0.5)


def test_what_sub_layers_are_without_is_said() -> None:
    known: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 4}
    known |= {"intermediate_size": 32, "parallel_sublayers": 4}
    for field, value, sentence in (
        ("parallel_residual", True, "parallel_sublayers 4 with parallel_residual"),
        ("residual", "ladder", "parallel_sublayers 4 with residual ladder"),
        ("moe", {"num_experts": 4, "top_k": 2, "expert_size": 8}, "parallel_sublayers 4 with moe"),
        ("num_kv_heads", 2, "parallel_sublayers 4 doesn't divide num_kv_heads 2: take 2, or another num_kv_heads"),
        ("intermediate_size", 33, "doesn't divide intermediate_size 33: take 3"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ModelSpec.model_validate({**known, field: value})
    spec = ModelSpec.model_validate({**known, "num_heads": 8, "num_kv_heads": 8})
    for name, found in (
        ("tp2-sp-fp32", "sp of a model with parallel_sublayers 4 (each rank has whole streams of all positions)"),
        ("tp2-domino-mb2-fp32", "tp_overlap domino of a model with parallel_sublayers 4 (whose collectives"),
        ("dp1-tile2-fp32", "sequence_tiles of a model with parallel_sublayers 4"),
    ):
        assert any(one.startswith(found) for one in unsupported_features(parse_plan_name(name), spec)), name
    workload = Workload(seq_len=16, global_batch_size=8)
    with pytest.raises(
        InfeasibleError, match=r"tp 8 doesn't divide the model's parallel_sublayers 4.*legal are 1, 2, 4"
    ):
        require_runnable(parse_plan_name("tp8-fp32"), spec, workload, 8)


def test_as_many_parameters_as_an_ordinary_model_but_for_vectors_and_the_conjunction() -> None:
    """The published two-way model of 125 M parameters: six heads of 113 elements and an MLP of width 1,356 each."""
    sizes: dict[str, Any] = {
        "vocab_size": 50304,
        "num_layers": 12,
        "num_heads": 12,
        "hidden_size": 678,
        "head_dim": 113,
    }
    sizes |= {"position": "learned", "max_positions": 1024, "norm": "layer", "gated": False, "tied_embeddings": True}
    sizes |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "intermediate_size": 2 * 2 * 678}
    own = ModelSpec.model_validate(sizes | {"activation": "gelu", "rotary_dim": None, "parallel_sublayers": 2})
    sublayer = 4 * 678 * 679 + 678 * 1356 * 2 + 1356 + 678 + 4 * 678
    ends = 678 * (50304 + 1024) + 678 * (2 * 678 + 1) + 2 * 678
    assert own.num_parameters == 12 * 2 * sublayer + ends
    assert 123e6 < own.num_parameters < 126e6


@pytest.mark.parametrize(("layers", "batch"), quick_sample([(8, 8), (32, 64)], 0))
def test_the_planner_takes_tensor_parallel_degrees_that_divide_the_sub_layers(layers: int, batch: int) -> None:
    """And knows that sums are hidden by attention."""
    asked: dict[str, Any] = {"global_batch": batch, "top": 3}
    model = load_model("llama3-8b").model_copy(update={"num_layers": layers})
    found = best_plans(model.model_copy(update={"parallel_sublayers": 4}), "8xa100", require="tp4", **asked)
    plain = best_plans(model, "8xa100", require="tp4", **asked)
    plain_s, own_s = (one.predictions[0].parts.communication_s["tp"] for one in (plain, found))
    assert own_s < 0.5 * plain_s
    with pytest.raises(InfeasibleError):
        best_plans(model.model_copy(update={"parallel_sublayers": 4}), "8xa100", require="tp8", **asked)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("sublayers", "name", "seq_len", "micro_batches"),
    [
        (2, "tp2-pp2", 2048, 2),
        (2, "dp4-z3-rfull", 2048, 1),
        (2, "pp4-rfull", 2048, 4),
        (4, "tp4", 16384, 1),
        (4, "dp2-tp2-z3-relem", 8192, 2),
        (4, "tp2-pp2-szbh1", 8192, 3),
    ],
)
def test_forecast_is_what_pytorch_counts(sublayers: int, name: str, seq_len: int, micro_batches: int) -> None:
    spec = SHORT_LLAMA.model_copy(update={"parallel_sublayers": sublayers})
    assert_forecast_is_accounting(spec, name, seq_len, micro_batches)


@pytest.mark.soak
def test_a_run_goes_on_under_every_other_plan(tmp_path: Path) -> None:
    words = ["tp4-pp1", "dp1", "tp2-pp2", "dp2-z3", "pp2-rfull", "tp2-dp2-z1", "dp1"]
    config = small_run(family="gpt2 kraken4", kv_heads=4, steps=500).model_dump(mode="json")
    plans = [parse_plan_name(word, Plan(precision="fp64")).model_dump(mode="json") for word in words]
    chain = {"config": config, "plans": plans}
    assert test_resume.check([chain], test_resume.run(tmp_path, [chain], most=4)) == len(words) - 1


def test_a_run_generates_with_either_degree_and_isnt_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    options = "--preset", "tiny", "--model.parallel_sublayers", "2", "--train.steps", "2", "--parallel", "tp2-mb2-fp32"
    begun = train(*options, "--run", run_dir, *QUICK)
    assert begun.code == 0, begun.err
    text = generate(run_dir, "the quick", tokens=8, temperature=0).texts
    assert text == generated(run_dir, "the quick", plan="tp2", words=("--tokens", "8")) != ("",)
    assert main(["checkpoint", "convert", str(run_dir), str(tmp_path / "export"), "--to", "hf"]) == 3
    assert "can't express its parallel_sublayers" in capsys.readouterr().err
