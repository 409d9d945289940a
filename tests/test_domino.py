"""Slices of a micro-batch whose collectives travel beside each other's compute (`tp_overlap: domino`)."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from muster.api.verbs import plan as best_plans
from muster.config.named_model import load_model
from muster.cost.time import alternating_turns, batch_slices
from muster.parallel.stage import DecoderStage
from muster.parallel.stage_inputs import StageInputs
from muster.parallel.turns import Turns
from muster.parallel.world import fake_world
from muster.spec.errors import ConfigError
from muster.spec.plan_name import parse_plan_name
from tests.plans import unequal
from tests.sampling import quick_sample
from tests.test_memory_forecast import SHORT_LLAMA
from tests.test_parity import by_layer, check_parity

CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"plan": "tp2-domino-mb2", "profile": True},
        {"plan": "tp2-sp-domino-mb2-rfull", "tied": True},
        {"plan": "tp2-domino-mb8", "family": "gpt2"},
        {"plan": "tp2-domino-mb2-relem", "family": "gemma2", "packing": "document_mask"},
        {"plan": "tp2-domino-mb4-rfull", "family": "qwen3", "packing": "none"},
        {"plan": "tp2-sp-domino-mb2", "family": "olmo2"},
        {"plan": "tp2-domino-mb2", "family": "gpt_neox"},
        {"plan": "tp2-sp-domino-mb2", "family": "latent"},
        {"plan": "tp2-domino-mb2-rfull", "family": "dropout"},
        {"plan": "tp2-sp-domino-mb4", "family": "hidden dropout", "packing": "next_fit"},
    ],
    4: [
        {"plan": "tp2-domino-dp2-mb2-z3", "family": "gpt2", "profile": True},
        {"plan": "tp2-domino-pp2-mb2", "tied": True},
        {"plan": "tp2-sp-domino-dp2-mb2-z3-rfull"},
        {"plan": "tp2-domino-dp2-mb2-z2", "family": "olmo2"},
        {"plan": "tp2-domino-dp2-mb2-z1", "tied": True, "overlaps": True},
        {"plan": "tp2-domino-dp2-mb2-z3", "family": "gemma2", "changes": {"bucket_layers": 2}},
        {"plan": "tp2-domino-dp2-mb2-z3", "changes": {"prefetch_buckets": 2}},
        {"plan": "tp2-sp-domino-pp2-mb2-szbh1-relem", "family": "gpt2"},
        {"plan": "tp2-domino-cp2-mb2"},
        {"plan": "tp4-domino-mb2-rfull"},
        {"plan": "tp2-domino-pp2-mb2", "changes": by_layer("none", "full", "elementwise", "full", tp_overlap="domino")},
        {"plan": "pp2-domino-mb2-z1", "tied": True, "changes": unequal((3, {"tp": 2}), (1, {"dp_shard": 2}))},
    ],
}
SAMPLE = {2: [CASES[2][1] | {"layers": 2}, CASES[2][-2] | {"layers": 2}], 4: [CASES[4][0] | {"layers": 2}]}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize("num_ranks", quick_sample(list(SAMPLE), 0))
def test_gradients_of_slices_equal_one_process(num_ranks: int, cache: Path) -> None:
    check_parity(num_ranks, [case | {"precision": "fp64", "steps": 1} for case in SAMPLE[num_ranks]], cache)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", CASES)
def test_gradients_of_more_slices_equal_one_process(num_ranks: int, cache: Path) -> None:
    check_parity(num_ranks, [case | {"precision": "fp64", "steps": 1} for case in CASES[num_ranks]], cache)


@pytest.mark.soak
@pytest.mark.parametrize("compiled", [False, True])
def test_slices_hand_over_at_every_collective(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-reduce behind attention and one behind the MLP, in the backward one before each, of either slice."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        spec = SHORT_LLAMA.model_copy(
            update={"vocab_size": 64, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
        )
        plan = parse_plan_name("tp2-domino-mb2-fp32").model_copy(update={"compile": compiled})
        stage = DecoderStage(spec, fake_world(plan, 0, FakeStore()), 0, 8, seed=0)
        handed: list[bool] = []
        hand_over = Turns.hand_over
        monkeypatch.setattr(Turns, "hand_over", lambda own: (handed.append(own._running is not None), hand_over(own)))
        tokens_BS = torch.zeros(2, 8, dtype=torch.int64)
        stage.inputs = StageInputs((tokens_BS,), (tokens_BS,), 16)
        stage.forward(0, None)
        assert sum(handed) == 2 * 2 * spec.num_layers
        stage.backward(0, None)
        assert sum(handed) == 2 * 4 * spec.num_layers
    finally:
        dist.destroy_process_group()


def test_slices_take_the_longer_one_of_compute_and_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternating_turns, "OVERLAP_SLOWDOWN", 0.0)
    assert batch_slices.slices_s([2, 2], [1, 1]) == (8, 1)
    assert batch_slices.slices_s([2, 2], [3, 3]) == (12, 2)
    assert batch_slices.slices_s([2, 2], [3, 3], [1, 1]) == (12, 1)  # no faster than the links


@pytest.mark.parametrize(("layers", "batch"), quick_sample([(8, 8), (32, 64)], 0))
def test_the_planner_takes_an_overlap_that_it_may_where_it_pays(layers: int, batch: int) -> None:
    asked: dict[str, Any] = {"global_batch": batch, "require": "tp8-mb8", "top": 1}
    model = load_model("llama3-8b").model_copy(update={"num_layers": layers})
    plain, either = (best_plans(model, "8xa100", **asked, allow=allow) for allow in ("", "domino"))
    assert [found.best.default_strategy.tp_overlap for found in (plain, either)] == ["none", "domino"]
    assert either.predictions[0].step_time_s < 0.97 * plain.predictions[0].step_time_s
    with pytest.raises(ConfigError, match="asynctp, domino or tppairs"):
        best_plans(model, "8xa100", allow="dominos")
