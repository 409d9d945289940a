"""Latent attention and DeepSeek-V3's family: parity under every kind of plan, generation, forecasts, refusals."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.cost.flops import forward_flops_per_token
from muster.model.decoder import Decoder
from muster.model.init import init_stage
from muster.model.kv_cache import KvCache
from muster.spec.errors import InfeasibleError
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.model_components import MlaSpec, MoeSpec
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from tests.parity import FAMILIES, with_two_layers
from tests.sampling import quick_sample
from tests.test_context_parallel import in_float64
from tests.test_memory_forecast import assert_forecast_is_accounting
from tests.test_parity import CHUNKED, GRADIENT_TOLERANCE, cache, check_parity, run  # noqa: F401
from tests.train_runs import AT_ONCE, QUICK, rows_of, train

LATENT_FAMILIES = ("latent", "direct latent", "deepseek")
CASES: dict[int, list[dict[str, Any]]] = {
    1: [{"plan": f"dp1{how}", "family": family} for family in LATENT_FAMILIES for how in ("", "-relem", "-rfull")],
    2: [
        *({"plan": plan, "family": "latent", "profile": True} for plan in ("tp2-sp", "tp2", "tp2-sp-relem")),
        *({"plan": plan, "family": "direct latent", "profile": True} for plan in ("tp2-sp-rfull", "tp2")),
        *({"plan": "tp2", "family": family, "changes": CHUNKED, "profile": True} for family in LATENT_FAMILIES[:2]),
        *({"plan": plan, "family": "latent"} for plan in ("dp2-z1", "dp2-z2", "dp2-z3", "pp2-l3.1-sgpipe-oact")),
        {"plan": "pp2v2-szbv", "family": "latent"},
        {"plan": "pp2-szbh1-relem", "family": "direct latent"},
        {"plan": "pp2-vocab", "family": "latent", "tied": True},
        {"plan": "dp2", "family": "latent", "optim": "muon"},
        {"plan": "dp2-tile2", "family": "latent"},
        {"plan": "pp2-slice2", "family": "latent"},
        *({"plan": f"cp2{kind}", "family": "latent", "profile": True} for kind in ("", "a", "u", "b", "t", "s")),
        *({"plan": f"cp2{kind}-mb2", "family": "direct latent", "packing": "next_fit"} for kind in ("", "a", "u")),
        {"plan": "tp2-sp-mb2", "family": "latent", "packing": "document_mask"},
        {"plan": "dp2-mb2", "family": "latent", "packing": "none"},
        *(
            {"plan": plan, "family": "deepseek"}
            for plan in ("dp2-ep2-z1", "dp2-ep2-z3", "tp2-sp-ep2", "cp2-ep2", "tp2-etp2", "tp2-sp-etp2")
        ),
        {"plan": "pp2-szbh1", "family": "deepseek"},
    ],
    4: [
        {"plan": "tp4-sp", "family": "latent", "profile": True},
        {"plan": "tp2-sp-pp2v2-szbv", "family": "direct latent", "tied": True},
        {"plan": "tp2-sp-cp2", "family": "latent", "profile": True},
        {"plan": "cp4u2", "family": "latent", "profile": True},
        {"plan": "dp2-pp2-z1-vocab", "family": "latent"},
        {"plan": "dp2-tp2-sp-ep4", "family": "deepseek"},
        {"plan": "dp2-pp2-ep2-z3", "family": "deepseek"},
    ],
}
"""Plans that train models with latent attention."""


def latent_model(family: str = "latent", **fields: Any) -> ModelSpec:
    shape = {"vocab_size": 50, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "intermediate_size": 48}
    return ModelSpec(**shape | FAMILIES[family] | fields)


def sample_of(num_ranks: int) -> list[dict[str, Any]]:
    """Return a few cases of a number of ranks, of each family one."""
    draw, by_family = random.Random(num_ranks), {}
    for case in draw.sample(CASES[num_ranks], len(CASES[num_ranks])):
        by_family.setdefault(case["family"], case)
    return list(by_family.values())


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_modules_have_the_parameters_of_the_spec(family: str) -> None:
    spec = latent_model(family)
    module = Decoder(spec, range(3), first=True, last=True)
    found = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    assert found == list(parameter_shapes(spec))


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_a_cache_reads_on(family: str) -> None:
    """Texts of two lengths, padded on the left, read at once and then token by token."""
    spec = latent_model(family)
    model = Decoder(spec, range(3), first=True, last=True).double()
    init_stage(model, spec, 0)
    texts = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 3])
    with KvCache(model, starts, 12) as texts_cache:
        found = [texts_cache.read(texts[:, :8]), *(texts_cache.read(texts[:, at : at + 1]) for at in range(8, 12))]
    with torch.no_grad():
        for row, start in enumerate(starts.tolist()):
            whole = model(texts[row : row + 1, start:])[0, 7 - start :]
            assert torch.allclose(torch.stack([logits[row] for logits in found]), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_ranks", quick_sample([2, 4], 1))
def test_gradients_equal_one_process(num_ranks: int, cache: Path) -> None:  # noqa: F811
    check_parity(num_ranks, in_float64(list(map(with_two_layers, sample_of(num_ranks)))), cache)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_ranks", CASES)
def test_gradients_of_every_plan_equal_one_process(num_ranks: int, cache: Path) -> None:  # noqa: F811
    check_parity(num_ranks, in_float64(CASES[num_ranks]), cache)


def test_a_sown_bug_is_caught(cache: Path) -> None:  # noqa: F811
    bug = {"plan": "tp2", "family": "latent", "fault": "lone latents"}
    ((*found,),) = run(2, in_float64([bug]), cache)
    assert max(rank["gradient_error"] for rank in found) > 1e4 * GRADIENT_TOLERANCE


def wide_model(**latent: Any) -> ModelSpec:
    """Layers of DeepSeek-V3's proportions, a quarter as wide."""
    mla = {"q_lora_rank": 512, "kv_lora_rank": 256, "nope_head_dim": 128, "rope_head_dim": 64, "v_head_dim": 128}
    shape = {"vocab_size": 32000, "hidden_size": 2048, "num_layers": 3, "num_heads": 32, "intermediate_size": 8192}
    return ModelSpec(**shape, mla=MlaSpec(**mla | latent))


