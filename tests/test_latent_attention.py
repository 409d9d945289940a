"""Latent attention and DeepSeek-V3's family: parity under every kind of plan, generation, forecasts, refusals."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.model.decoder import Decoder
from muster.model.init import init_stage
from muster.model.kv_cache import KvCache
from muster.spec.model import ModelSpec, parameter_shapes
from tests.parity import FAMILIES
from tests.test_context_parallel import in_float64
from tests.test_parity import CHUNKED, GRADIENT_TOLERANCE, cache, check_parity, run  # noqa: F401

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
    """Return a few cases of a number of ranks, of each of the first words of plans one."""
    draw, by_axis = random.Random(num_ranks), {}
    for case in draw.sample(CASES[num_ranks], len(CASES[num_ranks])):
        by_axis.setdefault((case["plan"][:2], case["family"]), case)
    return list(by_axis.values())


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


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_equal_one_process(num_ranks: int, cache: Path) -> None:  # noqa: F811
    check_parity(num_ranks, in_float64(sample_of(num_ranks)), cache)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_ranks", CASES)
def test_gradients_of_every_plan_equal_one_process(num_ranks: int, cache: Path) -> None:  # noqa: F811
    check_parity(num_ranks, in_float64(CASES[num_ranks]), cache)


def test_a_sown_bug_is_caught(cache: Path) -> None:  # noqa: F811
    bug = {"plan": "tp2", "family": "latent", "fault": "lone latents"}
    ((*found,),) = run(2, in_float64([bug]), cache)
    assert max(rank["gradient_error"] for rank in found) > 1e4 * GRADIENT_TOLERANCE
