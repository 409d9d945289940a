"""Multi-token prediction (DeepSeek-V3's MTP layers): parity under every kind of plan, forecasts, bytes, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.cost.time.kernels import matmul_s
from muster.cost.time.layer import head_passes, layer_passes
from muster.cost.time.plan_times import place_plan
from muster.cost.time.stage_times import StageTimes
from muster.interop.hf_config import spec_from_hf_config
from muster.model.decoder import Decoder
from muster.model.documents import Documents
from muster.model.further_tokens import shift_further
from muster.model.init import init_stage
from muster.model.loss import cross_entropy_sum
from muster.report.terminal import plan_lines
from muster.spec.errors import InfeasibleError
from muster.spec.frameworks import MUSTER
from muster.spec.inference_plans import require_evaluation_supported, require_generation_supported
from muster.spec.model import ModelSpec, parameter_shapes, stage_parameter_shapes
from muster.spec.model_components import MoeSpec
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from tests.hf_models import CONFIGS
from tests.parity import FAMILIES, further_loss, with_two_layers
from tests.ranks import run_ranks
from tests.sampling import quick_sample
from tests.test_context_parallel import in_float64
from tests.test_hf_round_trip import convert, opened, our_logits, some_tokens, their_logits
from tests.test_memory_forecast import assert_forecast_is_accounting
from tests.test_parity import CHUNKED, GRADIENT_TOLERANCE, cache, check_parity, run  # noqa: F401
from tests.weights import read_weights, save_weights

CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"plan": f"dp1{how}", "family": f"{family} mtp"}
        for family in ("llama", "gemma2", "gpt2", "experts", "deepseek")
        for how in ("", "-relem", "-rfull")
    ],
    2: [
        {"plan": "tp2-sp", "family": "gemma2 mtp", "tied": True, "profile": True},
        {"plan": "pp2-szbh1", "family": "deepseek mtp"},
        {"plan": "cp2u-ep2", "family": "deepseek mtp"},
        {"plan": "dp2-ep2-z3", "family": "deepseek mtp"},
        {"plan": "dp2-mb2", "family": "deepseek mtp", "packing": "none"},
        {"plan": "tp2-sp-ep2", "family": "deepseek mtp"},
        {"plan": "tp2-ep2-mb2", "family": "experts mtp", "packing": "none"},
        {"plan": "tp2-etp2-mb2-rfull", "family": "experts mtp", "packing": "none"},
        {"plan": "tp2", "family": "llama mtp", "changes": CHUNKED},
        {"plan": "tp2-rfull", "family": "llama mtp", "profile": True},
        {"plan": "pp2", "family": "deepseek mtp"},
        {"plan": "pp2-sgpipe", "family": "llama mtp", "tied": True},
        {"plan": "pp2v2-sdualpipe", "family": "llama mtp", "tied": True},
        {"plan": "pp2v2-szbv", "family": "experts mtp"},
        {"plan": "pp2v2-sinterleaved", "family": "gpt2 mtp", "tied": True},
        *({"plan": f"dp2-{zero}", "family": "llama mtp", "profile": True} for zero in ("z1", "z2", "z3")),
        *({"plan": f"dp2-{zero}", "family": "experts mtp"} for zero in ("z1", "z2", "z3")),
        {"plan": "dp2-z1-uneven3.1", "family": "llama mtp", "z_loss": 0.1},
        {"plan": "dp2-tile2", "family": "gpt2 mtp"},
        {"plan": "dp2", "family": "llama mtp", "optim": "muon"},
        {"plan": "cp2", "family": "llama mtp"},
        {"plan": "cp2a-mb2", "family": "llama mtp", "packing": "next_fit"},
        {"plan": "pp2-mb2", "family": "llama mtp", "packing": "document_mask"},
    ],
    4: [
        {"plan": "tp2-sp-pp2v2-szbv", "family": "llama mtp", "tied": True},
        {"plan": "dp2-tp2-sp-ep4", "family": "deepseek mtp"},
        {"plan": "dp2-pp2-ep2-z3", "family": "deepseek mtp"},
        {"plan": "dp2-pp2-z1", "family": "llama mtp"},
        {"plan": "dp2x2-z2", "family": "experts mtp"},
        {"plan": "cp2-pp2", "family": "deepseek mtp"},
        {"plan": "tp2-sp-cp2-ep4", "family": "deepseek mtp"},
    ],
}
"""Plans that train models with multi-token prediction; the first three of 2 ranks are in `make test`."""


def model_of(family: str, **fields: Any) -> ModelSpec:
    shape = {"vocab_size": 50, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "intermediate_size": 48}
    return ModelSpec(**shape | FAMILIES[family] | fields)


def test_modules_have_the_parameters_of_the_spec() -> None:
    spec = model_of("deepseek mtp")
    for layers, first in ((range(3), True), (range(2, 3), False)):
        module = Decoder(spec, layers, first, last=True)
        found = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
        assert found == list(stage_parameter_shapes(spec, layers, first, True))
    names = dict(parameter_shapes(spec))
    assert names["mtp.1.eh_proj.weight"] == (32, 64)
    assert "mtp.1.mlp.experts.up.weight" in names
    assert spec.expert_layers == (1, 2, 3, 4)


@pytest.mark.parametrize("starts", [None, (0, 5, 6, 9)])
def test_padding_to_whole_sequences_changes_nothing(starts: tuple[int, ...] | None) -> None:
    """Losses of whole sequences whose ends don't count equal those of the paper's shorter sequences, by document."""
    spec = model_of("llama mtp")
    model = Decoder(spec, range(3), first=True, last=True).double()
    init_stage(model, spec, 0)
    text = torch.randint(50, (2, 13), generator=torch.Generator().manual_seed(0))
    tokens, labels = text[:, :-1], text[:, 1:]
    positions = torch.arange(12).expand(2, -1)
    if starts is not None:
        begins = torch.tensor([max(start for start in starts if start <= at) for at in range(12)])
        positions = positions - begins
        last_of_document = torch.tensor([at + 1 in starts for at in range(12)])
        labels = labels.masked_fill(last_of_document, -100)
    further = [shift_further(tokens, labels, depth, positions) for depth in (1, 2)]
    assert further[1].counted_BS.sum() == sum(max(0, len(row) - 2) for row in documents(positions))
    found = []
    model.reduce_hidden = lambda hidden, depth: found.append(hidden) or hidden.sum()
    model.further_tokens = further
    model.position_state.documents = Documents.from_positions(positions, torch.device("cpu"))
    model(tokens)
    hidden_at_depth = zip(found[1:], further, strict=True)
    losses = [cross_entropy_sum(model.logits(hidden), one.labels_BS) for hidden, one in hidden_at_depth]
    expected = further_loss(model, tokens, labels, found[0], positions.numpy(), 0.0)
    assert torch.allclose(sum(losses) * spec.mtp_loss_scaling_factor / 2, expected, rtol=1e-12, atol=0)


def documents(positions_BS: torch.Tensor) -> list[list[int]]:
    """Positions of each document of each row."""
    found: list[list[int]] = []
    for row in positions_BS.tolist():
        for at in row:
            if at == 0:
                found.append([])
            found[-1].append(at)
    return found


def test_gradients_equal_one_process(cache: Path) -> None:  # noqa: F811
    check_parity(2, in_float64(list(map(with_two_layers, CASES[2][:3]))), cache)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_ranks", CASES)
def test_gradients_of_every_plan_equal_one_process(num_ranks: int, cache: Path) -> None:  # noqa: F811
    check_parity(num_ranks, in_float64(CASES[num_ranks]), cache)


@pytest.mark.soak
def test_sown_bugs_are_caught(cache: Path) -> None:  # noqa: F811
    bugs = [
        {"plan": "pp2", "family": "llama mtp", "fault": "same further token"},
        {"plan": "pp2", "family": "llama mtp", "fault": "lone embedding"},
        {"plan": "dp2-mb2", "family": "experts mtp", "packing": "none", "fault": "routed padding counts"},
    ]
    for bug, found in zip(bugs, run(2, in_float64(bugs), cache), strict=True):
        assert max(rank["gradient_error"] for rank in found) > 1e4 * GRADIENT_TOLERANCE, bug


BYTES = [
    ("tp2-sp-rfull", False, {"family": "llama mtp"}),
    ("tp2", True, {"family": "gemma2 mtp"}),
    ("tp2-sp-ep2", False, {"family": "deepseek mtp"}),
    ("dp2-ep2-z3", False, {"family": "deepseek mtp"}),
    ("pp2", False, {"family": "llama mtp"}),
    ("cp2-rfull", False, {"family": "experts mtp"}),
    ("tp2-ep2-rfull", False, {"family": "experts mtp"}),
    ("dp2-ep2-z1-rfull", False, {"family": "deepseek mtp"}),
    ("tp2-etp2-rfull", False, {"family": "experts mtp"}),
    ("tp2-sp-ep2-rfull", False, {"family": "balanced mtp"}),
    ("dp2-tile2-rfull", False, {"family": "llama mtp"}),
    ("tp2-tile2-rfull", False, {"family": "llama mtp"}),
    ("tp2", False, {"family": "llama mtp"}, CHUNKED),
]


@pytest.mark.soak
def test_sent_bytes_are_the_formulas(tmp_path: Path) -> None:
    """What goes to experts as a mean over ranks, whose load is uneven."""
    found = run_ranks(2, "tests.comm_volume_ranks:count", {"cases": BYTES, "cache": str(tmp_path)})
    for ranks in zip(*found, strict=True):
        to_experts = [sum(case[how].pop("ep", {}).values()) for how in ("counted", "predicted") for case in ranks]
        assert sum(to_experts[:2]) == sum(to_experts[2:]), ranks[0]["plan"]
        assert all(case["counted"] == case["predicted"] for case in ranks), ranks[0]["plan"]


@pytest.mark.parametrize("name", quick_sample(["dp2-z3", "dp1-rfull", "pp2-szbh1"], 1, 2))
def test_forecast_is_what_pytorch_counts(name: str) -> None:
    shape = {"vocab_size": 2000, "hidden_size": 1024, "num_layers": 2, "num_heads": 16, "intermediate_size": 2816}
    moe = MoeSpec(num_experts=8, top_k=2, expert_size=704)
    spec = ModelSpec(**shape, mtp_layers=1, moe=moe if name == "dp2-z3" else None)
    assert_forecast_is_accounting(spec, name, 2048, 2, only_ends=True)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ("pp2-vocab", "vocab_parallel with multi-token prediction .* nearest: pp2-"),
        ("pp2-slice2", "sequence_slices with multi-token prediction .* nearest: pp2-"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(plan: str, sentence: str) -> None:
    spec = model_of("llama mtp")
    with pytest.raises(InfeasibleError, match=sentence) as refusal:
        require_runnable(parse_plan_name(plan), spec, Workload(seq_len=16, global_batch_size=8), 2)
    assert "\n" not in str(refusal.value)


def test_the_last_stage_names_its_layers_for_multi_token_prediction() -> None:
    workload, plan = Workload(seq_len=16, global_batch_size=8), parse_plan_name("pp2")
    lines = plan_lines(plan, model_of("llama mtp"), workload, 8).splitlines()
    further = [line for line in lines if "for multi-token prediction" in line]
    assert len(further) == 1
    assert "1: layer" in further[0]
    assert further[0].endswith("for multi-token prediction, head")


@pytest.mark.soak
def test_an_export_opens_and_comes_back_whole(tmp_path: Path) -> None:
    """`transformers` leaves out the layers that it doesn't know."""
    spec = spec_from_hf_config(CONFIGS["deepseek_v3"] | {"num_nextn_predict_layers": 2}, "test")
    step = save_weights(tmp_path / "checkpoints", spec)
    theirs, weights = opened(convert(step, tmp_path / "hf", "hf")), read_weights(step)
    tokens = some_tokens(spec.vocab_size)
    torch.testing.assert_close(their_logits(theirs, tokens), our_logits(spec, weights, tokens), rtol=1e-5, atol=1e-5)
    back = read_weights(convert(tmp_path / "hf", tmp_path / "back", "muster"))
    assert list(back) == list(weights)
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("name", ["tp2", "tp2-etp2"])
def test_ranks_that_generate_have_slices_of_experts(name: str) -> None:
    require_generation_supported(parse_plan_name(name), model_of("deepseek mtp"))
    require_evaluation_supported(parse_plan_name(f"dp2-{name}"), model_of("experts"))