@pytest.mark.parametrize(
    ("latent", "name", "seq_len"),
    quick_sample(
        [
            ({}, "dp1-fp32", 4096),
            ({}, "tp2-sp-relem", 8192),
            ({"q_lora_rank": None}, "tp4-sp-rfull", 4096),
            ({"v_head_dim": 192}, "cp2u", 4096),
        ],
        2,
    ),
)
def test_forecast_is_what_pytorch_counts(latent: dict[str, Any], name: str, seq_len: int) -> None:
    assert_forecast_is_accounting(wide_model(**latent), name, seq_len, 2, only_ends=True)


@pytest.mark.parametrize(
    ("name", "seq_len"), quick_sample([("dp2-ep2", 1024), ("dp2-ep2", 4096), ("tp2-sp-etp2", 4096)], 0)
)
def test_forecast_of_experts_behind_latent_attention_is_what_pytorch_counts(name: str, seq_len: int) -> None:
    moe = MoeSpec(num_experts=16, top_k=4, expert_size=1024, shared_size=1024, dense_layers=1, router="sigmoid")
    assert_forecast_is_accounting(wide_model().model_copy(update={"moe": moe}), name, seq_len, 2, only_ends=True)


def test_the_flops_are_of_both_widths() -> None:
    """Per position and head, the scores of a key's width and the sum of a value's."""
    narrow, wide = (wide_model(v_head_dim=width) for width in (128, 192))
    per_head = (forward_flops_per_token(one, 8192) - forward_flops_per_token(one, 4096) for one in (narrow, wide))
    assert [count / (2 * 4096 * 32 * 3) for count in per_head] == [192 + 128, 192 + 192]


def test_fp8_is_refused() -> None:
    model = latent_model()
    with pytest.raises(InfeasibleError, match=r"fp8 with latent attention .* can't be run yet; nearest: dp2"):
        require_runnable(parse_plan_name("dp2-fp8"), model, Workload(seq_len=16, global_batch_size=8), 2)


@pytest.mark.soak
def test_a_run_resumes_under_any_other_plan(tmp_path: Path) -> None:
    usual = ("--preset", "tiny-deepseek", *QUICK, *AT_ONCE, "--train.save_every", "1", "--allow-changes")
    first = tmp_path / "first"
    assert train(*usual, "--train.steps", "2", "--parallel", "tp2-sp-etp2", "--run", first).code == 0
    losses = {}
    for name in ("dp1", "tp2-sp-etp2", "dp2-ep2", "pp2", "dp2-z3", "cp2-ep2"):
        run_dir = Path(shutil.copytree(first, tmp_path / name))
        ended = train(*usual, "--train.steps", "4", "--parallel", name, "--run", run_dir)
        assert ended.code == 0, ended.out + ended.err
        losses[name] = [row["train/loss"] for row in rows_of(run_dir)]
    assert all(len(one) == 4 for one in losses.values())
    for name, one in losses.items():
        assert one == pytest.approx(losses["dp1"], rel=1e-5), name