def test_predictions_count_the_projection_of_further_tokens() -> None:
    """A second depth takes as much longer than the first as its matmuls take, those of `eh_proj` among them."""
    spec, cluster = load_model("llama3.2-1b"), load_cluster("1xh100")
    device, tokens, eager = cluster.device, 4096, parse_plan_name("dp1-bf16").model_copy(update={"compile": False})
    by_depth = []
    for depth in (0, 1, 2):
        model = spec.model_copy(update={"mtp_layers": depth, "tied_embeddings": False})
        workload = Workload(seq_len=tokens, global_batch_size=1)
        placed = place_plan(model, eager, workload, cluster, MUSTER)
        by_depth.append(StageTimes(placed, 0))
    context = by_depth[0].layer_context
    layer, head = layer_passes(context, 0), head_passes(context, spec.vocab_size)
    made_s = [[one.compute_s for one in stage._compute()] for stage in by_depth]
    for index, part in enumerate(("forward", "input_grads", "weight_grads")):
        first_s, second_s = (made_s[depth + 1][index] - made_s[depth][index] for depth in (0, 1))
        assert first_s == pytest.approx(second_s)
        known_s = sum(getattr(one, part).compute_s for one in (layer, head))
        projection_s = matmul_s(device, tokens, spec.hidden_size, 2 * spec.hidden_size, "bf16")
        assert projection_s < first_s - known_s < 5 * projection_s, part
